//! The cache: the only module that sees all three tiers.
//!
//! A [`Table`] owns the rows of one table shard. A [`Lookup`] plans batches over several tables; each [`Plan`] pins the rows of one
//! batch, brings them to the tier that kernels run on, runs the kernels or hands slots to Python, and commits or releases.
//!
//! Locks, in the order they are taken: a plan's own state, then a table's `rows_in_use` (kernels against copies of pinned rows), then
//! the table's state, then whatever the SSD tier locks inside. No lock is held while waiting for a fetch, except by operations that
//! must see one state (device placement, import, export chunks).

mod birth;
mod capacity;
mod columns;
mod commit;
mod compute;
mod evict;
mod export;
mod groups;
mod import;
mod lineage;
mod load;
mod locks;
mod lookup;
mod modified;
mod moment;
mod place;
mod place_device;
mod plan;
mod preimages;
mod rows;
mod segments;
mod stream;
mod table;

pub use crate::device::DeviceRows;
pub use columns::{PickedRows, RowColumns};
pub use compute::DeviceTensors;
pub use export::Chunk;
pub use groups::{Gather, GroupSink};
pub use lineage::Ancestor;
pub use lookup::Lookup;
pub use moment::TableMoment;
pub use plan::Plan;
pub use preimages::PreImages;
pub use rows::{FoundRows, RowBlock};
pub use stream::ExportStream;
pub use table::{Table, TableStats, device_row_bytes, host_row_bytes};

#[cfg(test)]
mod resident;

#[cfg(all(test, loom))]
mod models;
