//! The policy `s3fifo`: S3-FIFO. Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache
//! eviction", SOSP 2023.
//!
//! A new row enters the *small* queue, which has a tenth of the slots. At the end of that queue, a row that was used at
//! least twice since moves to the *main* queue. Any other row is evicted, and the *ghost* remembers its id for as many
//! departures as main has slots. A row that is inserted again in that time enters main. At the end of main, a row that
//! was used is reinserted at the front. So the rows of a scan pass through the small queue only.

use std::collections::TryReserveError;

use super::linked_list::{PerSlot, SlotLinks, SlotList};
use super::{AHEAD, PolicyVictim, RECHECKED, ReplacementPolicy};
use crate::runtime::simd::prefetch;
use crate::types::{CacheSlot, Id, hash_id};

/// The queues of the module's description. Slots that were in use at the end of their queue are parked, and return to
/// the end of their queue once they are free.
#[derive(Clone, Debug, Default)]
pub(super) struct S3FifoPolicy {
    links: SlotLinks,
    /// A packed `S3FifoMark` per slot. One byte is little to touch for each row of a plan.
    marks: PerSlot<u8>,
    small: SlotList,
    main: SlotList,
    parked: SlotList,
    ghost: GhostTable,
}

#[derive(Clone, Copy, Debug, Default)]
struct S3FifoMark {
    queue: S3FifoQueue,
    parked: bool,
    /// Number of uses since the row entered the queue or was reinserted. Saturates at three, as in the paper.
    uses: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum S3FifoQueue {
    #[default]
    Neither,
    Small,
    Main,
}

const USE: u8 = 1;
const USES: u8 = 3;
const PARKED: u8 = 4;
const SMALL: u8 = 8;
const MAIN: u8 = 16;

impl S3FifoMark {
    fn pack(self) -> u8 {
        let queue = match self.queue {
            S3FifoQueue::Neither => 0,
            S3FifoQueue::Small => SMALL,
            S3FifoQueue::Main => MAIN,
        };
        queue | if self.parked { PARKED } else { 0 } | self.uses
    }

    fn unpack(bits: u8) -> Self {
        let queue = match bits & (SMALL | MAIN) {
            SMALL => S3FifoQueue::Small,
            MAIN => S3FifoQueue::Main,
            _ => S3FifoQueue::Neither,
        };
        Self { queue, parked: bits & PARKED != 0, uses: bits & USES }
    }
}

/// Number of uses in the small queue that move a row to the main queue.
const USES_TO_STAY: u8 = 2;
/// The small queue has one slot in this many.
const SMALL_SHARE: u32 = 10;

impl S3FifoPolicy {
    pub(super) fn new(capacity: u32) -> Self {
        Self { links: SlotLinks::with_capacity(capacity), marks: PerSlot::with_capacity(capacity), ..Self::default() }
    }

    fn list(&mut self, mark: S3FifoMark) -> (&mut SlotLinks, &mut SlotList) {
        let list = match mark {
            S3FifoMark { parked: true, .. } => &mut self.parked,
            S3FifoMark { queue: S3FifoQueue::Small, .. } => &mut self.small,
            S3FifoMark { .. } => &mut self.main,
        };
        (&mut self.links, list)
    }

    fn put_front(&mut self, slot: CacheSlot, mark: S3FifoMark) {
        let (links, list) = self.list(mark);
        links.push_front(list, slot);
        self.marks.set(slot, mark.pack());
    }

    fn take_out(&mut self, slot: CacheSlot) -> S3FifoMark {
        let mark = S3FifoMark::unpack(self.marks.get(slot));
        if mark.queue != S3FifoQueue::Neither {
            let (links, list) = self.list(mark);
            links.unlink(list, slot);
            self.marks.set(slot, 0);
        }
        mark
    }

    /// Removes a slot whose row is evicted. Returns the number of departures for which the ghost is to remember the
    /// row's id.
    fn take_out_evicted(&mut self, slot: CacheSlot) -> u32 {
        let resident = self.small.len() + self.main.len() + self.parked.len();
        let is_small = self.take_out(slot).queue == S3FifoQueue::Small;
        if is_small { resident - resident / SMALL_SHARE } else { 0 }
    }

    /// Checks the `count` oldest parked slots. Evictable ones return to the end of their queue.
    fn recheck(&mut self, count: u32, evictable: &mut dyn FnMut(CacheSlot) -> bool) {
        for _ in 0..count.min(self.parked.len()) {
            let Some(slot) = self.parked.back() else { return };
            if evictable(slot) {
                let mark = S3FifoMark { parked: false, ..self.take_out(slot) };
                let (links, list) = self.list(mark);
                links.push_back(list, slot);
                self.marks.set(slot, mark.pack());
            } else {
                self.links.move_to_front(&mut self.parked, slot);
            }
        }
    }

    /// Processes the slot at the end of a queue. Returns it if it is to be evicted, and moves it otherwise.
    fn step(&mut self, slot: CacheSlot, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        let mark = S3FifoMark::unpack(self.marks.get(slot));
        let moved = match mark.queue {
            S3FifoQueue::Small if mark.uses >= USES_TO_STAY => {
                S3FifoMark { queue: S3FifoQueue::Main, uses: 0, parked: false }
            }
            S3FifoQueue::Main if mark.uses > 0 => S3FifoMark { uses: mark.uses - 1, ..mark },
            _ if evictable(slot) => return Some(slot),
            _ => S3FifoMark { parked: true, ..mark },
        };
        self.take_out(slot);
        self.put_front(slot, moved);
        None
    }

    fn scan(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        // Every step moves a slot to main, decrements a use count, or parks a slot. So this terminates.
        loop {
            let small_is_full = self.small.len() > (self.small.len() + self.main.len()) / SMALL_SHARE;
            let slot = match (self.small.back(), self.main.back()) {
                (Some(slot), _) if small_is_full => slot,
                (_, Some(slot)) | (Some(slot), None) => slot,
                (None, None) => return None,
            };
            let victim = self.step(slot, evictable);
            if victim.is_some() {
                return victim;
            }
        }
    }
}

impl ReplacementPolicy for S3FifoPolicy {
    fn inserted(&mut self, slot: CacheSlot, id: Id) {
        self.take_out(slot);
        let queue = if self.ghost.take(id) { S3FifoQueue::Main } else { S3FifoQueue::Small };
        self.put_front(slot, S3FifoMark { queue, parked: false, uses: 0 });
    }

    fn prefetch_insert(&self, id: Id) {
        self.ghost.prefetch(id);
    }

    fn all_inserted(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        let Some(&highest) = slots.iter().max() else { return };
        self.links.cover(highest);
        self.marks.cover(highest);
        let (mut small, mut main) = (Vec::with_capacity(slots.len()), Vec::new());
        for (at, (&slot, &id)) in slots.iter().zip(ids).enumerate() {
            if let Some(&later) = ids.get(at + AHEAD) {
                self.ghost.prefetch(later);
            }
            self.take_out(slot);
            let (queue, list) =
                if self.ghost.take(id) { (S3FifoQueue::Main, &mut main) } else { (S3FifoQueue::Small, &mut small) };
            list.push(slot);
            self.marks.set(slot, S3FifoMark { queue, parked: false, uses: 0 }.pack());
        }
        self.links.push_all_front(&mut self.small, &small);
        self.links.push_all_front(&mut self.main, &main);
    }

    fn accessed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.marks.prefetch(ahead);
            }
            let mark = self.marks.get(slot);
            if mark & (SMALL | MAIN) != 0 && mark & USES != USES {
                self.marks.set(slot, mark + USE);
            }
        }
    }

    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        self.recheck(RECHECKED, evictable);
        self.scan(evictable).or_else(|| {
            self.recheck(u32::MAX, evictable);
            self.scan(evictable)
        })
    }

    fn victims(&mut self, requested: usize, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Vec<PolicyVictim> {
        let mut victims = Vec::with_capacity(requested);
        while victims.len() < requested
            && let Some(slot) = self.victim(evictable)
        {
            let departures = self.take_out_evicted(slot);
            victims.push(PolicyVictim { slot, departures });
        }
        victims
    }

    fn remember(&mut self, victims: &[PolicyVictim], ids: &[Id]) {
        for (at, (victim, &id)) in victims.iter().zip(ids).enumerate() {
            if let Some(&later) = ids.get(at + AHEAD) {
                self.ghost.prefetch(later);
            }
            if victim.departures > 0 {
                self.ghost.remember(id, victim.departures);
            }
        }
    }

    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.links.reserve(slots)?;
        self.marks.reserve(slots)
    }

    fn removed(&mut self, slot: CacheSlot, id: Id, evicted: bool) {
        if !evicted {
            self.take_out(slot);
            return;
        }
        let departures = self.take_out_evicted(slot);
        if departures > 0 {
            self.ghost.remember(id, departures);
        }
    }

    fn all_removed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.marks.prefetch(ahead);
                self.links.prefetch_neighbours(ahead);
            }
            self.take_out(slot);
        }
    }

    fn bytes_per_slot(&self) -> usize {
        SlotLinks::BYTES_PER_SLOT + size_of::<u8>() + GhostTable::BYTES_PER_ID
    }

    fn boxed_clone(&self) -> Box<dyn ReplacementPolicy> {
        Box::new(self.clone())
    }
}

const BUCKET: usize = 8;

/// A table of buckets without lists, as in the S3-FIFO paper (section 4.2): remembers about the last `length` ids that
/// were added. When a bucket overflows its oldest id is forgotten early. Two ids in the same bucket have equal
/// fingerprints with a probability of 2⁻³². Only the choice of victims depends on this.
#[derive(Clone, Debug, Default)]
pub(super) struct GhostTable {
    /// The departure number (0 for a free entry) in the upper half, and a fingerprint of the id in the lower.
    entries: Vec<u64>,
    length: u32,
    now: u32,
}

impl GhostTable {
    /// Bytes per slot of the tier: 8 bytes per entry, 0.9 remembered ids per slot, 5/4 entries per id, and a fifth
    /// more.
    pub(super) const BYTES_PER_ID: usize = 11;

    /// Remembers `id` for the next `length` departures.
    pub(super) fn remember(&mut self, id: Id, length: u32) {
        let length = length.max(1);
        let needed = (length as usize * 5 / 4).next_multiple_of(BUCKET);
        if self.entries.len() < needed || self.now == u32::MAX {
            // A fifth more entries than needed, so that a tier that fills up does not restart with an empty table for
            // every row.
            let len = if self.now == 0 { needed } else { (needed * 6 / 5).next_multiple_of(BUCKET) };
            let mut entries = Vec::new();
            if entries.try_reserve_exact(len).is_ok() {
                entries.resize(len, 0);
                self.entries = entries;
            } else if self.entries.is_empty() {
                return;
            } else {
                // The allocation failed. The table is emptied instead, and remembers fewer departures.
                self.entries.fill(0);
            }
            self.now = 0;
        }
        self.length = length;
        self.now += 1;
        let entry = u64::from(self.now) << 32 | u64::from(fingerprint(id));
        let oldest = self.bucket(id).iter_mut().min_by_key(|entry| **entry >> 32);
        if let Some(oldest) = oldest {
            *oldest = entry;
        }
    }

    /// Returns true if `id` left recently, and forgets it.
    pub(super) fn take(&mut self, id: Id) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let (now, length) = (self.now, self.length);
        let found = self.bucket(id).iter_mut().find(|entry| {
            let left = (**entry >> 32) as u32;
            left != 0 && **entry as u32 == fingerprint(id) && now - left < length
        });
        found.map(|entry| *entry = 0).is_some()
    }

    /// Prefetches the bucket of `id` into the CPU cache.
    pub(super) fn prefetch(&self, id: Id) {
        if !self.entries.is_empty() {
            prefetch(&self.entries, self.start(id));
        }
    }

    /// The index of the first entry of an id's bucket.
    fn start(&self, id: Id) -> usize {
        let buckets = self.entries.len() / BUCKET;
        ((u128::from(hash_id(id)) * buckets as u128) >> 64) as usize * BUCKET
    }

    fn bucket(&mut self, id: Id) -> &mut [u64] {
        let start = self.start(id);
        &mut self.entries[start..][..BUCKET]
    }
}

/// The lower half of the hash. Its upper bits choose the bucket.
fn fingerprint(id: Id) -> u32 {
    hash_id(id) as u32
}
