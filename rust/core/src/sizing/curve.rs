//! Results of a measurement: miss ratios by size, and the counts that they are computed from.

use super::simulation::LEAST_MEMBERS;
use crate::config::PolicyKind;

/// The misses of a cache as a fraction of its lookups, for caches of many sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct MissRatioCurve {
    /// The policy of the caches.
    pub policy: PolicyKind,
    /// Sizes of the caches in rows, in ascending order: `[n]`.
    pub rows: Vec<u64>,
    /// Misses divided by lookups, including first uses: `[n]`, 0 to 1.
    pub miss_ratios: Vec<f64>,
    /// The fraction of lookups that were the first use of their id, which miss in a cache of any size.
    pub first_use_ratio: f64,
    /// The fraction of lookups that inserted a new row, so that nothing was read.
    pub new_row_ratio: f64,
    /// Lookups of distinct ids in the measured plans.
    pub lookups: u64,
    /// Number of measured plans.
    pub batches: u64,
    /// Maximum lookups of one plan.
    pub largest_batch: u64,
    /// Distinct ids since the measurement started, as estimated.
    pub distinct_ids: u64,
    /// The fraction of ids that is in the sample.
    pub sampling_rate: f64,
}

/// Counters that do not depend on the size of a cache.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TrafficTotals {
    pub(super) lookups: u64,
    pub(super) batches: u64,
    pub(super) largest_batch: u64,
    /// New rows.
    pub(super) new_rows: u64,
    /// First uses of ids, as estimated.
    pub(super) first_uses: f64,
}

impl MissRatioCurve {
    /// Creates the curve from pairs of rows and misses, in ascending order of rows.
    ///
    /// The sample may have too many or too few of the most frequent ids. The difference between the true number of
    /// lookups and the estimated misses counts as hits, like the correction of SHARDS (FAST 2015, section 3.1,
    /// "SHARDS-adj").
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

/// Number of buckets per power of two.
const BUCKETS_AN_OCTAVE: usize = 8;
/// Distances up to 2^48.
const OCTAVES: usize = 48;
/// Shift that leaves the bucket bits of a float: its exponent, and three bits of its fraction.
const SHIFT: u32 = f64::MANTISSA_DIGITS - 1 - BUCKETS_AN_OCTAVE.ilog2();

/// Number of uses by distance, with buckets that widen with the distance.
#[derive(Debug)]
pub(super) struct DistanceHistogram(Vec<f64>);

impl Default for DistanceHistogram {
    fn default() -> Self {
        Self(vec![0.0; OCTAVES * BUCKETS_AN_OCTAVE])
    }
}

impl DistanceHistogram {
    /// Adds a use that represents `weight` uses. `distance` includes the row itself: it is the number of rows that a
    /// cache needs for a hit, at least 1.
    pub(super) fn add(&mut self, distance: f64, weight: f64) {
        let bucket = (distance.to_bits() >> SHIFT) as usize - (1.0_f64.to_bits() >> SHIFT) as usize;
        let last = self.0.len() - 1;
        self.0[bucket.min(last)] += weight;
    }

    /// The upper end of a bucket, exclusive.
    fn end(bucket: usize) -> f64 {
        let (octave, part) = (bucket / BUCKETS_AN_OCTAVE, bucket % BUCKETS_AN_OCTAVE);
        2_f64.powi(octave as i32) * (1.0 + (part + 1) as f64 / BUCKETS_AN_OCTAVE as f64)
    }

    /// The rows and misses of caches under `lru`. For a sample, caches with few members are omitted.
    pub(super) fn misses(&self, first_uses: f64, rate: f64) -> Vec<(u64, f64)> {
        let mut misses = first_uses + self.0.iter().sum::<f64>();
        let mut points: Vec<(u64, f64)> = Vec::new();
        for (bucket, &uses) in self.0.iter().enumerate() {
            misses -= uses;
            // A cache of this many rows hits at all integer distances below the bucket's end.
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
