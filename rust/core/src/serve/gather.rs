//! The lookup of many ids: where their rows are, and the rows.

#![allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.

use super::answer::{Answer, Output};
use super::faults::major_faults;
use super::files::{Files, Place, RowFile, Spot};
use super::index::RowIndex;
use super::overlay::Overlay;
use crate::error::Result;
use crate::simd::{Isa, Job};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Ids whose places are looked up together.
const IDS_AT_ONCE: usize = 4096;
/// Rows that are asked for together, and then copied.
const BLOCK: usize = 64;
/// Bytes that a processor loads at a time.
const LINE_BYTES: usize = 64;

/// The row of an id whose pages were not seen in memory lately.
pub(super) struct Far {
    position: usize,
    place: Place,
}

/// Says whether the system has taken pages back since a lookup began. Of a short one that is not asked.
enum Faults {
    NotAsked,
    Before(u64),
    Risen,
}

impl Faults {
    fn of(ids: &[Id]) -> Self {
        if ids.len() > IDS_AT_ONCE { Self::Before(major_faults()) } else { Self::NotAsked }
    }

    fn have_risen(&mut self) -> bool {
        if matches!(*self, Self::Before(before) if major_faults() != before) {
            *self = Self::Risen;
        }
        matches!(self, Self::Risen)
    }
}

/// Copies the float32 rows of places, of positions from `first` on, all of which are near.
struct CopyRows<'a, 'b, O, N> {
    gather: &'a Gather<'a>,
    first: usize,
    slots: &'a [CacheSlot],
    answer: &'a mut Answer<'b, O, N>,
}

impl<O: Output, N: FnMut(usize, bool)> Job for CopyRows<'_, '_, O, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut spots = [Spot::NONE; BLOCK];
        for (number, block) in self.slots.chunks(BLOCK).enumerate() {
            self.gather.ask_for(block, &mut spots);
            for (at, spot) in spots[..block.len()].iter().enumerate() {
                let position = self.first + number * BLOCK + at;
                if spot.is_none() {
                    self.answer.put(position, None);
                } else {
                    self.answer.copy(position, self.gather.files.at(spot));
                }
            }
        }
    }
}

/// Looks ids up in one version of a table.
pub(super) struct Gather<'a> {
    files: &'a Files,
    index: &'a RowIndex,
    overlay: &'a Overlay,
    /// Columns of a row.
    dim: usize,
    /// The generation of pages.
    generation: usize,
    /// Whether the rows of all files may be read at once.
    all_near: bool,
    /// Of each file, whether all its rows may be read at once. Empty where nothing is known, or all may.
    near_files: Vec<bool>,
    /// Whether rows are held against rules of eviction.
    rules: bool,
    /// Whether these look at weights.
    needs_weights: bool,
}

impl<'a> Gather<'a> {
    /// For a lookup of so many ids.
    pub(super) fn new(
        files: &'a Files,
        (index, overlay): (&'a RowIndex, &'a Overlay),
        dim: usize,
        generation: usize,
        ids: usize,
    ) -> Self {
        let (rules, needs_weights) = (overlay.has_rules(), overlay.needs_weights());
        // Few ids are looked at one by one, and so are all where rules look at more than weights.
        let is_asked = !rules && (ids >= files.all().len() || files.are_known_near(generation));
        let which = if is_asked { files.which_are_near(generation) } else { Some(Vec::new()) };
        let (all_near, near_files) = (which.is_none(), which.unwrap_or_default());
        Self { files, index, overlay, dim, generation, all_near, near_files, rules, needs_weights }
    }

    /// Write the row of each id to `answer`. Returns the rows whose pages are not surely in memory, which were not written.
    pub(super) fn near_rows<O: Output, N: FnMut(usize, bool)>(
        &self,
        ids: &[Id],
        answer: &mut Answer<'_, O, N>,
    ) -> Vec<Far> {
        let mut far: Vec<Far> = Vec::new();
        let mut slots = vec![NO_SLOT; ids.len().min(IDS_AT_ONCE)];
        let is_plain = self.all_near && self.files.are_float32() && answer.is_float32();
        let mut faults = Faults::of(ids);
        for (number, ids) in ids.chunks(IDS_AT_ONCE).enumerate() {
            let (slots, first) = (&mut slots[..ids.len()], number * IDS_AT_ONCE);
            self.index.get_batch(ids, slots);
            if !self.overlay.is_empty() {
                self.overlay.change(ids, slots);
            }
            // The system took pages back that were taken to be near. The others that are gone are better asked for together.
            if faults.have_risen() {
                self.leave(first, slots, &mut far, answer);
            } else if is_plain {
                Isa::best().run(CopyRows { gather: self, first, slots, answer });
            } else {
                self.gather(first, slots, &mut far, answer);
            }
        }
        far
    }

    /// Leave the rows of places for later, for which the system is asked, and say at once where there is none.
    fn leave<O: Output, N: FnMut(usize, bool)>(
        &self,
        first: usize,
        slots: &[CacheSlot],
        far: &mut Vec<Far>,
        answer: &mut Answer<'_, O, N>,
    ) {
        for (at, &slot) in slots.iter().enumerate() {
            let (position, place) = (first + at, Place(slot));
            if self.files.find(place).is_none() {
                answer.put(position, None);
            } else {
                far.push(Far { position, place });
                self.ask_for_row(place);
            }
        }
    }

    /// Write the rows of places that are near, of positions from `first` on, and add the others to `far`.
    fn gather<O: Output, N: FnMut(usize, bool)>(
        &self,
        first: usize,
        slots: &[CacheSlot],
        far: &mut Vec<Far>,
        answer: &mut Answer<'_, O, N>,
    ) {
        // The disk reads the rows that are far while those that are near are written.
        let which_are_far = self.ask_for_far(first, slots, far);
        let mut spots = [Spot::NONE; BLOCK];
        for (number, (block, far)) in slots.chunks(BLOCK).zip(which_are_far).enumerate() {
            self.ask_for(block, &mut spots);
            for (at, (&slot, spot)) in block.iter().zip(&spots).enumerate() {
                let position = first + number * BLOCK + at;
                if spot.is_none() {
                    answer.put(position, None);
                } else if self.rules {
                    if far >> at & 1 == 0 {
                        answer.put(position, self.living(Place(slot)));
                    }
                } else if far >> at & 1 == 0 {
                    answer.put(position, Some(self.files.at(spot)));
                }
            }
        }
    }

    /// Add the rows of places that are far, of positions from `first` on, to `far`, and have the system begin to read what they need. Returns
    /// a bit for each place, in a word for each block, which says whether it is far.
    fn ask_for_far(&self, first: usize, slots: &[CacheSlot], far: &mut Vec<Far>) -> Vec<u64> {
        let of_block = |(number, block): (usize, &[CacheSlot])| {
            let mut which = 0;
            for (at, &slot) in block.iter().enumerate() {
                let (place, spot) = (Place(slot), self.files.spot(Place(slot)));
                if !spot.is_none() && !self.is_spot_near(&spot) && !self.is_near(place) {
                    which |= 1 << at;
                    far.push(Far { position: first + number * BLOCK + at, place });
                    self.ask_for_row(place);
                }
            }
            which
        };
        slots.chunks(BLOCK).enumerate().map(of_block).collect()
    }

    /// Have the system begin to read what a lookup of the row of a place reads.
    #[cold]
    fn ask_for_row(&self, place: Place) {
        if let Some((file, _, row)) = self.files.find(place) {
            file.ranges(row, self.rules).for_each(|range| file.mapping().ask_for(&range));
        }
    }

    /// Find where the rows of some places lie, and start to load them into the processor's cache. The loop does nothing else: a processor looks
    /// some hundred instructions ahead, and finds the more pages at once the fewer there are for each row.
    #[inline(always)]
    fn ask_for(&self, slots: &[CacheSlot], spots: &mut [Spot; BLOCK]) {
        let row_bytes = self.files.row_bytes();
        for (slot, spot) in slots.iter().zip(&mut *spots) {
            *spot = self.files.spot(Place(*slot));
            for offset in (0..row_bytes).step_by(LINE_BYTES) {
                spot.prefetch(offset);
            }
        }
        // Columns start at lines of the cache, and so does each row that is whole lines long. Another one may end in a line of its own.
        if !row_bytes.is_multiple_of(LINE_BYTES) {
            spots[..slots.len()].iter().for_each(|spot| spot.prefetch(row_bytes - 1));
        }
    }

    /// Whether a row may be read at once: there are no rules to hold it against, and its pages were seen in memory lately.
    #[inline]
    fn is_spot_near(&self, spot: &Spot) -> bool {
        let all = self.all_near || self.near_files.get(spot.file as usize).is_some_and(|all| *all);
        all || !self.rules && self.files.is_near(spot, self.generation)
    }

    /// Whether all that a place needs was seen in memory lately.
    fn is_near(&self, place: Place) -> bool {
        let found = self.files.find(place);
        found.is_none_or(|(file, _, row)| file.is_near(row, self.rules, self.generation))
    }

    /// The bytes of the row of a place, unless a rule of eviction took it. What this needs is in memory.
    fn living(&self, place: Place) -> Option<&'a [u8]> {
        let (file, number, row) = self.files.find(place)?;
        let bytes = file.weights(row);
        let is_dead = || {
            let mut weights = vec![0.0; if self.needs_weights { self.dim } else { 0 }];
            if self.needs_weights {
                self.files.read(bytes, &mut weights);
            }
            self.overlay.is_dead(self.files.link_of(number), &file.header(row), &weights)
        };
        (!self.rules || !is_dead()).then_some(bytes)
    }

    /// Write the rows that [`Gather::near_rows`] left, for all of which the system was asked.
    #[cold]
    pub(super) fn far_rows<O: Output, N: FnMut(usize, bool)>(
        &self,
        far: &[Far],
        answer: &mut Answer<'_, O, N>,
    ) -> Result<()> {
        for (file, _, row) in far.iter().filter_map(|each| self.files.find(each.place)) {
            self.bring_in(file, row)?;
        }
        for each in far {
            answer.put(each.position, self.living(each.place));
        }
        Ok(())
    }

    /// Wait until all that a lookup of a row reads is in memory.
    fn bring_in(&self, file: &RowFile, row: usize) -> Result<()> {
        file.ranges(row, self.rules).try_for_each(|range| {
            if !file.pages.are_near(range.start, range.len(), self.generation) {
                file.mapping().bring_in(&range)?;
                file.pages.see(range.start, range.len(), self.generation);
            }
            Ok(())
        })
    }
}
