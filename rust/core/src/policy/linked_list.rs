//! Doubly linked lists of slots. The links are stored in one array that is indexed by slot. So a list costs no
//! allocation, and a slot is in one list at most.

use std::collections::TryReserveError;

use crate::runtime::mapping::ask_for_huge_pages;
use crate::runtime::memory::vec_with_capacity;
use crate::runtime::simd::prefetch;
use crate::types::CacheSlot;

const END: CacheSlot = CacheSlot::MAX;

/// The links of all slots of a policy: the newer and the older neighbour of each slot.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotLinks(Vec<[CacheSlot; 2]>);

/// A list of slots. Its newest slot is in front, its oldest at the back.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotList {
    front: CacheSlot,
    back: CacheSlot,
    len: u32,
}

impl Default for SlotList {
    fn default() -> Self {
        Self { front: END, back: END, len: 0 }
    }
}

impl SlotList {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The oldest slot.
    pub(super) fn back(&self) -> Option<CacheSlot> {
        (self.back != END).then_some(self.back)
    }
}

impl SlotLinks {
    pub(super) const BYTES_PER_SLOT: usize = size_of::<[CacheSlot; 2]>();

    /// Links with memory for `slots`, unless that allocation fails.
    pub(super) fn with_capacity(slots: u32) -> Self {
        Self(vec_for_slots(slots))
    }

    /// Reserves memory, so that slots below `slots` need no more.
    pub(super) fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.0.try_reserve(slots.saturating_sub(self.0.len()))
    }

    /// Extends the links to `slot` and all slots below it.
    pub(super) fn cover(&mut self, slot: CacheSlot) {
        if self.0.len() <= slot as usize {
            self.0.resize(slot as usize + 1, [END; 2]);
        }
    }

    /// Prefetches the links of a slot into the CPU cache.
    pub(super) fn prefetch(&self, slot: CacheSlot) {
        prefetch(&self.0, slot as usize);
    }

    /// Prefetches the links of a slot's neighbours, which change when it is unlinked.
    pub(super) fn prefetch_neighbours(&self, slot: CacheSlot) {
        for &neighbour in self.0.get(slot as usize).into_iter().flatten() {
            self.prefetch(neighbour);
        }
    }

    /// Puts a slot that is in no list at the front of `list`.
    pub(super) fn push_front(&mut self, list: &mut SlotList, slot: CacheSlot) {
        self.cover(slot);
        self.0[slot as usize] = [END, list.front];
        match list.front {
            END => list.back = slot,
            front => self.0[front as usize][0] = slot,
        }
        list.front = slot;
        list.len += 1;
    }

    /// Puts slots that are in no list at the front of `list`, in order, like [`SlotLinks::push_front`] for each. The
    /// links must cover all of them.
    pub(super) fn push_all_front(&mut self, list: &mut SlotList, slots: &[CacheSlot]) {
        let (Some(&first), Some(&last)) = (slots.first(), slots.last()) else { return };
        match list.front {
            END => list.back = first,
            front => self.0[front as usize][0] = first,
        }
        let mut older = list.front;
        for (at, &slot) in slots.iter().enumerate() {
            self.0[slot as usize] = [slots.get(at + 1).copied().unwrap_or(END), older];
            older = slot;
        }
        list.front = last;
        list.len += slots.len() as u32;
    }

    /// Puts a slot that is in no list at the back of `list`.
    pub(super) fn push_back(&mut self, list: &mut SlotList, slot: CacheSlot) {
        self.cover(slot);
        self.0[slot as usize] = [list.back, END];
        match list.back {
            END => list.front = slot,
            back => self.0[back as usize][1] = slot,
        }
        list.back = slot;
        list.len += 1;
    }

    /// Removes a slot from `list`, which must contain it.
    pub(super) fn unlink(&mut self, list: &mut SlotList, slot: CacheSlot) {
        let [newer, older] = self.0[slot as usize];
        match newer {
            END => list.front = older,
            newer => self.0[newer as usize][1] = older,
        }
        match older {
            END => list.back = newer,
            older => self.0[older as usize][0] = newer,
        }
        list.len -= 1;
    }

    /// Moves a slot of `list` to its front.
    pub(super) fn move_to_front(&mut self, list: &mut SlotList, slot: CacheSlot) {
        self.unlink(list, slot);
        self.push_front(list, slot);
    }
}

/// A value per slot, `T::default()` if not set.
#[derive(Clone, Debug, Default)]
pub(super) struct PerSlot<T>(Vec<T>);

impl<T: Copy + Default> PerSlot<T> {
    /// See [`SlotLinks::with_capacity`].
    pub(super) fn with_capacity(slots: u32) -> Self {
        Self(vec_for_slots(slots))
    }

    /// See [`SlotLinks::reserve`].
    pub(super) fn reserve(&mut self, slots: usize) -> Result<(), TryReserveError> {
        self.0.try_reserve(slots.saturating_sub(self.0.len()))
    }

    pub(super) fn get(&self, slot: CacheSlot) -> T {
        self.0.get(slot as usize).copied().unwrap_or_default()
    }

    pub(super) fn set(&mut self, slot: CacheSlot, value: T) {
        self.cover(slot);
        self.0[slot as usize] = value;
    }

    /// See [`SlotLinks::cover`].
    pub(super) fn cover(&mut self, slot: CacheSlot) {
        if self.0.len() <= slot as usize {
            self.0.resize(slot as usize + 1, T::default());
        }
    }

    /// Prefetches the value of a slot into the CPU cache.
    pub(super) fn prefetch(&self, slot: CacheSlot) {
        prefetch(&self.0, slot as usize);
    }
}

/// An empty vector with capacity for `slots` elements, unless the allocation fails. Slots are used from the first one
/// on, so large allocations use huge pages: filling them takes few page faults.
fn vec_for_slots<T>(slots: u32) -> Vec<T> {
    let mut all = vec_with_capacity(slots as usize);
    ask_for_huge_pages(all.spare_capacity_mut());
    all
}
