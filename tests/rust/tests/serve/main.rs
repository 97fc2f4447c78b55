//! Serving: rows of checkpoints, converted or not, that servers read while a trainer saves, and faults meanwhile.

mod concurrent_opens;
mod conversion;
mod faults;
mod following;
mod index;
mod memory;
mod server;
mod source;
mod source_faults;
mod source_rules;
mod version_swaps;
