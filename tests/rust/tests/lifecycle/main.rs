//! The rules by which ids get rows and rows leave their table: admission, eviction, and sweeps.

mod admission;
mod evicted_rows;
mod eviction;
mod eviction_order;
mod given_rules;
mod pinned_rows;
mod ssd_sweeps;
