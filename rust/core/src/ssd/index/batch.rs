//! Finding many ids at once, and pointing what was found to other locations without another search.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_cmplt_epu64_mask, _mm512_loadu_si512, _mm512_set1_epi64};

use super::location::Location;
use super::pages::{EMPTY, PAGE};
use super::{AHEAD, LOCATION_BITS, LOCATION_MASK, TagIndex};
use crate::prefetch::prefetch;
use crate::simd::Isa;
use crate::types::{Id, hash_id};

/// Entries of a line of the processor's cache, which are compared at once.
const LINE: usize = 8;
/// Where the entry of an id often lies at most, counted from its home. It may be in the next line of the cache.
const USUAL_DISTANCE: usize = 4;
/// The place of what is in the exact map.
const IN_EXACT: u64 = u64::MAX;

/// Ids that are looked for at the same time, each at one of the steps of the search.
const RING: usize = (4 * AHEAD).next_power_of_two();

/// Where an id will be looked for: the position of its home is in a sub-table.
#[derive(Clone, Copy, Debug, Default)]
struct Ahead {
    table: usize,
    tag: u64,
    home: usize,
}

/// What an index has for an id, and where. It is given back to the index to change that.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The entry with its tag, or only the location where that is in the exact map; `EMPTY` where there is none.
    entry: u64,
    /// Its place in the pool of pages. A page belongs to one sub-table for good.
    place: u64,
}

impl Found {
    /// Nothing was found.
    pub const NONE: Self = Self { entry: EMPTY, place: IN_EXACT };

    /// The location that [`TagIndex::get`] gives.
    #[inline]
    pub fn location(&self) -> Option<Location> {
        (self.entry != EMPTY).then(|| Location::from_bits(self.entry))
    }
}

impl TagIndex {
    /// [`TagIndex::get`] for each id, whose memory is asked for ahead.
    ///
    /// # Panics
    /// When `locations` has not the length of `ids`.
    pub fn get_batch(&self, ids: &[Id], locations: &mut [Option<Location>]) {
        assert_eq!(ids.len(), locations.len(), "one place for each id");
        self.each_found(ids, &mut |at, found| locations[at] = found.location());
    }

    /// As [`TagIndex::get_batch`], but says too where the locations were found.
    ///
    /// # Panics
    /// When `found` has not the length of `ids`.
    pub fn find_batch(&self, ids: &[Id], found: &mut [Found]) {
        assert_eq!(ids.len(), found.len(), "one place for each id");
        self.each_found(ids, &mut |at, here| found[at] = here);
    }

    fn each_found(&self, ids: &[Id], sink: &mut impl FnMut(usize, Found)) {
        match Isa::best() {
            // SAFETY: `Isa::best` found that the processor has AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { self.each_found_wide(ids, sink) },
            _ => self.each_found_portably(ids, sink),
        }
    }

    /// As on a processor without wide registers.
    pub(super) fn each_found_portably(&self, ids: &[Id], sink: &mut impl FnMut(usize, Found)) {
        self.each_found_by(ids, sink, which_below);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn each_found_wide(&self, ids: &[Id], sink: &mut impl FnMut(usize, Found)) {
        self.each_found_by(ids, sink, |line, least| which_below_wide(line, least));
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // The caller is compiled for a certain instruction set, and this with it.
    fn each_found_by(
        &self,
        ids: &[Id],
        sink: &mut impl FnMut(usize, Found),
        which_below: impl Fn(&[u64; LINE], u64) -> u32,
    ) {
        // Where an entry is follows from its sub-table, and then from the number of its page. Each of these is in the processor's cache when it
        // is needed, because it was asked for AHEAD ids before.
        let mut ring = [Ahead::default(); RING];
        for turn in 0..ids.len() + 3 * AHEAD {
            if let Some(&id) = ids.get(turn) {
                ring[turn % RING] = self.ask_for_table(id);
            }
            if let Some(at) = turn.checked_sub(AHEAD).filter(|at| *at < ids.len()) {
                self.ask_for_page(&mut ring[at % RING]);
            }
            if let Some(at) = turn.checked_sub(2 * AHEAD).filter(|at| *at < ids.len()) {
                self.ask_for_entry(ring[at % RING]);
            }
            if let Some(at) = turn.checked_sub(3 * AHEAD) {
                let (id, Ahead { table, tag, home }) = (ids[at], ring[at % RING]);
                let in_exact = self.exact.get(id).map(|location| Found { entry: location.bits(), place: IN_EXACT });
                sink(at, in_exact.unwrap_or_else(|| self.found_by((table, tag, home), &which_below)));
            }
        }
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // As `each_found_by`.
    fn ask_for_table(&self, id: Id) -> Ahead {
        let (table, tag) = self.prints.print(hash_id(id));
        prefetch(&self.tables, table);
        Ahead { table, tag, home: 0 }
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // As `each_found_by`.
    fn ask_for_page(&self, ahead: &mut Ahead) {
        ahead.home = self.home(ahead.table, ahead.tag);
        prefetch(&self.tables[ahead.table].pages, ahead.home / PAGE);
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // As `each_found_by`.
    fn ask_for_entry(&self, Ahead { table, home, .. }: Ahead) {
        if let Some(&page) = self.tables[table].pages.get(home / PAGE) {
            let page = self.pool.page(page);
            prefetch(page, home % PAGE);
            prefetch(page, (home % PAGE + USUAL_DISTANCE).min(PAGE - 1));
        }
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // As `each_found_by`.
    fn found_by(
        &self,
        (table, tag, mut at): (usize, u64, usize),
        which_below: &impl Fn(&[u64; LINE], u64) -> u32,
    ) -> Found {
        let least = tag << LOCATION_BITS;
        let found = |at: usize, number: u32, entry: u64| {
            let is_here = entry ^ least <= LOCATION_MASK && entry != EMPTY;
            if is_here { Found { entry, place: self.pool.place(number, at % PAGE) } } else { Found::NONE }
        };
        while let Some(&number) = self.tables[table].pages.get(at / PAGE) {
            // A page is whole lines of the cache. Tags ascend, so that the first entry from `at` on that is not below the tag is the one or shows
            // that there is none.
            let (lines, from) = (self.pool.page(number).as_chunks::<LINE>().0, at % LINE);
            let line = &lines[at % PAGE / LINE];
            let entry = from + (which_below(line, least) >> from).trailing_ones() as usize;
            at += entry - from;
            if let Some(&entry) = line.get(entry) {
                return found(at, number, entry);
            }
        }
        Found::NONE
    }

    /// Start to load what was found into the processor's cache.
    #[inline]
    pub fn prefetch_found(&self, found: &Found) {
        if found.place != IN_EXACT {
            self.pool.prefetch(found.place);
        }
    }

    /// [`TagIndex::replace`] of an id for which this was found. Others may have changed the index since.
    #[inline]
    pub fn replace_found(&mut self, id: Id, found: &Found, location: Location) -> Option<Location> {
        if let Some(place) = self.exact.get_mut(id) {
            return Some(std::mem::replace(place, location));
        }
        let Some(entry) = self.found_entry(found) else { return self.replace(id, location) };
        let before = *entry;
        *entry = before & !LOCATION_MASK | location.bits();
        Some(Location::from_bits(before))
    }

    /// [`TagIndex::is_at`] of an id for which this was found. Others may have changed the index since.
    #[inline]
    pub fn is_found_at(&mut self, id: Id, found: &Found, location: Location) -> bool {
        match self.found_entry(found) {
            // An entry that points there is this id's. Another one may be of an id whose print is the same.
            Some(entry) if Location::from_bits(*entry) == location => true,
            _ => self.is_at(id, location),
        }
    }

    /// The entry that was found, if an entry with its tag is still there.
    #[inline]
    fn found_entry(&mut self, found: &Found) -> Option<&mut u64> {
        let entry = if found.place == IN_EXACT { return None } else { self.pool.entry_mut(found.place)? };
        (*entry ^ found.entry <= LOCATION_MASK && *entry != EMPTY).then_some(entry)
    }
}

/// A bit for each entry of a line, which says whether it is below `least`.
#[inline]
fn which_below(line: &[u64; LINE], least: u64) -> u32 {
    line.iter().enumerate().fold(0, |which, (at, &entry)| which | u32::from(entry < least) << at)
}

/// Does what [`which_below`] does, for all entries at once.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn which_below_wide(line: &[u64; LINE], least: u64) -> u32 {
    // SAFETY: there are so many bytes.
    let entries = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
    u32::from(_mm512_cmplt_epu64_mask(entries, _mm512_set1_epi64(least as i64)))
}
