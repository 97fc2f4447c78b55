//! What is told of a measurement: miss ratios by size, and the counts that they are made from.

use super::caches::LEAST_MEMBERS;
use crate::config::PolicyKind;

/// The misses of a cache as a share of its lookups, for caches of many sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct MissRatioCurve {
    /// The policy of the caches.
    pub policy: PolicyKind,
    /// Rows that a cache holds, rising: `[n]`.
    pub rows: Vec<u64>,
    /// Its misses divided by its lookups, first uses included: `[n]`, 0 to 1.
    pub miss_ratios: Vec<f64>,
    /// The share of lookups that were the first use of their id, which miss in a cache of any size.
    pub first_use_ratio: f64,
    /// The share of lookups whose row was born with them, so that nothing was read.
    pub new_row_ratio: f64,
    /// Lookups of distinct ids of plans that were looked at.
    pub lookups: u64,
    /// The plans that they were of.
    pub batches: u64,
    /// The most lookups of one plan.
    pub largest_batch: u64,
    /// Distinct ids since the measurement began, as estimated.
    pub distinct_ids: u64,
    /// The share of the ids that is in the sample now.
    pub sampling_rate: f64,
}

/// What was counted, whatever the size of a cache.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TrafficTotals {
    pub(super) lookups: u64,
    pub(super) batches: u64,
    pub(super) largest_batch: u64,
    /// Rows that were born.
    pub(super) new_rows: u64,
    /// First uses of ids, as estimated.
    pub(super) first_uses: f64,
}

impl MissRatioCurve {
    /// The curve of caches of so many rows with so many misses, by rising size.
    ///
    /// The sample may have too many or too few of the ids that are used most. What the estimated misses leave of the true number of lookups
    /// counts as hits, as SHARDS corrects it (FAST 2015, section 3.1, "SHARDS-adj").
    pub(super) fn new(
        policy: PolicyKind,
        misses: Vec<(u64, f64)>,
        totals: TrafficTotals,
        distinct: u64,
        rate: f64,
    ) -> Self {
        let share = |misses: f64| if totals.lookups == 0 { 0.0 } else { (misses / totals.lookups as f64).min(1.0) };
        let first_use_ratio = share(totals.first_uses);
        let mut points: Vec<(u64, f64)> = misses.into_iter().filter(|&(rows, _)| rows < distinct).collect();
        points.push((distinct, totals.first_uses));
        Self {
            policy,
            rows: points.iter().map(|&(rows, _)| rows).collect(),
            miss_ratios: points.iter().map(|&(_, misses)| share(misses).max(first_use_ratio)).collect(),
            first_use_ratio,
            new_row_ratio: share(totals.new_rows as f64),
            lookups: totals.lookups,
            batches: totals.batches,
            largest_batch: totals.largest_batch,
            distinct_ids: distinct,
            sampling_rate: rate,
        }
    }
}

/// Each power of two is divided into so many buckets.
const BUCKETS_AN_OCTAVE: usize = 8;
/// Distances up to 2^48.
const OCTAVES: usize = 48;
/// The bits of a float that say its bucket: its exponent, and three bits of its fraction.
const SHIFT: u32 = f64::MANTISSA_DIGITS - 1 - BUCKETS_AN_OCTAVE.ilog2();

/// How many uses came at which distance, with buckets that widen with the distance.
#[derive(Debug)]
pub(super) struct DistanceHistogram(Vec<f64>);

impl Default for DistanceHistogram {
    fn default() -> Self {
        Self(vec![0.0; OCTAVES * BUCKETS_AN_OCTAVE])
    }
}

impl DistanceHistogram {
    /// Add a use that stands for `weight` uses. `distance` counts the row itself: it is the rows that a cache needs for a hit, at least 1.
    pub(super) fn add(&mut self, distance: f64, weight: f64) {
        let bucket = (distance.to_bits() >> SHIFT) as usize - (1.0_f64.to_bits() >> SHIFT) as usize;
        let last = self.0.len() - 1;
        self.0[bucket.min(last)] += weight;
    }

    /// The first number above those of a bucket.
    fn end(bucket: usize) -> f64 {
        let (octave, part) = (bucket / BUCKETS_AN_OCTAVE, bucket % BUCKETS_AN_OCTAVE);
        2_f64.powi(octave as i32) * (1.0 + (part + 1) as f64 / BUCKETS_AN_OCTAVE as f64)
    }

    /// Caches under `lru` by their rows, and their misses. Of a sample those are left out that would have few members.
    pub(super) fn misses(&self, first_uses: f64, rate: f64) -> Vec<(u64, f64)> {
        let mut misses = first_uses + self.0.iter().sum::<f64>();
        let mut points: Vec<(u64, f64)> = Vec::new();
        for (bucket, &uses) in self.0.iter().enumerate() {
            misses -= uses;
            // A cache of so many rows has the hits of all whole distances below the bucket's end.
            let rows = Self::end(bucket).ceil() as u64 - 1;
            if rows as f64 * rate < LEAST_MEMBERS && rate < 1.0 {
                continue;
            }
            match points.last_mut() {
                Some(last) if last.0 == rows => last.1 = misses,
                _ => points.push((rows, misses)),
            }
        }
        points
    }
}
