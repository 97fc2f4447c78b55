//! The cache: the only module that uses all three tiers.
//!
//! A [`Table`] owns the rows of one table shard. A [`Lookup`] plans batches over several tables; each [`Plan`] pins the
//! rows of one batch, places them on the tier that kernels run on, runs the kernels or returns slots to Python, and
//! commits or releases.
//!
//! Each folder imports only from those before it:
//!
//! | folder | contents |
//! | --- | --- |
//! | `watch` | rows that snapshots, exports, deltas and hooks need, tracked while rows move and change |
//! | `residency` | placement: the only code that moves rows, with their state bits and the counters |
//! | `locks` | the locks around the placement, and their order |
//! | `walk` | the single loop that passes on rows: exports, saves, deltas, snapshots |
//! | `table` | the public table |
//! | `plan` | lookups and plans |

mod base;
mod columns;
mod groups;
mod locks;
mod plan;
mod residency;
mod rows;
mod table;
mod walk;
mod watch;

pub use crate::device::DeviceRowReader;
pub use crate::host::INDEX_BYTES_PER_ROW;
pub use columns::{PickedRows, RowColumns};
pub use groups::{GroupGatherer, GroupSink};
pub use plan::{Lookup, Plan, RowLists};
pub use residency::{ChangeCounts, FetchedRows, MissingMode, PlanMode, TableStats, device_row_bytes, host_row_bytes};
pub use rows::{DeviceTensors, FoundRows, RowBlock, RowChunk};
pub use table::Table;
pub use walk::{ExportStream, TableSnapshot};
pub use watch::{BaseCheckpoint, EvictedQueue, EvictedRows, PreImages};

#[cfg(test)]
mod resident;

#[cfg(all(test, loom))]
mod models;
