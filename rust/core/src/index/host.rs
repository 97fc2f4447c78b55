//! The index of a tier in RAM: id to slot.
#![allow(unsafe_code)]

use crate::prefetch::prefetch;
use crate::rows::Mapping;
use crate::types::{CacheSlot, Id, NO_SLOT, hash_id};

/// Sixteen bytes, four to a cache line. Zeros are an empty entry.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Entry {
    id: Id,
    /// The slot plus one; 0 says that no id is here.
    place: u32,
    unused: u32,
}

/// Id to slot, full keys: open addressing with linear probing, at most two thirds full, removal without tombstones.
///
/// It doubles from small on, up to the size for the capacity it was made for, and grows by a quarter past that. A home is
/// `hash * entries / 2^64`, so that any number of entries will do.
#[derive(Debug)]
pub struct HostIndex {
    mapping: Option<Mapping>,
    entries: usize,
    limit: usize,
    len: usize,
    capacity: usize,
}

/// Ids that [`HostIndex::get_batch`] asks for before it looks at the block before them.
const BLOCK: usize = 32;
const LEAST_ENTRIES: usize = 256;

impl HostIndex {
    /// An empty index that will take `capacity` ids in exactly `capacity` × [`HostIndex::bytes_per_entry`], when it is full.
    pub fn new(capacity: usize) -> Self {
        Self { mapping: None, entries: 0, limit: 0, len: 0, capacity }
    }

    /// Ids in the index.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of RAM it takes.
    pub fn bytes(&self) -> usize {
        self.entries * size_of::<Entry>()
    }

    /// Bytes of RAM an entry costs when the index is as full as it gets.
    pub fn bytes_per_entry() -> usize {
        size_of::<Entry>() * 3 / 2
    }

    /// The slot of one id, or `NO_SLOT`.
    #[inline]
    pub fn get(&self, id: Id) -> CacheSlot {
        if self.len == 0 {
            return NO_SLOT;
        }
        let entries = self.entries();
        found(entries, id, home(entries.len(), id)).map_or_else(|_| NO_SLOT, |at| entries[at].place - 1)
    }

    /// The slots of `ids`, `NO_SLOT` where absent, looked up in prefetched blocks: `slots[i]` for `ids[i]`.
    ///
    /// # Panics
    /// When `slots` has not the length of `ids`.
    pub fn get_batch(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        assert_eq!(ids.len(), slots.len(), "a slot for each id");
        if self.len == 0 {
            return slots.fill(NO_SLOT);
        }
        let entries = self.entries();
        let place = |block: &[Id], homes: &mut [usize; BLOCK]| {
            for (id, home_of) in block.iter().zip(homes) {
                *home_of = home(entries.len(), *id);
                prefetch(entries, *home_of);
            }
        };
        let (mut homes, mut ahead) = ([0; BLOCK], [0; BLOCK]);
        let mut blocks = ids.chunks(BLOCK);
        let mut next = blocks.next();
        place(next.unwrap_or_default(), &mut ahead);
        for slots in slots.chunks_mut(BLOCK) {
            let block = next.unwrap_or_default();
            next = blocks.next();
            std::mem::swap(&mut homes, &mut ahead);
            place(next.unwrap_or_default(), &mut ahead);
            for ((&id, &home), slot) in block.iter().zip(&homes).zip(slots) {
                let mut at = home;
                *slot = loop {
                    // SAFETY: `at` is a home, below the number of entries, or follows one and wraps there.
                    let entry = unsafe { entries.get_unchecked(at) };
                    if entry.id == id || entry.place == 0 {
                        break entry.place.wrapping_sub(1);
                    }
                    at = if at + 1 == entries.len() { 0 } else { at + 1 };
                };
            }
        }
    }

    /// Add an id that is absent, at a slot that is not `NO_SLOT`.
    ///
    /// # Panics
    /// When the system has no memory to grow.
    pub fn insert(&mut self, id: Id, slot: CacheSlot) {
        debug_assert!(slot != NO_SLOT, "a row is in a slot");
        if self.len >= self.limit {
            self.grow();
        }
        let entries = self.entries_mut();
        let at = found(entries, id, home(entries.len(), id)).expect_err("an id is inserted when it is absent");
        entries[at] = Entry { id, place: slot + 1, unused: 0 };
        self.len += 1;
    }

    /// Point an id that is present to another slot.
    ///
    /// # Panics
    /// When the id is absent.
    pub fn replace(&mut self, id: Id, slot: CacheSlot) {
        debug_assert!(slot != NO_SLOT, "a row is in a slot");
        let entries = self.entries_mut();
        let at = (!entries.is_empty()).then(|| found(entries, id, home(entries.len(), id)).ok()).flatten();
        entries[at.expect("an id is replaced when it is present")].place = slot + 1;
    }

    /// Remove an id; its slot, or `NO_SLOT` if absent.
    pub fn remove(&mut self, id: Id) -> CacheSlot {
        if self.len == 0 {
            return NO_SLOT;
        }
        let entries = self.entries_mut();
        let count = entries.len();
        let Ok(mut gap) = found(entries, id, home(count, id)) else { return NO_SLOT };
        let slot = entries[gap].place - 1;
        let mut next = gap;
        loop {
            next = if next + 1 == count { 0 } else { next + 1 };
            let entry = entries[next];
            if entry.place == 0 {
                break;
            }
            // What is behind the gap moves into it unless its home is behind the gap too.
            let from_home = distance(home(count, entry.id), next, count);
            if from_home >= distance(gap, next, count) {
                entries[gap] = entry;
                gap = next;
            }
        }
        entries[gap].place = 0;
        self.len -= 1;
        slot
    }

    fn entries(&self) -> &[Entry] {
        let Some(mapping) = &self.mapping else { return &[] };
        // SAFETY: the mapping is page-aligned, as large as `entries` entries, zeroed at first (empty entries) and written
        // through `entries_mut` only.
        unsafe { std::slice::from_raw_parts(mapping.start().cast(), self.entries) }
    }

    fn entries_mut(&mut self) -> &mut [Entry] {
        let Some(mapping) = &self.mapping else { return &mut [] };
        // SAFETY: as in `entries`, and self is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(mapping.start().cast(), self.entries) }
    }

    fn grow(&mut self) {
        let full = (self.capacity * 3).div_ceil(2).max(LEAST_ENTRIES);
        let entries = if self.entries < full {
            (self.entries * 2).clamp(LEAST_ENTRIES, full)
        } else {
            self.entries + self.entries / 4
        };
        let mapping = Mapping::new(entries * size_of::<Entry>()).unwrap_or_else(|refused| panic!("{refused}"));
        let grown =
            Self { mapping: Some(mapping), entries, limit: entries * 2 / 3, len: self.len, capacity: self.capacity };
        let old = std::mem::replace(self, grown);
        let entries = self.entries_mut();
        // Homes keep the order of hashes, so that this walks both sides from front to back.
        for entry in old.entries().iter().filter(|entry| entry.place != 0) {
            let mut at = home(entries.len(), entry.id);
            while entries[at].place != 0 {
                at = if at + 1 == entries.len() { 0 } else { at + 1 };
            }
            entries[at] = *entry;
        }
    }
}

#[inline]
fn home(entries: usize, id: Id) -> usize {
    ((u128::from(hash_id(id)) * entries as u128) >> 64) as usize
}

/// Steps from `from` on to `to`, around the end.
fn distance(from: usize, to: usize, entries: usize) -> usize {
    if to >= from { to - from } else { to + entries - from }
}

/// Where `id` is, looking from `at` on; or where it would go.
#[inline]
fn found(entries: &[Entry], id: Id, mut at: usize) -> Result<usize, usize> {
    loop {
        let entry = &entries[at];
        if entry.place == 0 {
            return Err(at);
        }
        if entry.id == id {
            return Ok(at);
        }
        at = if at + 1 == entries.len() { 0 } else { at + 1 };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Every id is reachable from its home without a gap.
    fn check_structure(index: &HostIndex) {
        let entries = index.entries();
        let present = entries.iter().enumerate().filter(|(_, entry)| entry.place != 0);
        assert_eq!(present.clone().count(), index.len());
        for (at, entry) in present {
            assert_eq!(found(entries, entry.id, home(entries.len(), entry.id)), Ok(at));
        }
    }

    #[test]
    fn ids_like_any_sentinel_are_ids() {
        let mut index = HostIndex::new(4);
        let ids = [0, -1, i64::MIN, i64::MAX];
        let mut slots = [7; 4];
        index.get_batch(&ids, &mut slots);
        assert_eq!(slots, [NO_SLOT; 4]);
        for (slot, &id) in ids.iter().enumerate() {
            index.insert(id, slot as u32);
            assert_eq!(index.get(0), 0);
        }
        index.get_batch(&ids, &mut slots);
        assert_eq!(slots, [0, 1, 2, 3]);
        assert_eq!(index.remove(0), 0);
        assert_eq!((index.get(0), index.remove(0), index.len()), (NO_SLOT, NO_SLOT, 3));
        index.get_batch(&ids, &mut slots);
        assert_eq!(slots, [NO_SLOT, 1, 2, 3]);
    }

    #[test]
    fn the_index_takes_its_capacity_in_the_bytes_it_says_and_goes_on_past_it() {
        let mut index = HostIndex::new(10_000);
        for id in 0..10_000 {
            index.insert(id * 3, id as u32);
        }
        assert_eq!(index.bytes(), 10_000 * HostIndex::bytes_per_entry());
        for id in 10_000..20_000 {
            index.insert(id * 3, id as u32);
        }
        assert!((0..20_000).all(|id| index.get(id * 3) == id as u32 && index.get(id * 3 + 1) == NO_SLOT));
        check_structure(&index);
    }

    #[test]
    fn removal_around_the_end_leaves_no_gap() {
        let mut index = HostIndex::new(0);
        index.grow();
        let entries = index.entries;
        let last: Vec<Id> = (0..).filter(|&id| home(entries, id) >= entries - 2).take(12).collect();
        for removed in 0..last.len() {
            for (slot, &id) in last.iter().enumerate() {
                index.insert(id, slot as u32);
            }
            assert_eq!(index.remove(last[removed]), removed as u32);
            check_structure(&index);
            for &id in last.iter().filter(|id| **id != last[removed]) {
                assert_ne!(index.remove(id), NO_SLOT);
                check_structure(&index);
            }
        }
    }

    proptest! {
        #[test]
        fn behaves_as_a_map(
            capacity in 0_usize..600,
            steps in prop::collection::vec((0_u8..5, prop_oneof![-500_i64..500, Just(i64::MIN), Just(i64::MAX)]), 1..3000),
        ) {
            let mut index = HostIndex::new(capacity);
            let mut model = BTreeMap::new();
            for (slot, (step, id)) in steps.into_iter().enumerate() {
                let slot = slot as u32;
                if step == 0 {
                    prop_assert_eq!(index.remove(id), model.remove(&id).unwrap_or(NO_SLOT));
                } else if model.insert(id, slot).is_some() {
                    index.replace(id, slot);
                } else {
                    index.insert(id, slot);
                }
                prop_assert_eq!(index.get(id), model.get(&id).copied().unwrap_or(NO_SLOT));
            }
            check_structure(&index);
            let ids: Vec<Id> = (-520..520).collect();
            let mut slots = vec![0; ids.len()];
            index.get_batch(&ids, &mut slots);
            for (id, slot) in ids.iter().zip(slots) {
                prop_assert_eq!(slot, model.get(id).copied().unwrap_or(NO_SLOT));
            }
        }
    }
}
