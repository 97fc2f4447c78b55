//! Pins: the number of plans that use each slot.
//!
//! A slot has no pins, has `n` pins, or is claimed by one evictor.
//!
//! 1. A planner pins the slot before it uses the row, and unpins it at the end of the batch, on any thread.
//! 2. An evictor claims the slot before it removes the row, and unclaims it when another row may be inserted.
//!
//! If a planner and an evictor compete for a slot, one of them wins, as the results of `pin` and `try_claim` show.
//! Writes under a pin are visible under the claim that follows, and vice versa.

use std::collections::TryReserveError;

use crate::sync::{AtomicU32, Ordering};
use crate::types::CacheSlot;

const CLAIMED: u32 = u32::MAX;

/// The pins of the slots of a tier. [`PinTable::grow`] adds slots, and none is removed.
#[derive(Debug, Default)]
pub struct PinTable {
    states: Vec<AtomicU32>,
}

impl PinTable {
    /// Creates a table of `slots` slots without pins.
    pub fn new(slots: usize) -> Self {
        let mut table = Self::default();
        table.grow(slots);
        table
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// True if there are no slots.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Makes sure that there are at least `slots` slots. New ones have no pins.
    pub fn grow(&mut self, slots: usize) {
        let slots = slots.max(self.states.len());
        self.states.resize_with(slots, || AtomicU32::new(0));
    }

    /// Allocates memory for `slots` slots.
    pub fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.states.try_reserve(slots.saturating_sub(self.states.len()))
    }

    /// Adds a pin. Returns false if the slot is claimed; it is not pinned then.
    ///
    /// # Panics
    /// If the slot has 2³² − 2 pins.
    #[must_use]
    pub fn pin(&self, slot: CacheSlot) -> bool {
        let state = &self.states[slot as usize];
        let mut seen = state.load(Ordering::Relaxed);
        while seen != CLAIMED {
            assert!(seen < CLAIMED - 1, "slot {slot} is pinned {seen} times");
            match state.compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Removes a pin. Returns true if it was the last one of the slot.
    ///
    /// # Panics
    /// If the slot has no pin.
    pub fn unpin(&self, slot: CacheSlot) -> bool {
        let fewer = |pins: u32| (pins != 0 && pins != CLAIMED).then(|| pins - 1);
        let before = self.states[slot as usize].fetch_update(Ordering::AcqRel, Ordering::Relaxed, fewer);
        assert!(before.is_ok(), "slot {slot} is not pinned");
        before == Ok(1)
    }

    /// Claims a slot. Returns false if it has pins, or is claimed already.
    #[must_use]
    pub fn try_claim(&self, slot: CacheSlot) -> bool {
        self.states[slot as usize].compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases a claimed slot.
    ///
    /// # Panics
    /// If it is not claimed.
    pub fn unclaim(&self, slot: CacheSlot) {
        let before = self.states[slot as usize].swap(0, Ordering::Release);
        assert!(before == CLAIMED, "slot {slot} is not claimed");
    }

    /// Prefetches the slot's pins into the CPU cache. The slot need not exist.
    #[inline]
    pub(crate) fn prefetch(&self, slot: CacheSlot) {
        crate::prefetch::prefetch(&self.states, slot as usize);
    }

    /// Returns true if the slot has pins.
    pub fn is_pinned(&self, slot: CacheSlot) -> bool {
        !matches!(self.states[slot as usize].load(Ordering::Acquire), 0 | CLAIMED)
    }
}

#[cfg(all(test, loom))]
mod loom;
#[cfg(all(test, not(loom)))]
mod tests;
