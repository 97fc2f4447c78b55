//! The sample: ids whose hash is below a bound. The number of members is limited, and when the limit is exceeded, the
//! bound is lowered. The pace of the measurement is limited too.
#![allow(clippy::inline_always)] // jobs and their callees are compiled for each instruction set

use std::collections::{BinaryHeap, HashMap};

use super::curve::{DistanceHistogram, MissRatioCurve, TrafficTotals};
use super::reuse_distance::ReuseTracker;
use super::simulation::{CacheSimulation, SampleUse};
use crate::config::PolicyKind;
use crate::index::IdHash;
use crate::runtime::simd::{InstructionSet, SimdJob};
use crate::types::{CacheSlot, Id};

/// Maximum number of members. Their caches and all other state then use less than [`MOST_BYTES`].
pub(super) const MOST_MEMBERS: usize = 16_384;
/// Maximum bytes of RAM of one measurement.
#[cfg(test)]
pub(super) const MOST_BYTES: usize = 8 << 20;

/// Selects evenly from ids that are close together.
const HASH: IdHash = IdHash::new(0x9e37_79b9_7f4a_7c15);

/// Excludes that a small id, which may be a frequent one, is in every sample.
const SALT: Id = 0x5851_f42d_4c95_7f2d;

/// Number of ids that are compared together.
const AT_ONCE: usize = 16;

/// Uses of sampled ids that are always simulated.
const FREE: u64 = 1 << 16;

/// Beyond those, one use is simulated per this number of lookups.
const LOOKUPS_A_USE: u64 = 512;

/// A burst ends when it has simulated this many uses more than were due. It covers the sample many times, so that the
/// boundary between two bursts has little weight.
const BURST: u64 = 1 << 18;
/// The members of the sample, and the results for them.
#[derive(Debug)]
pub(super) struct IdSample {
    /// The number of each member.
    members: HashMap<Id, CacheSlot, IdHash>,
    /// The id of each member, by its number.
    ids: Vec<Id>,
    /// Members by their hash: the highest is removed first.
    by_hash: BinaryHeap<(u64, CacheSlot)>,
    /// Numbers that no member has.
    free: Vec<CacheSlot>,
    /// Ids with a hash below this are members.
    hash_bound: u64,
    policy: PolicyKind,
    recency: ReuseTracker,
    distances: DistanceHistogram,
    /// `None` for `lru`, whose misses at all sizes follow from the distances.
    caches: Option<CacheSimulation>,
    totals: TrafficTotals,
}

impl IdSample {
    /// Creates the sample of a table whose tiers in RAM fit `rows` rows.
    pub(super) fn new(policy: PolicyKind, rows: u64) -> Self {
        // With more members the sample would be full before the RAM is, and if all rows fit in RAM no curve is needed.
        let most = MOST_MEMBERS as u64;
        let below = if rows <= most { u64::MAX } else { (u64::MAX / rows) * most };
        Self {
            members: HashMap::default(),
            ids: vec![0; MOST_MEMBERS],
            by_hash: BinaryHeap::new(),
            free: (0..MOST_MEMBERS as CacheSlot).rev().collect(),
            hash_bound: below,
            policy,
            recency: ReuseTracker::new(MOST_MEMBERS),
            distances: DistanceHistogram::default(),
            caches: (policy != PolicyKind::Lru).then(|| CacheSimulation::new(policy, MOST_MEMBERS)),
            totals: TrafficTotals::default(),
        }
    }

    /// Ids with a hash below this are members.
    pub(super) fn hash_bound(&self) -> u64 {
        self.hash_bound
    }

    /// The fraction of all ids that is in the sample.
    fn rate(&self) -> f64 {
        self.hash_bound as f64 / 2_f64.powi(64)
    }

    /// Records the number of lookups and of new rows of a plan. The uses of sampled ids are passed to
    /// [`IdSample::used`].
    pub(super) fn looked_up(&mut self, lookups: u64, new_rows: u64) {
        self.totals.lookups += lookups;
        self.totals.new_rows += new_rows;
        self.totals.batches += 1;
        self.totals.largest_batch = self.totals.largest_batch.max(lookups);
    }

    /// Records uses of ids that were in the sample at their lookup: their hashes and ids.
    pub(super) fn used(&mut self, uses: &[(u64, Id)]) {
        for &(hash, id) in uses {
            // The bound may have been lowered since.
            if hash < self.hash_bound {
                self.used_once(hash, id);
            }
        }
    }

    fn used_once(&mut self, hash: u64, id: Id) {
        let Some((member, is_first)) = self.member(hash, id) else { return };
        let weight = 1.0 / self.rate();
        match self.recency.used(member) {
            Some(distance) => self.distances.add(f64::from(distance) * weight + 1.0, weight),
            None => self.totals.first_uses += weight,
        }
        let rate = self.rate();
        if let Some(caches) = &mut self.caches {
            caches.used(SampleUse { member, is_first, weight }, &self.ids, rate);
        }
    }

    /// The number of an id, and true if this is its first use. `None` if the bound is lowered below its hash to free a
    /// number.
    fn member(&mut self, hash: u64, id: Id) -> Option<(CacheSlot, bool)> {
        if let Some(&member) = self.members.get(&id) {
            return Some((member, false));
        }
        if self.free.is_empty() {
            self.lower(hash);
        }
        if hash >= self.hash_bound {
            return None;
        }
        let rate = self.rate();
        if let Some(caches) = &mut self.caches {
            caches.begin_full(&self.members, rate);
        }
        let member = self.free.pop().expect("a member has left where there was no number");
        self.members.insert(id, member);
        self.ids[member as usize] = id;
        self.by_hash.push((hash, member));
        Some((member, true))
    }

    /// Lowers the bound to the highest hash of the members and of `hash`. A member with this hash is removed.
    fn lower(&mut self, hash: u64) {
        self.hash_bound = self.by_hash.peek().map_or(hash, |&(highest, _)| highest.max(hash));
        if self.hash_bound != hash
            && let Some((_, member)) = self.by_hash.pop()
        {
            let id = self.ids[member as usize];
            self.members.remove(&id);
            self.recency.forget(member);
            if let Some(caches) = &mut self.caches {
                caches.forget(member, id);
            }
            self.free.push(member);
        }
        let rate = self.rate();
        if let Some(caches) = &mut self.caches {
            caches.rate_fell(&self.ids, rate);
        }
    }

    /// The curve of the table's policy, and the curve of `lru` if that is another policy.
    pub(super) fn curves(&self) -> Vec<MissRatioCurve> {
        let rate = self.rate();
        let distinct = (self.members.len() as f64 / rate).round() as u64;
        let curve = |policy, points| MissRatioCurve::new(policy, points, self.totals, distinct, rate);
        let lru = curve(PolicyKind::Lru, self.distances.misses(self.totals.first_uses, rate));
        let of_policy = self.caches.as_ref().map(|caches| curve(self.policy, caches.misses().collect()));
        of_policy.into_iter().chain([lru]).collect()
    }

    /// Resets the counts. The simulated caches stay as full as they are.
    pub(super) fn reset_counts(&mut self) {
        self.totals = TrafficTotals::default();
        self.distances = DistanceHistogram::default();
        if let Some(caches) = &mut self.caches {
            caches.reset_counts();
        }
    }

    /// Maximum bytes of RAM, with all members.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        // A map of the standard library has capacity for an eighth more than its entries, rounded up to a power of two.
        let map = (MOST_MEMBERS * 8 / 7).next_power_of_two() * (size_of::<(Id, CacheSlot)>() + 1);
        let lists = MOST_MEMBERS * (size_of::<Id>() + 2 * size_of::<(u64, CacheSlot)>() + size_of::<CacheSlot>());
        map + lists + self.recency.bytes() + self.caches.as_ref().map_or(0, CacheSimulation::bytes)
    }
}

/// The hashes below `hash_bound`, and the positions of their ids.
pub(super) fn sampled_ids(ids: &[Id], hash_bound: u64) -> Vec<(u64, u32)> {
    InstructionSet::best().run(SampleJob { ids, hash_bound })
}

struct SampleJob<'a> {
    ids: &'a [Id],
    hash_bound: u64,
}

impl SimdJob for SampleJob<'_> {
    type Output = Vec<(u64, u32)>;

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut found = Vec::new();
        let (parts, rest) = self.ids.as_chunks::<AT_ONCE>();
        for (number, part) in parts.iter().enumerate() {
            // Mostly no id is selected. The lanes have no branch, so that they are compared together.
            let mut any = false;
            for &id in part {
                any |= hash(id) < self.hash_bound;
            }
            if any {
                self.add(part, number * AT_ONCE, &mut found);
            }
        }
        self.add(rest, parts.len() * AT_ONCE, &mut found);
        found
    }
}

impl SampleJob<'_> {
    #[inline(always)]
    fn add(&self, ids: &[Id], begin: usize, found: &mut Vec<(u64, u32)>) {
        for (at, &id) in ids.iter().enumerate() {
            let hash = hash(id);
            if hash < self.hash_bound {
                found.push((hash, (begin + at) as u32));
            }
        }
    }
}

#[inline(always)]
fn hash(id: Id) -> u64 {
    HASH.once(id ^ SALT)
}

/// Limits the measurement to a fraction of a step's time.
///
/// If few ids make up a table's traffic, most of them are in the sample, and to simulate each of their uses would cost
/// more than the lookups themselves. So the measurement works in bursts. Between them it pauses, and the simulated
/// caches do not change.
#[derive(Debug, Default)]
pub(super) struct SamplingPace {
    lookups: u64,
    simulated: u64,
    is_resting: bool,
}

impl SamplingPace {
    /// Counts lookups. Returns true if they are to be measured.
    pub(super) fn should_sample(&mut self, lookups: u64) -> bool {
        self.lookups += lookups;
        let due = FREE + self.lookups / LOOKUPS_A_USE;
        if self.is_resting {
            self.is_resting = self.simulated > due;
        } else {
            self.is_resting = self.simulated > due + BURST;
        }
        !self.is_resting
    }

    /// Counts simulated uses.
    pub(super) fn sampled(&mut self, uses: u64) {
        self.simulated += uses;
    }
}
