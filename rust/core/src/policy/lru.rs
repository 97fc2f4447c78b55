//! The policy `lru`: evicts the least recently used row first.

use std::collections::TryReserveError;

use super::linked_list::{PerSlot, SlotLinks, SlotList};
use super::{AHEAD, RECHECKED, ReplacementPolicy};
use crate::types::{CacheSlot, Id};

/// A queue in the order of last use. Slots that were in use at the end of the queue are parked, and are evicted first
/// once they are free.
#[derive(Clone, Debug, Default)]
pub(super) struct LruPolicy {
    links: SlotLinks,
    lists: PerSlot<LruList>,
    queue: SlotList,
    parked: SlotList,
}

/// The list of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LruList {
    #[default]
    Neither,
    Queue,
    Parked,
}

impl LruPolicy {
    pub(super) fn new(capacity: u32) -> Self {
        Self { links: SlotLinks::with_capacity(capacity), lists: PerSlot::with_capacity(capacity), ..Self::default() }
    }

    fn take_out(&mut self, slot: CacheSlot) {
        match self.lists.get(slot) {
            LruList::Neither => {}
            LruList::Queue => self.links.unlink(&mut self.queue, slot),
            LruList::Parked => self.links.unlink(&mut self.parked, slot),
        }
        self.lists.set(slot, LruList::Neither);
    }

    fn put(&mut self, slot: CacheSlot, which: LruList) {
        let list = if which == LruList::Parked { &mut self.parked } else { &mut self.queue };
        self.links.push_front(list, slot);
        self.lists.set(slot, which);
    }

    /// The first evictable slot among the `count` oldest parked ones. Slots that are not evictable move to the front.
    fn recheck(&mut self, count: u32, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        for _ in 0..count.min(self.parked.len()) {
            let slot = self.parked.back()?;
            if evictable(slot) {
                return Some(slot);
            }
            self.links.move_to_front(&mut self.parked, slot);
        }
        None
    }
}

impl ReplacementPolicy for LruPolicy {
    fn inserted(&mut self, slot: CacheSlot, _id: Id) {
        self.take_out(slot);
        self.put(slot, LruList::Queue);
    }

    fn all_inserted(&mut self, slots: &[CacheSlot], _ids: &[Id]) {
        let Some(&highest) = slots.iter().max() else { return };
        self.links.cover(highest);
        self.lists.cover(highest);
        for &slot in slots {
            self.take_out(slot);
            self.lists.set(slot, LruList::Queue);
        }
        self.links.push_all_front(&mut self.queue, slots);
    }

    fn accessed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.lists.prefetch(ahead);
                self.links.prefetch(ahead);
            }
            if self.lists.get(slot) != LruList::Neither {
                self.take_out(slot);
                self.put(slot, LruList::Queue);
            }
        }
    }

    fn victim(&mut self, evictable: &mut dyn FnMut(CacheSlot) -> bool) -> Option<CacheSlot> {
        if let Some(slot) = self.recheck(RECHECKED, evictable) {
            return Some(slot);
        }
        while let Some(slot) = self.queue.back() {
            if evictable(slot) {
                return Some(slot);
            }
            self.take_out(slot);
            self.put(slot, LruList::Parked);
        }
        self.recheck(u32::MAX, evictable)
    }

    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.links.reserve(slots)?;
        self.lists.reserve(slots)
    }

    fn removed(&mut self, slot: CacheSlot, _id: Id, _evicted: bool) {
        self.take_out(slot);
    }

    fn all_removed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.lists.prefetch(ahead);
                self.links.prefetch_neighbours(ahead);
            }
            self.take_out(slot);
        }
    }

    fn bytes_per_slot(&self) -> usize {
        SlotLinks::BYTES_PER_SLOT + size_of::<LruList>()
    }

    fn boxed_clone(&self) -> Box<dyn ReplacementPolicy> {
        Box::new(self.clone())
    }
}
