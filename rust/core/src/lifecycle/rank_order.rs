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
mod tests {
    use super::*;

    fn standing(score: u32, last_step: u64, id: u64) -> RankKey {
        RankKey { score, last_step, id }
    }

    fn row(id: i64, last_step: u64, score: f32) -> RowHeader {
        RowHeader { id, last_step, score, ..RowHeader::default() }
    }

    #[test]
    fn scores_of_every_kind_have_one_order() {
        let ordered = [f32::NEG_INFINITY, f32::MIN, -1.0, -f32::MIN_POSITIVE / 2.0, 0.0, f32::MIN_POSITIVE / 2.0];
        let ordered = [&ordered[..], &[1.0, 1.0 + f32::EPSILON, f32::MAX, f32::INFINITY, f32::NAN]].concat();
        assert!(ordered.windows(2).all(|pair| sortable_score(pair[0]) < sortable_score(pair[1])));
        assert_eq!(sortable_score(-0.0), sortable_score(0.0));
        let others = [-f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)];
        assert!(others.iter().all(|&score| sortable_score(score) == sortable_score(f32::NAN)));
    }

    #[test]
    fn rank_orders_by_score_then_last_step_then_unsigned_id() {
        let decay = ScoreDecay::new(10).expect("in range");
        let rows =
            [row(9, 10, 1.0), row(7, 0, 4.1), row(3, 20, 2.1), row(5, 20, 2.1), row(-5, 20, 2.1), row(1, 0, 9.0)];
        let standings: Vec<RankKey> = rows.iter().map(|row| RankKey::of(row, &decay, 20)).collect();
        // The decayed scores are 0.5, 1.025, 2.1 three times, 2.25.
        assert!(standings.windows(2).all(|pair| pair[0] < pair[1]), "{standings:?}");
        let (older, newer) = (RankKey::of(&row(9, 3, 2.0), &decay, 3), RankKey::of(&row(1, 13, 2.0), &decay, 3));
        assert!(older < newer, "one that decays and one that does not, at one step");
    }

    /// The keys of a range have the same bits above their digits.
    #[test]
    fn digit_has_bits_above_shift_for_all_keys_of_a_range() {
        let at = standing(0xaabb_ccdd, 0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff01);
        let digits = [(0, 0xff01), (16, 0xddee), (60, 0x7889), (64, 0x7788), (112, 0x1122), (116, 0xd112)];
        for (shift, digit) in digits.into_iter().chain([(127, 0x99ba), (128, 0xccdd), (140, 0xabbc), (144, 0xaabb)]) {
            assert_eq!(at.digit(shift), digit, "{shift}");
        }
        assert_eq!(RankKey::bits_within(&RankKey::LOWEST, &RankKey::HIGHEST), 160);
        for (other, bits) in [
            (at, 0),
            (RankKey { id: at.id ^ 1, ..at }, 1),
            (RankKey { id: at.id ^ 1 << 63, ..at }, 64),
            (RankKey { last_step: at.last_step ^ 1, ..at }, 65),
            (RankKey { score: at.score ^ 1, ..at }, 129),
        ] {
            assert_eq!(RankKey::bits_within(&at, &other), bits);
        }
    }

    #[test]
    fn a_histogram_counts_a_range_by_digits_and_lists_another() {
        let all = RankKeyRange { low: RankKey::LOWEST, high: RankKey::HIGHEST, is_listed: false };
        let decay = || ScoreDecay::new(1 << 53).expect("in range");
        let mut histogram = ScoreHistogramBuilder::new(9, decay(), &[all]).expect("memory");
        let rows: Vec<RowHeader> = (0..100).map(|id| row(id, 9, 1.0 + (id % 4) as f32)).collect();
        rows.iter().try_for_each(|row| histogram.add(row)).expect("memory");
        histogram.add(&row(1000, 10, 1.0)).expect("memory");
        let ScoreHistogram { rows: counted, newest, ranges: found } = histogram.finish();
        assert_eq!((counted, newest), (100, 100), "a row that was trained after the step is not counted");
        let RankRangeContents::Counted(parts) = &found[0] else { panic!("{found:?}") };
        let scores: Vec<(u32, u64)> = parts.iter().map(|(digit, part)| (*digit, part.rows)).collect();
        let digit = |score: f32| sortable_score(score) >> 16;
        assert_eq!(scores, [1.0, 2.0, 3.0, 4.0].map(|score| (digit(score), 25)));
        let (low, high) = (parts[1].1.low, parts[1].1.high);
        assert_eq!((low, high), (standing(sortable_score(2.0), 9, 1), standing(sortable_score(2.0), 9, 97)));
        // All have one score and one step: only the ids differ, in their lowest seven bits.
        let ranges = [
            RankKeyRange { low, high, is_listed: false },
            RankKeyRange { low: RankKey { id: 50, ..low }, high, is_listed: true },
        ];
        let mut histogram = ScoreHistogramBuilder::new(9, decay(), &ranges).expect("memory");
        rows.iter().try_for_each(|row| histogram.add(row)).expect("memory");
        let mut found = histogram.finish().ranges;
        let Some(RankRangeContents::Listed(listed)) = found.pop() else { panic!("{found:?}") };
        assert!(listed.iter().map(|standing| standing.id).eq((50..98).filter(|id| id % 4 == 1)), "{listed:?}");
        let Some(RankRangeContents::Counted(parts)) = found.pop() else { panic!("{found:?}") };
        assert!(
            parts.len() == 25 && parts.iter().all(|(digit, part)| part.low.id == u64::from(*digit) && part.rows == 1)
        );
    }
}
