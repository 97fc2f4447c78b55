//! Pins: the number of plans that use each slot.
//!
//! A slot has no pins, has `n` pins, or is claimed by one evictor.
//!
//! 1. A planner pins the slot before it uses the row, and unpins it at the end of the batch, on any thread.
//! 2. An evictor claims the slot before it removes the row, and unclaims it when another row may be inserted.
//!
//! If a planner and an evictor compete for a slot, one of them wins, as the results of `pin` and `try_claim` show.
//! Writes under a pin are visible under the claim that follows, and vice versa.
//!
//! A [`PinGroup`] is a set of pins that are acquired and released together.

#[cfg(all(test, loom))]
#[path = "pins/tests/loom.rs"]
mod loom;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::TryReserveError;
use std::sync::Arc;

use super::{RowState, SlotMap};
use crate::runtime::sync::{AtomicU32, Ordering};
use crate::types::{CacheSlot, NO_SLOT};

const CLAIMED: u32 = u32::MAX;

/// Distance, in slots, at which a pass over the slots of a group prefetches into the CPU cache.
const GROUP_AHEAD: usize = 24;

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
        crate::runtime::simd::prefetch(&self.states, slot as usize);
    }

    /// Returns true if the slot has pins.
    pub fn is_pinned(&self, slot: CacheSlot) -> bool {
        !matches!(self.states[slot as usize].load(Ordering::Acquire), 0 | CLAIMED)
    }
}

/// Identifies the pins that [`SlotMap::pin_group`] acquired together.
#[derive(Debug, PartialEq, Eq)]
pub struct PinGroup(u64);

impl SlotMap {
    /// Pins distinct slots together, and skips `NO_SLOT` among them. The cost does not depend on the number of slots,
    /// and [`SlotMap::unpin_group`] releases all pins together, unless the pins of a single slot were queried in
    /// between.
    pub fn pin_group(&mut self, slots: Arc<Vec<CacheSlot>>) -> PinGroup {
        self.next_group += 1;
        self.groups.push((PinGroup(self.next_group), slots));
        PinGroup(self.next_group)
    }

    /// Pins further slots together with those of a group whose list is `slots`: each of `added` is written to its
    /// position in the list, where `NO_SLOT` was. Returns false, without a change, if the group has another list or its
    /// pins were counted by slot.
    #[must_use]
    pub fn extend_group(
        &mut self,
        group: &PinGroup,
        slots: &mut Arc<Vec<CacheSlot>>,
        added: impl Iterator<Item = (u32, CacheSlot)>,
    ) -> bool {
        let has_list =
            |(other, held): &&mut (PinGroup, Arc<Vec<CacheSlot>>)| other == group && Arc::ptr_eq(held, slots);
        let Some((_, held)) = self.groups.iter_mut().find(has_list) else { return false };
        // The group drops its reference temporarily, so that the list is changed in place and not copied.
        *held = Arc::default();
        let list = Arc::make_mut(slots);
        for (place, slot) in added {
            debug_assert_eq!(list[place as usize], NO_SLOT, "a slot that is pinned once is given back once");
            list[place as usize] = slot;
        }
        *held = Arc::clone(slots);
        true
    }

    /// Returns true if each of these rows is inserted, current, and was read without an error, so that releasing its
    /// last pin requires no further work. Skips `NO_SLOT` among the slots.
    pub fn are_settled(&self, slots: &[CacheSlot]) -> bool {
        self.all_settled()
            || slots.iter().enumerate().all(|(at, &slot)| {
                if let Some(&later) = slots.get(at + GROUP_AHEAD) {
                    self.prefetch_state(later);
                }
                slot == NO_SLOT || !self.state(slot).has(RowState::UNSETTLED)
            })
    }

    /// Releases the pins of a group. All its rows must be settled ([`SlotMap::are_settled`]). Returns its slots, or
    /// `None` if they were counted by slot: then each slot must be unpinned separately.
    #[must_use]
    pub fn unpin_group(&mut self, group: &PinGroup) -> Option<Arc<Vec<CacheSlot>>> {
        let found = self.groups.iter().position(|(other, _)| other == group);
        found.map(|at| self.groups.swap_remove(at).1)
    }

    /// Counts the pins of all groups in `pins`.
    #[inline]
    pub(super) fn count_groups(&mut self) {
        if !self.groups.is_empty() {
            self.count_all_groups();
        }
    }

    #[inline(never)]
    fn count_all_groups(&mut self) {
        for (_, slots) in std::mem::take(&mut self.groups) {
            for (at, &slot) in slots.iter().enumerate() {
                if let Some(&later) = slots.get(at + GROUP_AHEAD) {
                    self.pins.prefetch(later);
                }
                if slot != NO_SLOT {
                    self.pin(slot);
                }
            }
        }
    }
}
