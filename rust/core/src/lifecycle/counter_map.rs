//! A compact, exact map from ids to small counts.
//!
//! It is an open-addressing table of lines. A line has the size of a CPU cache line and five entries, so most lookups
//! touch one. A full line is marked when an id is inserted past it, and a search ends at the first line without the
//! mark. The table grows by a tenth when nine tenths of its entries are in use, so an entry uses 14 to 16 bytes. Marks
//! of lines from which ids were removed stay, so the table is rebuilt, in the size that its ids need, before an eighth
//! of its entries have been removed.
//!
//! Its lines are in the pages of a [`CounterPool`].

use crate::error::Result;
use crate::runtime::mapping::ZeroedSlice;
use crate::runtime::memory::or_from_reserve;
use crate::runtime::simd::prefetch;
use crate::types::Id;

/// Entries of a line.
const ENTRIES: usize = 5;

/// Lines of a page.
const PAGE: usize = 8;

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

/// A map from ids to entries, whose memory is in a pool. The caller hashes the ids, always with the same function.
#[derive(Debug)]
pub(super) struct CounterMap {
    /// The table's index in the pool.
    table: u32,
    lines: u32,
    len: u32,
    /// Number of ids removed since the table was built.
    removed: u32,
}

/// The result of a search for an id in one line.
#[derive(Clone, Copy, Debug)]
pub(super) enum CounterLookup {
    /// Its entry and location.
    Found(CounterSpot, CounterEntry),
    /// The id is not in the table.
    Absent,
    /// The id may be in this line or a later one.
    Further(u32),
}

impl CounterMap {
    /// Creates the empty table with this index in its pool.
    pub(super) fn new(table: u32) -> Self {
        Self { table, lines: 0, len: 0, removed: 0 }
    }

    /// The line at which a search for the id with this hash starts. `None` if the table is empty.
    #[inline]
    pub(super) fn home(&self, hash: u64) -> Option<u32> {
        (self.lines > 0).then(|| (((hash >> 32) * u64::from(self.lines)) >> 32) as u32)
    }

    /// Prefetches the memory that [`CounterMap::prefetch`] reads.
    #[inline]
    pub(super) fn prefetch_page(&self, pool: &CounterPool, home: u32) {
        pool.prefetch_entry(self.table, home);
    }

    /// Prefetches the memory that a search from `home` reads first.
    #[inline]
    pub(super) fn prefetch(&self, pool: &CounterPool, home: u32) {
        pool.prefetch_line(pool.line_of(self.table, home));
    }

    /// The index in the pool of a line.
    #[inline]
    pub(super) fn line_of(&self, pool: &CounterPool, at: u32) -> usize {
        pool.line_of(self.table, at)
    }

    /// Searches one line for an id.
    #[inline]
    fn look(&self, pool: &CounterPool, at: u32, id: Id) -> CounterLookup {
        self.look_at(pool, self.line_of(pool, at), at, id)
    }

    /// Like [`CounterMap::look`], in a line whose index in the pool is known.
    #[inline]
    pub(super) fn look_at(&self, pool: &CounterPool, address: usize, at: u32, id: Id) -> CounterLookup {
        let line = pool.line(address);
        match line.find(id) {
            Some(place) => {
                CounterLookup::Found(CounterSpot::new(address, place), CounterEntry::of(line.entries[place]))
            }
            None if line.passed == 0 => CounterLookup::Absent,
            None => CounterLookup::Further(self.after(at)),
        }
    }

    /// Searches for an id, starting at a line. Returns its entry and location.
    #[inline]
    pub(super) fn find_from(&self, pool: &CounterPool, mut at: u32, id: Id) -> Option<(CounterSpot, CounterEntry)> {
        for _ in 0..self.lines {
            match self.look(pool, at, id) {
                CounterLookup::Found(spot, entry) => return Some((spot, entry)),
                CounterLookup::Absent => return None,
                CounterLookup::Further(next) => at = next,
            }
        }
        None
    }

    /// The entry and location of an id.
    #[inline]
    pub(super) fn find(&self, pool: &CounterPool, id: Id, hash: u64) -> Option<(CounterSpot, CounterEntry)> {
        self.find_from(pool, self.home(hash)?, id)
    }

    /// Number of pages.
    pub(super) fn pages(&self) -> usize {
        self.lines as usize / PAGE
    }

    /// Adds an id that is not in the table, with its entry.
    pub(super) fn insert(
        &mut self,
        pool: &mut CounterPool,
        id: Id,
        hash: u64,
        entry: CounterEntry,
        rehash: impl Fn(Id) -> u64,
    ) {
        let entries = u64::from(self.lines) * ENTRIES as u64;
        if u64::from(self.removed) * 8 > entries {
            // Capacity for the ids, and some more before it grows.
            self.rebuild(pool, self.len / ENTRIES as u32 * 5 / 4 + 1, rehash);
        } else if u64::from(self.len + 1) * 10 > entries * 9 {
            self.rebuild(pool, self.lines + self.lines / 10 + 1, rehash);
        }
        self.add(pool, id, hash, entry);
    }

    /// Removes the entry at a spot, which must be in this table.
    pub(super) fn remove(&mut self, pool: &mut CounterPool, spot: CounterSpot) {
        pool.line_mut(spot.line()).taken &= !(1 << spot.place());
        self.len -= 1;
        self.removed += 1;
    }

    /// All ids and entries, in no order.
    pub(super) fn all<'a>(&'a self, pool: &'a CounterPool) -> impl Iterator<Item = (Id, CounterEntry)> + 'a {
        (0..self.lines).flat_map(|at| pool.line(pool.line_of(self.table, at)).all())
    }

    /// Keeps the entries for which `keep` returns true. `keep` may change entries.
    pub(super) fn retain(&mut self, pool: &mut CounterPool, mut keep: impl FnMut(Id, &mut CounterEntry) -> bool) {
        for at in 0..self.lines {
            let address = pool.line_of(self.table, at);
            let line = pool.line_mut(address);
            let mut gone = 0;
            for place in (0..ENTRIES).filter(|place| line.taken >> place & 1 == 1) {
                let mut entry = CounterEntry::of(line.entries[place]);
                if keep(line.ids[place], &mut entry) {
                    line.entries[place] = entry.bits();
                } else {
                    gone |= 1 << place;
                }
            }
            line.taken &= !gone;
            self.len -= gone.count_ones();
            self.removed += gone.count_ones();
        }
    }

    /// Removes all ids and returns all memory.
    pub(super) fn clear(&mut self, pool: &mut CounterPool) {
        let pages = pool.pages_of(self.table, self.lines).to_vec();
        pool.give_back(&pages);
        *self = Self::new(self.table);
    }

    #[inline]
    fn after(&self, at: u32) -> u32 {
        if at + 1 == self.lines { 0 } else { at + 1 }
    }

    /// Adds an id that is not in the table. There must be a free entry.
    fn add(&mut self, pool: &mut CounterPool, id: Id, hash: u64, entry: CounterEntry) {
        let Some(mut at) = self.home(hash) else { return };
        loop {
            let address = pool.line_of(self.table, at);
            let line = pool.line_mut(address);
            if let Some(place) = line.free() {
                line.put(place, id, entry);
                self.len += 1;
                return;
            }
            line.passed = 1;
            at = self.after(at);
        }
    }

    /// Rebuilds the table with at least this number of lines.
    fn rebuild(&mut self, pool: &mut CounterPool, lines: u32, rehash: impl Fn(Id) -> u64) {
        let lines = lines.next_multiple_of(PAGE as u32);
        let old = pool.pages_of(self.table, self.lines).to_vec();
        pool.give_pages(self.table, lines);
        *self = Self { lines, ..Self::new(self.table) };
        for &page in &old {
            for address in page as usize * PAGE..(page as usize + 1) * PAGE {
                let line = *pool.line(address);
                for (id, entry) in line.all() {
                    self.add(pool, id, rehash(id), entry);
                }
            }
        }
        pool.give_back(&old);
    }
}

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
    fn bits(self) -> u32 {
        self.count | u32::from(self.generation) << COUNT_BITS | self.tag << (COUNT_BITS + 1)
    }

    fn of(bits: u32) -> Self {
        Self { count: bits & MOST_COUNT, generation: bits >> COUNT_BITS & 1 == 1, tag: bits >> (COUNT_BITS + 1) }
    }
}

#[derive(Clone, Copy, Debug, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CounterLine {
    ids: [Id; ENTRIES],
    entries: [u32; ENTRIES],
    /// Bit set of the entries in use.
    taken: u8,
    /// True if an id was inserted in a later line because this line was full.
    passed: u8,
}

const _: () = assert!(size_of::<CounterLine>() == 64);

impl CounterLine {
    /// Returns the place of an id. Every place is compared, since a branch that depends on the place is rarely
    /// predicted.
    #[inline]
    fn find(&self, id: Id) -> Option<usize> {
        let same = (0..ENTRIES).fold(0, |same, at| same | u8::from(self.ids[at] == id) << at) & self.taken;
        (same != 0).then(|| same.trailing_zeros() as usize)
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        let at = self.taken.trailing_ones() as usize;
        (at < ENTRIES).then_some(at)
    }

    fn put(&mut self, at: usize, id: Id, entry: CounterEntry) {
        (self.ids[at], self.entries[at]) = (id, entry.bits());
        self.taken |= 1 << at;
    }

    fn all(&self) -> impl Iterator<Item = (Id, CounterEntry)> + '_ {
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
    fn new(line: usize, place: usize) -> Self {
        Self(line as u64 * Self::PLACES + place as u64)
    }

    #[inline]
    fn line(self) -> usize {
        (self.0 / Self::PLACES) as usize
    }

    #[inline]
    fn place(self) -> usize {
        (self.0 % Self::PLACES) as usize
    }
}

/// The memory of a fixed number of tables: lines of entries, in pages.
///
/// Pages of all tables come from one pool, because growing by copies would fragment the heap. A page that is not in use
/// has no entries, and an id has at most one entry in a pool. So an entry can be found again by its [`CounterSpot`],
/// without a search, while the id is in the pool.
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
    fn line_of(&self, table: u32, at: u32) -> usize {
        self.directory[self.entry_of(table, at)] as usize * PAGE + at as usize % PAGE
    }

    /// The position in the directory of the page of a table's line.
    #[inline]
    fn entry_of(&self, table: u32, at: u32) -> usize {
        table as usize * self.stride + at as usize / PAGE
    }

    /// Prefetches the directory entry of a line.
    #[inline]
    fn prefetch_entry(&self, table: u32, at: u32) {
        prefetch(&self.directory, self.entry_of(table, at));
    }

    /// The pages of a table with this number of lines.
    fn pages_of(&self, table: u32, lines: u32) -> &[u32] {
        self.directory.get(self.entry_of(table, 0)..self.entry_of(table, lines)).unwrap_or_default()
    }

    /// Assigns empty pages for this number of lines to a table without pages.
    ///
    /// # Panics
    /// Panics if no memory was reserved and the allocation fails.
    fn give_pages(&mut self, table: u32, lines: u32) {
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
        let mut wider = or_from_reserve(make).unwrap_or_else(|error| panic!("{error}"));
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
        self.reserve(1).unwrap_or_else(|error| panic!("{error}"));
        self.taken += 1;
        self.taken - 1
    }

    /// Returns pages to the pool and clears their entries.
    fn give_back(&mut self, pages: &[u32]) {
        for &page in pages {
            for line in page as usize * PAGE..(page as usize + 1) * PAGE {
                *self.line_mut(line) = bytemuck::Zeroable::zeroed();
            }
        }
        self.free.extend_from_slice(pages);
    }

    #[inline]
    fn line(&self, line: usize) -> &CounterLine {
        &self.chunks[line / CHUNK][line % CHUNK]
    }

    #[inline]
    fn line_mut(&mut self, line: usize) -> &mut CounterLine {
        &mut self.chunks[line / CHUNK][line % CHUNK]
    }
}

#[cfg(test)]
mod tests;
