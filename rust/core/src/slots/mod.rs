//! The slots of the host tier or of the device tier: which row is in which slot, what state the row is in, which plans use it, and
//! which row leaves first.
//!
//! A [`SlotMap`] knows no bytes of rows. The host tier keeps an arena beside it, and the device tier keeps headers. It is used under the
//! lock of its table. Slots `0..capacity` are the budget of the tier. Slots from `capacity` on are overflow: they are taken only for a
//! working set that does not fit the budget.

mod fill;
mod groups;
mod listing;
mod pins;
mod state;

use std::ops::Range;
use std::sync::Arc;

pub use groups::PinGroup;
pub use pins::PinTable;
pub use state::RowState;

use crate::config::PolicyKind;
use crate::error::Result;
use crate::index::SlotIndex;
use crate::memory;
use crate::policy::{ReplacementPolicy, new_policy};
use crate::prefetch::prefetch;
use crate::types::{CacheSlot, Id};

/// The slots of one tier. The module's documentation says what that is.
#[derive(Debug)]
pub struct SlotMap {
    index: SlotIndex,
    states: Vec<RowState>,
    /// How many slots have a state with a bit of `RowState::UNSETTLED`.
    unsettled: u32,
    pins: PinTable,
    /// Groups of pins that `pins` does not count yet. They are counted before anybody looks at the pins of a single slot or takes one
    /// back.
    groups: Vec<(PinGroup, Arc<Vec<CacheSlot>>)>,
    next_group: u64,
    policy: Box<dyn ReplacementPolicy>,
    /// Empty slots that were used before.
    free: Vec<CacheSlot>,
    /// Empty slots above the limit. They are free again when the limit rises.
    parked: Vec<CacheSlot>,
    /// The lowest slot of the budget that was never used.
    next_fresh: CacheSlot,
    capacity: u32,
    limit: u32,
    /// How many slots of the budget are taken.
    used: u32,
    free_overflow: Vec<CacheSlot>,
    overflow_used: u32,
    /// How many slots have a pin that `pins` counts.
    pinned: u32,
}

impl SlotMap {
    /// A tier of `capacity` slots, all empty.
    pub fn new(capacity: u32, policy: PolicyKind) -> Self {
        Self::growing(capacity, capacity, policy)
    }

    /// A tier of `capacity` slots, all empty, of which only the first `limit` may be used now. Its index and its policy are sized for these.
    pub fn growing(capacity: u32, limit: u32, policy: PolicyKind) -> Self {
        Self {
            index: SlotIndex::new(limit as usize),
            states: Vec::new(),
            unsettled: 0,
            pins: PinTable::new(0),
            groups: Vec::new(),
            next_group: 0,
            policy: new_policy(policy, limit),
            free: Vec::new(),
            parked: Vec::new(),
            next_fresh: 0,
            capacity,
            limit,
            used: 0,
            free_overflow: Vec::new(),
            overflow_used: 0,
            pinned: 0,
        }
    }

    /// Bytes of RAM that a slot costs: its index entry, state, pins, place in the free list, and what the policy keeps of it.
    pub fn bytes_per_slot(policy: PolicyKind) -> usize {
        SlotIndex::bytes_per_entry() + size_of::<RowState>() + 4 + 4 + new_policy(policy, 0).bytes_per_slot()
    }

    /// How many slots the budget has.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// How many slots of the budget may be used now. It is at most `capacity`.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Change how many slots may be used. Rows in slots above the limit stay until somebody moves them.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit.min(self.capacity);
        let limit = self.limit;
        self.free.extend(self.parked.extract_if(.., |slot| *slot < limit));
    }

    /// How many slots of the budget are taken.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// How many overflow slots are taken.
    pub fn overflow_used(&self) -> u32 {
        self.overflow_used
    }

    /// How many slots have at least one pin.
    pub fn pinned(&mut self) -> u32 {
        self.count_groups();
        self.pinned
    }

    /// At most how many slots have a pin. A slot that several groups have pinned counts once for each.
    pub fn most_pinned(&self) -> u64 {
        u64::from(self.pinned) + self.groups.iter().map(|(_, slots)| slots.len() as u64).sum::<u64>()
    }

    /// The slot after the highest one that was ever taken, of the overflow too while there is any.
    pub fn high_water(&self) -> u32 {
        self.states.len() as u32
    }

    /// The slot of an id; `NO_SLOT` where the tier does not have it.
    pub fn get(&self, id: Id) -> CacheSlot {
        self.index.get(id)
    }

    /// The index by which ids find their slots, for those who look for many of them.
    pub fn index(&self) -> &SlotIndex {
        &self.index
    }

    /// The state of the row in a slot; no bits where the slot is empty.
    pub fn state(&self, slot: CacheSlot) -> RowState {
        self.states.get(slot as usize).copied().unwrap_or_default()
    }

    /// The states of some slots, from the first of them to the last that exists.
    pub fn states(&self, slots: Range<CacheSlot>) -> &[RowState] {
        let end = (slots.end as usize).min(self.states.len());
        &self.states[(slots.start as usize).min(end)..end]
    }

    /// Replace the state of an occupied slot.
    pub fn set_state(&mut self, slot: CacheSlot, state: RowState) {
        let before = std::mem::replace(&mut self.states[slot as usize], state);
        self.unsettled += u32::from(state.has(RowState::UNSETTLED));
        self.unsettled -= u32::from(before.has(RowState::UNSETTLED));
    }

    /// Set bits of the state of an occupied slot.
    pub fn mark(&mut self, slot: CacheSlot, bits: RowState) {
        self.set_state(slot, self.states[slot as usize].with(bits));
    }

    /// Clear bits of the state of an occupied slot.
    pub fn unmark(&mut self, slot: CacheSlot, bits: RowState) {
        self.set_state(slot, self.states[slot as usize].without(bits));
    }

    /// Whether every row is born, current, and was read without an error. A plan need not look at states then.
    pub fn all_settled(&self) -> bool {
        self.unsettled == 0
    }

    /// Fetch the state and the pins of a slot into the processor's cache. The slot need not exist.
    #[inline]
    pub fn prefetch(&self, slot: CacheSlot) {
        self.prefetch_state(slot);
        self.pins.prefetch(slot);
    }

    /// Fetch the state of a slot into the processor's cache. The slot need not exist.
    #[inline]
    pub fn prefetch_state(&self, slot: CacheSlot) {
        prefetch(&self.states, slot as usize);
    }

    /// Pin a slot, which protects its row from eviction.
    ///
    /// # Panics
    /// When the slot is being evicted.
    pub fn pin(&mut self, slot: CacheSlot) {
        if !self.pins.is_pinned(slot) {
            self.pinned += 1;
        }
        assert!(self.pins.pin(slot), "slot {slot} is pinned while it is evicted");
    }

    /// Take one pin back. True says that it was the last one of the slot.
    pub fn unpin(&mut self, slot: CacheSlot) -> bool {
        self.count_groups();
        let last = self.pins.unpin(slot);
        if last {
            self.pinned -= 1;
        }
        last
    }

    /// Whether a plan uses the slot.
    pub fn is_pinned(&mut self, slot: CacheSlot) -> bool {
        self.count_groups();
        self.pins.is_pinned(slot)
    }

    /// Tell the policy that a plan used these rows.
    pub fn accessed(&mut self, slots: &[CacheSlot]) {
        self.policy.accessed(slots);
    }

    /// How many slots of the budget can be taken without evicting a row.
    pub fn free_slots(&self) -> u32 {
        self.limit.saturating_sub(self.used)
    }

    /// Take an empty slot of the budget, if there is one. Follow with `insert`, or with `give_back`.
    pub fn take(&mut self) -> Option<CacheSlot> {
        if self.used >= self.limit {
            return None;
        }
        while let Some(slot) = self.free.pop() {
            if slot < self.limit {
                self.used += 1;
                return Some(slot);
            }
            self.parked.push(slot);
        }
        let slot = self.next_fresh;
        if slot >= self.limit {
            return None;
        }
        self.next_fresh += 1;
        self.cover(slot);
        self.used += 1;
        Some(slot)
    }

    /// Take an overflow slot. The caller has made room for its bytes.
    pub fn take_overflow(&mut self) -> CacheSlot {
        let slot = self.free_overflow.pop().unwrap_or_else(|| self.capacity + self.overflow_used);
        self.overflow_used += 1;
        self.cover(slot);
        slot
    }

    fn cover(&mut self, slot: CacheSlot) {
        let needed = slot as usize + 1;
        if self.states.len() < needed {
            self.states.resize(needed, RowState::default());
        }
        if self.pins.len() < needed {
            self.pins.grow(needed);
        }
    }

    /// Ask the system now for the memory of `rows` more rows: in free slots of the budget, and past those in the overflow.
    ///
    /// Errors: `Memory` where the system refuses. Nothing has changed then.
    pub fn reserve(&mut self, rows: u32) -> Result<()> {
        let past = rows.saturating_sub(self.free_slots());
        let fresh = self.next_fresh.saturating_add(rows).min(self.capacity);
        let highest =
            if past > 0 || self.overflow_used > 0 { self.capacity + self.overflow_used + past } else { fresh };
        let slots = (highest as usize).max(self.states.len());
        self.index.reserve(rows as usize)?;
        self.states
            .try_reserve(slots - self.states.len())
            .and_then(|()| self.pins.reserve(slots))
            .and_then(|()| self.policy.reserve(slots))
            // Every slot can be given back without asking for memory.
            .and_then(|()| self.free.try_reserve(fresh as usize - (fresh as usize).min(self.free.len())))
            .and_then(|()| {
                self.free_overflow
                    .try_reserve((slots - (self.capacity as usize).min(slots)).saturating_sub(self.free_overflow.len()))
            })
            .map_err(|_| memory::refused_error("keep track of rows", slots * size_of::<u64>()))
    }

    /// Give a taken slot back, empty.
    #[inline]
    pub fn give_back(&mut self, slot: CacheSlot) {
        self.set_state(slot, RowState::default());
        if slot < self.capacity {
            self.used -= 1;
            self.free.push(slot);
        } else {
            self.overflow_used -= 1;
            if self.overflow_used == 0 {
                self.free_overflow.clear();
                self.states.truncate(self.capacity as usize);
            } else {
                self.free_overflow.push(slot);
            }
        }
    }

    /// Put a row into a taken slot.
    pub fn insert(&mut self, slot: CacheSlot, id: Id, state: RowState) {
        self.set_state(slot, state.with(RowState::OCCUPIED));
        self.index.insert(id, slot);
        self.policy.inserted(slot, id);
    }

    /// Take a row out of its slot and give the slot back. `evicted` tells the policy whether the row left to make room.
    pub fn remove(&mut self, slot: CacheSlot, id: Id, evicted: bool) {
        self.index.remove(id);
        self.policy.removed(slot, id, evicted);
        self.give_back(slot);
    }

    /// Move a row with its state to a taken slot, and give its old slot back. Neither slot may be pinned.
    pub fn relocate(&mut self, from: CacheSlot, to: CacheSlot, id: Id) {
        let state = self.state(from);
        self.index.replace(id, to);
        self.policy.removed(from, id, false);
        self.policy.inserted(to, id);
        self.give_back(from);
        self.set_state(to, state);
    }

    /// The rows to evict next, `requested` of them or as many as there are, which the policy has forgotten already. Follow with `remove_victims`, or
    /// with `spare` to keep a row. `prefetch` starts to load what `id_of` will look at.
    ///
    /// # Panics
    /// When the policy proposes a slot that it was told is in use.
    pub fn victims(
        &mut self,
        requested: usize,
        id_of: impl Fn(CacheSlot) -> Id,
        prefetch: impl Fn(CacheSlot),
    ) -> Vec<CacheSlot> {
        self.count_groups();
        let (pins, states) = (&self.pins, &self.states);
        let victims = self.policy.victims(requested, &mut |slot| {
            !states[slot as usize].has(RowState::LOADING.with(RowState::SHADOW)) && !pins.is_pinned(slot)
        });
        let mut slots = Vec::with_capacity(victims.len());
        for victim in &victims {
            prefetch(victim.slot);
            assert!(pins.try_claim(victim.slot), "slot {} is in use and cannot be evicted", victim.slot);
            slots.push(victim.slot);
        }
        let ids: Vec<Id> = slots.iter().map(|&slot| id_of(slot)).collect();
        self.policy.remember(&victims, &ids);
        slots
    }

    /// Make a row of the caller's choice a victim. Follow as after `victims`.
    ///
    /// # Panics
    /// When the slot is pinned.
    pub fn claim_victim(&mut self, slot: CacheSlot, id: Id) {
        self.count_groups();
        assert!(self.pins.try_claim(slot), "slot {slot} is in use and cannot be evicted");
        self.policy.removed(slot, id, true);
    }

    /// Keep a victim after all.
    pub fn keep_victim(&mut self, slot: CacheSlot, id: Id) {
        self.pins.unclaim(slot);
        self.policy.inserted(slot, id);
    }

    /// Take [`RowState::MODIFIED`] off every row.
    pub fn clear_marks(&mut self) {
        for state in &mut self.states {
            *state = state.without(RowState::MODIFIED);
        }
    }
}

#[cfg(test)]
mod tests;
