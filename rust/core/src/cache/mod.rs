//! The cache: the only module that sees all three tiers.
//!
//! A [`Table`] owns the rows of one table shard. A [`Lookup`] plans batches over several tables; each [`Plan`] pins the rows of one batch,
//! brings them to the tier that kernels run on, runs the kernels or hands slots to Python, and commits or releases.
//!
//! Each folder imports from those before it:
//!
//! | folder | what it owns |
//! | --- | --- |
//! | `watch` | what moments, exports, deltas and hooks want of rows while they move and change |
//! | `residency` | where the rows are: it alone moves them, and keeps their bits and the counters |
//! | `locks` | the locks around the residency, and their order |
//! | `walk` | the one loop that hands over rows: exports, saves, deltas, moments |
//! | `table` | a table as its users see it |
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
