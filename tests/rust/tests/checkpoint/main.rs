//! Checkpoints: round trips over numbers of ranks, damage of every kind, and crashes at every operation.

mod at_once;
mod beside;
mod beside_delta;
mod block_saves;
mod blocks;
mod counts;
mod crash;
mod damage;
mod delta;
mod dense;
mod elastic;
mod for_serving;
mod linked;
mod linked_back;
mod linked_paths;
mod made;
mod made_blocks;
mod missing_reads;
mod round_trip;
mod serving;
mod serving_faults;
mod serving_memory;
mod serving_source;
mod serving_source_faults;
mod sweeps;
mod sweeps_crash;
