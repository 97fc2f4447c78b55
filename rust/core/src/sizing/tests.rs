use std::collections::BTreeMap;

use proptest::prelude::*;

use super::TableSizing;
use super::reuse_distance::ReuseTracker;
use super::sample::{IdSample, MOST_BYTES, MOST_MEMBERS, SamplingPace, sampled_ids};
use crate::config::PolicyKind;
use crate::policy::{ReplacementPolicy, new_policy};
use crate::types::{CacheSlot, Id};

/// An unsampled cache, with one lookup at a time.
struct WholeTrace {
    policy: Box<dyn ReplacementPolicy>,
    slots: BTreeMap<Id, CacheSlot>,
    ids: Vec<Id>,
    free: Vec<CacheSlot>,
}

impl WholeTrace {
    fn new(kind: PolicyKind, rows: u32) -> Self {
        Self {
            policy: new_policy(kind, rows),
            slots: BTreeMap::new(),
            ids: vec![0; rows as usize],
            free: (0..rows).rev().collect(),
        }
    }

    fn misses(&mut self, id: Id) -> bool {
        if let Some(&slot) = self.slots.get(&id) {
            self.policy.accessed(&[slot]);
            return false;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = self.policy.victim(&mut |_| true).expect("no slot is in use");
            self.slots.remove(&self.ids[slot as usize]);
            self.policy.removed(slot, self.ids[slot as usize], true);
            slot
        });
        self.policy.inserted(slot, id);
        self.slots.insert(id, slot);
        self.ids[slot as usize] = id;
        true
    }
}

/// The miss ratio of a cache of `rows` rows over the entire trace.
fn miss_ratio(kind: PolicyKind, rows: u64, trace: &[Id]) -> f64 {
    let mut whole = WholeTrace::new(kind, rows as u32);
    trace.iter().filter(|&&id| whole.misses(id)).count() as f64 / trace.len() as f64
}

fn feed(sample: &mut IdSample, trace: &[Id]) {
    for batch in trace.chunks(1000) {
        let found = sampled_ids(batch, sample.hash_bound());
        let uses: Vec<(u64, Id)> = found.iter().map(|&(hash, position)| (hash, batch[position as usize])).collect();
        sample.looked_up(batch.len() as u64, 0);
        sample.used(&uses);
    }
}

/// Pseudorandom numbers, the same in each run (Marsaglia, "Xorshift RNGs", 2003).
struct NumberStream(u64);

impl NumberStream {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A rank below `ranks`, of which low ones are more frequent, about as `1 / rank`.
    fn skewed(&mut self, ranks: u64) -> Id {
        let share = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        ((ranks as f64).powf(share) - 1.0) as Id
    }
}

fn skewed_trace(lookups: usize, ranks: u64) -> Vec<Id> {
    let mut numbers = NumberStream(0x9e37_79b9);
    (0..lookups).map(|_| numbers.skewed(ranks).wrapping_mul(0x1234_5677)).collect()
}

#[test]
fn where_every_id_is_in_the_sample_each_curve_is_exact() {
    let trace = skewed_trace(60_000, 6_000);
    for kind in PolicyKind::ALL {
        let mut sample = IdSample::new(kind, 1000);
        feed(&mut sample, &trace);
        for curve in sample.curves() {
            assert!(curve.rows.len() > 8, "{curve:?}");
            assert_eq!(curve.lookups, 60_000);
            for (&rows, &ratio) in curve.rows.iter().zip(&curve.miss_ratios) {
                let exact = miss_ratio(curve.policy, rows, &trace);
                assert!((ratio - exact).abs() < 1e-9, "{kind:?} {:?} {rows}: {ratio} {exact}", curve.policy);
            }
        }
    }
}

#[test]
fn where_few_ids_are_in_the_sample_each_curve_is_close() {
    let drift = |at: usize, id: Id| id + (at / 2000) as Id * 97;
    let skewed = skewed_trace(500_000, 150_000);
    let drifting: Vec<Id> = skewed.iter().enumerate().map(|(at, &id)| drift(at, id)).collect();
    let scanned: Vec<Id> =
        skewed.iter().enumerate().map(|(at, &id)| if at % 3 == 0 { -1 - at as Id } else { id }).collect();
    for (name, trace) in [("skewed", skewed), ("drifting", drifting), ("scanned", scanned)] {
        for kind in PolicyKind::ALL {
            let mut sample = IdSample::new(kind, 100_000);
            feed(&mut sample, &trace);
            for curve in sample.curves() {
                assert!(curve.sampling_rate < 0.25, "{curve:?}");
                let points: Vec<_> = curve.rows.iter().zip(&curve.miss_ratios).collect();
                let picked: Vec<_> = points.iter().step_by(points.len().div_ceil(4)).collect();
                let errors =
                    picked.iter().map(|&&(&rows, ratio)| (miss_ratio(curve.policy, rows, &trace) - ratio).abs());
                let errors: Vec<f64> = errors.collect();
                let mean = errors.iter().sum::<f64>() / errors.len() as f64;
                // Under `lfu`, few rows of a cache change while traffic drifts, so the few members of the sample
                // represent them less accurately.
                let most = if curve.policy == PolicyKind::Lfu { 0.02 } else { 0.01 };
                assert!(mean < most, "{name} {:?}: {errors:?}", curve.policy);
            }
        }
    }
}

#[test]
fn a_measurement_takes_no_more_memory_than_it_says() {
    for kind in PolicyKind::ALL {
        let mut sample = IdSample::new(kind, 1);
        let trace: Vec<Id> = (0..8 * MOST_MEMBERS as Id).collect();
        feed(&mut sample, &trace);
        assert!(sample.bytes() <= MOST_BYTES, "{kind:?}: {}", sample.bytes());
    }
}

#[test]
fn a_reset_of_the_counts_keeps_the_caches_warm() {
    let trace = skewed_trace(50_000, 3_000);
    let mut sample = IdSample::new(PolicyKind::S3Fifo, 1000);
    feed(&mut sample, &trace);
    sample.reset_counts();
    assert_eq!(sample.curves()[0].lookups, 0);
    feed(&mut sample, &trace);
    for curve in sample.curves() {
        assert_eq!(curve.lookups, 50_000);
        // Every id was used before.
        assert!(curve.first_use_ratio.abs() < 1e-12);
        assert!(curve.miss_ratios.last().is_some_and(|last| last.abs() < 1e-12));
    }
}

#[test]
fn ids_without_a_row_are_no_lookups() {
    let sizing = TableSizing::default();
    sizing.record(&[1, 2, 3], &[], 0);
    assert!(sizing.curves(false).is_none());
    sizing.begin(PolicyKind::Lru, 100);
    sizing.record(&[1, 2, 3, 4], &[1, 3], 2);
    sizing.record(&[1, 3], &[], 0);
    let curve = sizing.curves(false).expect("it is measured").remove(0);
    assert_eq!((curve.lookups, curve.distinct_ids), (4, 2));
    assert_eq!((curve.batches, curve.largest_batch), (2, 2));
    assert!((curve.first_use_ratio - 0.5).abs() < 1e-12);
    assert!((curve.new_row_ratio - 0.5).abs() < 1e-12);
}

#[test]
fn few_ids_that_are_used_all_the_time_are_looked_at_in_bursts() {
    let mut pace = SamplingPace::default();
    let (mut looked, mut total) = (0_u64, 0_u64);
    let mut changes = 0;
    let mut before = true;
    for _ in 0..2_000_000 {
        total += 1000;
        let looks = pace.should_sample(1000);
        if looks {
            looked += 1000;
            pace.sampled(1000);
        }
        changes += u32::from(looks != before);
        before = looks;
    }
    assert!(looked as f64 / (total as f64) < 1.2 / 512.0, "{looked} of {total}");
    assert!(changes > 10, "{changes}");
}

proptest! {
    #[test]
    fn a_reuse_distance_is_the_number_of_other_members_used_since(
        uses in prop::collection::vec((0_u32..20, prop::bool::weighted(0.1)), 0..600)
    ) {
        let mut recency = ReuseTracker::new(20);
        let mut order: Vec<u32> = Vec::new();
        for (member, forgets) in uses {
            let at = order.iter().position(|&other| other == member);
            if forgets {
                recency.forget(member);
                at.map(|at| order.remove(at));
                continue;
            }
            let expected = at.map(|at| (order.len() - 1 - at) as u32);
            prop_assert_eq!(recency.used(member), expected);
            at.map(|at| order.remove(at));
            order.push(member);
        }
    }
}
