//! The lookup of many ids: where their rows are, and the rows.

use super::files::{Files, Place, RowFile};
use super::table::ServedTable;
use crate::error::{Error, Result};
use crate::prefetch::{prefetch_address, prefetch_range};
use crate::types::Id;

/// Ids that are looked up together, so that what they need arrives in the processor's cache at the same time.
const BLOCK: usize = 64;

/// The row of an id whose pages were not seen in memory lately.
struct Far {
    position: usize,
    place: Place,
    is_sure: bool,
}

/// A row that was found.
struct Found<'a> {
    file: &'a RowFile,
    row: usize,
}

/// Looks ids up in one version of a table.
pub(super) struct Gather<'a> {
    table: &'a ServedTable,
    generation: usize,
    rules: bool,
    /// Rows that had to be asked for.
    pub(super) far: usize,
}

impl<'a> Gather<'a> {
    pub(super) fn new(table: &'a ServedTable) -> Self {
        Self { table, generation: table.near.generation(), rules: table.overlay.has_rules(), far: 0 }
    }

    fn files(&self) -> &'a Files {
        &self.table.files
    }

    /// Hand the bytes of the row of each id to `put`, with the position of the id; `None` where the id has no row. Rows that may have to be read
    /// from the disk come last, and are read together.
    pub(super) fn run(&mut self, ids: &[Id], mut put: impl FnMut(usize, Option<&[u8]>)) -> Result<()> {
        let mut far: Vec<Far> = Vec::new();
        let mut places = [Place::NONE; BLOCK];
        self.table.index.prefetch_all(&ids[..ids.len().min(BLOCK)]);
        for (number, block) in ids.chunks(BLOCK).enumerate() {
            let first = number * BLOCK;
            let next = (first + BLOCK).min(ids.len())..(first + 2 * BLOCK).min(ids.len());
            self.table.index.prefetch_all(&ids[next]);
            let sure = self.places_of(block, &mut places[..block.len()]);
            self.prefetch_rows(&places[..block.len()]);
            for (at, (&id, &place)) in block.iter().zip(&places).enumerate() {
                let (position, is_sure) = (first + at, sure & (1 << at) != 0);
                match self.files().find(place) {
                    None => put(position, None),
                    Some((file, _, row))
                        if !file.is_near(row, self.files().row_bytes(), self.rules, self.generation) =>
                    {
                        far.push(Far { position, place, is_sure });
                    }
                    Some(_) => {
                        let found = self.settle(id, place, is_sure)?;
                        put(position, found.map(|found| self.bytes(&found)));
                    }
                }
            }
        }
        if far.is_empty() { Ok(()) } else { self.run_far(ids, &far, put) }
    }

    /// The places where ids may be. A bit of the result is set where a place is surely the id's.
    fn places_of(&self, ids: &[Id], places: &mut [Place]) -> u64 {
        places.fill(Place::NONE);
        let mut sure = 0;
        if !self.table.overlay.is_empty() {
            self.table.overlay.places_of(ids, places);
            for (at, place) in places.iter().enumerate() {
                sure |= u64::from(*place != Place::NONE) << at;
            }
        }
        self.table.index.first_of(ids, places);
        sure
    }

    fn prefetch_rows(&self, places: &[Place]) {
        let bytes = self.files().row_bytes();
        for &place in places {
            if let Some((file, _, row)) = self.files().find(place) {
                let (id, weights) = file.addresses(row, bytes);
                prefetch_address(id);
                prefetch_range(weights, bytes);
            }
        }
    }

    fn bytes(&self, found: &Found<'a>) -> &'a [u8] {
        found.file.weights(found.row, self.files().row_bytes())
    }

    /// The row of an id whose place was looked up, if it has one. What the place needs is in memory.
    fn settle(&mut self, id: Id, place: Place, is_sure: bool) -> Result<Option<Found<'a>>> {
        let Some((file, number, row)) = self.files().find(place) else { return Ok(None) };
        if !is_sure && file.id(row) != id {
            return self.find_further(id);
        }
        Ok((!self.is_dead(file, number, row)).then_some(Found { file, row }))
    }

    fn is_dead(&self, file: &RowFile, number: usize, row: usize) -> bool {
        self.rules && {
            let link = self.files().link_of(number);
            let weights: Vec<f32> = bytemuck::pod_collect_to_vec(file.weights(row, self.files().row_bytes()));
            self.table.overlay.is_dead(link, &file.header(row), &weights)
        }
    }

    /// The row of an id where another id has the same print.
    fn find_further(&mut self, id: Id) -> Result<Option<Found<'a>>> {
        let files = self.files();
        let mut failed: Option<Error> = None;
        let generation = self.generation;
        let is_it = |place: Place| {
            let Some((file, _, row)) = files.find(place) else { return false };
            let near = bring_in(file, row, files.row_bytes(), self.rules, generation);
            match near {
                Ok(()) => file.id(row) == id,
                Err(error) => {
                    failed.get_or_insert(error);
                    false
                }
            }
        };
        let place = self.table.index.find(id, is_it);
        match failed {
            Some(error) => Err(error),
            None => self.settle(id, place, true),
        }
    }

    #[cold]
    fn run_far(&mut self, ids: &[Id], far: &[Far], mut put: impl FnMut(usize, Option<&[u8]>)) -> Result<()> {
        self.far += far.len();
        let (files, bytes) = (self.files(), self.files().row_bytes());
        let placed = || far.iter().filter_map(|each| files.find(each.place));
        for (file, _, row) in placed() {
            file.ranges(row, bytes, self.rules).for_each(|range| file.mapping().ask_for(&range));
        }
        for (file, _, row) in placed() {
            bring_in(file, row, bytes, self.rules, self.generation)?;
        }
        for each in far {
            let found = self.settle(ids[each.position], each.place, each.is_sure)?;
            put(each.position, found.map(|found| self.bytes(&found)));
        }
        Ok(())
    }
}

/// Wait until all that a lookup of a row reads is in memory.
fn bring_in(file: &RowFile, row: usize, bytes: usize, rules: bool, generation: usize) -> Result<()> {
    if file.is_near(row, bytes, rules, generation) {
        return Ok(());
    }
    file.ranges(row, bytes, rules).try_for_each(|range| {
        file.mapping().bring_in(&range)?;
        file.pages.see(range.start, range.len(), generation);
        Ok(())
    })
}
