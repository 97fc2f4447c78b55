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

pub use crate::device::DeviceRows;
pub use crate::host::INDEX_BYTES_PER_ROW;
pub use columns::{PickedRows, RowColumns};
pub use groups::{Gather, GroupSink};
pub use plan::{Lookup, Plan, RowLists};
pub use residency::{ChangeCounts, FetchedRows, PlanMode, TableStats, Unseen, device_row_bytes, host_row_bytes};
pub use rows::{Chunk, DeviceTensors, FoundRows, RowBlock};
pub use table::Table;
pub use walk::{ExportStream, TableMoment};
pub use watch::{Ancestor, EvictedQueue, EvictedRows, PreImages};

#[cfg(test)]
mod resident;

#[cfg(all(test, loom))]
mod models;
