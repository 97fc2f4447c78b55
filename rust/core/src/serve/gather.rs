//! The lookup of many ids: where their rows are, and the rows.

use super::files::{Files, Place, RowFile, Spot};
use super::index::RowIndex;
use super::overlay::Overlay;
use crate::error::Result;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Ids whose places are looked up together.
const IDS_AT_ONCE: usize = 4096;
/// Rows that are asked for together, before those of the block before are copied.
const BLOCK: usize = 32;
/// Bytes that a processor loads at a time.
const LINE_BYTES: usize = 64;

/// The row of an id whose pages were not seen in memory lately.
pub(super) struct Far {
    position: usize,
    place: Place,
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
    /// Whether rows are held against rules of eviction.
    rules: bool,
    /// Whether these look at weights.
    needs_weights: bool,
}

impl<'a> Gather<'a> {
    pub(super) fn new(
        files: &'a Files,
        (index, overlay): (&'a RowIndex, &'a Overlay),
        dim: usize,
        generation: usize,
    ) -> Self {
        let (rules, needs_weights) = (overlay.has_rules(), overlay.needs_weights());
        Self { files, index, overlay, dim, generation, rules, needs_weights }
    }

    /// Hand the bytes of the row of each id to `put`, with the position of the id; `None` where the id has no row. Returns the rows whose pages
    /// are not surely in memory, which were not handed over.
    pub(super) fn near_rows(&self, ids: &[Id], mut put: impl FnMut(usize, Option<&[u8]>)) -> Vec<Far> {
        let mut far: Vec<Far> = Vec::new();
        let mut slots = vec![NO_SLOT; ids.len().min(IDS_AT_ONCE)];
        for (number, ids) in ids.chunks(IDS_AT_ONCE).enumerate() {
            let slots = &mut slots[..ids.len()];
            self.index.get_batch(ids, slots);
            if !self.overlay.is_empty() {
                self.overlay.change(ids, slots);
            }
            self.gather(number * IDS_AT_ONCE, slots, &mut far, &mut put);
        }
        far
    }

    /// Hand over the rows of places that are near, of positions from `first` on, and add the others to `far`.
    fn gather(
        &self,
        first: usize,
        slots: &[CacheSlot],
        far: &mut Vec<Far>,
        put: &mut impl FnMut(usize, Option<&[u8]>),
    ) {
        let (mut spots, mut next) = ([Spot::NONE; BLOCK], [Spot::NONE; BLOCK]);
        self.ask_for(&slots[..slots.len().min(BLOCK)], &mut next);
        for (number, block) in slots.chunks(BLOCK).enumerate() {
            let begin = number * BLOCK;
            std::mem::swap(&mut spots, &mut next);
            let after = (begin + BLOCK).min(slots.len());
            self.ask_for(&slots[after..(after + BLOCK).min(slots.len())], &mut next);
            for (at, (&slot, spot)) in block.iter().zip(&spots).enumerate() {
                let position = first + begin + at;
                if spot.is_none() {
                    put(position, None);
                } else if !self.rules && self.files.is_near(spot, self.generation) {
                    put(position, Some(self.files.at(spot)));
                } else if self.is_near(Place(slot)) {
                    put(position, self.living(Place(slot)));
                } else {
                    far.push(Far { position, place: Place(slot) });
                }
            }
        }
    }

    /// Find where the rows of some places lie, and start to load them into the processor's cache. The loop that asks does nothing else: a processor
    /// looks some hundred instructions ahead, and finds the more pages at once the fewer there are for each row.
    fn ask_for(&self, slots: &[CacheSlot], spots: &mut [Spot; BLOCK]) {
        for (slot, spot) in slots.iter().zip(spots.iter_mut()) {
            *spot = self.files.spot(Place(*slot));
        }
        let (spots, row_bytes) = (&spots[..slots.len()], self.files.row_bytes());
        for offset in (0..row_bytes).step_by(LINE_BYTES).chain([row_bytes - 1]) {
            for spot in spots {
                spot.prefetch(offset);
            }
        }
    }

    /// Whether all that a place needs was seen in memory lately.
    fn is_near(&self, place: Place) -> bool {
        let found = self.files.find(place);
        found.is_none_or(|(file, _, row)| file.is_near(row, self.files.row_bytes(), self.rules, self.generation))
    }

    /// The bytes of the row of a place, unless a rule of eviction took it. What this needs is in memory.
    fn living(&self, place: Place) -> Option<&'a [u8]> {
        let (file, number, row) = self.files.find(place)?;
        let bytes = file.weights(row, self.files.row_bytes());
        let is_dead = || {
            let mut weights = vec![0.0; if self.needs_weights { self.dim } else { 0 }];
            if self.needs_weights {
                self.files.precision().load(bytes, &mut weights);
            }
            self.overlay.is_dead(self.files.link_of(number), &file.header(row), &weights)
        };
        (!self.rules || !is_dead()).then_some(bytes)
    }

    /// Hand over the rows that [`Gather::near_rows`] left. They are read together, as far as they are not in memory.
    #[cold]
    pub(super) fn far_rows(&self, far: &[Far], mut put: impl FnMut(usize, Option<&[u8]>)) -> Result<()> {
        let bytes = self.files.row_bytes();
        let placed = || far.iter().filter_map(|each| self.files.find(each.place));
        for (file, _, row) in placed() {
            file.ranges(row, bytes, self.rules).for_each(|range| file.mapping().ask_for(&range));
        }
        for (file, _, row) in placed() {
            self.bring_in(file, row)?;
        }
        for each in far {
            put(each.position, self.living(each.place));
        }
        Ok(())
    }

    /// Wait until all that a lookup of a row reads is in memory.
    fn bring_in(&self, file: &RowFile, row: usize) -> Result<()> {
        let bytes = self.files.row_bytes();
        file.ranges(row, bytes, self.rules).try_for_each(|range| {
            if !file.pages.are_near(range.start, range.len(), self.generation) {
                file.mapping().bring_in(&range)?;
                file.pages.see(range.start, range.len(), self.generation);
            }
            Ok(())
        })
    }
}
