//! The slots of the host tier or of the device tier: the row in each slot, its state, its pins, and the eviction order.
//!
//! A [`SlotMap`] does not store the contents of rows. The host tier has an arena for them, and the device tier has
//! headers. It is used under the lock of its table. Slots `0..capacity` are the budget of the tier. Slots from
//! `capacity` on are overflow: they are taken only for a working set that does not fit the budget.

mod pins;
#[cfg(test)]
mod tests;

pub use pins::{PinGroup, PinTable};

use std::ops::Range;
use std::sync::Arc;

use crate::config::PolicyKind;
use crate::error::Result;
use crate::index::SlotIndex;
use crate::policy::{ReplacementPolicy, new_policy};
use crate::runtime::memory;
use crate::runtime::simd::prefetch;
use crate::types::{CacheSlot, Id};

/// Number of slots that [`SlotMap::modified`] checks together.
const MARKS_AT_ONCE: usize = 16;

/// Number of slots that [`SlotMap::newest_from`] checks together.
const LISTED_AT_ONCE: usize = 1024;

/// The slots of one tier; see the module's documentation.
#[derive(Debug)]
pub struct SlotMap {
    index: SlotIndex,
    states: Vec<RowState>,
    /// Number of slots whose state has a bit of `RowState::UNSETTLED`.
    unsettled: u32,
    pins: PinTable,
    /// Groups of pins that `pins` does not count yet. They are counted before the pins of a single slot are read or
    /// released.
    groups: Vec<(PinGroup, Arc<Vec<CacheSlot>>)>,
    next_group: u64,
    policy: Box<dyn ReplacementPolicy>,
    /// Empty slots that were used before.
    free: Vec<CacheSlot>,
    /// Empty slots above the limit. They become free when the limit rises.
    parked: Vec<CacheSlot>,
    /// The lowest slot of the budget that was never used.
    next_fresh: CacheSlot,
    capacity: u32,
    limit: u32,
    /// Number of taken slots of the budget.
    used: u32,
    free_overflow: Vec<CacheSlot>,
    overflow_used: u32,
    /// Number of slots with a pin that `pins` counts.
    pinned: u32,
}

impl SlotMap {
    /// Creates a tier of `capacity` slots, all empty.
    pub fn new(capacity: u32, policy: PolicyKind) -> Self {
        Self::growing(capacity, capacity, policy)
    }

    /// Creates a tier of `capacity` slots, all empty, of which only the first `limit` are usable. Its index and its
    /// policy are sized for `limit` slots.
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

    /// Bytes of RAM per slot: its index entry, state, pins, place in the free list, and the policy's entry.
    pub fn bytes_per_slot(policy: PolicyKind) -> usize {
        SlotIndex::bytes_per_entry() + size_of::<RowState>() + 4 + 4 + new_policy(policy, 0).bytes_per_slot()
    }

    /// Number of slots of the budget.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Number of usable slots of the budget, at most `capacity`.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Changes the number of usable slots. Rows in slots above the limit stay until the caller moves them.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit.min(self.capacity);
        let limit = self.limit;
        self.free.extend(self.parked.extract_if(.., |slot| *slot < limit));
    }

    /// Number of taken slots of the budget.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Number of taken overflow slots.
    pub fn overflow_used(&self) -> u32 {
        self.overflow_used
    }

    /// Number of slots with at least one pin.
    pub fn pinned(&mut self) -> u32 {
        self.count_groups();
        self.pinned
    }

    /// Upper bound of the number of slots with a pin. A slot pinned by several groups counts once for each.
    pub fn most_pinned(&self) -> u64 {
        u64::from(self.pinned) + self.groups.iter().map(|(_, slots)| slots.len() as u64).sum::<u64>()
    }

    /// The slot after the highest one that was ever taken, including the overflow while it is in use.
    pub fn high_water(&self) -> u32 {
        self.states.len() as u32
    }

    /// Returns the slot of an id; `NO_SLOT` if the tier does not have it.
    pub fn get(&self, id: Id) -> CacheSlot {
        self.index.get(id)
    }

    /// Returns the index from ids to slots, for lookups of many ids.
    pub fn index(&self) -> &SlotIndex {
        &self.index
    }

    /// Returns the state of the row in a slot; no bits if the slot is empty.
    pub fn state(&self, slot: CacheSlot) -> RowState {
        self.states.get(slot as usize).copied().unwrap_or_default()
    }

    /// Returns the states of some slots, from the first of them to the last that exists.
    pub fn states(&self, slots: Range<CacheSlot>) -> &[RowState] {
        let end = (slots.end as usize).min(self.states.len());
        &self.states[(slots.start as usize).min(end)..end]
    }

    /// Replaces the state of an occupied slot.
    pub fn set_state(&mut self, slot: CacheSlot, state: RowState) {
        let before = std::mem::replace(&mut self.states[slot as usize], state);
        self.unsettled += u32::from(state.has(RowState::UNSETTLED));
        self.unsettled -= u32::from(before.has(RowState::UNSETTLED));
    }

    /// Sets bits of the state of an occupied slot.
    pub fn mark(&mut self, slot: CacheSlot, bits: RowState) {
        self.set_state(slot, self.states[slot as usize].with(bits));
    }

    /// Clears bits of the state of an occupied slot.
    pub fn unmark(&mut self, slot: CacheSlot, bits: RowState) {
        self.set_state(slot, self.states[slot as usize].without(bits));
    }

    /// Returns true if every row is inserted, current, and was read without an error. A plan need not check states
    /// then.
    pub fn all_settled(&self) -> bool {
        self.unsettled == 0
    }

    /// Prefetches the state and the pins of a slot into the CPU cache. The slot need not exist.
    #[inline]
    pub fn prefetch(&self, slot: CacheSlot) {
        self.prefetch_state(slot);
        self.pins.prefetch(slot);
    }

    /// Prefetches the state of a slot into the CPU cache. The slot need not exist.
    #[inline]
    pub fn prefetch_state(&self, slot: CacheSlot) {
        prefetch(&self.states, slot as usize);
    }

    /// Pins a slot, which protects its row from eviction.
    ///
    /// # Panics
    /// If the slot is being evicted.
    pub fn pin(&mut self, slot: CacheSlot) {
        if !self.pins.is_pinned(slot) {
            self.pinned += 1;
        }
        assert!(self.pins.pin(slot), "slot {slot} is pinned while it is evicted");
    }

    /// Releases one pin. Returns true if it was the last one of the slot.
    pub fn unpin(&mut self, slot: CacheSlot) -> bool {
        self.count_groups();
        let last = self.pins.unpin(slot);
        if last {
            self.pinned -= 1;
        }
        last
    }

    /// Returns true if a plan uses the slot.
    pub fn is_pinned(&mut self, slot: CacheSlot) -> bool {
        self.count_groups();
        self.pins.is_pinned(slot)
    }

    /// Reports to the policy that a plan used these rows.
    pub fn accessed(&mut self, slots: &[CacheSlot]) {
        self.policy.accessed(slots);
    }

    /// Number of slots of the budget that can be taken without evicting a row.
    pub fn free_slots(&self) -> u32 {
        self.limit.saturating_sub(self.used)
    }

    /// Takes an empty slot of the budget, if there is one. Follow with `insert`, or with `give_back`.
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

    /// Takes an overflow slot. The caller has made space for its bytes.
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

    /// Allocates memory for `rows` more rows: in free slots of the budget, and beyond those in the overflow.
    ///
    /// Errors: `Memory` if the allocation fails. Nothing has changed then.
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
            // Every slot can be freed without allocating memory.
            .and_then(|()| self.free.try_reserve(fresh as usize - (fresh as usize).min(self.free.len())))
            .and_then(|()| {
                self.free_overflow
                    .try_reserve((slots - (self.capacity as usize).min(slots)).saturating_sub(self.free_overflow.len()))
            })
            .map_err(|_| memory::refused_error("keep track of rows", slots * size_of::<u64>()))
    }

    /// Frees a taken slot, which becomes empty.
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

    /// Puts a row into a taken slot.
    pub fn insert(&mut self, slot: CacheSlot, id: Id, state: RowState) {
        self.set_state(slot, state.with(RowState::OCCUPIED));
        self.index.insert(id, slot);
        self.policy.inserted(slot, id);
    }

    /// Removes a row and frees its slot. `evicted` is true if the row left to free space; it is passed to the policy.
    pub fn remove(&mut self, slot: CacheSlot, id: Id, evicted: bool) {
        self.index.remove(id);
        self.policy.removed(slot, id, evicted);
        self.give_back(slot);
    }

    /// Moves a row with its state to a taken slot, and frees its old slot. Neither slot may be pinned.
    pub fn relocate(&mut self, from: CacheSlot, to: CacheSlot, id: Id) {
        let state = self.state(from);
        self.index.replace(id, to);
        self.policy.removed(from, id, false);
        self.policy.inserted(to, id);
        self.give_back(from);
        self.set_state(to, state);
    }

    /// Returns the rows to evict next, up to `requested`, which the policy has forgotten already. Follow with
    /// `remove_victims`, or with `keep_victim` to keep a row. `prefetch` loads the data that `id_of` will read.
    ///
    /// # Panics
    /// If the policy proposes a slot that is in use.
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

    /// Makes a row chosen by the caller a victim. Follow as after `victims`.
    ///
    /// # Panics
    /// If the slot is pinned.
    pub fn claim_victim(&mut self, slot: CacheSlot, id: Id) {
        self.count_groups();
        assert!(self.pins.try_claim(slot), "slot {slot} is in use and cannot be evicted");
        self.policy.removed(slot, id, true);
    }

    /// Keeps a victim.
    pub fn keep_victim(&mut self, slot: CacheSlot, id: Id) {
        self.pins.unclaim(slot);
        self.policy.inserted(slot, id);
    }

    /// Clears [`RowState::MODIFIED`] of every row.
    pub fn clear_marks(&mut self) {
        for state in &mut self.states {
            *state = state.without(RowState::MODIFIED);
        }
    }

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

    /// Returns the occupied slots whose rows are marked [`RowState::MODIFIED`], in ascending order.
    pub fn modified(&self) -> impl Iterator<Item = CacheSlot> + '_ {
        let marked = |state: &RowState| state.has(RowState::MODIFIED) && state.has(RowState::OCCUPIED);
        let any = |block: &[RowState; MARKS_AT_ONCE]| block.iter().fold(0, |bits, state| bits | state.0);
        let blocks = self.states.chunks_exact(MARKS_AT_ONCE);
        let rest = (self.states.len() - blocks.remainder().len()) as CacheSlot..self.states.len() as CacheSlot;
        (0..)
            .step_by(MARKS_AT_ONCE)
            .zip(blocks)
            .filter(move |(_, block)| {
                block.first_chunk().is_some_and(|block| RowState(any(block)).has(RowState::MODIFIED))
            })
            .flat_map(|(first, block)| (first..).zip(block).map(|(slot, _)| slot))
            .chain(rest)
            .filter(move |&slot| marked(&self.states[slot as usize]))
    }

    /// Appends to `found` the slots with the newest copies of rows, in ascending order from slot `from` on, until
    /// `found` has `most`. Returns the slot after the last checked one.
    pub fn newest_from(&self, from: CacheSlot, most: usize, found: &mut Vec<CacheSlot>) -> CacheSlot {
        let mut next = from;
        while let Some(states) = self.states.get(next as usize..).filter(|states| !states.is_empty())
            && found.len() < most
        {
            // Every slot is stored, and the end advances only if it counts: so there is no unpredictable branch.
            let states = &states[..states.len().min(most - found.len()).min(LISTED_AT_ONCE)];
            let mut end = found.len();
            found.resize(end + states.len(), 0);
            for (slot, state) in (next..).zip(states) {
                found[end] = slot;
                end += usize::from(state.is_newest());
            }
            found.truncate(end);
            next += states.len() as CacheSlot;
        }
        next
    }

    /// Returns the occupied slots from slot `from` on, in ascending order.
    pub fn occupied_from(&self, from: CacheSlot) -> impl Iterator<Item = CacheSlot> + '_ {
        let states = self.states.get(from as usize..).unwrap_or_default();
        (from..).zip(states).filter(|(_, state)| state.has(RowState::OCCUPIED)).map(|(slot, _)| slot)
    }
}

/// The state of the row in a slot, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowState(u8);

impl RowState {
    /// The slot has a row.
    pub const OCCUPIED: Self = Self(1);
    /// The copy of the row on SSD, if there is one, is older than this one.
    pub const DIRTY: Self = Self(2);
    /// SSD has a copy of the row, current or outdated.
    pub const ON_SSD: Self = Self(4);
    /// The row was planned and never trained. It is discarded with its last pin.
    pub const PROVISIONAL: Self = Self(8);
    /// In a slot of the host tier: the row is being read from SSD. In a slot of the device tier: the row was not
    /// scattered into the device tensors yet, and its current copy is where it was before.
    pub const LOADING: Self = Self(16);
    /// The current copy is on the device. The slot is kept only because a plan has pinned it.
    pub const SHADOW: Self = Self(32);
    /// The read of the row failed. It is discarded with its last pin, and the copy on SSD stays the current one.
    pub const FAILED: Self = Self(64);
    /// This is the newest copy of the row, and it was trained or imported since the last call of
    /// [`SlotMap::clear_marks`](SlotMap::clear_marks).
    pub const MODIFIED: Self = Self(128);

    /// The bits of an unsettled row: releasing its last pin, or planning it, requires further work.
    const UNSETTLED: Self = Self::PROVISIONAL.with(Self::LOADING).with(Self::SHADOW).with(Self::FAILED);

    /// Returns the union of both sets of bits.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the bits without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns true if any bit of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns true if the row is inserted and this copy of it is complete and current.
    pub const fn is_current(self) -> bool {
        self.has(Self::OCCUPIED) && !self.has(Self::UNSETTLED)
    }

    /// Returns true if this is the newest copy of the row: it is current, and no tier below has the same one.
    pub const fn is_newest(self) -> bool {
        self.is_current() && (self.has(Self::DIRTY) || !self.has(Self::ON_SSD))
    }
}
