//! The lookup of many ids: where their rows are, and the rows.

use super::files::{Files, Place, RowFile, Spot};
use super::table::ServedTable;
use crate::error::Result;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Ids whose places are looked up together.
const IDS_AT_ONCE: usize = 4096;
/// A row is prefetched this many ids before its turn. A power of two.
const AHEAD: usize = 32;

/// The row of an id whose pages were not seen in memory lately.
struct Far {
    position: usize,
    place: Place,
}

/// Looks ids up in one version of a table.
pub(super) struct Gather<'a> {
    table: &'a ServedTable,
    files: &'a Files,
    generation: usize,
    /// Whether rows are held against rules of eviction.
    rules: bool,
    /// Rows that had to be asked for.
    pub(super) far: usize,
}

impl<'a> Gather<'a> {
    pub(super) fn new(table: &'a ServedTable) -> Self {
        let (generation, rules) = (table.near.generation(), table.overlay.has_rules());
        Self { table, files: &table.files, generation, rules, far: 0 }
    }

    /// Hand the bytes of the row of each id to `put`, with the position of the id; `None` where the id has no row. Rows that may have to be read
    /// from the disk come last, and are read together.
    pub(super) fn run(&mut self, ids: &[Id], mut put: impl FnMut(usize, Option<&[u8]>)) -> Result<()> {
        let mut far: Vec<Far> = Vec::new();
        let mut slots = vec![NO_SLOT; ids.len().min(IDS_AT_ONCE)];
        for (number, ids) in ids.chunks(IDS_AT_ONCE).enumerate() {
            let slots = &mut slots[..ids.len()];
            self.table.index.get_batch(ids, slots);
            if !self.table.overlay.is_empty() {
                self.table.overlay.change(ids, slots);
            }
            self.gather(number * IDS_AT_ONCE, slots, &mut far, &mut put);
        }
        if far.is_empty() { Ok(()) } else { self.gather_far(&far, put) }
    }

    /// Hand over the rows of places that are near, of positions from `first` on, and add the others to `far`.
    fn gather(
        &self,
        first: usize,
        slots: &[CacheSlot],
        far: &mut Vec<Far>,
        put: &mut impl FnMut(usize, Option<&[u8]>),
    ) {
        let (files, row_bytes) = (self.files, self.files.row_bytes());
        let mut spots = [Spot::NONE; AHEAD];
        let find = |at: usize| {
            let spot = slots.get(at).map_or(Spot::NONE, |slot| files.spot(Place(*slot), self.generation));
            if !spot.is_none() {
                spot.prefetch(row_bytes);
            }
            spot
        };
        for (at, spot) in spots.iter_mut().enumerate() {
            *spot = find(at);
        }
        for (at, &slot) in slots.iter().enumerate() {
            let spot = std::mem::replace(&mut spots[at % AHEAD], find(at + AHEAD));
            let position = first + at;
            if spot.is_none() {
                put(position, None);
            } else if spot.is_near && !self.rules {
                put(position, Some(files.at(&spot)));
            } else if self.is_near(Place(slot)) {
                put(position, self.living(Place(slot)));
            } else {
                far.push(Far { position, place: Place(slot) });
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
            let weights: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
            self.table.overlay.is_dead(self.files.link_of(number), &file.header(row), &weights)
        };
        (!self.rules || !is_dead()).then_some(bytes)
    }

    #[cold]
    fn gather_far(&mut self, far: &[Far], mut put: impl FnMut(usize, Option<&[u8]>)) -> Result<()> {
        self.far += far.len();
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
