//! Changes of a table's rows while they move: a snapshot needs the original rows, an export each row once, a delta the
//! tombstones. The placement notifies these watchers of every change; they do not depend on it.

mod history;
mod marks;
mod pre_images;
mod tracker;

pub use history::BaseCheckpoint;
pub use pre_images::PreImages;

pub(crate) use history::MOST_SWEEPS;
pub(crate) use marks::{SlotMarks, SnapshotRows, WrittenBackIds};
pub(crate) use tracker::{ChangeTracker, FREE_HISTORY_BYTES, MovedRows};
