//! Embedding tables that are larger than memory. Rows are stored on SSD and in RAM, and are planned for tensors on any
//! device.
//!
//! The crate depends on neither Python nor torch nor device memory. A [`cache::Table`] owns the rows of one table shard
//! in its host and SSD tiers, and decides where each row is placed. A [`cache::Lookup`] plans a batch over several
//! tables.

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod index;
pub mod io;
pub mod kernels;
pub mod lifecycle;
pub mod paths;
pub mod policy;
pub mod rows;
pub mod runtime;
pub mod serve;
pub mod sizing;
pub mod slots;
pub mod ssd;
pub mod stats;
pub mod types;

mod tiers;

pub use error::{Error, Kind, Result};
pub use runtime::process::{PerProcess, work_alone};
