//! The index of a tier in RAM: id to slot.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_cmpeq_epi64_mask, _mm512_load_si512, _mm512_set1_epi64};
use std::hint::select_unpredictable;

use super::hash::IdHash;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::prefetch::prefetch;
use crate::simd::Isa;
use crate::types::{CacheSlot, Id, NO_SLOT};

const WIDTH: usize = 5;

/// A cache line of entries: those in use first.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line {
    ids: [Id; WIDTH],
    /// Slots plus one; 0 where no entry is, whatever its id (zeros are an empty line), and in the last, which has no id.
    places: [u32; WIDTH + 1],
}

impl Line {
    /// The place of an id, 0 if it is not in this line. Entry by entry and without branches: which one it is cannot be foreseen.
    #[inline]
    fn place(&self, id: Id) -> u32 {
        // The first that matches: an entry in use comes before those with ids left over.
        let entry =
            (0..WIDTH).rev().fold(WIDTH, |found, entry| select_unpredictable(self.ids[entry] == id, entry, found));
        // SAFETY: an entry, or the place after them.
        unsafe { *self.places.get_unchecked(entry) }
    }

    /// [`Line::place`], all entries at once.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn place_at_once(&self, id: Id) -> u32 {
        // SAFETY: a line is 64 bytes, and aligned to as many.
        let line = unsafe { _mm512_load_si512((&raw const *self).cast()) };
        let equal = _mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(id));
        // What follows the ids in the line may equal the id, too, but comes after the place of none.
        let entry = (u32::from(equal) | 1 << WIDTH).trailing_zeros() as usize;
        // SAFETY: bit WIDTH is set, so that this is an entry or the place after them.
        unsafe { *self.places.get_unchecked(entry) }
    }

    #[inline]
    fn entry(&self, id: Id) -> Option<usize> {
        (0..WIDTH).find(|&entry| self.ids[entry] == id && self.places[entry] != 0)
    }

    /// Entries in use.
    #[inline]
    fn len(&self) -> usize {
        (0..WIDTH).filter(|&entry| self.places[entry] != 0).count()
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.places[WIDTH - 1] != 0
    }

    /// Add an entry to a line that is not full.
    #[inline]
    fn push(&mut self, id: Id, place: u32) {
        let gap = self.len();
        self.ids[gap] = id;
        self.places[gap] = place;
    }

    /// Take an entry out; the last comes in its place.
    fn take(&mut self, entry: usize) -> (Id, u32) {
        let taken = (self.ids[entry], self.places[entry]);
        let last = self.len() - 1;
        self.ids[entry] = self.ids[last];
        self.places[entry] = self.places[last];
        self.places[last] = 0;
        taken
    }
}

/// Id to slot, full keys: lines of five entries, at most three quarters full. An id is in its home line or, where that is full, in
/// the next that is not; on removal ids move back. So most lookups touch one cache line.
///
/// It doubles from small on, up to the size for the capacity it was made for, and grows by a quarter past that. A home is
/// `hash * lines / 2^64`, so that any number of lines will do.
///
/// Steps past a home are not counted, and nothing is hashed anew for them: the multiplier is random and 63 bits wide, and shows in no
/// result, so that nobody can choose ids that meet; and the fold between the two multiplications puts no stride in step with it.
#[derive(Debug)]
pub struct HostIndex {
    mapping: Option<Mapping>,
    lines: usize,
    limit: usize,
    len: usize,
    capacity: usize,
    /// Random, so that nobody can choose ids that meet.
    hash: IdHash,
}

/// How many ids ahead [`HostIndex::get_batch`] asks for lines.
const AHEAD: usize = 64;
const LEAST_LINES: usize = 16;

impl HostIndex {
    /// An empty index that will take `capacity` ids in `capacity` × [`HostIndex::bytes_per_entry`] or less, and a page.
    pub fn new(capacity: usize) -> Self {
        Self { mapping: None, lines: 0, limit: 0, len: 0, capacity, hash: IdHash::random() }
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
        self.lines * size_of::<Line>()
    }

    /// Bytes of RAM an entry costs when the index is as full as it gets.
    pub fn bytes_per_entry() -> usize {
        (size_of::<Line>() * 4).div_ceil(WIDTH * 3)
    }

    /// The slot of one id, or `NO_SLOT`.
    #[inline]
    pub fn get(&self, id: Id) -> CacheSlot {
        if self.len == 0 {
            return NO_SLOT;
        }
        let (lines, hash) = (self.lines(), self.hash);
        slot_from(lines, home(hash, lines.len(), id), id)
    }

    /// Start loading the line of an id.
    #[inline]
    pub fn prefetch(&self, id: Id) {
        let (lines, hash) = (self.lines(), self.hash);
        prefetch(lines, home(hash, lines.len(), id));
    }

    /// The slots of `ids`, `NO_SLOT` where absent, with lines asked for ahead: `slots[i]` for `ids[i]`.
    ///
    /// # Panics
    /// When `slots` has not the length of `ids`.
    pub fn get_batch(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        assert_eq!(ids.len(), slots.len(), "a slot for each id");
        if self.len == 0 {
            return slots.fill(NO_SLOT);
        }
        match Isa::best() {
            // SAFETY: the processor has AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { slots_at_once(self.hash, self.lines(), ids, slots) },
            _ => slots_ahead(self.hash, self.lines(), ids, slots, Line::place),
        }
    }

    /// Add an id that is absent, at a slot that is not `NO_SLOT`.
    ///
    /// # Panics
    /// When the system has no memory to grow; after [`HostIndex::reserve`] it has grown.
    pub fn insert(&mut self, id: Id, slot: CacheSlot) {
        debug_assert!(slot != NO_SLOT, "a row is in a slot");
        debug_assert!(self.get(id) == NO_SLOT, "an id is inserted when it is absent");
        if self.len >= self.limit {
            self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        }
        put(self.hash, self.lines_mut(), id, slot + 1);
        self.len += 1;
    }

    /// Add an id at a slot that is not `NO_SLOT` if it is absent; whether it was.
    ///
    /// # Panics
    /// As [`HostIndex::insert`].
    pub fn insert_new(&mut self, id: Id, slot: CacheSlot) -> bool {
        debug_assert!(slot != NO_SLOT, "a row is in a slot");
        if self.len >= self.limit {
            self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        }
        let hash = self.hash;
        let lines = self.lines_mut();
        let mut line = home(hash, lines.len(), id);
        loop {
            let here = &mut lines[line];
            if here.place(id) != 0 {
                return false;
            }
            if !here.is_full() {
                here.push(id, slot + 1);
                self.len += 1;
                return true;
            }
            line = following(line, lines.len());
        }
    }

    /// Make sure that `more` ids can be added without more memory. `Kind::Memory`, and nothing changed, where the system refuses.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        if self.len + more > self.limit { self.grow(self.len + more) } else { Ok(()) }
    }

    /// Point an id that is present to another slot.
    ///
    /// # Panics
    /// When the id is absent.
    pub fn replace(&mut self, id: Id, slot: CacheSlot) {
        debug_assert!(slot != NO_SLOT, "a row is in a slot");
        let (line, entry) = self.find(id).expect("an id is replaced when it is present");
        self.lines_mut()[line].places[entry] = slot + 1;
    }

    /// Remove an id; its slot, or `NO_SLOT` if absent.
    pub fn remove(&mut self, id: Id) -> CacheSlot {
        let Some((mut line, entry)) = self.find(id) else { return NO_SLOT };
        let hash = self.hash;
        let lines = self.lines_mut();
        // Only past full lines are there ids whose home is at or before them; the first that may move back does.
        let mut full = lines[line].is_full();
        let (_, place) = lines[line].take(entry);
        let mut next = line;
        while full {
            next = following(next, lines.len());
            full = lines[next].is_full();
            let moves = (0..lines[next].len()).find(|&other| {
                let home = home(hash, lines.len(), lines[next].ids[other]);
                distance(home, next, lines.len()) >= distance(line, next, lines.len())
            });
            if let Some(other) = moves {
                let (id, place) = lines[next].take(other);
                lines[line].push(id, place);
                line = next;
            }
        }
        self.len -= 1;
        place - 1
    }

    /// Line and entry of an id.
    fn find(&self, id: Id) -> Option<(usize, usize)> {
        let (lines, hash) = (self.lines(), self.hash);
        let mut line = if self.len == 0 { return None } else { home(hash, lines.len(), id) };
        loop {
            match lines[line].entry(id) {
                Some(entry) => return Some((line, entry)),
                None if !lines[line].is_full() => return None,
                None => line = following(line, lines.len()),
            }
        }
    }

    fn lines(&self) -> &[Line] {
        let Some(mapping) = &self.mapping else { return &[] };
        // SAFETY: the mapping is page-aligned, as large as `lines` lines, zeroed at first (empty lines) and written through
        // `lines_mut` only.
        unsafe { std::slice::from_raw_parts(mapping.start().cast(), self.lines) }
    }

    fn lines_mut(&mut self) -> &mut [Line] {
        let Some(mapping) = &self.mapping else { return &mut [] };
        // SAFETY: as in `lines`, and self is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(mapping.start().cast(), self.lines) }
    }

    /// To the next size that has room for `ids`.
    fn grow(&mut self, ids: usize) -> Result<()> {
        let full = (self.capacity * 4).div_ceil(WIDTH * 3).max(LEAST_LINES);
        let limit_of = |lines: usize| lines * WIDTH * 3 / 4;
        let mut lines = self.lines;
        while limit_of(lines) < ids {
            lines = if lines < full { (lines * 2).clamp(LEAST_LINES, full) } else { lines + lines / 4 };
        }
        let mapping = Mapping::new(lines * size_of::<Line>())?;
        let limit = limit_of(lines);
        let (capacity, hash) = (self.capacity, self.hash);
        let grown = Self { mapping: Some(mapping), lines, limit, len: self.len, capacity, hash };
        let old = std::mem::replace(self, grown);
        // Homes keep the order of hashes, so that this walks both sides from front to back.
        for line in old.lines() {
            for entry in 0..line.len() {
                put(hash, self.lines_mut(), line.ids[entry], line.places[entry]);
            }
        }
        Ok(())
    }
}

/// The home line: the hash scaled to the lines. Nothing on disk, and no result, hangs on it.
#[inline]
fn home(hash: IdHash, lines: usize, id: Id) -> usize {
    ((u128::from(hash.of(id)) * lines as u128) >> 64) as usize
}

#[inline]
fn following(line: usize, lines: usize) -> usize {
    if line + 1 == lines { 0 } else { line + 1 }
}

/// Steps from `from` on to `to`, around the end.
fn distance(from: usize, to: usize, lines: usize) -> usize {
    if to >= from { to - from } else { to + lines - from }
}

/// The slot of an id whose home is `line`, or `NO_SLOT`.
#[inline]
fn slot_from(lines: &[Line], mut line: usize, id: Id) -> CacheSlot {
    loop {
        let here = &lines[line];
        let place = here.place(id);
        if place != 0 || !here.is_full() {
            return place.wrapping_sub(1);
        }
        line = following(line, lines.len());
    }
}

/// The slots of `ids`, `NO_SLOT` where absent; `place` looks an id up in a line. The lines of ids [`AHEAD`] are asked for.
#[inline(always)]
#[allow(clippy::inline_always)] // It is compiled for the instruction set of who calls it.
fn slots_ahead(hash: IdHash, lines: &[Line], ids: &[Id], slots: &mut [CacheSlot], place: impl Fn(&Line, Id) -> u32) {
    let mut homes = [0; AHEAD];
    for (id, ahead) in ids.iter().zip(&mut homes) {
        *ahead = home(hash, lines.len(), *id);
        prefetch(lines, *ahead);
    }
    for (done, (&id, slot)) in ids.iter().zip(slots).enumerate() {
        let ahead = home(hash, lines.len(), ids[(done + AHEAD).min(ids.len() - 1)]);
        prefetch(lines, ahead);
        let line = std::mem::replace(&mut homes[done % AHEAD], ahead);
        let here = &lines[line];
        let place = place(here, id);
        *slot = if place != 0 || !here.is_full() { place.wrapping_sub(1) } else { slot_past(lines, line, id) };
    }
}

/// [`slots_ahead`] with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn slots_at_once(hash: IdHash, lines: &[Line], ids: &[Id], slots: &mut [CacheSlot]) {
    slots_ahead(hash, lines, ids, slots, |line, id| line.place_at_once(id));
}

/// The slot of an id that is not in `line`, its home, which is full.
#[inline(never)]
fn slot_past(lines: &[Line], line: usize, id: Id) -> CacheSlot {
    slot_from(lines, following(line, lines.len()), id)
}

/// Enter an id that is absent.
fn put(hash: IdHash, lines: &mut [Line], id: Id, place: u32) {
    let mut line = home(hash, lines.len(), id);
    while lines[line].is_full() {
        line = following(line, lines.len());
    }
    lines[line].push(id, place);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Every id is in its home line or past full ones.
    fn check_structure(index: &HostIndex) {
        let lines = index.lines();
        let mut len = 0;
        for (at, line) in lines.iter().enumerate() {
            for entry in 0..line.len() {
                assert_eq!(index.find(line.ids[entry]), Some((at, entry)));
            }
            assert!(line.places[line.len()..].iter().all(|place| *place == 0), "those in use first");
            len += line.len();
        }
        assert_eq!(len, index.len());
        assert!(len <= index.limit);
    }

    #[test]
    fn ids_like_any_sentinel_are_ids() {
        let mut index = HostIndex::new(4);
        let ids = [0, -1, i64::MIN, i64::MAX];
        let mut slots = [7; 4];
        index.get_batch(&ids, &mut slots);
        assert_eq!(slots, [NO_SLOT; 4]);
        for (slot, &id) in ids.iter().enumerate() {
            assert!(index.insert_new(id, slot as u32) && !index.insert_new(id, 9));
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
        assert!(index.bytes() <= 10_000 * HostIndex::bytes_per_entry());
        for id in 10_000..20_000 {
            assert!(index.insert_new(id * 3, id as u32) && !index.insert_new(id * 3, 1));
        }
        assert!((0..20_000).all(|id| index.get(id * 3) == id as u32 && index.get(id * 3 + 1) == NO_SLOT));
        check_structure(&index);
    }

    /// Lines past their homes where ids are: all together, and the most of one.
    fn steps_past_homes(index: &HostIndex) -> (usize, usize) {
        let lines = index.lines();
        let steps = lines.iter().enumerate().flat_map(|(at, line)| {
            line.ids[..line.len()].iter().map(move |&id| distance(home(index.hash, lines.len(), id), at, lines.len()))
        });
        steps.fold((0, 0), |(sum, most), steps| (sum + steps, most.max(steps)))
    }

    #[test]
    fn ids_at_any_stride_lie_three_lines_past_their_homes_on_average_at_most() {
        const IDS: u64 = 7680;
        let fibonacci = (0..85).scan((1_u64, 1_u64), |(one, two), _| {
            (*one, *two) = (*two, *one + *two);
            Some(*one)
        });
        let powers = (0..64).map(|bit| 1 << bit);
        let others = [3, 5, 60, 3600, 86_400, 4093, 65_537, 0x9e37_79b9_7f4a_7c15, 0xffff_ffff, u64::MAX];
        for stride in fibonacci.chain(powers).chain(others) {
            for seed in [0x1234_5678_9abc_def1, 0xd1b5_4a32_d192_ed03, 0x9e37_79b9_7f4a_7c15] {
                // The index is as full as it gets.
                let mut index = HostIndex { hash: IdHash::new(seed), ..HostIndex::new(IDS as usize) };
                for n in 0..IDS {
                    index.insert_new(n.wrapping_mul(stride) as Id, n as u32);
                }
                let (sum, most) = steps_past_homes(&index);
                assert!(
                    sum < 3 * index.len() && most < 64,
                    "stride {stride}, seed {seed:x}: {sum} steps, {most} for one"
                );
            }
        }
    }

    #[test]
    fn ids_chosen_against_one_index_do_not_meet_in_another() {
        let (mut one, mut other) = (HostIndex::new(4000), HostIndex::new(4000));
        one.reserve(4000).expect("memory");
        other.reserve(4000).expect("memory");
        let lines = one.lines;
        let chosen: Vec<Id> = (0..).filter(|&id| home(one.hash, lines, id) < 8).take(1500).collect();
        for (slot, &id) in chosen.iter().enumerate() {
            other.insert(id, slot as u32);
        }
        let past = |&id: &Id| other.find(id).map(|(line, _)| distance(home(other.hash, lines, id), line, lines));
        let steps: usize = chosen.iter().filter_map(past).sum();
        assert!(steps < chosen.len(), "{steps} lines past the homes of {} ids", chosen.len());
    }

    #[test]
    fn removal_around_the_end_leaves_no_gap() {
        let mut index = HostIndex::new(0);
        index.grow(index.limit + 1).expect("memory");
        let (lines, hash) = (index.lines, index.hash);
        let last: Vec<Id> = (0..100_000).filter(|&id| home(hash, lines, id) >= lines - 2).take(40).collect();
        for &removed in &last {
            for (slot, &id) in last.iter().enumerate() {
                index.insert(id, slot as u32);
            }
            assert_ne!(index.remove(removed), NO_SLOT);
            check_structure(&index);
            for &id in last.iter().filter(|id| **id != removed) {
                assert_ne!(index.remove(id), NO_SLOT);
                check_structure(&index);
            }
        }
        assert_eq!(index.lines, lines, "all in lines that follow each other around the end");
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
            for (id, slot) in ids.iter().zip(&slots) {
                prop_assert_eq!(*slot, model.get(id).copied().unwrap_or(NO_SLOT));
            }
            let mut one_by_one = vec![0; ids.len()];
            if !index.is_empty() {
                slots_ahead(index.hash, index.lines(), &ids, &mut one_by_one, Line::place);
                prop_assert_eq!(slots, one_by_one, "on every instruction set");
            }
        }
    }
}
