//! The memory of the maps from ids to counts: lines of entries, in pages.
//!
//! Pages of all maps come from one pool, because growing by copies would leave holes in the heap. A page that is not in use has no entries,
//! and an id has one entry in a pool at most. So an entry that was found once can be found again by its [`Spot`], without a search, as long
//! as the id is still there.

use crate::error::Result;
use crate::mapping::ZeroedSlice;
use crate::memory::or_from_reserve;
use crate::prefetch::prefetch;
use crate::types::Id;

/// Entries of a line.
pub(super) const ENTRIES: usize = 5;
/// Lines of a page.
pub(super) const PAGE: usize = 8;
/// Lines that are asked from the system at once: 32 MiB. They come untouched, so that what is not used costs no memory.
const CHUNK: usize = 1 << 19;
/// Bits of a count.
const COUNT_BITS: u32 = 24;
/// Bits of a tag.
const TAG_BITS: u32 = 7;

/// The largest count. A larger one stays at it.
pub(super) const MOST_COUNT: u32 = (1 << COUNT_BITS) - 1;
/// The largest tag.
pub(super) const MOST_TAG: u32 = (1 << TAG_BITS) - 1;

/// What the map knows of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CounterEntry {
    /// At most [`MOST_COUNT`].
    pub(super) count: u32,
    /// Which of two generations the entry belongs to.
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
    /// The entries that are taken, as bits.
    pub(super) taken: u8,
    /// Whether an id went past this line because it was full.
    pub(super) passed: u8,
}

const _: () = assert!(size_of::<CounterLine>() == 64);

impl CounterLine {
    /// The place of an id. Every place is compared, since a branch that depends on the place would be foreseen seldom.
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

/// Where an entry was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterSpot(u64);

impl CounterSpot {
    /// No entry was found.
    pub(crate) const NOWHERE: Self = Self(u64::MAX);
    /// A spot has room for more places than a line.
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
    /// Pages that were ever taken.
    taken: u32,
    /// Pages that were given back.
    free: Vec<u32>,
    /// The pages of each table: `[tables, stride]`. They are in one array, which one look-up fewer leads to than to an array each, and which
    /// leaves no holes in the heap where tables grow.
    directory: ZeroedSlice<u32>,
    /// No table has more pages.
    stride: usize,
    tables: usize,
}

impl CounterPool {
    /// The memory of so many tables, which have none yet.
    pub(super) fn new(tables: usize) -> Self {
        let (chunks, free) = (Vec::new(), Vec::new());
        Self { chunks, taken: 0, free, directory: ZeroedSlice::default(), stride: 0, tables }
    }

    /// Bytes of the pages that are in use.
    pub(super) fn bytes(&self) -> u64 {
        (self.taken as usize - self.free.len()) as u64 * (PAGE * size_of::<CounterLine>()) as u64
    }

    #[cfg(test)]
    pub(super) fn pages_ever_taken(&self) -> u32 {
        self.taken
    }

    /// Have memory for `pages` more to be taken.
    ///
    /// Errors: `Memory`, and nothing has changed.
    pub(super) fn reserve(&mut self, pages: usize) -> Result<()> {
        while self.chunks.len() * (CHUNK / PAGE) + self.free.len() < self.taken as usize + pages {
            self.chunks.push(ZeroedSlice::new("count the occurrences of ids without a row", CHUNK)?);
        }
        Ok(())
    }

    /// The entry of an id where it was found earlier, if it is still there.
    #[inline]
    pub(super) fn find_again(&self, spot: CounterSpot, id: Id) -> Option<CounterEntry> {
        let line = self.chunks.get(spot.line() / CHUNK)?.get(spot.line() % CHUNK)?;
        (*line.ids.get(spot.place())? == id && line.taken >> spot.place() & 1 == 1)
            .then(|| CounterEntry::of(line.entries[spot.place()]))
    }

    /// Replace the entry at a spot where one is.
    #[inline]
    pub(super) fn replace(&mut self, spot: CounterSpot, entry: CounterEntry) {
        self.line_mut(spot.line()).entries[spot.place()] = entry.bits();
    }

    /// Fetch the entry at a spot into the processor's cache.
    #[inline]
    pub(super) fn prefetch(&self, spot: CounterSpot) {
        self.prefetch_line(spot.line());
    }

    /// Fetch a line into the processor's cache. It need not exist.
    #[inline]
    pub(super) fn prefetch_line(&self, line: usize) {
        if let Some(chunk) = self.chunks.get(line / CHUNK) {
            prefetch(chunk, line % CHUNK);
        }
    }

    /// The number in the pool of a line of a table.
    #[inline]
    pub(super) fn line_of(&self, table: u32, at: u32) -> usize {
        self.directory[self.entry_of(table, at)] as usize * PAGE + at as usize % PAGE
    }

    /// Where the directory has the page of a line of a table.
    #[inline]
    fn entry_of(&self, table: u32, at: u32) -> usize {
        table as usize * self.stride + at as usize / PAGE
    }

    /// Fetch the directory's entry of a line into the processor's cache.
    #[inline]
    pub(super) fn prefetch_entry(&self, table: u32, at: u32) {
        prefetch(&self.directory, self.entry_of(table, at));
    }

    /// The pages of a table of so many lines.
    pub(super) fn pages_of(&self, table: u32, lines: u32) -> &[u32] {
        self.directory.get(self.entry_of(table, 0)..self.entry_of(table, lines)).unwrap_or_default()
    }

    /// Give a table, which has no page any more, pages for so many lines: all of it empty.
    ///
    /// # Panics
    /// Where no memory was reserved for it and there is none.
    pub(super) fn give_pages(&mut self, table: u32, lines: u32) {
        self.widen(lines as usize / PAGE);
        for at in (0..lines).step_by(PAGE) {
            let page = self.take_page();
            let entry = self.entry_of(table, at);
            self.directory[entry] = page;
        }
    }

    /// Have room in the directory for so many pages of each table.
    ///
    /// # Panics
    /// Where the system has no memory, nor the reserve.
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

    /// Take a page of empty lines.
    ///
    /// # Panics
    /// Where no memory was reserved for it and there is none.
    fn take_page(&mut self) -> u32 {
        if let Some(page) = self.free.pop() {
            return page;
        }
        self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        self.taken += 1;
        self.taken - 1
    }

    /// Give pages back. Their entries are gone.
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
