//! Watchers of a table's rows while they move and change: a snapshot needs the original rows, an export each row once,
//! a delta the tombstones, and a hook the evicted rows. The placement notifies them of every change; they do not depend
//! on it.

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
