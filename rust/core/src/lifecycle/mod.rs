//! Admission and expiry rules, computed from numbers only: which ids get a row, the counts of pending ids, and the rows
//! that expire.
//!
//! This module does not know the location of rows. The cache evaluates the rules and carries out their decisions.

pub(crate) mod admission;
mod admission_counters;
mod counter_map;
mod eviction_rule;
mod oov_row;
mod rank_order;
mod step_clock;

pub(crate) use admission_counters::AdmissionCounters;
pub use admission_counters::{BucketCounts, CountedId};
pub use eviction_rule::{ExpiryRule, ExpirySweep};
pub use oov_row::OovRow;
pub use rank_order::{
    RankKey, RankKeyPart, RankKeyRange, RankRangeContents, ScoreHistogram, ScoreHistogramBuilder, sortable_score,
};
pub use step_clock::StepClock;
