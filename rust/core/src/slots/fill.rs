//! Insertion and removal of many rows of a tier.

use super::{RowState, SlotMap};
use crate::types::{CacheSlot, Id};

impl SlotMap {
    /// Takes up to `requested` empty slots of the budget, and adds them to `taken`. Follow with
    /// [`SlotMap::insert_all_new`], or with `give_back`.
    pub fn take_many(&mut self, requested: usize, taken: &mut Vec<CacheSlot>) {
        let before = taken.len();
        let all = before + requested.min(self.free_slots() as usize);
        while taken.len() < all
            && let Some(slot) = self.free.pop()
        {
            if slot < self.limit {
                taken.push(slot);
            } else {
                self.parked.push(slot);
            }
        }
        let fresh = (all - taken.len()).min(self.limit.saturating_sub(self.next_fresh) as usize) as u32;
        if fresh > 0 {
            taken.extend(self.next_fresh..self.next_fresh + fresh);
            self.next_fresh += fresh;
            self.cover(self.next_fresh - 1);
        }
        self.used += (taken.len() - before) as u32;
    }

    /// Takes `requested` empty slots: of the budget, then of the overflow, for whose bytes the caller has made space.
    /// Follow as after [`SlotMap::take_many`].
    pub fn take_with_overflow(&mut self, requested: usize) -> Vec<CacheSlot> {
        let mut taken = Vec::with_capacity(requested);
        self.take_many(requested, &mut taken);
        taken.extend((taken.len()..requested).map(|_| self.take_overflow()));
        taken
    }

    /// Puts rows into taken slots, up to the first one whose id the tier has already. `slots` and `ids` are `[n]`.
    /// Returns the number inserted.
    pub fn insert_all_new(&mut self, slots: &[CacheSlot], ids: &[Id], state: RowState) -> usize {
        let put = self.index.insert_new_batch(ids, slots);
        let (slots, ids) = (&slots[..put], &ids[..put]);
        for &slot in slots {
            self.set_state(slot, state.with(RowState::OCCUPIED));
        }
        self.policy.all_inserted(slots, ids);
        put
    }

    /// Removes rows without eviction, and frees their slots. `slots` and `ids` are `[n]`.
    pub fn remove_batch(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        self.index.remove_batch(ids);
        self.policy.all_removed(slots);
        for &slot in slots {
            self.give_back(slot);
        }
    }

    /// Removes victims and frees their slots. `slots` and `ids` are `[n]`.
    pub fn remove_victims(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        self.index.remove_batch(ids);
        for &slot in slots {
            self.pins.unclaim(slot);
            self.give_back(slot);
        }
    }
}
