//! The parts of one tier, and the operations that keep them consistent. `work` uses them.
//!
//! - [`inner`]: the tier as its threads share it, and its locks.
//! - [`state`]: the data under the tier's lock: the index, and the parts below.
//! - [`segments`]: the current set, and the [`dead`] records in it. [`streams`]: its open segments. [`states`]:
//!   published states.
//! - [`moment`], [`tally`]: the records that a snapshot or a scan has to find, while records are added and become dead.
//! - [`reads`]: fetches in progress. [`takers`]: scans that consumers block. [`walk`]: where an eviction or expiry pass
//!   stopped.

pub(crate) mod dead;
pub(crate) mod inner;
pub(crate) mod moment;
pub(crate) mod reads;
pub(crate) mod segments;
pub(crate) mod state;
pub(crate) mod states;
pub(crate) mod streams;
pub(crate) mod takers;
pub(crate) mod tally;
pub(crate) mod walk;
