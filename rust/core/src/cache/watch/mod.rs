//! What others want of a table's rows while they move and change: a moment the rows as they were, an export each row once, a delta the ids
//! that left, and a hook those that were evicted. The residency of the rows tells these of every change; they know nothing of it.

mod evicted;
mod exports;
mod lineage;
mod preimages;
mod wanted;

pub use evicted::{EvictedQueue, EvictedRows};
pub use lineage::BaseCheckpoint;
pub use preimages::PreImages;

pub(crate) use exports::{ExportSet, WrittenBackIds};
pub(crate) use lineage::{CheckpointHistory, MOST_SWEEPS};
pub(crate) use wanted::{SlotMarks, SnapshotRows};
