//! The limits of the index benches: plain, well-written loops that prefetch.
#![allow(unsafe_code)]

use std::hint::select_unpredictable;

use embcache::types::Id;

/// Number of ids or rows to prefetch.
const AHEAD: usize = 32;

/// Prefetches the cache line at `address`.
#[inline(always)]
#[allow(clippy::inline_always)]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults and changes no memory.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[inline]
fn mix(id: Id) -> u64 {
    let id = id as u64;
    (id ^ (id >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Finds the distinct ids and the inverse of a batch, by one pass over a hash table of at least twice the batch's size.
#[derive(Debug)]
pub struct PlainDedupe {
    /// Each position contains `base` plus an index into `unique`. Smaller numbers are left over from earlier batches,
    /// and mean an empty position.
    table: Vec<u32>,
    base: u32,
    shift: u32,
    mostly_new: bool,
    /// The first `found` are the distinct ids: `[batch + 1]`.
    pub unique: Vec<Id>,
    /// The number of distinct ids.
    pub found: usize,
    /// For each id of the batch its index in `unique`: `[batch]`.
    pub inverse: Vec<u32>,
}

impl PlainDedupe {
    /// Creates the state for batches of `batch` ids. `mostly_new` is true if most of them are distinct. A branch is
    /// fastest then, and no branch is fastest otherwise.
    pub fn new(batch: usize, mostly_new: bool) -> Self {
        let bits = (batch * 2).next_power_of_two().trailing_zeros();
        Self {
            table: vec![0; 1 << bits],
            base: 1,
            shift: 64 - bits,
            mostly_new,
            unique: vec![0; batch + 1],
            found: 0,
            inverse: vec![0; batch],
        }
    }

    /// Computes `unique`, `found` and `inverse`.
    ///
    /// # Panics
    /// Panics when the number of `ids` is not the size of the batch.
    pub fn dedupe(&mut self, ids: &[Id]) {
        assert_eq!(ids.len(), self.inverse.len(), "batches of one size");
        if self.base > u32::MAX - ids.len() as u32 {
            self.table.fill(0);
            self.base = 1;
        }
        let (mask, base) = (self.table.len() - 1, self.base);
        let mut found = 0;
        for (position, &id) in ids.iter().enumerate() {
            let ahead = ids[(position + AHEAD).min(ids.len() - 1)];
            prefetch(self.table.as_ptr().wrapping_add((mix(ahead) >> self.shift) as usize));
            let mut at = (mix(id) >> self.shift) as usize;
            // SAFETY: `at` is below the table's length by the shift or by the mask. `found` is at most `position`, and
            // `unique` has one element more than the batch. The table contains numbers below `base`, or `base` plus a
            // number below `found`.
            let index = unsafe {
                *self.unique.get_unchecked_mut(found as usize) = id;
                loop {
                    let held = *self.table.get_unchecked(at);
                    if self.mostly_new && held < base {
                        *self.table.get_unchecked_mut(at) = base + found;
                        found += 1;
                        break found - 1;
                    }
                    let index = select_unpredictable(held < base, found, held.wrapping_sub(base));
                    if *self.unique.get_unchecked(index as usize) == id {
                        *self.table.get_unchecked_mut(at) = base + index;
                        found += u32::from(held < base);
                        break index;
                    }
                    at = (at + 1) & mask;
                }
            };
            self.inverse[position] = index;
        }
        self.found = found as usize;
        self.base += found;
    }
}

/// An index of ids by open addressing. It has two entries of 16 bytes per id, in huge pages.
#[derive(Debug)]
pub struct PlainIndex {
    entries: Vec<[u64; 2]>,
}

impl PlainIndex {
    /// Creates an index in which the slots of `ids` are 0, 1, 2 and so on.
    pub fn new(ids: &[Id]) -> Self {
        let mut index = Self::with_room(ids.len());
        for (slot, &id) in ids.iter().enumerate() {
            index.put(id, slot as u64 + 1);
        }
        index
    }

    /// Creates an empty index for at most `ids` ids. [`PlainIndex::put`] adds them.
    pub fn with_room(ids: usize) -> Self {
        let entries = vec![[0; 2]; (ids * 2).max(1)];
        huge_pages(&entries);
        Self { entries }
    }

    /// Removes all ids.
    pub fn clear(&mut self) {
        self.entries.fill([0; 2]);
    }

    /// Adds an id, which is not in the index yet, with a value that is not 0.
    #[inline]
    pub fn put(&mut self, id: Id, value: u64) {
        let mut at = Self::home(self.entries.len(), id);
        while self.entries[at][1] != 0 {
            at = if at + 1 == self.entries.len() { 0 } else { at + 1 };
        }
        self.entries[at] = [id as u64, value];
    }

    /// Sets the value of an id that is in the index.
    #[inline]
    pub fn replace(&mut self, id: Id, value: u64) {
        let mut at = Self::home(self.entries.len(), id);
        while self.entries[at][0] != id as u64 {
            at = if at + 1 == self.entries.len() { 0 } else { at + 1 };
        }
        self.entries[at][1] = value;
    }

    /// Prefetches the entry of an id.
    #[inline]
    pub fn prefetch(&self, id: Id) {
        prefetch(self.entries.as_ptr().wrapping_add(Self::home(self.entries.len(), id)));
    }

    /// The value of an id, or 0 for one that is not in the index.
    #[inline]
    pub fn value(&self, id: Id) -> u64 {
        let count = self.entries.len();
        let mut at = Self::home(count, id);
        // SAFETY: home entries, and those that follow them around the end, are below `count`.
        unsafe {
            while self.entries.get_unchecked(at)[1] != 0 && self.entries.get_unchecked(at)[0] != id as u64 {
                at = if at + 1 == count { 0 } else { at + 1 };
            }
            self.entries.get_unchecked(at)[1]
        }
    }

    #[inline]
    fn home(entries: usize, id: Id) -> usize {
        ((u128::from(mix(id)) * entries as u128) >> 64) as usize
    }

    /// Writes the slots of `ids`, and `u32::MAX` for those that are not in the index, like [`PlainIndex::get`].
    ///
    /// # Panics
    /// Panics when `slots` is shorter than `ids`.
    pub fn find(&self, ids: &[Id], slots: &mut [u32]) {
        let count = self.entries.len();
        for (at, (&id, slot)) in ids.iter().zip(&mut slots[..ids.len()]).enumerate() {
            let ahead = ids[(at + AHEAD).min(ids.len() - 1)];
            prefetch(self.entries.as_ptr().wrapping_add(Self::home(count, ahead)));
            let mut at = Self::home(count, id);
            while self.entries[at][1] != 0 && self.entries[at][0] != id as u64 {
                at = if at + 1 == count { 0 } else { at + 1 };
            }
            // A free entry contains 0.
            *slot = (self.entries[at][1] as u32).wrapping_sub(1);
        }
    }

    /// Writes the slots of `ids`, all of which must be in the index. The ids are processed in blocks: the home entries
    /// of the next block are prefetched while those of this block are read.
    ///
    /// # Panics
    /// Panics when `slots` is shorter than `ids`.
    pub fn get(&self, ids: &[Id], slots: &mut [u32]) {
        assert!(slots.len() >= ids.len(), "a slot for each id");
        let count = self.entries.len();
        let mut homes = [0; AHEAD];
        for (id, home) in ids.iter().zip(&mut homes) {
            *home = Self::home(count, *id);
            prefetch(self.entries.as_ptr().wrapping_add(*home));
        }
        for (block, slots) in slots[..ids.len()].chunks_mut(AHEAD).enumerate() {
            let begin = block * AHEAD;
            for (turn, slot) in slots.iter_mut().enumerate() {
                let (id, mut at) = (ids[begin + turn], homes[turn]);
                let ahead = Self::home(count, ids[(begin + turn + AHEAD).min(ids.len() - 1)]);
                homes[turn] = ahead;
                prefetch(self.entries.as_ptr().wrapping_add(ahead));
                // SAFETY: home entries, and those that follow them around the end, are below `count`.
                *slot = unsafe {
                    while self.entries.get_unchecked(at)[0] != id as u64 {
                        at = if at + 1 == count { 0 } else { at + 1 };
                    }
                    self.entries.get_unchecked(at)[1] as u32 - 1
                };
            }
        }
    }
}

/// Counts of ids by open addressing. It has two entries of 16 bytes per id, in huge pages.
#[derive(Debug)]
pub struct PlainCounts {
    /// Each entry has an id, and its count plus one. An entry of zeros is free.
    entries: Vec<[u64; 2]>,
}

impl PlainCounts {
    /// Creates empty counts for at most this number of ids.
    pub fn new(ids: usize) -> Self {
        let entries = vec![[0; 2]; (ids * 2).max(1)];
        huge_pages(&entries);
        Self { entries }
    }

    /// Prefetches the entry of an id.
    #[inline]
    pub fn prefetch(&self, id: Id) {
        prefetch(self.entries.as_ptr().wrapping_add(PlainIndex::home(self.entries.len(), id)));
    }

    /// Adds occurrences of an id.
    #[inline]
    pub fn add(&mut self, id: Id, occurrences: u32) {
        let mut at = PlainIndex::home(self.entries.len(), id);
        while self.entries[at][1] != 0 && self.entries[at][0] != id as u64 {
            at = if at + 1 == self.entries.len() { 0 } else { at + 1 };
        }
        let count = self.entries[at][1].max(1) + u64::from(occurrences);
        self.entries[at] = [id as u64, count];
    }
}

/// Requests huge pages for untouched memory.
pub fn huge_pages<T>(memory: &[T]) {
    const HUGE: usize = 2 << 20;
    let start = memory.as_ptr().addr().next_multiple_of(HUGE);
    let end = memory.as_ptr().wrapping_add(memory.len()).addr();
    if end > start + HUGE {
        let bytes = (end - start) / HUGE * HUGE;
        // SAFETY: these are whole pages of the caller's memory, and the advice changes no contents. If it fails, it
        // only costs speed.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_HUGEPAGE);
        }
    }
}
