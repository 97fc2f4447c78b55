//! What others want of a table's rows while they move and change: a moment the rows as they were, an export each row once, a delta the ids
//! that left, and a hook those that were evicted. The residency of the rows tells these of every change; they know nothing of it.

mod evicted;
mod exports;
mod lineage;
mod preimages;
mod wanted;

pub use evicted::{EvictedQueue, EvictedRows};
pub use lineage::Ancestor;
pub use preimages::PreImages;

pub(crate) use exports::{Exports, WrittenDown};
pub(crate) use lineage::{Lineage, MOST_SWEEPS};
pub(crate) use wanted::{Marks, WantedRows};
