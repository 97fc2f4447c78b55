//! The life of a row, as far as it is decided by numbers alone: which ids get a row, how the ids that wait for one are counted, and which
//! rows die.
//!
//! Nothing here knows where rows are. The cache asks, and carries out what is decided.

pub(crate) mod admission;
mod bucket;
mod clock;
mod order;
mod pending;
mod shared;
mod sweep;

pub use bucket::{BucketCounts, CountedId};
pub use clock::StepClock;
pub use order::{
    RankKey, RankKeyPart, RankKeyRange, RankRangeContents, ScoreHistogram, ScoreHistogramBuilder, sortable_score,
};
pub(crate) use pending::AdmissionCounters;
pub use shared::OovRow;
pub use sweep::{ExpiryRule, ExpirySweep};
