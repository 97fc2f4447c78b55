//! Admission: decides which ids get a row. The decision for an id of a training batch without a row is made when the
//! batch is forwarded.
//!
//! A decision depends on the settings, the id, the batch and the commits before it, and on nothing else: not on
//! budgets, ranks, threads, or on the number of batches planned ahead.

use std::ops::Range;

use super::AdmissionCounters;
use super::admission_counters::{AdmissionCount, BucketCounts, CountedId, SnapshotCounts};
use super::counter_map::CounterSpot;
use crate::config::{AdmissionRule, TableConfig};
use crate::error::{Kind, Result};
use crate::rows::philox;
use crate::types::{BucketMapper, Id, hash_id};

/// An id of a batch without a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdmissionCandidate {
    /// The id.
    pub(crate) id: Id,
    /// Its occurrences in the batch: its shows.
    pub(crate) occurrences: u32,
    /// Its clicks in the batch.
    pub(crate) clicks: u32,
    /// The location of its count.
    spot: CounterSpot,
}

impl AdmissionCandidate {
    /// Creates the candidate of an id with its shows and clicks in the batch.
    pub(crate) fn new(id: Id, occurrences: u32, clicks: u32) -> Self {
        Self { id, occurrences, clicks, spot: CounterSpot::NOWHERE }
    }
}

/// Distance, in ids, at which the count of an id is prefetched.
const AHEAD: usize = 32;
/// Distance of a second prefetch, because CPUs drop some of many prefetches. It costs nearly nothing if the line is
/// cached.
const ASKED_AGAIN: usize = 8;

/// Decides admission for one table shard, and counts its pending ids.
#[derive(Debug)]
pub(crate) struct RowAdmitter {
    rule: AdmissionRule,
    /// The Philox key of the random decisions.
    key: [u32; 2],
    /// The shows of the pending ids.
    shows: Option<AdmissionCounters>,
    /// The clicks of the pending ids that have any.
    clicks: Option<AdmissionCounters>,
    buckets: Range<u32>,
    bucketing: BucketMapper,
    /// The counts that an asynchronous save has not written yet.
    snapshot_counts: Option<SnapshotCounts>,
    /// Number of changes that may affect decisions.
    changes: u64,
}

impl RowAdmitter {
    /// Creates the admitter of a shard whose rule was [checked](check). Returns `None` if every id gets a row.
    pub(crate) fn of(config: &TableConfig) -> Option<Self> {
        config.admission.is_selective().then(|| Self::new(config))
    }

    fn new(config: &TableConfig) -> Self {
        let (rule, seed, key) = (config.admission, config.seed, config.key);
        let (buckets, bucketing) = (config.buckets.clone(), config.bucketing());
        // Initial weights have a key derived from the same numbers. The key for decisions differs, so that a decision
        // is independent of the weights.
        let mixed = hash_id(hash_id((seed ^ hash_id(key as Id)) as Id) as Id);
        let pending = |memory, window| AdmissionCounters::new(buckets.clone(), bucketing, memory, window);
        let (shows, clicks) = match rule {
            AdmissionRule::Count { window_steps, memory, .. } => (Some(pending(memory, window_steps)), None),
            AdmissionRule::ShowClick { window_steps, memory, .. } => {
                (Some(pending(memory, window_steps)), Some(pending(memory, window_steps).never_full()))
            }
            AdmissionRule::All | AdmissionRule::Probability { .. } | AdmissionRule::ReadOnly => (None, None),
        };
        let key = [mixed as u32, (mixed >> 32) as u32];
        Self { rule, key, shows, clicks, buckets, bucketing, snapshot_counts: None, changes: 0 }
    }

    /// A counter that changes when the decision for a candidate may change.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns true for each of `candidates` `[n]` that is admitted in the batch of step `step`: `[n]`. It records the
    /// location of their counts in the candidates, for [`RowAdmitter::count`].
    pub(crate) fn decide(&self, candidates: &mut [AdmissionCandidate], step: u64) -> Vec<bool> {
        let mut admitted = Vec::with_capacity(candidates.len());
        match self.rule {
            AdmissionRule::All => admitted.resize(candidates.len(), true),
            AdmissionRule::ReadOnly => admitted.resize(candidates.len(), false),
            AdmissionRule::Probability { p } => admitted.extend(candidates.iter().map(|each| self.coin(p, each, step))),
            AdmissionRule::Count { threshold, .. } => {
                let Some(shows) = &self.shows else { return admitted };
                shows.find_batch(
                    candidates,
                    |each| each.id,
                    |each, found| {
                        each.spot = found.spot;
                        admitted.push(each.occurrences.saturating_add(found.count) >= threshold);
                    },
                );
            }
            AdmissionRule::ShowClick { alpha, beta, threshold, .. } => {
                let (Some(shows), Some(clicks)) = (&self.shows, &self.clicks) else { return admitted };
                let ids: Vec<Id> = candidates.iter().map(|each| each.id).collect();
                let mut clicks_before = vec![0; ids.len()];
                clicks.get_batch(&ids, &mut clicks_before);
                let mut clicks_before = clicks_before.into_iter();
                shows.find_batch(
                    candidates,
                    |each| each.id,
                    |each, found| {
                        each.spot = found.spot;
                        let shows = f64::from(each.occurrences) + f64::from(found.count);
                        let clicks = f64::from(each.clicks) + f64::from(clicks_before.next().unwrap_or(0));
                        admitted.push(alpha * shows + beta * clicks >= threshold);
                    },
                );
            }
        }
        admitted
    }

    /// One decision for all occurrences of an id in a batch: it is admitted unless every occurrence is rejected.
    fn coin(&self, p: f64, each: &AdmissionCandidate, step: u64) -> bool {
        let id = each.id as u64;
        let word = philox::word([step as u32, (step >> 32) as u32, id as u32, (id >> 32) as u32], self.key);
        // The middle of the word's interval, if the unit interval is divided into 2³² parts.
        let thrown = (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0);
        thrown < 1.0 - power(1.0 - p, each.occurrences)
    }

    /// Allocates memory to count this number of additional ids.
    ///
    /// Errors: `Memory`.
    pub(crate) fn reserve(&mut self, ids: usize) -> Result<()> {
        self.all_counts().try_for_each(|pending| pending.reserve(ids))
    }

    /// Counts the occurrences of ids that were not admitted in a committed batch, except those in `except` `[m]`, which
    /// ascends. Memory must have been reserved.
    pub(crate) fn count(&mut self, candidates: &[AdmissionCandidate], except: &[Id], epoch: u32) {
        self.changes += 1;
        for (at, each) in candidates.iter().enumerate() {
            if let Some(shows) = &self.shows {
                let later = [candidates.get(at + AHEAD), candidates.get(at + ASKED_AGAIN)];
                later.into_iter().flatten().for_each(|later| shows.prefetch(later.id, later.spot));
            }
            if except.is_empty() || except.binary_search(&each.id).is_err() {
                self.count_one(each, epoch);
            }
        }
    }

    #[inline]
    fn count_one(&mut self, each: &AdmissionCandidate, epoch: u32) {
        self.keep_for_snapshot(each.id);
        let Some(shows) = &mut self.shows else { return };
        shows.add(each.id, each.spot, each.occurrences, epoch);
        let Some(clicks) = &mut self.clicks else { return };
        let mut before = [0];
        if each.clicks == 0 {
            clicks.get_batch(&[each.id], &mut before);
        }
        if each.clicks > 0 || before[0] > 0 {
            clicks.add(each.id, CounterSpot::NOWHERE, each.clicks, epoch);
        }
    }

    /// Forgets the counts of an id that got a row.
    pub(crate) fn forget(&mut self, id: Id) {
        self.changes += 1;
        self.keep_for_snapshot(id);
        self.all_counts().for_each(|pending| pending.remove(id));
    }

    /// Ends a step, after its batch was counted. Returns true if it is the first step after which ids are forgotten
    /// because the memory for their counts is full.
    pub(crate) fn end_step(&mut self, step: u64) -> bool {
        self.changes += 1;
        let ran_full = self.has_run_full();
        for bucket in self.shows.as_mut().map(|shows| shows.ending(step)).unwrap_or_default() {
            self.keep_bucket_for_snapshot(bucket);
            self.all_counts().for_each(|pending| pending.end_generation(bucket));
        }
        self.has_run_full() && !ran_full
    }

    fn has_run_full(&self) -> bool {
        self.shows.as_ref().is_some_and(AdmissionCounters::ran_full)
    }

    /// Forgets all counts.
    pub(crate) fn clear(&mut self) {
        self.changes += 1;
        self.buckets.clone().for_each(|bucket| self.keep_bucket_for_snapshot(bucket));
        self.all_counts().for_each(AdmissionCounters::clear);
    }

    /// The counts of the pending ids, if the rule counts them.
    pub(crate) fn counters(&self) -> Option<&AdmissionCounters> {
        self.shows.as_ref()
    }

    /// The counts of a bucket, restricted to ids that were counted in epoch `since` or later if that is set.
    pub(crate) fn of_bucket(&self, bucket: u32, since: Option<u32>) -> BucketCounts {
        let Some(shows) = &self.shows else { return BucketCounts { bucket, ..BucketCounts::default() } };
        let counts = since.map_or_else(|| shows.of_bucket(bucket), |since| shows.of_bucket_since(bucket, since));
        let ids: Vec<Id> = counts.iter().map(|count| count.id).collect();
        let mut clicks = vec![0; ids.len()];
        if let Some(pending) = &self.clicks {
            pending.get_batch(&ids, &mut clicks);
        }
        let pending = counts
            .into_iter()
            .zip(clicks)
            .map(|(AdmissionCount { id, count, is_older }, clicks)| CountedId { id, shows: count, clicks, is_older });
        BucketCounts { bucket, generation: shows.generation(bucket), ids: pending.collect() }
    }

    /// Restores the counts of an empty bucket. A rule that does not count ignores them.
    ///
    /// Errors: `Memory`, and the bucket has some of the counts.
    pub(crate) fn restore(&mut self, counts: &BucketCounts, epoch: u32) -> Result<()> {
        self.changes += 1;
        let BucketCounts { bucket, generation, ids: ref pending } = *counts;
        let list = |of: fn(&CountedId) -> u32| -> Vec<AdmissionCount> {
            let one = |each: &CountedId| AdmissionCount { id: each.id, count: of(each), is_older: each.is_older };
            pending.iter().map(one).collect()
        };
        if let Some(shows) = &mut self.shows {
            shows.restore((bucket, generation), &list(|each| each.shows), epoch)?;
        }
        if let Some(pending) = &mut self.clicks {
            let clicked: Vec<AdmissionCount> =
                list(|each| each.clicks).into_iter().filter(|each| each.count > 0).collect();
            pending.restore((bucket, generation), &clicked, epoch)?;
        }
        Ok(())
    }

    /// Starts a snapshot of the current counts, until [`RowAdmitter::take_snapshot_counts`] has taken those of every
    /// bucket.
    pub(crate) fn begin_snapshot(&mut self, since: Option<u32>) {
        self.snapshot_counts =
            self.shows.is_some().then(|| SnapshotCounts::new(self.buckets.start, self.buckets.len(), since));
    }

    /// Discards the snapshot.
    pub(crate) fn end_snapshot(&mut self) {
        self.snapshot_counts = None;
    }

    /// Takes the counts of a bucket at the start of the snapshot.
    pub(crate) fn take_snapshot_counts(&mut self, bucket: u32) -> BucketCounts {
        let Some(mut wanted) = self.snapshot_counts.take() else {
            return BucketCounts { bucket, ..BucketCounts::default() };
        };
        let counts = wanted.take(bucket, |since| self.of_bucket(bucket, since));
        self.snapshot_counts = Some(wanted);
        counts
    }

    #[inline]
    fn keep_for_snapshot(&mut self, id: Id) {
        if self.snapshot_counts.is_some() {
            self.keep_bucket_for_snapshot(self.bucketing.of(id));
        }
    }

    #[cold]
    fn keep_bucket_for_snapshot(&mut self, bucket: u32) {
        let Some(wanted) = &self.snapshot_counts else { return };
        if wanted.is_pending(bucket) {
            let counts = self.of_bucket(bucket, wanted.since);
            if let Some(wanted) = &mut self.snapshot_counts {
                wanted.keep(counts);
            }
        }
    }

    fn all_counts(&mut self) -> impl Iterator<Item = &mut AdmissionCounters> {
        [&mut self.shows, &mut self.clicks].into_iter().flatten()
    }
}

/// Checks that a rule's parameters are in range. Returns `Kind::Config`, which names the parameter, if not.
pub(crate) fn check(rule: &AdmissionRule) -> Result<()> {
    let refuse = |message: String| Err(Kind::Config.error(message));
    let check_memory = |memory: u64| {
        if memory == 0 {
            refuse("admission memory=0: give the counts some bytes, such as 64 MiB".into())
        } else {
            Ok(())
        }
    };
    match *rule {
        AdmissionRule::All | AdmissionRule::ReadOnly => Ok(()),
        AdmissionRule::Count { threshold: 0, .. } => {
            refuse("admission.Count(0) admits every id: leave admission out for that, or give 1 or more".into())
        }
        AdmissionRule::Count { threshold, memory, .. } => {
            if threshold > super::admission_counters::MOST_THRESHOLD {
                let most = super::admission_counters::MOST_THRESHOLD;
                return refuse(format!("admission.Count({threshold}) is out of range: give at most {most}"));
            }
            check_memory(memory)
        }
        AdmissionRule::Probability { p } => {
            if p > 0.0 && p <= 1.0 {
                return Ok(());
            }
            refuse(format!("admission.Probability({p}) is out of range: give more than 0 and at most 1"))
        }
        AdmissionRule::ShowClick { alpha, beta, threshold, memory, .. } => {
            for (name, number) in [("alpha", alpha), ("beta", beta), ("threshold", threshold)] {
                if !number.is_finite() || number < 0.0 {
                    return refuse(format!(
                        "admission.ShowClick({name}={number}) is out of range: give a finite number from 0"
                    ));
                }
            }
            if alpha == 0.0 && beta == 0.0 && threshold > 0.0 {
                return refuse(
                    "admission.ShowClick(alpha=0, beta=0) admits no id: give a weight, or use ReadOnly()".into(),
                );
            }
            check_memory(memory)
        }
    }
}

/// `base` to the power of `exponent`, by repeated squaring. The platform's function may round differently.
fn power(base: f64, exponent: u32) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

#[cfg(test)]
mod tests;
