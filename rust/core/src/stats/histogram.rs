//! Histograms of durations: log-linear buckets in fixed memory, into which threads record without a lock.
//!
//! The buckets are those of `HdrHistogram` (Gil Tene, <http://hdrhistogram.org>): each power of two is divided into
//! equally wide buckets, so that the relative error is bounded and the bucket of a value is found by a shift. They are
//! shifted by one, so that a bucket includes its upper bound and not its lower one. So the bounds that are powers of
//! two are exact `le` bounds of Prometheus.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Each power of two has 2 to this many buckets.
const BITS: u32 = 3;
const PER_POWER: usize = 1 << BITS;
/// Number of buckets for every `u64` up to `u64::MAX`; see [`bucket_of`].
const BUCKETS: usize = (u64::BITS - BITS + 1) as usize * PER_POWER;

/// Counts durations in nanoseconds by their size. It uses 4 KiB, for any number of durations.
///
/// Its atomics order nothing, and no Loom model covers them. So they are those of the standard library in Loom builds,
/// too.
pub(crate) struct DurationHistogram {
    buckets: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

/// The contents of a `DurationHistogram`, as plain numbers. Empty buckets are omitted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Number of durations.
    pub count: u64,
    /// Their sum in nanoseconds.
    pub sum_ns: u64,
    /// The largest duration in nanoseconds of each bucket; ascending.
    pub bounds: Vec<u64>,
    /// Number of durations in each bucket of `bounds`, excluding the previous buckets.
    pub counts: Vec<u64>,
}

impl Default for DurationHistogram {
    fn default() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(), sum_ns: AtomicU64::new(0) }
    }
}

impl std::fmt::Debug for DurationHistogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DurationHistogram").field(&self.snapshot()).finish()
    }
}

impl DurationHistogram {
    /// Records a duration. Any thread may call this at any time.
    #[inline]
    pub(crate) fn record(&self, duration: Duration) {
        // 2^64 ns are 584 years.
        let ns = duration.as_nanos() as u64;
        self.buckets[bucket_of(ns)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Returns the counts. For durations that are recorded concurrently, the sum and the counts may differ.
    pub(crate) fn snapshot(&self) -> HistogramSnapshot {
        let mut found =
            HistogramSnapshot { sum_ns: self.sum_ns.load(Ordering::Relaxed), ..HistogramSnapshot::default() };
        for (bucket, count) in self.buckets.iter().enumerate() {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                found.count += count;
                found.bounds.push(bound_of(bucket));
                found.counts.push(count);
            }
        }
        found
    }
}

/// The bucket of a value.
#[inline]
fn bucket_of(value: u64) -> usize {
    // A bucket includes its upper bound: the values above 2^k start the next power.
    let value = value.saturating_sub(1);
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(BITS + 1);
    (shift as usize * PER_POWER) + (value >> shift) as usize
}

/// The largest value of a bucket.
fn bound_of(bucket: usize) -> u64 {
    let shift = (bucket / PER_POWER).saturating_sub(1);
    let first = (bucket - shift * PER_POWER) as u128;
    // Only the last one exceeds the largest `u64`, by one.
    u64::try_from((first + 1) << shift).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
