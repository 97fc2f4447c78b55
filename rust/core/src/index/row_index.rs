//! The index of a tier in RAM: maps ids to slots.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use std::hint::select_unpredictable;

use super::hash::IdHash;
use crate::error::Result;
use crate::runtime::mapping::AnonymousMapping;
use crate::runtime::simd::{InstructionSet, prefetch};
use crate::types::{CacheSlot, Id, NO_SLOT};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_cmpeq_epi64_mask, _mm512_load_si512, _mm512_set1_epi64, _mm512_test_epi32_mask};

/// Number of entries of a line.
const WIDTH: usize = 5;

/// Distance, in ids, at which a batch prefetches the home line of an id.
const AHEAD: usize = 64;

/// Number of lines after a passed one that [`SlotIndex::remove_batch`] prefetches.
const FOLLOWING: usize = 2;

/// Distance, in ids, at which it prefetches them.
const FOLLOWING_AHEAD: usize = 16;

/// Distance, in ids, at which it prefetches the line again, because a CPU drops some of many prefetches. It costs
/// nearly nothing for a line in the cache.
const ASKED_AGAIN: usize = 16;

/// Number of queued ids whose home line does not have them and was passed, before half of them are looked up together
/// in a later line. The latest prefetches complete in the meantime, and are used with the other half.
const PAST: usize = 64;

/// Distance, in ids, at which [`slots_past`] prefetches a line again.
const PAST_AGAIN: usize = 6;

const LEAST_LINES: usize = 16;

/// Growth factor of an index with a capacity. All ids are put into new lines each time: in total a third of a move per
/// id, versus one move with a factor of two.
const GROWTH: usize = 4;

/// A cache line of entries. The entries in use come first.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct IndexLine {
    ids: [Id; WIDTH],
    /// For each entry its *tag*: the slot plus one, or 0 for a free entry (whose id may be anything, so that a line of
    /// zeros is empty). The last number belongs to no entry: it counts the ids stored past this line whose home is this
    /// line or one before it. If it is 0, a search for an id ends here.
    tags: [u32; WIDTH + 1],
}

impl IndexLine {
    /// The tag of an id, or 0 if it is not in this line. Checks all entries without branches, because the match is
    /// unpredictable.
    #[inline]
    fn tag(&self, id: Id) -> u32 {
        // The first matching entry counts. Entries in use come before free ones with a stale id.
        let entry =
            (0..WIDTH).rev().fold(WIDTH, |found, entry| select_unpredictable(self.ids[entry] == id, entry, found));
        // SAFETY: the fold starts with WIDTH and continues with entries.
        unsafe { self.tag_of_entry(entry) }
    }

    /// The tag of an entry, or 0 for `WIDTH`, which represents no entry. Branchless, as [`IndexLine::tag`].
    ///
    /// # Safety
    /// `entry` is at most `WIDTH`.
    #[inline]
    unsafe fn tag_of_entry(&self, entry: usize) -> u32 {
        debug_assert!(entry <= WIDTH);
        // SAFETY: `tags` has WIDTH + 1 elements, and the caller guarantees that `entry` is at most WIDTH.
        let tag = unsafe { *self.tags.get_unchecked(entry) };
        select_unpredictable(entry == WIDTH, 0, tag)
    }

    /// Like [`IndexLine::tag`], for all entries in parallel.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn tag_at_once(&self, id: Id) -> u32 {
        // SAFETY: a line has 64 bytes and is aligned to 64.
        let line = unsafe { _mm512_load_si512((&raw const *self).cast()) };
        let equal = _mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(id));
        // The data after the ids in the line may equal the id by chance. Bit WIDTH is set, so those bits are never the
        // lowest.
        let entry = (u32::from(equal) | 1 << WIDTH).trailing_zeros() as usize;
        // SAFETY: bit WIDTH is set, so `entry` is at most WIDTH.
        unsafe { self.tag_of_entry(entry) }
    }

    /// The entry of an id, found as in [`IndexLine::tag`].
    #[inline]
    fn entry(&self, id: Id) -> Option<usize> {
        let entry =
            (0..WIDTH).rev().fold(WIDTH, |found, entry| select_unpredictable(self.ids[entry] == id, entry, found));
        (entry < WIDTH && self.tags[entry] != 0).then_some(entry)
    }

    /// Number of ids stored past this line whose home is this line or one before it.
    #[inline]
    pub(crate) fn passed(&self) -> u32 {
        self.tags[WIDTH]
    }

    /// The ids of the entries that a search finds, which in a corrupted line may come after free ones.
    pub(crate) fn ids_in_use(&self) -> impl Iterator<Item = Id> {
        self.ids.iter().zip(&self.tags).filter(|(_, tag)| **tag != 0).map(|(id, _)| *id)
    }

    /// The number of entries in use.
    #[inline]
    fn len(&self) -> usize {
        (0..WIDTH).filter(|&entry| self.tags[entry] != 0).count()
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.tags[WIDTH - 1] != 0
    }

    /// Adds an entry to a line that is not full.
    #[inline]
    fn push(&mut self, id: Id, tag: u32) {
        let gap = self.len();
        self.ids[gap] = id;
        self.tags[gap] = tag;
    }

    /// Removes an entry. The last one in use moves to its position.
    fn take(&mut self, entry: usize) -> (Id, u32) {
        let taken = (self.ids[entry], self.tags[entry]);
        let last = self.len() - 1;
        self.ids[entry] = self.ids[last];
        self.tags[entry] = self.tags[last];
        self.tags[last] = 0;
        taken
    }

    /// Puts an id into a free entry.
    #[inline]
    fn set(&mut self, entry: usize, id: Id, tag: u32) {
        self.ids[entry] = id;
        self.tags[entry] = tag;
    }

    fn look(&self, id: Id) -> LineLookup {
        let len = self.len();
        LineLookup { has: self.ids[..len].contains(&id), len }
    }

    /// Like `look`, for all entries in parallel.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn look_at_once(&self, id: Id) -> LineLookup {
        // SAFETY: a line has 64 bytes and is aligned to 64.
        let line = unsafe { _mm512_load_si512((&raw const *self).cast()) };
        let equal = u32::from(_mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(id)));
        // The tags of the entries follow the ids, each of which has two words of 32 bits. Entries in use come first.
        let used = (u32::from(_mm512_test_epi32_mask(line, line)) >> (2 * WIDTH)) & ((1 << WIDTH) - 1);
        LineLookup { has: equal & used != 0, len: used.trailing_ones() as usize }
    }
}

/// The result of a lookup in a line.
struct LineLookup {
    /// True if the id is in the line.
    has: bool,
    /// Number of entries in use.
    len: usize,
}

/// A hash table from ids to slots with full keys. It consists of lines of five entries and is at most three quarters
/// full. An id is in its home line or, if that is full, in the next line that is not. Each line counts the ids that
/// have passed it this way. On removal ids move back towards their homes. So only full lines are passed, most lookups
/// touch one cache line, and most removals too.
///
/// It starts small and grows fourfold each time, up to the size for its capacity. Beyond that it grows by a quarter at
/// a time. The home line is `hash * lines / 2^64` (Lemire, "Fast random integer generation in an interval", 2019), so
/// any number of lines is possible.
///
/// Unlike [`super::IdDeduper`] it does not watch for collisions. Its multiplier has 63 random bits and is not visible
/// in any result, so colliding ids cannot be chosen. The fold between the two multiplications decorrelates every stride
/// of ids from it.
#[derive(Debug)]
pub struct SlotIndex {
    mapping: Option<AnonymousMapping>,
    lines: usize,
    /// Number of ids at which the index is three quarters full and grows.
    limit: usize,
    len: usize,
    capacity: usize,
    /// Growth factor on the way to the size for its capacity.
    growth: usize,
    /// Random for each index, so that colliding ids cannot be chosen.
    hash: IdHash,
}

impl SlotIndex {
    /// Creates an empty index. It will fit `capacity` ids in at most `capacity` × [`SlotIndex::bytes_per_entry`] bytes
    /// and a page.
    pub fn new(capacity: usize) -> Self {
        Self { mapping: None, lines: 0, limit: 0, len: 0, capacity, growth: GROWTH, hash: IdHash::random() }
    }

    /// Creates an empty index for any number of ids, which doubles: it uses at most twice the memory that it needs.
    pub fn unbounded() -> Self {
        Self { growth: 2, ..Self::new(1 << 32) }
    }

    /// Returns a copy in its own memory. `Kind::Memory` if the allocation fails.
    pub fn copied(&self) -> Result<Self> {
        let mut copy = Self { hash: self.hash, growth: self.growth, ..Self::new(self.capacity) };
        if self.len > 0 {
            copy.mapping = Some(AnonymousMapping::new(self.bytes())?);
            (copy.lines, copy.limit, copy.len) = (self.lines, self.limit, self.len);
            copy.lines_mut().copy_from_slice(self.lines());
        }
        Ok(copy)
    }

    /// Returns the number of ids in the index.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the index has no ids.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of RAM that the index uses.
    pub fn bytes(&self) -> usize {
        self.lines * size_of::<IndexLine>()
    }

    /// Bytes of RAM per id when the index is at its fullest.
    pub fn bytes_per_entry() -> usize {
        (size_of::<IndexLine>() * 4).div_ceil(WIDTH * 3)
    }

    /// Returns the slot of an id, or `NO_SLOT`.
    #[inline]
    pub fn get(&self, id: Id) -> CacheSlot {
        if self.len == 0 {
            return NO_SLOT;
        }
        let (lines, hash) = (self.lines(), self.hash);
        slot_from(lines, home(hash, lines.len(), id), id)
    }

    /// Prefetches the line of an id into the CPU cache.
    #[inline]
    pub fn prefetch(&self, id: Id) {
        let (lines, hash) = (self.lines(), self.hash);
        prefetch(lines, home(hash, lines.len(), id));
    }

    /// Writes the slot of `ids[i]` to `slots[i]`, or `NO_SLOT` if the index does not have the id. Lines are prefetched.
    ///
    /// # Panics
    /// If `slots` and `ids` differ in length.
    pub fn get_batch(&self, ids: &[Id], slots: &mut [CacheSlot]) {
        assert_eq!(ids.len(), slots.len(), "slots and ids must have the same length");
        if self.len == 0 {
            return slots.fill(NO_SLOT);
        }
        slots_of(self.hash, self.lines(), ids, slots);
    }

    /// The lines, and the hash that determines the home lines of ids.
    pub(crate) fn parts(&self) -> (&[IndexLine], IdHash) {
        (self.lines(), self.hash)
    }

    /// Adds a missing id at a slot that is not `NO_SLOT`.
    ///
    /// # Panics
    /// If the index must grow and the allocation fails. After [`SlotIndex::reserve`] it need not grow.
    pub fn insert(&mut self, id: Id, slot: CacheSlot) {
        debug_assert!(slot != NO_SLOT, "the slot must not be NO_SLOT");
        debug_assert!(self.get(id) == NO_SLOT, "an inserted id must be absent");
        if self.len >= self.limit {
            self.reserve(1).unwrap_or_else(|error| panic!("{error}"));
        }
        put(self.hash, self.lines_mut(), id, slot + 1);
        self.len += 1;
    }

    /// Adds an id at a slot that is not `NO_SLOT`, unless the id is present. Returns true if it was added.
    ///
    /// # Panics
    /// As [`SlotIndex::insert`].
    pub fn insert_new(&mut self, id: Id, slot: CacheSlot) -> bool {
        debug_assert!(slot != NO_SLOT, "the slot must not be NO_SLOT");
        if self.len >= self.limit {
            self.reserve(1).unwrap_or_else(|error| panic!("{error}"));
        }
        if self.find(id).is_some() {
            return false;
        }
        put(self.hash, self.lines_mut(), id, slot + 1);
        self.len += 1;
        true
    }

    /// Grows so that `more` ids can be added without allocation. If the allocation fails this returns `Kind::Memory`,
    /// and nothing changes.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        if self.len + more > self.limit { self.grow(self.len + more) } else { Ok(()) }
    }

    /// Changes the slot of a present id.
    ///
    /// # Panics
    /// If the id is missing.
    pub fn replace(&mut self, id: Id, slot: CacheSlot) {
        debug_assert!(slot != NO_SLOT, "the slot must not be NO_SLOT");
        let (line, entry) = self.find(id).expect("the id of a replaced slot must be present");
        self.lines_mut()[line].tags[entry] = slot + 1;
    }

    /// Removes an id. Returns its slot, or `NO_SLOT` if it was missing.
    pub fn remove(&mut self, id: Id) -> CacheSlot {
        let Some((mut line, entry)) = self.find(id) else { return NO_SLOT };
        let hash = self.hash;
        let lines = self.lines_mut();
        uncount_passed(lines, home(hash, lines.len(), id), line);
        let (_, tag) = lines[line].take(entry);
        // The first id that has passed the line with the gap moves into the gap and leaves another gap.
        while lines[line].passed() > 0 {
            let (next, other) = first_past(hash, lines, line);
            let (id, tag) = lines[next].take(other);
            lines[line].push(id, tag);
            uncount_passed(lines, line, next);
            line = next;
        }
        self.len -= 1;
        tag - 1
    }

    /// Removes ids. Missing ones are skipped. Lines are prefetched.
    pub fn remove_batch(&mut self, ids: &[Id]) {
        if self.len == 0 {
            return;
        }
        for step in 0..ids.len() + AHEAD {
            if let Some(&id) = ids.get(step) {
                self.prefetch(id);
            }
            if let Some(&id) = step.checked_sub(AHEAD - FOLLOWING_AHEAD).and_then(|at| ids.get(at)) {
                // An id that has passed a line moves back into it.
                let (lines, hash) = (self.lines(), self.hash);
                let mut line = home(hash, lines.len(), id);
                if lines[line].passed() > 0 {
                    for _ in 0..FOLLOWING {
                        line = following(line, lines.len());
                        prefetch(lines, line);
                    }
                }
            }
            if let Some(at) = step.checked_sub(AHEAD) {
                self.remove(ids[at]);
            }
        }
    }

    /// The line and the entry of an id.
    fn find(&self, id: Id) -> Option<(usize, usize)> {
        let (lines, hash) = (self.lines(), self.hash);
        let mut line = if self.len == 0 { return None } else { home(hash, lines.len(), id) };
        loop {
            match lines[line].entry(id) {
                Some(entry) => return Some((line, entry)),
                None if lines[line].passed() == 0 => return None,
                None => line = following(line, lines.len()),
            }
        }
    }

    fn lines(&self) -> &[IndexLine] {
        let Some(mapping) = &self.mapping else { return &[] };
        // SAFETY: the mapping is page-aligned and contains `lines` lines. It was zeroed by the operating system (so its
        // lines are empty) and is written only through `lines_mut`.
        unsafe { std::slice::from_raw_parts(mapping.start().cast(), self.lines) }
    }

    fn lines_mut(&mut self) -> &mut [IndexLine] {
        let Some(mapping) = &self.mapping else { return &mut [] };
        // SAFETY: the mapping is page-aligned and contains `lines` initialised lines, and self is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(mapping.start().cast(), self.lines) }
    }

    /// Grows to the next size that fits `ids`.
    fn grow(&mut self, ids: usize) -> Result<()> {
        let full = (self.capacity * 4).div_ceil(WIDTH * 3).max(LEAST_LINES);
        let limit_of = |lines: usize| lines * WIDTH * 3 / 4;
        let mut lines = self.lines;
        while limit_of(lines) < ids {
            lines = if lines < full { (lines * self.growth).clamp(LEAST_LINES, full) } else { lines + lines / 4 };
        }
        let mapping = AnonymousMapping::new(lines * size_of::<IndexLine>())?;
        let limit = limit_of(lines);
        let (capacity, growth, hash) = (self.capacity, self.growth, self.hash);
        let grown = Self { mapping: Some(mapping), lines, limit, len: self.len, capacity, growth, hash };
        let old = std::mem::replace(self, grown);
        // Homes are in the order of hashes, so this walks both the old lines and the new ones from front to back.
        for line in old.lines() {
            for entry in 0..line.len() {
                put(hash, self.lines_mut(), line.ids[entry], line.tags[entry]);
            }
        }
        Ok(())
    }

    /// Adds ids at slots, none of which is `NO_SLOT`, up to the first id that is present. `ids` and `slots` are `[n]`.
    /// Returns the number added. Lines are prefetched.
    ///
    /// # Panics
    /// As [`SlotIndex::insert`], and if `ids` and `slots` differ in length.
    pub fn insert_new_batch(&mut self, ids: &[Id], slots: &[CacheSlot]) -> usize {
        assert_eq!(ids.len(), slots.len(), "slots and ids must have the same length");
        if ids.is_empty() {
            return 0;
        }
        self.reserve(ids.len()).unwrap_or_else(|error| panic!("{error}"));
        let (hash, lines) = (self.hash, self.lines_mut());
        let added = match InstructionSet::best() {
            // SAFETY: `InstructionSet::best` has checked that the CPU has AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { put_at_once(hash, lines, ids, slots) },
            _ => put_ahead(hash, lines, ids, slots, IndexLine::look),
        };
        self.len += added;
        added
    }
}

/// The home line of an id: its hash, scaled to the number of lines.
#[inline]
fn home(hash: IdHash, lines: usize, id: Id) -> usize {
    ((u128::from(hash.of(id)) * lines as u128) >> 64) as usize
}

#[inline]
fn following(line: usize, lines: usize) -> usize {
    if line + 1 == lines { 0 } else { line + 1 }
}

/// The number of steps from line `from` forward to line `to`, around the end.
fn distance(from: usize, to: usize, lines: usize) -> usize {
    if to >= from { to - from } else { to + lines - from }
}

/// The slot of an id whose home is `line`, or `NO_SLOT`.
#[inline]
fn slot_from(lines: &[IndexLine], mut line: usize, id: Id) -> CacheSlot {
    loop {
        let current = &lines[line];
        let tag = current.tag(id);
        if tag != 0 || current.passed() == 0 {
            return tag.wrapping_sub(1);
        }
        line = following(line, lines.len());
    }
}

/// The line and the entry of the first id past `line` that has passed it. It must exist.
fn first_past(hash: IdHash, lines: &[IndexLine], line: usize) -> (usize, usize) {
    let mut next = line;
    loop {
        next = following(next, lines.len());
        // Checks all entries without branches, because the match is unpredictable.
        let gap = distance(line, next, lines.len());
        let found = (0..WIDTH).fold(0_u32, |found, entry| {
            let home = home(hash, lines.len(), lines[next].ids[entry]);
            let has_passed = distance(home, next, lines.len()) >= gap;
            found | u32::from(has_passed && lines[next].tags[entry] != 0) << entry
        });
        if found != 0 {
            return (next, found.trailing_zeros() as usize);
        }
    }
}

/// Decrements the passed count of the lines from `from` up to the one before `to`.
fn uncount_passed(lines: &mut [IndexLine], from: usize, to: usize) {
    let mut line = from;
    while line != to {
        lines[line].tags[WIDTH] -= 1;
        line = following(line, lines.len());
    }
}

/// Adds a missing id.
fn put(hash: IdHash, lines: &mut [IndexLine], id: Id, tag: u32) {
    let mut line = home(hash, lines.len(), id);
    while lines[line].is_full() {
        lines[line].tags[WIDTH] += 1;
        line = following(line, lines.len());
    }
    lines[line].push(id, tag);
}

/// Like [`put_ahead`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn put_at_once(hash: IdHash, lines: &mut [IndexLine], ids: &[Id], slots: &[CacheSlot]) -> usize {
    put_ahead(hash, lines, ids, slots, |line, id| line.look_at_once(id))
}

/// Adds ids up to the first one that is present, and returns the number added. All of them must fit.
#[inline(always)]
#[allow(clippy::inline_always)] // The caller is compiled for a specific instruction set, and this with it.
fn put_ahead(
    hash: IdHash,
    lines: &mut [IndexLine],
    ids: &[Id],
    slots: &[CacheSlot],
    look: impl Fn(&IndexLine, Id) -> LineLookup,
) -> usize {
    let count = lines.len();
    let mut homes = [0; AHEAD];
    for (id, ahead) in ids.iter().zip(&mut homes) {
        *ahead = home(hash, count, *id);
        prefetch(lines, *ahead);
    }
    for (done, (&id, &slot)) in ids.iter().zip(slots).enumerate() {
        let ahead = home(hash, count, ids[(done + AHEAD).min(ids.len() - 1)]);
        prefetch(lines, ahead);
        let near = homes[(done + FOLLOWING_AHEAD) % AHEAD];
        if lines[near].is_full() {
            prefetch(lines, following(near, count));
        }
        let first = std::mem::replace(&mut homes[done % AHEAD], ahead);
        let LineLookup { has, len } = look(&lines[first], id);
        if has || len == WIDTH && !put_past(lines, first, id, slot + 1, &look) {
            return done;
        }
        if len < WIDTH {
            lines[first].set(len, id, slot + 1);
        }
    }
    ids.len()
}

/// Adds an id whose home is full and does not have it. Returns false, without a change, if a later line has it.
#[inline(always)]
#[allow(clippy::inline_always)] // As `put_ahead`.
fn put_past(
    lines: &mut [IndexLine],
    first: usize,
    id: Id,
    tag: u32,
    look: &impl Fn(&IndexLine, Id) -> LineLookup,
) -> bool {
    let count = lines.len();
    let mut line = following(first, count);
    loop {
        let LineLookup { has, len } = look(&lines[line], id);
        if has {
            return false;
        }
        if len < WIDTH {
            lines[line].set(len, id, tag);
            break;
        }
        line = following(line, count);
    }
    let mut passed = first;
    while passed != line {
        lines[passed].tags[WIDTH] += 1;
        passed = following(passed, count);
    }
    true
}

/// Writes the slot of `ids[i]` to `slots[i]`, or `NO_SLOT` if the lines do not have the id. There must be at least one
/// line. Lines are prefetched. They may come from a file: for any contents, this terminates if a line states that no id
/// has passed it.
pub(crate) fn slots_of(hash: IdHash, lines: &[IndexLine], ids: &[Id], slots: &mut [CacheSlot]) {
    match InstructionSet::best() {
        // SAFETY: `InstructionSet::best` has checked that the CPU has AVX-512 F.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { slots_at_once(hash, lines, ids, slots) },
        _ => slots_ahead(hash, lines, ids, slots, IndexLine::tag),
    }
}

/// Like [`slots_ahead`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn slots_at_once(hash: IdHash, lines: &[IndexLine], ids: &[Id], slots: &mut [CacheSlot]) {
    slots_ahead(hash, lines, ids, slots, |line, id| line.tag_at_once(id));
}

/// Looks up `ids`, with `NO_SLOT` for missing ones. `tag_of` looks an id up in one line. Lines are prefetched [`AHEAD`]
/// ids ahead.
#[inline(always)]
#[allow(clippy::inline_always)] // The caller is compiled for a specific instruction set, and this with it.
fn slots_ahead(
    hash: IdHash,
    lines: &[IndexLine],
    ids: &[Id],
    slots: &mut [CacheSlot],
    tag_of: impl Fn(&IndexLine, Id) -> u32,
) {
    let mut homes = [0; AHEAD];
    for (id, ahead) in ids.iter().zip(&mut homes) {
        *ahead = home(hash, lines.len(), *id);
        prefetch(lines, *ahead);
    }
    // Positions of ids to look up in a later line, and those lines, which are being prefetched: oldest first.
    let mut past = [(0, 0); PAST];
    let mut waiting = 0;
    for (done, &id) in ids.iter().enumerate() {
        let ahead = home(hash, lines.len(), ids[(done + AHEAD).min(ids.len() - 1)]);
        prefetch(lines, ahead);
        prefetch(lines, homes[(done + ASKED_AGAIN) % AHEAD]);
        let line = std::mem::replace(&mut homes[done % AHEAD], ahead);
        let current = &lines[line];
        let tag = tag_of(current, id);
        slots[done] = tag.wrapping_sub(1);
        // Branchless, because it is unpredictable which ids need a further lookup. The others prefetch the line ahead
        // again.
        let goes_on = (tag == 0) & (current.passed() != 0);
        let next = following(line, lines.len());
        prefetch(lines, select_unpredictable(goes_on, next, ahead));
        past[waiting] = (done, next);
        waiting += usize::from(goes_on);
        // If all of these ids need a further lookup, no place is free yet.
        while waiting == PAST {
            waiting = slots_past(lines, ids, slots, &mut past, PAST / 2);
        }
    }
    while waiting > 0 {
        waiting = slots_past(lines, ids, slots, &mut past[..waiting], waiting.div_ceil(2));
    }
}

/// Looks up the first `count` of the ids at some positions, each in one line. Those that may be in the next line are
/// moved behind the others, which were prefetched earlier, and all move to the front. Returns their number.
#[inline(never)]
fn slots_past(
    lines: &[IndexLine],
    ids: &[Id],
    slots: &mut [CacheSlot],
    past: &mut [(usize, usize)],
    count: usize,
) -> usize {
    let mut further = 0;
    for at in 0..count {
        if let Some((_, later)) = past.get(at + PAST_AGAIN) {
            prefetch(lines, *later);
        }
        let (position, line) = past[at];
        let current = &lines[line];
        let tag = current.tag(ids[position]);
        slots[position] = tag.wrapping_sub(1);
        if tag == 0 && current.passed() != 0 {
            let next = following(line, lines.len());
            prefetch(lines, next);
            past[further] = (position, next);
            further += 1;
        }
    }
    past.rotate_left(count);
    past.len() - (count - further)
}
