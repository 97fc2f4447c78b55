//! Lookups of many ids: finds their rows and copies them.

#![allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.

use super::answer::{LookupWriter, RowOutput};
use super::faults::major_faults;
use super::files::{RowFile, RowFileLocation, RowFilePointer, RowFileSet};
use super::index::ServeIndex;
use super::overlay::DeltaOverlay;
use crate::error::Result;
use crate::simd::{InstructionSet, SimdJob};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Number of ids looked up together in the index.
const IDS_AT_ONCE: usize = 4096;
/// Number of rows prefetched together, and then copied.
const BLOCK: usize = 64;
/// Size of a cache line.
const LINE_BYTES: usize = 64;

/// The row of an id whose pages were not recently seen in memory.
pub(super) struct ColdRow {
    position: usize,
    place: RowFileLocation,
}

/// Detects that the OS has reclaimed pages since the start of a lookup. Not measured for short lookups.
enum PageFaultProbe {
    Unmeasured,
    Baseline(u64),
    Increased,
}

impl PageFaultProbe {
    fn of(ids: &[Id]) -> Self {
        if ids.len() > IDS_AT_ONCE { Self::Baseline(major_faults()) } else { Self::Unmeasured }
    }

    fn has_increased(&mut self) -> bool {
        if matches!(*self, Self::Baseline(before) if major_faults() != before) {
            *self = Self::Increased;
        }
        matches!(self, Self::Increased)
    }
}

/// Copies the float32 rows at locations, for positions starting at `first`. All of them are resident.
struct CopyRowsJob<'a, 'b, O, N> {
    gather: &'a ServeLookup<'a>,
    first: usize,
    slots: &'a [CacheSlot],
    answer: &'a mut LookupWriter<'b, O, N>,
}

impl<O: RowOutput, N: FnMut(usize, bool)> SimdJob for CopyRowsJob<'_, '_, O, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut spots = [RowFilePointer::NONE; BLOCK];
        for (number, block) in self.slots.chunks(BLOCK).enumerate() {
            self.gather.prefetch_rows(block, &mut spots);
            for (at, spot) in spots[..block.len()].iter().enumerate() {
                let position = self.first + number * BLOCK + at;
                if spot.is_none() {
                    self.answer.put(position, None);
                } else {
                    self.answer.copy(position, self.gather.files.row_at(spot));
                }
            }
        }
    }
}

/// Looks up ids in one version of a table.
pub(super) struct ServeLookup<'a> {
    files: &'a RowFileSet,
    index: &'a ServeIndex,
    overlay: &'a DeltaOverlay,
    /// Width of a row.
    dim: usize,
    /// Page generation.
    generation: usize,
    /// True if the rows of all files may be read immediately.
    all_resident: bool,
    /// For each file, true if all its rows may be read immediately. Empty if nothing is known, or all may.
    resident_files: Vec<bool>,
    /// True if rows are matched against eviction rules.
    has_rules: bool,
    /// True if these rules evaluate weights.
    needs_weights: bool,
}

impl<'a> ServeLookup<'a> {
    /// Creates a lookup of `ids` ids.
    pub(super) fn new(
        files: &'a RowFileSet,
        (index, overlay): (&'a ServeIndex, &'a DeltaOverlay),
        dim: usize,
        generation: usize,
        ids: usize,
    ) -> Self {
        let (rules, needs_weights) = (overlay.has_rules(), overlay.needs_weights());
        // Pages are checked per row for few ids, and if rules evaluate more than weights.
        let is_asked = !rules && (ids >= files.all().len() || files.are_known_resident(generation));
        let which = if is_asked { files.resident_files(generation) } else { Some(Vec::new()) };
        let (all_near, near_files) = (which.is_none(), which.unwrap_or_default());
        Self {
            files,
            index,
            overlay,
            dim,
            generation,
            all_resident: all_near,
            resident_files: near_files,
            has_rules: rules,
            needs_weights,
        }
    }

    /// Writes the row of each id to `answer`. Returns the rows whose pages may not be in memory, which were not
    /// written.
    pub(super) fn write_resident_rows<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        ids: &[Id],
        answer: &mut LookupWriter<'_, O, N>,
    ) -> Vec<ColdRow> {
        let mut far: Vec<ColdRow> = Vec::new();
        let mut slots = vec![NO_SLOT; ids.len().min(IDS_AT_ONCE)];
        let is_plain = self.all_resident && self.files.are_float32() && answer.is_float32();
        let mut faults = PageFaultProbe::of(ids);
        for (number, ids) in ids.chunks(IDS_AT_ONCE).enumerate() {
            let (slots, first) = (&mut slots[..ids.len()], number * IDS_AT_ONCE);
            self.index.get_batch(ids, slots);
            if !self.overlay.is_empty() {
                self.overlay.apply(ids, slots);
            }
            // The OS reclaimed pages that were assumed resident. Other missing pages are better prefetched together.
            if faults.has_increased() {
                self.defer_rows(first, slots, &mut far, answer);
            } else if is_plain {
                InstructionSet::best().run(CopyRowsJob { gather: self, first, slots, answer });
            } else {
                self.gather(first, slots, &mut far, answer);
            }
        }
        far
    }

    /// Defers the rows at locations and prefetches their pages; reports missing ids immediately.
    fn defer_rows<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        first: usize,
        slots: &[CacheSlot],
        far: &mut Vec<ColdRow>,
        answer: &mut LookupWriter<'_, O, N>,
    ) {
        for (at, &slot) in slots.iter().enumerate() {
            let (position, place) = (first + at, RowFileLocation(slot));
            if self.files.find(place).is_none() {
                answer.put(position, None);
            } else {
                far.push(ColdRow { position, place });
                self.prefetch_row_pages(place);
            }
        }
    }

    /// Writes the resident rows at locations, for positions starting at `first`, and adds the others to `far`.
    fn gather<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        first: usize,
        slots: &[CacheSlot],
        far: &mut Vec<ColdRow>,
        answer: &mut LookupWriter<'_, O, N>,
    ) {
        // The disk reads the cold rows while the resident ones are written.
        let which_are_far = self.prefetch_cold_rows(first, slots, far);
        let mut spots = [RowFilePointer::NONE; BLOCK];
        for (number, (block, far)) in slots.chunks(BLOCK).zip(which_are_far).enumerate() {
            self.prefetch_rows(block, &mut spots);
            for (at, (&slot, spot)) in block.iter().zip(&spots).enumerate() {
                let position = first + number * BLOCK + at;
                if spot.is_none() {
                    answer.put(position, None);
                } else if self.has_rules {
                    if far >> at & 1 == 0 {
                        answer.put(position, self.live_row(RowFileLocation(slot)));
                    }
                } else if far >> at & 1 == 0 {
                    answer.put(position, Some(self.files.row_at(spot)));
                }
            }
        }
    }

    /// Adds the cold rows at locations, for positions starting at `first`, to `far`, and prefetches their pages.
    /// Returns a word per block, with a bit per location that is set if the row is cold.
    fn prefetch_cold_rows(&self, first: usize, slots: &[CacheSlot], far: &mut Vec<ColdRow>) -> Vec<u64> {
        let of_block = |(number, block): (usize, &[CacheSlot])| {
            let mut which = 0;
            for (at, &slot) in block.iter().enumerate() {
                let (place, spot) = (RowFileLocation(slot), self.files.pointer(RowFileLocation(slot)));
                if !spot.is_none() && !self.is_pointer_resident(&spot) && !self.is_resident(place) {
                    which |= 1 << at;
                    far.push(ColdRow { position: first + number * BLOCK + at, place });
                    self.prefetch_row_pages(place);
                }
            }
            which
        };
        slots.chunks(BLOCK).enumerate().map(of_block).collect()
    }

    /// Prefetches the pages that a lookup of the row at a location reads.
    #[cold]
    fn prefetch_row_pages(&self, place: RowFileLocation) {
        if let Some((file, _, row)) = self.files.find(place) {
            file.ranges(row, self.has_rules).for_each(|range| file.mapping().prefetch(&range));
        }
    }

    /// Finds the addresses of the rows at some locations, and prefetches them into the CPU cache. The loop does nothing
    /// else: a CPU looks a few hundred instructions ahead, and overlaps more page walks the fewer instructions there
    /// are per row.
    #[inline(always)]
    fn prefetch_rows(&self, slots: &[CacheSlot], spots: &mut [RowFilePointer; BLOCK]) {
        let row_bytes = self.files.row_bytes();
        for (slot, spot) in slots.iter().zip(&mut *spots) {
            *spot = self.files.pointer(RowFileLocation(*slot));
            for offset in (0..row_bytes).step_by(LINE_BYTES) {
                spot.prefetch(offset);
            }
        }
        // Columns start at cache lines, and so does each row if a row is whole lines. Otherwise a row may end in one
        // more line.
        if !row_bytes.is_multiple_of(LINE_BYTES) {
            spots[..slots.len()].iter().for_each(|spot| spot.prefetch(row_bytes - 1));
        }
    }

    /// True if a row may be read immediately: there are no rules to evaluate, and its pages were recently seen in
    /// memory.
    #[inline]
    fn is_pointer_resident(&self, spot: &RowFilePointer) -> bool {
        let all = self.all_resident || self.resident_files.get(spot.file as usize).is_some_and(|all| *all);
        all || !self.has_rules && self.files.is_resident(spot, self.generation)
    }

    /// True if everything that a location needs was recently seen in memory.
    fn is_resident(&self, place: RowFileLocation) -> bool {
        let found = self.files.find(place);
        found.is_none_or(|(file, _, row)| file.is_resident(row, self.has_rules, self.generation))
    }

    /// Bytes of the row at a location, unless it is expired. The pages that this reads are in memory.
    fn live_row(&self, place: RowFileLocation) -> Option<&'a [u8]> {
        let (file, number, row) = self.files.find(place)?;
        let bytes = file.weights(row);
        let is_dead = || {
            let mut weights = vec![0.0; if self.needs_weights { self.dim } else { 0 }];
            if self.needs_weights {
                self.files.read(bytes, &mut weights);
            }
            self.overlay.is_expired(self.files.link_of(number), &file.header(row), &weights)
        };
        (!self.has_rules || !is_dead()).then_some(bytes)
    }

    /// Writes the rows that [`Self::write_resident_rows`] deferred, all of which were prefetched.
    #[cold]
    pub(super) fn write_cold_rows<O: RowOutput, N: FnMut(usize, bool)>(
        &self,
        far: &[ColdRow],
        answer: &mut LookupWriter<'_, O, N>,
    ) -> Result<()> {
        for (file, _, row) in far.iter().filter_map(|each| self.files.find(each.place)) {
            self.load_row_pages(file, row)?;
        }
        for each in far {
            answer.put(each.position, self.live_row(each.place));
        }
        Ok(())
    }

    /// Waits until everything that a lookup of a row reads is in memory.
    fn load_row_pages(&self, file: &RowFile, row: usize) -> Result<()> {
        file.ranges(row, self.has_rules).try_for_each(|range| {
            if !file.pages.are_resident(range.start, range.len(), self.generation) {
                file.mapping().populate(&range)?;
                file.pages.mark_resident(range.start, range.len(), self.generation);
            }
            Ok(())
        })
    }
}
