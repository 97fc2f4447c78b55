//! The cache: plans and rows over the tiers, compared with models and with tables in RAM, for any fault, panic or full
//! tier.

mod caller_buffers;
mod capacity;
mod device_reads;
mod drops;
mod faults;
mod full_disk;
mod initial_rows;
mod metadata;
mod model;
mod panics;
mod parallel_tables;
mod pins;
mod plan;
mod plan_lists;
mod release;
mod shared_budget;
mod snapshot;
