//! The eviction order of a table's rows, for sweeps that evict a number of rows.
//!
//! Rows are ordered by their score decayed to the sweep's step, then by their last step, then by their id as a u64. Ids
//! are unique in a table, so no two rows are equal, and the order is bitwise identical on every rank and machine.

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::rows::{RowHeader, ScoreDecay};
use crate::runtime::memory;

/// Bits of a [`RankKey`] as one integer.
const BITS: u32 = 160;
/// Bits of rank keys that one histogram resolves.
const DIGIT_BITS: u32 = 16;
/// Number of list entries per memory allocation.
const LISTED_AT_ONCE: usize = 1 << 10;
/// Purpose of the histogram's memory, for errors.
const TO_ORDER: &str = "order rows by their scores";

/// The position of a row in eviction order. Its serde form is part of published states and of manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankKey {
    /// The score, as mapped by [`sortable_score`].
    pub score: u32,
    /// The last training step of the row.
    pub last_step: u64,
    /// The id, as a u64.
    pub id: u64,
}

impl RankKey {
    /// A key at or below the key of every row.
    pub const LOWEST: Self = Self { score: 0, last_step: 0, id: 0 };
    /// A key at or above the key of every row.
    pub const HIGHEST: Self = Self { score: u32::MAX, last_step: u64::MAX, id: u64::MAX };

    /// The key of a row whose score decays to `step`.
    #[inline]
    pub fn of(row: &RowHeader, decay: &ScoreDecay, step: u64) -> Self {
        Self::with(row, decay.of(row.score, row.last_step, step))
    }

    /// The key of a row whose score has decayed to `score`. A score below 0 stays below 0, even if its rest rounds to
    /// zero.
    #[inline]
    pub(super) fn with(row: &RowHeader, score: f32) -> Self {
        let score =
            if row.score < 0.0 { sortable_score(score).min(sortable_score(0.0) - 1) } else { sortable_score(score) };
        Self { score, last_step: row.last_step, id: row.id as u64 }
    }

    fn low_bits(&self) -> u128 {
        u128::from(self.last_step) << 64 | u128::from(self.id)
    }

    /// Number of low bits that can differ among the keys from `low` to `high`.
    fn bits_within(low: &Self, high: &Self) -> u32 {
        match low.score ^ high.score {
            0 => u128::BITS - (low.low_bits() ^ high.low_bits()).leading_zeros(),
            differs => BITS - differs.leading_zeros(),
        }
    }

    /// The 16 bits above the lowest `shift` bits, which are at most 144.
    #[inline]
    fn digit(&self, shift: u32) -> usize {
        let bits = if shift >= u128::BITS {
            self.score >> (shift - u128::BITS)
        } else {
            let low = (self.low_bits() >> shift) as u32;
            // A digit that starts in the last step may extend into the score.
            if shift > u128::BITS - DIGIT_BITS { low | self.score << (u128::BITS - shift) } else { low }
        };
        (bits & 0xffff) as usize
    }
}

/// Maps a score to an integer of the same order. Both zeros are equal, and so are all NaNs, which sort above all other
/// scores.
pub fn sortable_score(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    // The sum of negative zero and positive zero is positive zero.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// True if no row below the threshold moves above it while its score decays. A row may if the threshold's score is
/// below 0, because scores below 0 rise, or not finite, because an infinite score may decay to NaN.
pub(super) fn stays_below(threshold: &RankKey) -> bool {
    (sortable_score(0.0)..sortable_score(f32::INFINITY)).contains(&threshold.score)
}

/// The rank keys from `low` to `high`, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankKeyRange {
    /// The lowest key.
    pub low: RankKey,
    /// The highest key.
    pub high: RankKey,
    /// If true, each key in the range is listed. Otherwise keys are counted.
    pub is_listed: bool,
}

/// The keys in one part of a range, which share a digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankKeyPart {
    /// Number of keys.
    pub rows: u64,
    /// The lowest key.
    pub low: RankKey,
    /// The highest key.
    pub high: RankKey,
}

/// The contents of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankRangeContents {
    /// The parts that have rows, each after its digit, in ascending order.
    Counted(Vec<(u32, RankKeyPart)>),
    /// The keys, in no order.
    Listed(Vec<RankKey>),
}

/// Builds a histogram of rows by their rank keys, one row at a time. It uses several MiB per counted range, and 24
/// bytes per listed key.
#[derive(Debug)]
pub struct ScoreHistogramBuilder {
    decay: ScoreDecay,
    step: u64,
    ranges: Vec<RankRangeCounter>,
    rows: u64,
    newest: u64,
}

#[derive(Debug)]
struct RankRangeCounter {
    span: RankKeyRange,
    /// The digit of a key starts above this number of low bits.
    shift: u32,
    parts: Vec<RankKeyPart>,
    listed: Vec<RankKey>,
}

impl RankRangeCounter {
    fn new(span: RankKeyRange) -> Result<Self> {
        let shift = RankKey::bits_within(&span.low, &span.high).saturating_sub(DIGIT_BITS);
        let mut parts = Vec::new();
        if !span.is_listed {
            memory::reserve(&mut parts, TO_ORDER, 1 << DIGIT_BITS)?;
            parts.resize(1 << DIGIT_BITS, RankKeyPart { rows: 0, low: RankKey::HIGHEST, high: RankKey::LOWEST });
        }
        Ok(Self { span, shift, parts, listed: Vec::new() })
    }

    #[inline]
    fn add(&mut self, key: RankKey) -> Result<()> {
        if key < self.span.low || key > self.span.high {
            return Ok(());
        }
        if self.span.is_listed {
            if self.listed.len() == self.listed.capacity() {
                memory::reserve(&mut self.listed, TO_ORDER, LISTED_AT_ONCE)?;
            }
            self.listed.push(key);
        } else {
            let part = &mut self.parts[key.digit(self.shift)];
            part.rows += 1;
            part.low = part.low.min(key);
            part.high = part.high.max(key);
        }
        Ok(())
    }

    fn contents(self) -> RankRangeContents {
        if self.span.is_listed {
            return RankRangeContents::Listed(self.listed);
        }
        let parts = (0..).zip(self.parts).filter(|(_, part)| part.rows > 0);
        RankRangeContents::Counted(parts.collect())
    }
}

impl ScoreHistogramBuilder {
    /// Creates a histogram of the rows that a sweep after `step` evaluates, whose scores decay by `decay`.
    ///
    /// Errors: `Memory`.
    pub fn new(step: u64, decay: ScoreDecay, ranges: &[RankKeyRange]) -> Result<Self> {
        let ranges = ranges.iter().map(|range| RankRangeCounter::new(*range)).collect::<Result<_>>()?;
        Ok(Self { decay, step, ranges, rows: 0, newest: 0 })
    }

    /// Counts a row, unless it was trained after the step.
    ///
    /// Errors: `Memory`.
    #[inline]
    pub fn add(&mut self, row: &RowHeader) -> Result<()> {
        if row.last_step > self.step {
            return Ok(());
        }
        self.rows += 1;
        self.newest += u64::from(row.last_step == self.step);
        let standing = RankKey::of(row, &self.decay, self.step);
        self.ranges.iter_mut().try_for_each(|range| range.add(standing))
    }

    /// Returns the histogram.
    pub fn finish(self) -> ScoreHistogram {
        let ranges = self.ranges.into_iter().map(RankRangeCounter::contents).collect();
        ScoreHistogram { rows: self.rows, newest: self.newest, ranges }
    }
}

/// The histogram of the rows of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreHistogram {
    /// Number of rows.
    pub rows: u64,
    /// Number of rows whose last step is the histogram's step.
    pub newest: u64,
    /// The contents of each range.
    pub ranges: Vec<RankRangeContents>,
}

#[cfg(test)]
mod tests;
