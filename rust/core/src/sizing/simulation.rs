//! Miniature simulations of caches of many sizes under one policy: a cache of `n` rows is simulated by a cache of `n ×
//! rate` members of the sample, where `rate` is the fraction of ids in the sample.

use std::collections::HashMap;

use crate::config::PolicyKind;
use crate::index::IdHash;
use crate::policy::{ReplacementPolicy, new_policy};
use crate::types::{CacheSlot, Id};

/// The minimum number of members of a simulated cache. In a smaller cache, one member more or less would change its
/// size too much.
pub(super) const LEAST_MEMBERS: f64 = 32.0;
/// Sizes double in this number of steps.
const SIZES_AN_OCTAVE: i32 = 2;

/// The size with an index.
fn size_of(number: i32) -> f64 {
    2_f64.powf(f64::from(number) / f64::from(SIZES_AN_OCTAVE))
}

/// The simulated caches, smallest first.
#[derive(Debug)]
pub(super) struct CacheSimulation {
    simulated: Vec<SimulatedCache>,
    /// The policy of a cache that contains every member. Any cache equals it until it is full, so each starts as a copy
    /// of it.
    unlimited: Box<dyn ReplacementPolicy>,
    /// Bit sets of the caches that contain each member.
    inside: Vec<u32>,
    policy: PolicyKind,
    /// The index of the next size, and that size.
    next: i32,
    next_size: f64,
    /// Misses of a cache that contains every member.
    first_uses: f64,
}

#[derive(Debug)]
struct SimulatedCache {
    /// Rows.
    size: f64,
    bit: u32,
    policy: Box<dyn ReplacementPolicy>,
    members: u32,
    missed: f64,
}

/// A use of a member.
#[derive(Clone, Copy)]
pub(super) struct SampleUse {
    pub(super) member: CacheSlot,
    /// True if it is the member's first use.
    pub(super) is_first: bool,
    /// The number of uses that it represents.
    pub(super) weight: f64,
}

impl CacheSimulation {
    /// Creates the simulation for members below `members`.
    pub(super) fn new(policy: PolicyKind, members: usize) -> Self {
        Self {
            simulated: Vec::new(),
            unlimited: new_policy(policy, members as u32),
            inside: vec![0; members],
            policy,
            next: (f64::from(SIZES_AN_OCTAVE) * LEAST_MEMBERS.log2()) as i32,
            next_size: LEAST_MEMBERS,
            first_uses: 0.0,
        }
    }

    /// Records a use. `ids` has the id of each member.
    pub(super) fn used(&mut self, used: SampleUse, ids: &[Id], rate: f64) {
        let SampleUse { member, is_first, weight } = used;
        let id = ids[member as usize];
        for cache in &mut self.simulated {
            if self.inside[member as usize] & cache.bit != 0 {
                cache.policy.accessed(&[member]);
                continue;
            }
            cache.missed += weight;
            cache.shrink_to(members_of(cache.size, rate) - 1, &mut self.inside, ids);
            cache.policy.inserted(member, id);
            cache.members += 1;
            self.inside[member as usize] |= cache.bit;
            if self.policy == PolicyKind::Lfu && rate < 1.0 && cache.members >= members_of(cache.size, rate) {
                cache.drop_if_next(member, &mut self.inside, ids);
            }
        }
        if is_first {
            self.first_uses += weight;
            self.unlimited.inserted(member, id);
        } else {
            self.unlimited.accessed(&[member]);
        }
    }

    /// Starts the caches that are full, if they have enough members, before another member is added. `members` has all
    /// members of the sample.
    pub(super) fn begin_full(&mut self, members: &HashMap<Id, CacheSlot, IdHash>, rate: f64) {
        while members.len() >= members_of(self.next_size, rate) as usize {
            let size = self.next_size;
            self.next += 1;
            self.next_size = size_of(self.next);
            if size * rate < LEAST_MEMBERS {
                continue;
            }
            let taken = self.simulated.iter().fold(0, |bits, cache| bits | cache.bit);
            let bit = 1_u32 << (!taken).trailing_zeros();
            for &member in members.values() {
                self.inside[member as usize] |= bit;
            }
            let policy = self.unlimited.boxed_clone();
            self.simulated.push(SimulatedCache {
                size,
                bit,
                policy,
                members: members.len() as u32,
                missed: self.first_uses,
            });
        }
    }

    /// Removes a member of the sample.
    pub(super) fn forget(&mut self, member: CacheSlot, id: Id) {
        let inside = std::mem::take(&mut self.inside[member as usize]);
        for cache in self.simulated.iter_mut().filter(|cache| inside & cache.bit != 0) {
            cache.policy.removed(member, id, false);
            cache.members -= 1;
        }
        self.unlimited.removed(member, id, false);
    }

    /// Adjusts to a lower rate. Each cache shrinks, so that it represents the same number of rows, and caches that
    /// would have too few members are removed.
    pub(super) fn rate_fell(&mut self, ids: &[Id], rate: f64) {
        while let Some(cache) = self.simulated.first()
            && cache.size * rate < LEAST_MEMBERS
        {
            let bit = self.simulated.remove(0).bit;
            self.inside.iter_mut().for_each(|inside| *inside &= !bit);
        }
        for cache in &mut self.simulated {
            cache.shrink_to(members_of(cache.size, rate), &mut self.inside, ids);
        }
    }

    /// Resets the counts of misses.
    pub(super) fn reset_counts(&mut self) {
        self.first_uses = 0.0;
        self.simulated.iter_mut().for_each(|cache| cache.missed = 0.0);
    }

    /// The sizes in rows and their misses, in ascending order.
    pub(super) fn misses(&self) -> impl Iterator<Item = (u64, f64)> {
        self.simulated.iter().map(|cache| (cache.size.round() as u64, cache.missed))
    }

    /// Maximum bytes of RAM.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let policies = self.simulated.iter().map(|cache| &cache.policy).chain([&self.unlimited]);
        self.inside.len() * (4 + policies.map(|policy| policy.bytes_per_slot()).sum::<usize>())
    }
}

/// The number of members of a cache of `size` rows.
fn members_of(size: f64, rate: f64) -> u32 {
    ((size * rate).round() as u32).max(1)
}

impl SimulatedCache {
    /// Evicts members until there are at most `most`. `inside` has the caches of each member, `ids` its id.
    fn shrink_to(&mut self, most: u32, inside: &mut [u32], ids: &[Id]) {
        while self.members > most {
            let victim = self.policy.victim(&mut |_| true).expect("no member is pinned");
            self.evict(victim, inside, ids);
        }
    }

    fn evict(&mut self, victim: CacheSlot, inside: &mut [u32], ids: &[Id]) {
        self.policy.removed(victim, ids[victim as usize], true);
        inside[victim as usize] &= !self.bit;
        self.members -= 1;
    }

    /// Evicts a newcomer that is the next victim. The cache that this one represents has its next miss immediately, by
    /// an id that is not in the sample, and evicts it then. Without this a newcomer would stay until the next miss of a
    /// member.
    fn drop_if_next(&mut self, newcomer: CacheSlot, inside: &mut [u32], ids: &[Id]) {
        if self.policy.victim(&mut |_| true) == Some(newcomer) {
            self.evict(newcomer, inside, ids);
        }
    }
}
