//! Batched lookups, and updates of the found entries without another search.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_cmplt_epu64_mask, _mm512_loadu_si512, _mm512_set1_epi64};

use super::pages::{EMPTY, PAGE_ENTRIES};
use super::{LOCATION_BITS, LOCATION_MASK, PREFETCH_DISTANCE, RecordLocation, TagIndex};
use crate::runtime::simd::{InstructionSet, prefetch};
use crate::types::{Id, hash_id};

/// Entries of a CPU cache line, which are compared together.
const LINE_ENTRIES: usize = 8;
/// Usual maximum distance of an entry from its home slot. The entry may be in the next cache line.
const USUAL_DISTANCE: usize = 4;
/// Place of a location in the exact map.
const IN_EXACT: u64 = u64::MAX;

/// Ids in flight, each at one of the steps of the search.
const RING_SLOTS: usize = (4 * PREFETCH_DISTANCE).next_power_of_two();

/// A search in progress: `home` is the position of the home slot in a sub-table.
#[derive(Clone, Copy, Debug, Default)]
struct TagProbe {
    table: usize,
    tag: u64,
    home: usize,
}

/// Result of a lookup, and its place in the index. Pass it to the index to change the entry.
#[derive(Clone, Copy, Debug)]
pub struct TagMatch {
    /// The entry with its tag, or only the location if that is in the exact map; `EMPTY` if there is none.
    entry: u64,
    /// Its place in the pool of pages. A page belongs permanently to one sub-table.
    place: u64,
}

impl TagMatch {
    /// Not found.
    pub const NONE: Self = Self { entry: EMPTY, place: IN_EXACT };

    /// The location that [`TagIndex::get`] returns.
    #[inline]
    pub fn location(&self) -> Option<RecordLocation> {
        (self.entry != EMPTY).then(|| RecordLocation::from_bits(self.entry))
    }
}

impl TagIndex {
    /// Calls [`TagIndex::get`] for each id, and prefetches the memory.
    ///
    /// # Panics
    /// If `locations` and `ids` have different lengths.
    pub fn get_batch(&self, ids: &[Id], locations: &mut [Option<RecordLocation>]) {
        assert_eq!(ids.len(), locations.len(), "one place for each id");
        self.for_each_match(ids, &mut |at, found| locations[at] = found.location());
    }

    /// Like [`TagIndex::get_batch`], but also returns the places of the locations.
    ///
    /// # Panics
    /// If `found` and `ids` have different lengths.
    pub fn find_batch(&self, ids: &[Id], found: &mut [TagMatch]) {
        assert_eq!(ids.len(), found.len(), "one place for each id");
        self.for_each_match(ids, &mut |at, here| found[at] = here);
    }

    fn for_each_match(&self, ids: &[Id], sink: &mut impl FnMut(usize, TagMatch)) {
        match InstructionSet::best() {
            // SAFETY: `InstructionSet::best` found that the CPU has AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { self.for_each_match_avx512(ids, sink) },
            _ => self.for_each_match_portable(ids, sink),
        }
    }

    /// Lookup for a CPU without wide registers.
    pub(super) fn for_each_match_portable(&self, ids: &[Id], sink: &mut impl FnMut(usize, TagMatch)) {
        self.for_each_match_with(ids, sink, mask_below);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn for_each_match_avx512(&self, ids: &[Id], sink: &mut impl FnMut(usize, TagMatch)) {
        self.for_each_match_with(ids, sink, |line, least| mask_below_avx512(line, least));
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // inlined into callers that are compiled for a specific instruction set
    fn for_each_match_with(
        &self,
        ids: &[Id],
        sink: &mut impl FnMut(usize, TagMatch),
        which_below: impl Fn(&[u64; LINE_ENTRIES], u64) -> u32,
    ) {
        // The address of an entry depends on its sub-table, and then on the number of its page. Each of these is in the
        // CPU cache when it is needed, because it was prefetched `PREFETCH_DISTANCE` ids earlier.
        let mut ring = [TagProbe::default(); RING_SLOTS];
        for turn in 0..ids.len() + 3 * PREFETCH_DISTANCE {
            if let Some(&id) = ids.get(turn) {
                ring[turn % RING_SLOTS] = self.prefetch_table(id);
            }
            if let Some(at) = turn.checked_sub(PREFETCH_DISTANCE).filter(|at| *at < ids.len()) {
                self.prefetch_page(&mut ring[at % RING_SLOTS]);
            }
            if let Some(at) = turn.checked_sub(2 * PREFETCH_DISTANCE).filter(|at| *at < ids.len()) {
                self.prefetch_entry(ring[at % RING_SLOTS]);
            }
            if let Some(at) = turn.checked_sub(3 * PREFETCH_DISTANCE) {
                let (id, TagProbe { table, tag, home }) = (ids[at], ring[at % RING_SLOTS]);
                let in_exact = self.exact.get(id).map(|location| TagMatch { entry: location.bits(), place: IN_EXACT });
                sink(at, in_exact.unwrap_or_else(|| self.probe_from_home((table, tag, home), &which_below)));
            }
        }
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // see `for_each_match_with`
    fn prefetch_table(&self, id: Id) -> TagProbe {
        let (table, tag) = self.hasher.fingerprint(hash_id(id));
        prefetch(&self.tables, table);
        TagProbe { table, tag, home: 0 }
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // see `for_each_match_with`
    fn prefetch_page(&self, ahead: &mut TagProbe) {
        ahead.home = self.home(ahead.table, ahead.tag);
        prefetch(&self.tables[ahead.table].pages, ahead.home / PAGE_ENTRIES);
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // see `for_each_match_with`
    fn prefetch_entry(&self, TagProbe { table, home, .. }: TagProbe) {
        if let Some(&page) = self.tables[table].pages.get(home / PAGE_ENTRIES) {
            let page = self.pool.page(page);
            prefetch(page, home % PAGE_ENTRIES);
            prefetch(page, (home % PAGE_ENTRIES + USUAL_DISTANCE).min(PAGE_ENTRIES - 1));
        }
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // see `for_each_match_with`
    fn probe_from_home(
        &self,
        (table, tag, mut at): (usize, u64, usize),
        which_below: &impl Fn(&[u64; LINE_ENTRIES], u64) -> u32,
    ) -> TagMatch {
        let least = tag << LOCATION_BITS;
        let found = |at: usize, number: u32, entry: u64| {
            let is_here = entry ^ least <= LOCATION_MASK && entry != EMPTY;
            if is_here { TagMatch { entry, place: self.pool.place(number, at % PAGE_ENTRIES) } } else { TagMatch::NONE }
        };
        while let Some(&number) = self.tables[table].pages.get(at / PAGE_ENTRIES) {
            // A page is a whole number of cache lines. Tags ascend, so that the first entry from `at` on that is not
            // below the tag is the match or proves that there is none.
            let (lines, from) = (self.pool.page(number).as_chunks::<LINE_ENTRIES>().0, at % LINE_ENTRIES);
            let line = &lines[at % PAGE_ENTRIES / LINE_ENTRIES];
            let entry = from + (which_below(line, least) >> from).trailing_ones() as usize;
            at += entry - from;
            if let Some(&entry) = line.get(entry) {
                return found(at, number, entry);
            }
        }
        TagMatch::NONE
    }

    /// Prefetches the found entry into the CPU cache.
    #[inline]
    pub fn prefetch_match(&self, found: &TagMatch) {
        if found.place != IN_EXACT {
            self.pool.prefetch(found.place);
        }
    }

    /// Like [`TagIndex::replace`], for the result of a lookup of `id`. The index may have changed since the lookup.
    #[inline]
    pub fn replace_match(&mut self, id: Id, found: &TagMatch, location: RecordLocation) -> Option<RecordLocation> {
        if let Some(place) = self.exact.get_mut(id) {
            return Some(std::mem::replace(place, location));
        }
        let Some(entry) = self.matched_entry(found) else { return self.replace(id, location) };
        let before = *entry;
        *entry = before & !LOCATION_MASK | location.bits();
        Some(RecordLocation::from_bits(before))
    }

    /// Like [`TagIndex::is_at`], for the result of a lookup of `id`. The index may have changed since the lookup.
    #[inline]
    pub fn is_match_at(&mut self, id: Id, found: &TagMatch, location: RecordLocation) -> bool {
        match self.matched_entry(found) {
            // An entry with this location belongs to this id. Another entry may belong to an id with the same
            // fingerprint.
            Some(entry) if RecordLocation::from_bits(*entry) == location => true,
            _ => self.is_at(id, location),
        }
    }

    /// Returns the found entry, if an entry with its tag is still there.
    #[inline]
    fn matched_entry(&mut self, found: &TagMatch) -> Option<&mut u64> {
        let entry = if found.place == IN_EXACT { return None } else { self.pool.entry_mut(found.place)? };
        (*entry ^ found.entry <= LOCATION_MASK && *entry != EMPTY).then_some(entry)
    }
}

/// Returns a bit per entry of a line, set if the entry is below `least`.
#[inline]
fn mask_below(line: &[u64; LINE_ENTRIES], least: u64) -> u32 {
    line.iter().enumerate().fold(0, |which, (at, &entry)| which | u32::from(entry < least) << at)
}

/// Like [`mask_below`], for all entries in one instruction.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn mask_below_avx512(line: &[u64; LINE_ENTRIES], least: u64) -> u32 {
    // SAFETY: `line` has 64 bytes.
    let entries = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
    u32::from(_mm512_cmplt_epu64_mask(entries, _mm512_set1_epi64(least as i64)))
}
