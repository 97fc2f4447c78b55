//! Finding ids: the dedupe of a batch, and the index of the rows in a tier.

mod dedupe;
mod hash;
mod host;

pub use dedupe::{Deduped, Deduper, dedupe};
pub(crate) use hash::IdHash;
pub use host::HostIndex;
pub(crate) use host::{Line, slots_of};
