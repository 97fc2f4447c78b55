//! Admission and expiry rules, computed from numbers only: which ids get a row, the counts of pending ids, and the rows
//! that expire.
//!
//! This module does not know the location of rows. The cache evaluates the rules and carries out their decisions.

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
