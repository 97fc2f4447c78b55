//! Lookup of ids: the dedupe of a batch, and the index of the rows in a tier.

mod dedupe;
mod hash;
mod host;

pub use dedupe::{DedupedIds, IdDeduper, dedupe};
pub(crate) use hash::IdHash;
pub use host::SlotIndex;
pub(crate) use host::{IndexLine, slots_of};
