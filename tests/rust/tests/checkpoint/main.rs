//! Checkpoints: round trips over numbers of ranks, corruption of every kind, and crashes at every operation.

mod admission_counts;
mod async_deltas;
mod async_saves;
mod concurrent_saves;
mod corruption;
mod crash;
mod data_files;
mod delta;
mod dense;
mod linked;
mod linked_loads;
mod linked_paths;
mod missing_reads;
mod path_attacks;
mod ranks;
mod recis_files;
mod recis_saves;
mod references;
mod round_trip;
mod sweep_crashes;
mod sweep_moves;
mod sweeps;
