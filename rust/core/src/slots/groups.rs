//! Pins that are acquired and released together.

use std::sync::Arc;

use super::{RowState, SlotMap};
use crate::types::{CacheSlot, NO_SLOT};

/// Distance, in slots, at which a pass over the slots of a group prefetches into the CPU cache.
const GROUP_AHEAD: usize = 24;

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
