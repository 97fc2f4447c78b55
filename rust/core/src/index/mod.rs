//! Lookup of ids: the dedupe of a batch, and the index of the rows in a tier.

mod dedup;
mod hash;
mod row_index;

pub use dedup::{DedupedIds, IdDeduper, dedupe};
pub(crate) use hash::IdHash;
pub use row_index::SlotIndex;
pub(crate) use row_index::{IndexLine, slots_of};
