//! The index of a served table: where the row of each id lies in the checkpoint's files, in about 9 bytes a row.

mod file;
mod lines;

pub(super) use file::{INDEX_FILE, IndexOfTable, read_index, write_index};

use self::lines::{Home, Line, find, first, insert, lines_for};
use super::files::Place;
use crate::error::Result;
use crate::index::IdHash;
use crate::io::FileMapping;
use crate::mapping::Zeroed;
use crate::types::Id;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a line.
const LINE_BYTES: usize = size_of::<Line>();

/// Where the lines of an index are.
#[derive(Debug)]
enum Lines {
    /// In memory of this process.
    Private(Zeroed<Line>),
    /// In a file that all processes share, at these bytes.
    Shared(Arc<FileMapping>, Range<usize>),
}

/// Finds the places of ids. An entry has 16 bits of the hash of its id, so that whoever gets a place holds the id against the file.
#[derive(Debug)]
pub(super) struct RowIndex {
    lines: Lines,
    seed: u64,
    len: u64,
}

impl RowIndex {
    /// An empty index with room for so many ids. `Kind::Memory` where the system refuses.
    pub(super) fn with_room_for(ids: u64, seed: u64) -> Result<Self> {
        let lines = Zeroed::new("hold the index of a served table", lines_for(ids) as usize)?;
        Ok(Self { lines: Lines::Private(lines), seed, len: 0 })
    }

    fn lines(&self) -> &[Line] {
        match &self.lines {
            Lines::Private(lines) => lines,
            Lines::Shared(file, range) => bytemuck::cast_slice(&file.bytes()[range.clone()]),
        }
    }

    /// Add an id that is absent. There is room for as many as were asked for.
    pub(super) fn insert(&mut self, id: Id, place: Place) {
        let Lines::Private(lines) = &mut self.lines else { return };
        let home = Home::of(IdHash::new(self.seed), lines.len(), id);
        insert(lines, home, place);
        self.len += 1;
    }

    /// Start to load the line of an id into the processor's cache.
    #[inline]
    pub(super) fn prefetch(&self, id: Id) {
        let lines = self.lines();
        Home::of(IdHash::new(self.seed), lines.len(), id).prefetch(lines);
    }

    /// Write to each of `places` that is [`Place::NONE`] the place where the id may be. It is not yet known to be the id's: another id may
    /// have the same print. Lines should have been prefetched.
    #[inline]
    pub(super) fn first_of(&self, ids: &[Id], places: &mut [Place]) {
        let (lines, hash) = (self.lines(), IdHash::new(self.seed));
        for (id, place) in ids.iter().zip(places) {
            if *place == Place::NONE {
                *place = first(lines, Home::of(hash, lines.len(), *id));
            }
        }
    }

    /// Start to load the lines of ids into the processor's cache.
    #[inline]
    pub(super) fn prefetch_all(&self, ids: &[Id]) {
        let (lines, hash) = (self.lines(), IdHash::new(self.seed));
        for id in ids {
            Home::of(hash, lines.len(), *id).prefetch(lines);
        }
    }

    /// The place of an id, where `is_it` says whether a place is the id's.
    pub(super) fn find(&self, id: Id, is_it: impl FnMut(Place) -> bool) -> Place {
        let lines = self.lines();
        find(lines, Home::of(IdHash::new(self.seed), lines.len(), id), is_it)
    }

    /// How many ids it has.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of its lines.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.lines())
    }

    /// Whether it is in a file that all processes share.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.lines, Lines::Shared(..))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_is_found_at_its_place_and_no_other_is() {
        let count = 200_000_u64;
        let mut index = RowIndex::with_room_for(count, 12345).expect("memory");
        let id = |n: u64| n as Id * 7 - 300;
        for n in 0..count {
            index.insert(id(n), Place(n as u32));
        }
        assert!(index.bytes() as u64 <= count * 9, "{} bytes", index.bytes());
        for n in 0..count {
            assert_eq!(index.find(id(n), |place| place == Place(n as u32)), Place(n as u32));
        }
        let ids: Vec<Id> = (0..count).map(id).collect();
        let mut places = vec![Place::NONE; ids.len()];
        index.prefetch_all(&ids[..64]);
        index.first_of(&ids, &mut places);
        let right = (0..count as u32).zip(&places).filter(|(n, place)| place.0 == *n).count();
        assert!(right as u64 > count * 999 / 1000, "only {right} places come first");
        let wrong = (0..count).filter(|&n| index.find(id(n) + 1, |_| true) != Place::NONE).count();
        assert!(wrong < 200, "{wrong} absent ids have the print of another one");
    }

    #[test]
    fn an_id_whose_print_is_zero_is_absent_from_an_empty_line() {
        let index = RowIndex::with_room_for(10, 1).expect("memory");
        let mut places = vec![Place::NONE; 100_000];
        let ids: Vec<Id> = (0..100_000).collect();
        index.first_of(&ids, &mut places);
        assert!(places.iter().all(|place| *place == Place::NONE));
    }
}
