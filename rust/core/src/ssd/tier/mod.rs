//! One tier's parts, and the operations that keep them consistent. What they are used for is in `work`.
//!
//! - [`inner`]: the tier as its threads share it, and its locks.
//! - [`state`]: what changes under the tier's lock: the index, and the parts below.
//! - [`segments`]: the current set, and the [`dead`] records in it. [`streams`]: its open segments. [`states`]: published states.
//! - [`moment`], [`tally`]: what a save beside training and a scan have to know of records that come and go.
//! - [`reads`]: fetches under way. [`takers`]: scans that somebody keeps waiting. [`walk`]: where an eviction or a burial stopped.

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
