//! Pins: how many plans use each slot.
//!
//! A slot has no pins, has `n` pins, or is claimed by one evictor.
//!
//! 1. A planner pins the slot before it uses the row, and unpins it when the batch is over, on any thread.
//! 2. An evictor claims the slot before it takes the row out, and unclaims it when another row may be put in.
//!
//! When a planner and an evictor want the same slot, one of them wins: `pin` and `try_claim` say who. What was written under a pin is
//! seen under the claim that follows, and the other way round.

use std::collections::TryReserveError;

use crate::sync::{AtomicU32, Ordering};
use crate::types::CacheSlot;

const CLAIMED: u32 = u32::MAX;

/// The pins of the slots of a tier. Slots appear by [`PinTable::grow`] and stay.
#[derive(Debug, Default)]
pub struct PinTable {
    states: Vec<AtomicU32>,
}

impl PinTable {
    /// A table of `slots` slots without pins.
    pub fn new(slots: usize) -> Self {
        let mut table = Self::default();
        table.grow(slots);
        table
    }

    /// How many slots there are.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether there are no slots.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Make sure that there are at least `slots` slots. New ones have no pins.
    pub fn grow(&mut self, slots: usize) {
        let slots = slots.max(self.states.len());
        self.states.resize_with(slots, || AtomicU32::new(0));
    }

    /// Ask the system now for the memory of `slots` slots.
    pub fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.states.try_reserve(slots.saturating_sub(self.states.len()))
    }

    /// Add a pin. False says that the slot is claimed and was not pinned.
    ///
    /// # Panics
    /// When the slot has 2³² − 2 pins.
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

    /// Take a pin away. True says that it was the last one of the slot.
    ///
    /// # Panics
    /// When the slot has no pin.
    pub fn unpin(&self, slot: CacheSlot) -> bool {
        let fewer = |pins: u32| (pins != 0 && pins != CLAIMED).then(|| pins - 1);
        let before = self.states[slot as usize].fetch_update(Ordering::AcqRel, Ordering::Relaxed, fewer);
        assert!(before.is_ok(), "slot {slot} is not pinned");
        before == Ok(1)
    }

    /// Claim a slot. False says that it has pins, or is claimed already.
    #[must_use]
    pub fn try_claim(&self, slot: CacheSlot) -> bool {
        self.states[slot as usize].compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Give a claimed slot back.
    ///
    /// # Panics
    /// When it is not claimed.
    pub fn unclaim(&self, slot: CacheSlot) {
        let before = self.states[slot as usize].swap(0, Ordering::Release);
        assert!(before == CLAIMED, "slot {slot} is not claimed");
    }

    /// Fetch the slot's pins into the processor's cache. The slot need not exist.
    #[inline]
    pub(crate) fn prefetch(&self, slot: CacheSlot) {
        crate::prefetch::prefetch(&self.states, slot as usize);
    }

    /// Whether the slot has pins now.
    pub fn is_pinned(&self, slot: CacheSlot) -> bool {
        !matches!(self.states[slot as usize].load(Ordering::Acquire), 0 | CLAIMED)
    }
}

#[cfg(all(test, loom))]
mod loom;
#[cfg(all(test, not(loom)))]
mod tests;
