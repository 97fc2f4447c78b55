//! The cache: the only module that uses all three tiers.
//!
//! A [`Table`] owns the rows of one table shard. A [`Lookup`] plans batches over several tables; each [`Plan`] pins the
//! rows of one batch, places them on the tier that kernels run on, runs the kernels or returns slots to Python, and
//! commits or releases.
//!
//! Each module imports only from those before it:
//!
//! | module | contents |
//! | --- | --- |
//! | `changes` | rows that snapshots, exports and deltas need, tracked while rows move and change |
//! | `placement` | the only code that moves rows, with their state bits and the counters |
//! | `expiry` | the rows and their life: admission, sweeps by the table's eviction rule, the clock |
//! | `residency` | the other operations on rows, which depend on both |
//! | `lock` | the locks around the placement, and their order |
//! | `snapshot` | the single loop that passes on rows: exports, saves, deltas, snapshots |
//! | `table` | the public table |
//! | `plan` | lookups and plans |

mod changes;
mod evicted_rows;
mod expiry;
mod lock;
mod placement;
mod plan;
mod plan_lock;
mod residency;
mod row_blocks;
mod snapshot;
mod table;
mod table_context;

pub use crate::tiers::DeviceRowReader;
pub use crate::tiers::INDEX_BYTES_PER_ROW;
pub use changes::{BaseCheckpoint, PreImages};
pub use evicted_rows::{EvictedQueue, EvictedRows};
pub use placement::{ChangeCounts, FetchedRows, MissingMode, PlanMode, device_row_bytes, host_row_bytes};
pub use plan::{Lookup, Plan, RowLists};
pub use residency::TableStats;
pub use row_blocks::{DeviceTensors, FoundRows, GroupGatherer, GroupSink, PickedRows, RowBlock, RowChunk, RowColumns};
pub use snapshot::{ExportStream, TableSnapshot};
pub use table::Table;

#[cfg(test)]
mod tests;

#[cfg(all(test, loom))]
mod models;
