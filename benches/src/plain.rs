//! The limits of the index benches: plain, well-written loops that prefetch.
#![allow(unsafe_code)]

use std::hint::select_unpredictable;

use embcache::types::Id;

/// Ids or rows asked for ahead.
const AHEAD: usize = 32;

/// Start loading the cache line at `address`.
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

/// Unique ids and inverse of a batch: one pass over a hash table of twice the batch's size or more.
#[derive(Debug)]
pub struct PlainDedupe {
    /// The place in `unique` plus one; 0 where there is none.
    table: Vec<u32>,
    shift: u32,
    mostly_new: bool,
    /// The distinct ids are the first `found`: `[batch]`.
    pub unique: Vec<Id>,
    /// How many are distinct.
    pub found: usize,
    /// `[batch]`
    pub inverse: Vec<u32>,
}

impl PlainDedupe {
    /// For batches of `batch` ids, most of them distinct (a branch for those is fastest) or not (none is).
    pub fn new(batch: usize, mostly_new: bool) -> Self {
        let bits = (batch * 2).next_power_of_two().trailing_zeros();
        Self {
            table: vec![0; 1 << bits],
            shift: 64 - bits,
            mostly_new,
            unique: vec![0; batch + 1],
            found: 0,
            inverse: vec![0; batch],
        }
    }

    /// Fills `unique`, `found` and `inverse`.
    ///
    /// # Panics
    /// When `ids` is not as long as said.
    pub fn dedupe(&mut self, ids: &[Id]) {
        assert_eq!(ids.len(), self.inverse.len(), "batches of one size");
        self.table.fill(0);
        let mask = self.table.len() - 1;
        let mut found = 0;
        for (position, &id) in ids.iter().enumerate() {
            let ahead = ids[(position + AHEAD).min(ids.len() - 1)];
            prefetch(self.table.as_ptr().wrapping_add((mix(ahead) >> self.shift) as usize));
            let mut at = (mix(id) >> self.shift) as usize;
            // SAFETY: `at` is below the table's length by the shift or the mask; `found` is at most `position`, and `unique` has one
            // place more than there are positions; the table holds numbers up to `found`.
            let index = unsafe {
                *self.unique.get_unchecked_mut(found as usize) = id;
                loop {
                    let held = *self.table.get_unchecked(at);
                    if self.mostly_new && held == 0 {
                        found += 1;
                        *self.table.get_unchecked_mut(at) = found;
                        break found - 1;
                    }
                    let place = select_unpredictable(held == 0, found + 1, held);
                    if *self.unique.get_unchecked(place as usize - 1) == id {
                        *self.table.get_unchecked_mut(at) = place;
                        found += u32::from(held == 0);
                        break place - 1;
                    }
                    at = (at + 1) & mask;
                }
            };
            self.inverse[position] = index;
        }
        self.found = found as usize;
    }
}

/// Id to slot: open addressing, one entry of 16 bytes a key, a power of two of them.
#[derive(Debug)]
pub struct PlainIndex {
    entries: Vec<[u64; 2]>,
    shift: u32,
}

impl PlainIndex {
    /// The slots of `ids` are 0, 1, 2 and so on.
    pub fn new(ids: &[Id]) -> Self {
        let bits = (ids.len() * 3 / 2).next_power_of_two().trailing_zeros();
        let mut entries = vec![[0; 2]; 1 << bits];
        huge_pages(&entries);
        let shift = 64 - bits;
        for (slot, &id) in ids.iter().enumerate() {
            let mut at = (mix(id) >> shift) as usize;
            while entries[at][1] != 0 {
                at = (at + 1) & (entries.len() - 1);
            }
            entries[at] = [id as u64, slot as u64 + 1];
        }
        Self { entries, shift }
    }

    /// The slots of `ids`, which are all here.
    ///
    /// # Panics
    /// When `slots` is shorter than `ids`.
    pub fn get(&self, ids: &[Id], slots: &mut [u32]) {
        assert!(slots.len() >= ids.len(), "a slot for each id");
        let mask = self.entries.len() - 1;
        for (position, &id) in ids.iter().enumerate() {
            let ahead = ids[(position + AHEAD).min(ids.len() - 1)];
            prefetch(self.entries.as_ptr().wrapping_add((mix(ahead) >> self.shift) as usize));
            let mut at = (mix(id) >> self.shift) as usize;
            // SAFETY: `at` is below the number of entries by the shift or the mask.
            slots[position] = unsafe {
                while self.entries.get_unchecked(at)[0] != id as u64 {
                    at = (at + 1) & mask;
                }
                self.entries.get_unchecked(at)[1] as u32 - 1
            };
        }
    }
}

/// Ask for huge pages for memory not touched yet.
pub fn huge_pages<T>(memory: &[T]) {
    const HUGE: usize = 2 << 20;
    let start = memory.as_ptr().addr().next_multiple_of(HUGE);
    let end = memory.as_ptr().wrapping_add(memory.len()).addr();
    if end > start + HUGE {
        let bytes = (end - start) / HUGE * HUGE;
        // SAFETY: whole pages of the caller's memory; the advice changes no contents. Where it fails it only costs speed.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_HUGEPAGE);
        }
    }
}
