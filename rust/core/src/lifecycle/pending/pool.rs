//! The memory of the maps from ids to counts: lines of entries, in pages.
//!
//! Pages of all maps come from one pool, because growing by copies would fragment the heap. A page that is not in use
//! has no entries, and an id has at most one entry in a pool. So an entry can be found again by its [`CounterSpot`],
//! without a search, while the id is in the pool.

use crate::error::Result;
use crate::mapping::ZeroedSlice;
use crate::memory::or_from_reserve;
use crate::prefetch::prefetch;
use crate::types::Id;

/// Entries of a line.
pub(super) const ENTRIES: usize = 5;
/// Lines of a page.
pub(super) const PAGE: usize = 8;
/// Lines per memory allocation: 32 MiB. They are mapped but not touched, so unused lines use no memory.
const CHUNK: usize = 1 << 19;
/// Bits of a count.
const COUNT_BITS: u32 = 24;
/// Bits of a tag.
const TAG_BITS: u32 = 7;

/// The largest count. Counts saturate at it.
pub(super) const MOST_COUNT: u32 = (1 << COUNT_BITS) - 1;
/// The largest tag.
pub(super) const MOST_TAG: u32 = (1 << TAG_BITS) - 1;

/// The entry of an id in a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CounterEntry {
    /// At most [`MOST_COUNT`].
    pub(super) count: u32,
    /// The entry's generation, one of two.
    pub(super) generation: bool,
    /// At most [`MOST_TAG`].
    pub(super) tag: u32,
}

impl CounterEntry {
    pub(super) fn bits(self) -> u32 {
        self.count | u32::from(self.generation) << COUNT_BITS | self.tag << (COUNT_BITS + 1)
    }

    pub(super) fn of(bits: u32) -> Self {
        Self { count: bits & MOST_COUNT, generation: bits >> COUNT_BITS & 1 == 1, tag: bits >> (COUNT_BITS + 1) }
    }
}

#[derive(Clone, Copy, Debug, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct CounterLine {
    pub(super) ids: [Id; ENTRIES],
    pub(super) entries: [u32; ENTRIES],
    /// Bit set of the entries in use.
    pub(super) taken: u8,
    /// True if an id was inserted in a later line because this line was full.
    pub(super) passed: u8,
}

const _: () = assert!(size_of::<CounterLine>() == 64);

impl CounterLine {
    /// Returns the place of an id. Every place is compared, since a branch that depends on the place is rarely
    /// predicted.
    #[inline]
    pub(super) fn find(&self, id: Id) -> Option<usize> {
        let same = (0..ENTRIES).fold(0, |same, at| same | u8::from(self.ids[at] == id) << at) & self.taken;
        (same != 0).then(|| same.trailing_zeros() as usize)
    }

    #[inline]
    pub(super) fn free(&self) -> Option<usize> {
        let at = self.taken.trailing_ones() as usize;
        (at < ENTRIES).then_some(at)
    }

    pub(super) fn put(&mut self, at: usize, id: Id, entry: CounterEntry) {
        (self.ids[at], self.entries[at]) = (id, entry.bits());
        self.taken |= 1 << at;
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (Id, CounterEntry)> + '_ {
        (0..ENTRIES).filter(|at| self.taken >> at & 1 == 1).map(|at| (self.ids[at], CounterEntry::of(self.entries[at])))
    }
}

/// The location of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterSpot(u64);

impl CounterSpot {
    /// The location of no entry.
    pub(crate) const NOWHERE: Self = Self(u64::MAX);
    /// Spots are numbered with more places than a line has.
    const PLACES: u64 = 8;

    #[inline]
    pub(super) fn new(line: usize, place: usize) -> Self {
        Self(line as u64 * Self::PLACES + place as u64)
    }

    #[inline]
    pub(super) fn line(self) -> usize {
        (self.0 / Self::PLACES) as usize
    }

    #[inline]
    pub(super) fn place(self) -> usize {
        (self.0 % Self::PLACES) as usize
    }
}

/// The memory of a fixed number of tables.
#[derive(Debug)]
pub(super) struct CounterPool {
    chunks: Vec<ZeroedSlice<CounterLine>>,
    /// Number of pages that were ever taken.
    taken: u32,
    /// Pages that were returned.
    free: Vec<u32>,
    /// The pages of each table: `[tables, stride]`. One array needs one lookup less than an array per table, and does
    /// not fragment the heap when tables grow.
    directory: ZeroedSlice<u32>,
    /// Maximum number of pages per table.
    stride: usize,
    tables: usize,
}

impl CounterPool {
    /// Creates the pool of this number of tables, which have no pages.
    pub(super) fn new(tables: usize) -> Self {
        let (chunks, free) = (Vec::new(), Vec::new());
        Self { chunks, taken: 0, free, directory: ZeroedSlice::default(), stride: 0, tables }
    }

    /// Bytes of the pages in use.
    pub(super) fn bytes(&self) -> u64 {
        (self.taken as usize - self.free.len()) as u64 * (PAGE * size_of::<CounterLine>()) as u64
    }

    #[cfg(test)]
    pub(super) fn pages_ever_taken(&self) -> u32 {
        self.taken
    }

    /// Allocates memory for `pages` more pages.
    ///
    /// Errors: `Memory`, and nothing has changed.
    pub(super) fn reserve(&mut self, pages: usize) -> Result<()> {
        while self.chunks.len() * (CHUNK / PAGE) + self.free.len() < self.taken as usize + pages {
            self.chunks.push(ZeroedSlice::new("count the occurrences of ids without a row", CHUNK)?);
        }
        Ok(())
    }

    /// Returns the entry of an id at a spot from an earlier search, if it is still there.
    #[inline]
    pub(super) fn find_again(&self, spot: CounterSpot, id: Id) -> Option<CounterEntry> {
        let line = self.chunks.get(spot.line() / CHUNK)?.get(spot.line() % CHUNK)?;
        (*line.ids.get(spot.place())? == id && line.taken >> spot.place() & 1 == 1)
            .then(|| CounterEntry::of(line.entries[spot.place()]))
    }

    /// Replaces the entry at a spot, which must have one.
    #[inline]
    pub(super) fn replace(&mut self, spot: CounterSpot, entry: CounterEntry) {
        self.line_mut(spot.line()).entries[spot.place()] = entry.bits();
    }

    /// Prefetches the entry at a spot.
    #[inline]
    pub(super) fn prefetch(&self, spot: CounterSpot) {
        self.prefetch_line(spot.line());
    }

    /// Prefetches a line, which need not exist.
    #[inline]
    pub(super) fn prefetch_line(&self, line: usize) {
        if let Some(chunk) = self.chunks.get(line / CHUNK) {
            prefetch(chunk, line % CHUNK);
        }
    }

    /// The index in the pool of a line of a table.
    #[inline]
    pub(super) fn line_of(&self, table: u32, at: u32) -> usize {
        self.directory[self.entry_of(table, at)] as usize * PAGE + at as usize % PAGE
    }

    /// The position in the directory of the page of a table's line.
    #[inline]
    fn entry_of(&self, table: u32, at: u32) -> usize {
        table as usize * self.stride + at as usize / PAGE
    }

    /// Prefetches the directory entry of a line.
    #[inline]
    pub(super) fn prefetch_entry(&self, table: u32, at: u32) {
        prefetch(&self.directory, self.entry_of(table, at));
    }

    /// The pages of a table with this number of lines.
    pub(super) fn pages_of(&self, table: u32, lines: u32) -> &[u32] {
        self.directory.get(self.entry_of(table, 0)..self.entry_of(table, lines)).unwrap_or_default()
    }

    /// Assigns empty pages for this number of lines to a table without pages.
    ///
    /// # Panics
    /// Panics if no memory was reserved and the allocation fails.
    pub(super) fn give_pages(&mut self, table: u32, lines: u32) {
        self.widen(lines as usize / PAGE);
        for at in (0..lines).step_by(PAGE) {
            let page = self.take_page();
            let entry = self.entry_of(table, at);
            self.directory[entry] = page;
        }
    }

    /// Grows the directory to this number of pages per table.
    ///
    /// # Panics
    /// Panics if the allocation fails, even with the reserve.
    fn widen(&mut self, pages: usize) {
        if pages <= self.stride {
            return;
        }
        // Tables grow by a tenth, and most of them at about the same time.
        let stride = pages + pages / 8;
        let make = || ZeroedSlice::new("count the occurrences of ids without a row", self.tables * stride);
        let mut wider = or_from_reserve(make).unwrap_or_else(|refused| panic!("{refused}"));
        if self.stride > 0 {
            for (row, pages) in wider.chunks_exact_mut(stride).zip(self.directory.chunks_exact(self.stride)) {
                row[..self.stride].copy_from_slice(pages);
            }
        }
        (self.directory, self.stride) = (wider, stride);
    }

    /// Takes a page of empty lines.
    ///
    /// # Panics
    /// Panics if no memory was reserved and the allocation fails.
    fn take_page(&mut self) -> u32 {
        if let Some(page) = self.free.pop() {
            return page;
        }
        self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        self.taken += 1;
        self.taken - 1
    }

    /// Returns pages to the pool and clears their entries.
    pub(super) fn give_back(&mut self, pages: &[u32]) {
        for &page in pages {
            for line in page as usize * PAGE..(page as usize + 1) * PAGE {
                *self.line_mut(line) = bytemuck::Zeroable::zeroed();
            }
        }
        self.free.extend_from_slice(pages);
    }

    #[inline]
    pub(super) fn line(&self, line: usize) -> &CounterLine {
        &self.chunks[line / CHUNK][line % CHUNK]
    }

    #[inline]
    pub(super) fn line_mut(&mut self, line: usize) -> &mut CounterLine {
        &mut self.chunks[line / CHUNK][line % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_keeps_all_its_bits() {
        for found in [(0, false, 0), (MOST_COUNT, true, MOST_TAG), (1, true, 0), (MOST_COUNT, false, 1)] {
            let (count, generation, tag) = found;
            let entry = CounterEntry { count, generation, tag };
            assert_eq!(CounterEntry::of(entry.bits()), entry);
        }
    }
}
