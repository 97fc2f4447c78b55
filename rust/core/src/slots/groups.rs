//! Pins that are taken and given back together.

use std::sync::Arc;

use super::{RowState, SlotMap};
use crate::types::{CacheSlot, NO_SLOT};

/// While the slots of a group are gone through, what is looked at of the slot that comes this many slots later is fetched into the processor's
/// cache.
const GROUP_AHEAD: usize = 24;

/// Names the pins that [`SlotMap::pin_group`] took together.
#[derive(Debug, PartialEq, Eq)]
pub struct PinGroup(u64);

impl SlotMap {
    /// Pin distinct slots together, and skip `NO_SLOT` among them. The cost does not depend on the number of slots, and
    /// [`SlotMap::unpin_group`] takes all pins back at once, unless somebody asked for the pins of a single slot meanwhile.
    pub fn pin_group(&mut self, slots: Arc<Vec<CacheSlot>>) -> PinGroup {
        self.next_group += 1;
        self.groups.push((PinGroup(self.next_group), slots));
        PinGroup(self.next_group)
    }

    /// Pin further slots together with those of a group whose list is `slots`: each of `added` goes to its place in the list, where `NO_SLOT`
    /// was. False says that nothing has changed, because the group has another list or its pins were counted by slot meanwhile.
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
        // The group gives up its share meanwhile, so that the list is changed where it is and not copied.
        *held = Arc::default();
        let list = Arc::make_mut(slots);
        for (place, slot) in added {
            debug_assert_eq!(list[place as usize], NO_SLOT, "a slot that is pinned once is given back once");
            list[place as usize] = slot;
        }
        *held = Arc::clone(slots);
        true
    }

    /// Whether each of these rows is born, current, and was read without an error, so that whoever takes the last pin of one back has no work
    /// to do. `NO_SLOT` among the slots is skipped.
    pub fn are_settled(&self, slots: &[CacheSlot]) -> bool {
        self.all_settled()
            || slots.iter().enumerate().all(|(at, &slot)| {
                if let Some(&later) = slots.get(at + GROUP_AHEAD) {
                    self.prefetch_state(later);
                }
                slot == NO_SLOT || !self.state(slot).has(RowState::UNSETTLED)
            })
    }

    /// Take the pins of a group back. All its rows are settled by now ([`SlotMap::are_settled`]). Returns its slots, or `None` where they were
    /// counted by slot meanwhile: then each slot must be unpinned by itself.
    #[must_use]
    pub fn unpin_group(&mut self, group: &PinGroup) -> Option<Arc<Vec<CacheSlot>>> {
        let found = self.groups.iter().position(|(other, _)| other == group);
        found.map(|at| self.groups.swap_remove(at).1)
    }

    /// Count the pins of all groups in `pins`.
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
