//! The order of a table's rows in which a sweep that takes a number of rows takes them.
//!
//! Rows are ordered by their score as it has decayed by the sweep's step, then by their last step, then by their id as a u64. Ids are
//! unique in a table, so no two rows are equal, and the order has the same bits on every rank and machine.

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::memory;
use crate::rows::{RowHeader, ScoreDecay};

/// Bits of a [`RankKey`], as one number.
const BITS: u32 = 160;
/// Bits that one count of standings tells apart.
const DIGIT_BITS: u32 = 16;
/// Places of a list for which memory is asked for at once.
const LISTED_AT_ONCE: usize = 1 << 10;
/// What the memory of a census is for.
const TO_ORDER: &str = "order rows by their scores";

/// Where a row stands in the order. Its serde form is part of published states and of manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankKey {
    /// The score, as [`rising`] maps it.
    pub score: u32,
    /// The step in which the row was trained last.
    pub last_step: u64,
    /// The id, as a u64.
    pub id: u64,
}

impl RankKey {
    /// At or below the standing of every row.
    pub const LOWEST: Self = Self { score: 0, last_step: 0, id: 0 };
    /// At or above the standing of every row.
    pub const HIGHEST: Self = Self { score: u32::MAX, last_step: u64::MAX, id: u64::MAX };

    /// The standing of a row whose score decays to `step`.
    #[inline]
    pub fn of(row: &RowHeader, decay: &ScoreDecay, step: u64) -> Self {
        Self::with(row, decay.of(row.score, row.last_step, step))
    }

    /// The standing of a row of which so much is left of its score. A score below 0 stays below 0, however little is left of it.
    #[inline]
    pub(super) fn with(row: &RowHeader, score: f32) -> Self {
        let score =
            if row.score < 0.0 { sortable_score(score).min(sortable_score(0.0) - 1) } else { sortable_score(score) };
        Self { score, last_step: row.last_step, id: row.id as u64 }
    }

    fn low_bits(&self) -> u128 {
        u128::from(self.last_step) << 64 | u128::from(self.id)
    }

    /// How many bits, counted from the lowest, can differ among the standings from `low` to `high`.
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
            // A digit that begins in the last step may end in the score.
            if shift > u128::BITS - DIGIT_BITS { low | self.score << (u128::BITS - shift) } else { low }
        };
        (bits & 0xffff) as usize
    }
}

/// A number that rises with the score. Both zeros are one score, and so are all values that are no number, which come above all others.
pub fn sortable_score(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    // The sum of the negative zero and the positive one is the positive one.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// Whether no row that stands below the cut moves above it while its score decays. One may where the cut's score is below 0, because scores
/// below 0 rise, or not finite, because what is left of an infinite score may be no number.
pub(super) fn stays_below(threshold: &RankKey) -> bool {
    (sortable_score(0.0)..sortable_score(f32::INFINITY)).contains(&threshold.score)
}

/// The standings from `low` to `high`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankKeyRange {
    /// The lowest.
    pub low: RankKey,
    /// The highest.
    pub high: RankKey,
    /// Whether each standing in it is listed. Otherwise they are counted.
    pub is_listed: bool,
}

/// The standings in a part of a span: those that have its digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankKeyPart {
    /// How many.
    pub rows: u64,
    /// The lowest of them.
    pub low: RankKey,
    /// The highest of them.
    pub high: RankKey,
}

/// What was found in a span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankRangeContents {
    /// The parts that have rows, each after its digit, in rising order.
    Counted(Vec<(u32, RankKeyPart)>),
    /// The standings, in no order.
    Listed(Vec<RankKey>),
}

/// A count of rows by their standings, which is fed one row after the other. It takes some MiB a span that is counted, and 24 bytes a standing
/// of one that is listed.
#[derive(Debug)]
pub struct ScoreHistogramBuilder {
    decay: ScoreDecay,
    step: u64,
    spans: Vec<RankRangeCounter>,
    rows: u64,
    newest: u64,
}

#[derive(Debug)]
struct RankRangeCounter {
    span: RankKeyRange,
    /// The digit of a standing are the bits above so many.
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
    /// A count of the rows that a sweep after `step` looks at, of which `decay` says how their scores decay.
    ///
    /// Errors: `Memory`.
    pub fn new(step: u64, decay: ScoreDecay, spans: &[RankKeyRange]) -> Result<Self> {
        let spans = spans.iter().map(|span| RankRangeCounter::new(*span)).collect::<Result<_>>()?;
        Ok(Self { decay, step, spans, rows: 0, newest: 0 })
    }

    /// Count a row, but not one that was trained after the step.
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
        self.spans.iter_mut().try_for_each(|span| span.add(standing))
    }

    /// What was counted.
    pub fn finish(self) -> ScoreHistogram {
        let spans = self.spans.into_iter().map(RankRangeCounter::contents).collect();
        ScoreHistogram { rows: self.rows, newest: self.newest, spans }
    }
}

/// What a census has counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreHistogram {
    /// The rows in all.
    pub rows: u64,
    /// Those of them whose last step is the census's.
    pub newest: u64,
    /// What was found in each span.
    pub spans: Vec<RankRangeContents>,
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
    fn rows_are_ordered_by_score_then_last_step_then_the_id_as_a_number_without_sign() {
        let decay = ScoreDecay::new(10).expect("in range");
        let rows =
            [row(9, 10, 1.0), row(7, 0, 4.1), row(3, 20, 2.1), row(5, 20, 2.1), row(-5, 20, 2.1), row(1, 0, 9.0)];
        let standings: Vec<RankKey> = rows.iter().map(|row| RankKey::of(row, &decay, 20)).collect();
        // What is left of the scores: 0.5, 1.025, 2.1 three times, 2.25.
        assert!(standings.windows(2).all(|pair| pair[0] < pair[1]), "{standings:?}");
        let (older, newer) = (RankKey::of(&row(9, 3, 2.0), &decay, 3), RankKey::of(&row(1, 13, 2.0), &decay, 3));
        assert!(older < newer, "one that decays and one that does not, at one step");
    }

    #[test]
    fn a_digit_has_the_bits_above_a_number_of_bits_and_so_do_all_places_of_a_span_above_their_digits() {
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
    fn a_census_counts_a_span_by_digits_and_lists_another() {
        let all = RankKeyRange { low: RankKey::LOWEST, high: RankKey::HIGHEST, is_listed: false };
        let decay = || ScoreDecay::new(1 << 53).expect("in range");
        let mut census = ScoreHistogramBuilder::new(9, decay(), &[all]).expect("memory");
        let rows: Vec<RowHeader> = (0..100).map(|id| row(id, 9, 1.0 + (id % 4) as f32)).collect();
        rows.iter().try_for_each(|row| census.add(row)).expect("memory");
        census.add(&row(1000, 10, 1.0)).expect("memory");
        let ScoreHistogram { rows: counted, newest, spans: found } = census.finish();
        assert_eq!((counted, newest), (100, 100), "a row that was trained after the step is not counted");
        let RankRangeContents::Counted(parts) = &found[0] else { panic!("{found:?}") };
        let scores: Vec<(u32, u64)> = parts.iter().map(|(digit, part)| (*digit, part.rows)).collect();
        let digit = |score: f32| sortable_score(score) >> 16;
        assert_eq!(scores, [1.0, 2.0, 3.0, 4.0].map(|score| (digit(score), 25)));
        let (low, high) = (parts[1].1.low, parts[1].1.high);
        assert_eq!((low, high), (standing(sortable_score(2.0), 9, 1), standing(sortable_score(2.0), 9, 97)));
        // All of one score and one step: the ids alone differ, in their lowest seven bits.
        let spans = [
            RankKeyRange { low, high, is_listed: false },
            RankKeyRange { low: RankKey { id: 50, ..low }, high, is_listed: true },
        ];
        let mut census = ScoreHistogramBuilder::new(9, decay(), &spans).expect("memory");
        rows.iter().try_for_each(|row| census.add(row)).expect("memory");
        let mut found = census.finish().spans;
        let Some(RankRangeContents::Listed(listed)) = found.pop() else { panic!("{found:?}") };
        assert!(listed.iter().map(|standing| standing.id).eq((50..98).filter(|id| id % 4 == 1)), "{listed:?}");
        let Some(RankRangeContents::Counted(parts)) = found.pop() else { panic!("{found:?}") };
        assert!(
            parts.len() == 25 && parts.iter().all(|(digit, part)| part.low.id == u64::from(*digit) && part.rows == 1)
        );
    }
}
