//! Least recently used.

use std::collections::TryReserveError;

use super::list::{Links, List, PerSlot};
use super::{AHEAD, Policy, RECHECKED};
use crate::types::{CacheSlot, Id};

/// One queue by last use. Slots that were in use when their turn came wait apart, and go first once they are not.
#[derive(Debug, Default)]
pub(super) struct Lru {
    links: Links,
    places: PerSlot<Place>,
    queue: List,
    parked: List,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Nowhere,
    Queue,
    Parked,
}

impl Lru {
    pub(super) fn new(capacity: u32) -> Self {
        Self { links: Links::with_capacity(capacity), places: PerSlot::with_capacity(capacity), ..Self::default() }
    }

    fn take_out(&mut self, slot: CacheSlot) {
        match self.places.get(slot) {
            Place::Nowhere => {}
            Place::Queue => self.links.unlink(&mut self.queue, slot),
            Place::Parked => self.links.unlink(&mut self.parked, slot),
        }
        self.places.set(slot, Place::Nowhere);
    }

    fn put(&mut self, slot: CacheSlot, place: Place) {
        let list = if place == Place::Parked { &mut self.parked } else { &mut self.queue };
        self.links.push_front(list, slot);
        self.places.set(slot, place);
    }

    /// The first of the oldest `count` parked slots that is evictable; the others go to the front.
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

impl Policy for Lru {
    fn inserted(&mut self, slot: CacheSlot, _id: Id) {
        self.take_out(slot);
        self.put(slot, Place::Queue);
    }

    fn accessed(&mut self, slots: &[CacheSlot]) {
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(at + AHEAD) {
                self.places.prefetch(ahead);
                self.links.prefetch(ahead);
            }
            if self.places.get(slot) != Place::Nowhere {
                self.take_out(slot);
                self.put(slot, Place::Queue);
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
            self.put(slot, Place::Parked);
        }
        self.recheck(u32::MAX, evictable)
    }

    fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.links.reserve(slots)?;
        self.places.reserve(slots)
    }

    fn removed(&mut self, slot: CacheSlot, _id: Id, _evicted: bool) {
        self.take_out(slot);
    }

    fn bytes_per_slot(&self) -> usize {
        Links::BYTES_PER_SLOT + size_of::<Place>()
    }
}
