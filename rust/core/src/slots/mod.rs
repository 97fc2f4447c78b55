//! The slots of a tier in RAM or on a device: which row is where, what state it is in, who uses it, and who leaves first.
//!
//! A [`SlotMap`] knows no bytes: the host tier puts an arena beside it, the device tier only headers. It is used under its table's
//! lock. Slots `0..capacity` are the tier's budget; slots from `capacity` on are overflow, taken only for a working set that does not
//! fit.

mod pins;
mod state;

use std::sync::Arc;

pub use pins::PinTable;
pub use state::RowState;

use crate::config::PolicyKind;
use crate::error::Result;
use crate::index::HostIndex;
use crate::memory;
use crate::policy::{Policy, new_policy};
use crate::prefetch::prefetch;
use crate::types::{CacheSlot, Id};

/// How many slots ahead the pins of a group are asked for.
const GROUP_AHEAD: usize = 24;
/// Slots whose marks are looked at together.
const MARKS_AT_ONCE: usize = 16;
/// Slots that are listed at a time.
const LISTED_AT_ONCE: usize = 1024;

/// The pins of a plan's rows taken together, see [`SlotMap::pin_group`].
#[derive(Debug, PartialEq, Eq)]
pub struct PinGroup(u64);

/// See the module.
#[derive(Debug)]
pub struct SlotMap {
    index: HostIndex,
    states: Vec<RowState>,
    /// Slots whose state is `UNSETTLED`.
    unsettled: u32,
    pins: PinTable,
    /// Plans whose pins are not counted by slot yet. They are before anybody looks at, or takes back, the pins of a slot.
    groups: Vec<(PinGroup, Arc<Vec<CacheSlot>>)>,
    next_group: u64,
    policy: Box<dyn Policy>,
    free: Vec<CacheSlot>,
    /// Empty slots above the limit, for when it rises again.
    parked: Vec<CacheSlot>,
    next_fresh: CacheSlot,
    capacity: u32,
    limit: u32,
    used: u32,
    free_overflow: Vec<CacheSlot>,
    overflow_used: u32,
    pinned: u32,
}

impl SlotMap {
    /// `capacity` slots, all empty.
    pub fn new(capacity: u32, policy: PolicyKind) -> Self {
        Self {
            index: HostIndex::new(capacity as usize),
            states: Vec::new(),
            unsettled: 0,
            pins: PinTable::new(0),
            groups: Vec::new(),
            next_group: 0,
            policy: new_policy(policy, capacity),
            free: Vec::new(),
            parked: Vec::new(),
            next_fresh: 0,
            capacity,
            limit: capacity,
            used: 0,
            free_overflow: Vec::new(),
            overflow_used: 0,
            pinned: 0,
        }
    }

    /// Bytes of RAM a slot costs: index entry, state, pins, free list and policy.
    pub fn bytes_per_slot(policy: PolicyKind) -> usize {
        HostIndex::bytes_per_entry() + size_of::<RowState>() + 4 + 4 + new_policy(policy, 0).bytes_per_slot()
    }

    /// Slots within the budget.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Slots that may be used now: at most `capacity`.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Change how many slots may be used; rows above stay until they are moved.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit.min(self.capacity);
        let limit = self.limit;
        self.free.extend(self.parked.extract_if(.., |slot| *slot < limit));
    }

    /// Slots in use within the budget.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Overflow slots in use.
    pub fn overflow_used(&self) -> u32 {
        self.overflow_used
    }

    /// Slots with at least one pin.
    pub fn pinned(&mut self) -> u32 {
        self.count_groups();
        self.pinned
    }

    /// One past the highest slot ever handed out, overflow included.
    pub fn high_water(&self) -> u32 {
        self.states.len() as u32
    }

    /// The slot of an id, or `NO_SLOT`.
    pub fn get(&self, id: Id) -> CacheSlot {
        self.index.get(id)
    }

    /// The slots of many ids.
    pub fn get_batch(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        self.index.get_batch(ids, slots);
    }

    /// The state of a slot.
    pub fn state(&self, slot: CacheSlot) -> RowState {
        self.states.get(slot as usize).copied().unwrap_or_default()
    }

    /// Change the state of an occupied slot.
    pub fn set_state(&mut self, slot: CacheSlot, state: RowState) {
        let before = std::mem::replace(&mut self.states[slot as usize], state);
        self.unsettled += u32::from(state.has(RowState::UNSETTLED));
        self.unsettled -= u32::from(before.has(RowState::UNSETTLED));
    }

    /// Set bits.
    pub fn mark(&mut self, slot: CacheSlot, bits: RowState) {
        self.set_state(slot, self.states[slot as usize].with(bits));
    }

    /// Clear bits.
    pub fn unmark(&mut self, slot: CacheSlot, bits: RowState) {
        self.set_state(slot, self.states[slot as usize].without(bits));
    }

    /// Whether every row is born, here, current and read without error, so that a plan need not look at states.
    pub fn all_settled(&self) -> bool {
        self.unsettled == 0
    }

    /// Fetch what is known of a slot into the processor's cache. Any value will do.
    #[inline]
    pub fn prefetch(&self, slot: CacheSlot) {
        self.prefetch_state(slot);
        self.pins.prefetch(slot);
    }

    /// Fetch the state of a slot into the processor's cache. Any value will do.
    #[inline]
    pub fn prefetch_state(&self, slot: CacheSlot) {
        prefetch(&self.states, slot as usize);
    }

    /// Protect a slot from eviction.
    ///
    /// # Panics
    /// When the slot is being evicted.
    pub fn pin(&mut self, slot: CacheSlot) {
        if !self.pins.is_pinned(slot) {
            self.pinned += 1;
        }
        assert!(self.pins.pin(slot), "slot {slot} is pinned while it is evicted");
    }

    /// Pin distinct slots, all of rows that are settled ([`SlotMap::all_settled`]), at once: nothing is counted by slot, and the
    /// whole group may be unpinned at once, unless somebody asks for the pins of single slots meanwhile.
    pub fn pin_group(&mut self, slots: Arc<Vec<CacheSlot>>) -> PinGroup {
        self.next_group += 1;
        self.groups.push((PinGroup(self.next_group), slots));
        PinGroup(self.next_group)
    }

    /// Take the pins of a group back; false where they were counted by slot meanwhile, so that each must be unpinned.
    #[must_use]
    pub fn unpin_group(&mut self, group: &PinGroup) -> bool {
        let found = self.groups.iter().position(|(other, _)| other == group);
        found.map(|at| self.groups.swap_remove(at)).is_some()
    }

    /// Count the pins of all groups by slot.
    fn count_groups(&mut self) {
        for (_, slots) in std::mem::take(&mut self.groups) {
            for (at, &slot) in slots.iter().enumerate() {
                if let Some(&later) = slots.get(at + GROUP_AHEAD) {
                    self.pins.prefetch(later);
                }
                self.pin(slot);
            }
        }
    }

    /// Take one pin back; whether it was the last.
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

    /// Slots that can be taken without evicting.
    pub fn free_slots(&self) -> u32 {
        self.limit.saturating_sub(self.used)
    }

    /// Take an empty slot within the budget. Fill it with `insert`, or give it back with `give_back`.
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

    /// Take an overflow slot; the owner of the bytes must make room for it.
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
            self.pins.grow(pins_for(needed));
        }
    }

    /// Make sure that `rows` more rows take no more memory, in slots or, past the free ones, in the overflow. `Kind::Memory`, and
    /// nothing changed, where the system refuses.
    pub fn reserve(&mut self, rows: u32) -> Result<()> {
        let past = rows.saturating_sub(self.free_slots());
        let fresh = self.next_fresh.saturating_add(rows).min(self.capacity);
        let highest =
            if past > 0 || self.overflow_used > 0 { self.capacity + self.overflow_used + past } else { fresh };
        let slots = (highest as usize).max(self.states.len());
        self.index.reserve(rows as usize)?;
        self.states
            .try_reserve(slots - self.states.len())
            .and_then(|()| self.pins.reserve(pins_for(slots)))
            .and_then(|()| self.policy.reserve(slots))
            // Every slot can be given back without asking for memory.
            .and_then(|()| self.free.try_reserve(fresh as usize - (fresh as usize).min(self.free.len())))
            .and_then(|()| {
                self.free_overflow
                    .try_reserve((slots - (self.capacity as usize).min(slots)).saturating_sub(self.free_overflow.len()))
            })
            .map_err(|_| memory::refused("keep track of rows", slots * size_of::<u64>()))
    }

    /// Give an empty slot back.
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

    /// Fetch what inserting `id` touches into the processor's cache.
    #[inline]
    pub fn prefetch_insert(&self, id: Id) {
        self.index.prefetch(id);
        self.policy.prefetch_insert(id);
    }

    /// Put a row into a taken slot.
    pub fn insert(&mut self, slot: CacheSlot, id: Id, state: RowState) {
        self.set_state(slot, state.with(RowState::OCCUPIED));
        self.index.insert(id, slot);
        self.policy.inserted(slot, id);
    }

    /// Put a row into a taken slot if there is none of its id; whether there was none.
    pub fn insert_new(&mut self, slot: CacheSlot, id: Id, state: RowState) -> bool {
        let new = self.index.insert_new(id, slot);
        if new {
            self.set_state(slot, state.with(RowState::OCCUPIED));
            self.policy.inserted(slot, id);
        }
        new
    }

    /// Take a row out of its slot and free the slot.
    pub fn remove(&mut self, slot: CacheSlot, id: Id, evicted: bool) {
        self.index.remove(id);
        self.policy.removed(slot, id, evicted);
        self.give_back(slot);
    }

    /// Move a row to a taken slot, state and all; the old slot is freed. Neither may be pinned.
    pub fn relocate(&mut self, from: CacheSlot, to: CacheSlot, id: Id) {
        let state = self.state(from);
        self.index.replace(id, to);
        self.policy.removed(from, id, false);
        self.policy.inserted(to, id);
        self.give_back(from);
        self.set_state(to, state);
    }

    /// The row to evict next, already out of the policy's lists: follow with `evict`, or `spare` to put it back.
    ///
    /// # Panics
    /// When the policy proposes a slot that it was told is in use.
    pub fn victim(&mut self, id_of: impl Fn(CacheSlot) -> Id) -> Option<CacheSlot> {
        self.count_groups();
        let (pins, states) = (&self.pins, &self.states);
        let slot = self.policy.victim(&mut |slot| {
            !states[slot as usize].has(RowState::LOADING.with(RowState::SHADOW)) && !pins.is_pinned(slot)
        })?;
        self.unlist(slot, id_of(slot));
        Some(slot)
    }

    /// Make a row of one's own choice a victim: out of the policy's lists, to be followed like `victim`.
    ///
    /// # Panics
    /// When the slot is pinned.
    pub fn unlist(&mut self, slot: CacheSlot, id: Id) {
        self.count_groups();
        assert!(self.pins.try_claim(slot), "slot {slot} is in use and cannot be evicted");
        self.policy.removed(slot, id, true);
    }

    /// Finish the eviction of a victim.
    pub fn evict(&mut self, slot: CacheSlot, id: Id) {
        self.index.remove(id);
        self.pins.unclaim(slot);
        self.give_back(slot);
    }

    /// A victim stays after all.
    pub fn spare(&mut self, slot: CacheSlot, id: Id) {
        self.pins.unclaim(slot);
        self.policy.inserted(slot, id);
    }

    /// Take [`RowState::MODIFIED`] off every row.
    pub fn clear_marks(&mut self) {
        for state in &mut self.states {
            *state = state.without(RowState::MODIFIED);
        }
    }

    /// Occupied slots of rows that are marked as modified, lowest first.
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

    /// Append to `found` slots of rows that no tier below has as they are here, lowest first, from `from` on, until they are `most`;
    /// the slot after those that were looked at.
    pub fn newest_from(&self, from: CacheSlot, most: usize, found: &mut Vec<CacheSlot>) -> CacheSlot {
        let mut next = from;
        while let Some(states) = self.states.get(next as usize..).filter(|states| !states.is_empty())
            && found.len() < most
        {
            // Each is written down, and counts if it is one: nothing to guess for the processor.
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

    /// Occupied slots at or above `from`, lowest first.
    pub fn occupied_from(&self, from: CacheSlot) -> impl Iterator<Item = CacheSlot> + '_ {
        let states = self.states.get(from as usize..).unwrap_or_default();
        (from..).zip(states).filter(|(_, state)| state.has(RowState::OCCUPIED)).map(|(slot, _)| slot)
    }
}

/// Pins that are made when slots up to `needed` come into use.
fn pins_for(needed: usize) -> usize {
    (needed * 2).max(64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(capacity: u32, rows: u32) -> SlotMap {
        let mut slots = SlotMap::new(capacity, PolicyKind::Lru);
        for id in 0..rows {
            let slot = slots.take().expect("an empty slot");
            slots.insert(slot, id.into(), RowState::DIRTY);
        }
        slots
    }

    #[test]
    fn newest_rows_are_listed_in_turn_however_many_at_a_time() {
        for rows in [0, 1, 5, 3000] {
            let mut slots = filled(4096, rows);
            let newest: Vec<CacheSlot> = (0..rows).filter(|slot| slot % 7 != 3).collect();
            (0..rows)
                .filter(|slot| slot % 7 == 3)
                .for_each(|slot| slots.set_state(slot, RowState::OCCUPIED.with(RowState::ON_SSD)));
            for most in [1, 4, 1024, 5000] {
                let (mut all, mut from) = (Vec::new(), 0);
                while from < slots.high_water() {
                    let mut some = Vec::new();
                    from = slots.newest_from(from, most, &mut some);
                    assert!(some.len() == most || from == slots.high_water(), "{} of {most}", some.len());
                    all.extend(some);
                }
                assert_eq!(all, newest);
            }
        }
    }

    #[test]
    fn marked_rows_are_found_among_any_number_of_others() {
        for rows in [0, 1, 15, 16, 17, 100] {
            let mut slots = filled(128, rows);
            let marked: Vec<CacheSlot> = (0..rows).filter(|slot| slot % 7 == 3 || slot + 1 == rows).collect();
            for &slot in &marked {
                slots.mark(slot, RowState::MODIFIED);
            }
            assert_eq!(slots.modified().collect::<Vec<_>>(), marked, "of {rows}");
            slots.clear_marks();
            assert_eq!(slots.modified().count(), 0);
        }
    }

    #[test]
    fn no_slot_is_lost_when_the_limit_falls_and_rises_again() {
        let mut slots = filled(8, 8);
        for id in 0..8 {
            slots.remove(slots.get(id), id, false);
        }
        slots.set_limit(3);
        let taken: Vec<CacheSlot> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(taken.len(), 3);
        assert!(taken.iter().all(|&slot| slot < 3));
        slots.set_limit(8);
        assert_eq!(std::iter::from_fn(|| slots.take()).count(), 5);
    }

    #[test]
    fn a_spared_victim_is_found_and_can_be_a_victim_again() {
        let mut slots = filled(4, 4);
        let victim = slots.victim(i64::from).expect("a victim");
        assert_eq!(victim, slots.get(0), "the least recently used");
        slots.spare(victim, 0);
        assert_eq!(slots.get(0), victim);
        let all: Vec<CacheSlot> = std::iter::from_fn(|| slots.victim(i64::from)).collect();
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn pinned_loading_and_shadow_rows_are_never_victims() {
        let mut slots = filled(4, 4);
        slots.pin(slots.get(0));
        slots.mark(slots.get(1), RowState::LOADING);
        slots.mark(slots.get(2), RowState::SHADOW);
        assert_eq!(slots.victim(i64::from), Some(slots.get(3)));
        assert_eq!(slots.victim(i64::from), None);
        assert!(slots.unpin(slots.get(0)), "the last pin");
        assert_eq!(slots.victim(i64::from), Some(slots.get(0)));
    }

    #[test]
    fn a_group_protects_its_rows_and_counts_only_when_single_pins_are_asked_for() {
        let mut slots = filled(4, 4);
        let of = |slots: &SlotMap, ids: [i64; 2]| Arc::new(ids.map(|id| slots.get(id)).to_vec());
        let (first, second) = (of(&slots, [0, 1]), of(&slots, [1, 2]));
        let group = slots.pin_group(Arc::clone(&first));
        assert!(slots.unpin_group(&group), "nobody asked");
        assert_eq!(slots.pinned(), 0);
        let groups = [slots.pin_group(Arc::clone(&first)), slots.pin_group(Arc::clone(&second))];
        assert_eq!(slots.victim(i64::from), Some(slots.get(3)));
        assert_eq!((slots.victim(i64::from), slots.pinned()), (None, 3));
        for (group, held) in groups.iter().zip([first, second]) {
            assert!(!slots.unpin_group(group), "the victim's search counted them");
            let last: Vec<bool> = held.iter().map(|&slot| slots.unpin(slot)).collect();
            assert_eq!(last[0], held[0] == slots.get(0) || !slots.is_pinned(held[0]));
        }
        assert_eq!(slots.pinned(), 0);
    }

    #[test]
    fn rows_are_settled_when_none_is_loading_unborn_shadowed_or_failed() {
        let mut slots = filled(4, 3);
        assert!(slots.all_settled());
        let slot = slots.take().expect("an empty slot");
        slots.insert(slot, 9, RowState::LOADING);
        assert!(!slots.all_settled());
        slots.mark(slot, RowState::SHADOW);
        slots.unmark(slot, RowState::LOADING);
        assert!(!slots.all_settled());
        slots.remove(slot, 9, false);
        assert!(slots.all_settled());
    }

    #[test]
    fn overflow_slots_come_after_the_capacity_and_are_used_again() {
        let mut slots = filled(2, 2);
        assert_eq!(slots.take(), None);
        let overflow: Vec<CacheSlot> = (0..3).map(|_| slots.take_overflow()).collect();
        assert_eq!(overflow, [2, 3, 4]);
        slots.insert(3, 30, RowState::default());
        slots.give_back(2);
        assert_eq!(slots.take_overflow(), 2);
        slots.remove(3, 30, true);
        for slot in [2, 4] {
            slots.give_back(slot);
        }
        assert_eq!((slots.overflow_used(), slots.high_water()), (0, 2));
    }

    #[test]
    fn a_row_keeps_its_state_when_it_moves() {
        let mut slots = filled(4, 2);
        let (from, to) = (slots.get(1), slots.take().expect("an empty slot"));
        slots.relocate(from, to, 1);
        assert_eq!(slots.get(1), to);
        assert!(slots.state(to).has(RowState::DIRTY) && !slots.state(from).has(RowState::OCCUPIED));
        assert_eq!(slots.used(), 2);
    }
}
