//! The index of the SSD tier. It finds the location of an id, takes about ten bytes an id, and keeps no ids.
//!
//! An id is known by its *print*: the first bits of its hash, which pick a sub-table, and its *tag*, bits of another hash that depends on a
//! secret of the index, so that nobody can choose ids whose tags meet or lie side by side. An entry is 8 bytes: the tag (24 bits) and the
//! location (40 bits).
//!
//! The tag alone gives the entry's home, `tag * homes / 2^tag_bits`, which keeps the order of tags at any size. So a sub-table is the
//! sorted list of its tags with gaps (ordered linear probing; Amble and Knuth 1974). It grows without the ids, and a search ends at the
//! first tag that is not smaller.
//!
//! At most one entry has a given print. An id whose print is taken goes to a small exact map (see `exact`), which is looked at first. So a
//! search has one candidate at most. For an id that is not in the index it may be another id's with the same print, which whoever reads the
//! record finds out.
//!
//! Sub-tables grow by `GROWTH` when `MAX_LOAD` is reached, each at its own counts, so that neither the bytes nor the time of growing
//! come all at once. They live in pages of one pool, so that growing leaves no holes in the heap.
//!
//! With 2³⁴ prints, 3 ids in 100 are in the exact map where there are 10⁹ ids, and 12 in 100 where there are [`TagIndex::MAX_IDS`]. An id
//! takes at most 12 bytes up to 2 × 10⁹ ids, and 14 at the limit.

use exact::ExactMap;
use pages::{EMPTY, IndexPages, PAGE_ENTRIES};

use crate::error::Result;
use crate::prefetch::prefetch;
use crate::types::{Id, hash_id};

/// Bits of a tag. With 1024 sub-tables an id has one of 2³⁴ prints.
pub(crate) const TAG_BITS: u32 = 24;

/// Bits of a location in an entry.
const LOCATION_BITS: u32 = 40;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
/// By how much a sub-table grows at a time.
const GROWTH: f64 = 1.2;
/// Homes of the smallest sub-table.
const MIN_HOMES: f64 = 64.0;
/// A sub-table grows when it has entries for 0.9 of its homes.
const MAX_LOAD: f64 = 0.9;
/// A search asks for the memory of the id that comes 16 searches later.
pub(crate) const PREFETCH_DISTANCE: usize = 16;

/// Finds the location of an id. See the module.
#[derive(Debug)]
pub struct TagIndex {
    hasher: FingerprintHasher,
    tables: Vec<SubTable>,
    pool: IndexPages,
    exact: ExactMap,
    tagged: usize,
    scratch: Vec<u64>,
}

/// The entries of one sub-table. Position `p` is in `pages[p / PAGE]`. Positions `0..homes` are homes, and those that follow are overhang.
#[derive(Clone, Debug, Default)]
struct SubTable {
    homes: u32,
    len: u32,
    limit: u32,
    level: u32,
    pages: Vec<u32>,
}

impl TagIndex {
    /// More ids than these are not to be added: past them the exact map takes too large a share.
    pub const MAX_IDS: u64 = 1 << 32;

    /// An index with 1024 sub-tables and tags of `tag_bits` bits, 1 to 24. With few bits, as in tests, many ids collide.
    pub fn new(tag_bits: u32) -> Self {
        Self::with_sub_tables(10, tag_bits)
    }

    /// An index with 2^`sub_table_bits` (at most 16) sub-tables and tags of `tag_bits` (1 to 24) bits.
    ///
    /// # Panics
    /// With widths out of these ranges.
    pub fn with_sub_tables(sub_table_bits: u32, tag_bits: u32) -> Self {
        assert!(sub_table_bits <= 16 && (1..=24).contains(&tag_bits), "widths out of range");
        Self {
            hasher: FingerprintHasher::new(sub_table_bits, tag_bits),
            tables: vec![SubTable::default(); 1 << sub_table_bits],
            pool: IndexPages::default(),
            exact: ExactMap::default(),
            tagged: 0,
            scratch: Vec::new(),
        }
    }

    /// How it takes prints; a cleared index takes them as before.
    pub fn fingerprint_hasher(&self) -> FingerprintHasher {
        self.hasher
    }

    /// Ids in the index.
    pub fn len(&self) -> usize {
        self.tagged + self.exact.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids that share their print with another and are kept in full.
    pub fn exact_len(&self) -> usize {
        self.exact.len()
    }

    /// Bytes of RAM it takes.
    pub fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.tables.iter().map(|table| size_of::<SubTable>() + table.pages.capacity() * 4).sum::<usize>()
            + self.pool.bytes()
            + self.exact.bytes()
            + self.scratch.capacity() * 8
    }

    /// The one location where `id` may be. For an id in the index it is the id's own. For another id it is `None`, or the location of an id
    /// with the same print.
    #[inline]
    pub fn get(&self, id: Id) -> Option<RecordLocation> {
        if let Some(location) = self.exact.get(id) {
            return Some(location);
        }
        let (table, tag) = self.fingerprint(id);
        self.find(table, tag).ok().map(|(_, entry)| RecordLocation::from_bits(entry))
    }

    /// Ask for the memory of `more` ids to come, so that [`TagIndex::insert`] of them needs no large block.
    ///
    /// Errors: `Kind::Memory`, and nothing has changed.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        // Each sub-table that an entry comes to may grow by a step, and by the entries themselves.
        let grown = 2 * self.tables.len().min(more) + more / (PAGE_ENTRIES / 2) + self.pool.used() / 4;
        self.pool.reserve(grown)?;
        // Tags depend on a secret, so that an id meets another in its sub-table by chance alone. All ids may be in one sub-table.
        let pairs = more as u128 * (self.len() + more) as u128;
        let met = (pairs >> self.hasher.tag_bits).min(more as u128) as usize;
        self.exact.reserve(more.min(2 * met + 8))
    }

    /// Add an id that is known to be absent.
    ///
    /// # Panics
    /// At a location past 40 bits, and where the system refuses memory that was not reserved.
    pub fn insert(&mut self, id: Id, location: RecordLocation) {
        let (table, tag) = self.fingerprint(id);
        match self.find(table, tag) {
            Ok(_) => self.exact.insert(id, location).unwrap_or_else(|refused| panic!("{refused}")),
            Err(mut at) => {
                if self.tables[table].len >= self.tables[table].limit {
                    self.grow(table);
                    at = self.find(table, tag).expect_err("growing adds no tag");
                }
                self.shift_in(table, at, tag << LOCATION_BITS | location.bits());
                self.tables[table].len += 1;
                self.tagged += 1;
            }
        }
    }

    /// Point an id that is known to be present to another location; the one before.
    pub fn replace(&mut self, id: Id, location: RecordLocation) -> Option<RecordLocation> {
        if let Some(place) = self.exact.get_mut(id) {
            return Some(std::mem::replace(place, location));
        }
        let (table, tag) = self.fingerprint(id);
        let (at, entry) = self.find(table, tag).ok()?;
        *self.entry_mut(table, at) = tag << LOCATION_BITS | location.bits();
        Some(RecordLocation::from_bits(entry))
    }

    /// Remove an id that is known to be present; its location.
    pub fn remove(&mut self, id: Id) -> Option<RecordLocation> {
        if let Some(location) = self.exact.remove(id) {
            return Some(location);
        }
        let (table, tag) = self.fingerprint(id);
        let (at, entry) = self.find(table, tag).ok()?;
        self.shift_out(table, at);
        self.tables[table].len -= 1;
        self.tagged -= 1;
        Some(RecordLocation::from_bits(entry))
    }

    /// Whether the index points to `location`, where a record of `id` is.
    pub fn is_at(&self, id: Id, location: RecordLocation) -> bool {
        // An entry that points there is this id's, because the record is. So the exact map is looked at only where there is none.
        self.is_tagged_at(id, location) || self.exact.get(id) == Some(location)
    }

    fn is_tagged_at(&self, id: Id, location: RecordLocation) -> bool {
        let (table, tag) = self.fingerprint(id);
        self.find(table, tag).is_ok_and(|(_, entry)| RecordLocation::from_bits(entry) == location)
    }

    /// Point `id` to `to` if it is at `from`; whether it was.
    pub fn relocate(&mut self, id: Id, from: RecordLocation, to: RecordLocation) -> bool {
        self.is_at(id, from) && self.replace(id, to).is_some()
    }

    /// Forget everything and give the memory back.
    pub fn clear(&mut self) {
        let (prints, pool) = (self.hasher, self.pool.cleared());
        *self = Self { hasher: prints, pool, ..Self::with_sub_tables(prints.sub_table_bits, prints.tag_bits) };
    }

    /// Hand every location to `sink`, each once, in no particular order.
    pub fn visit(&self, sink: &mut dyn FnMut(RecordLocation)) {
        for page in self.tables.iter().flat_map(|table| &table.pages) {
            for &entry in self.pool.page(*page).iter().filter(|entry| **entry != EMPTY) {
                sink(RecordLocation::from_bits(entry));
            }
        }
        self.exact.locations().for_each(sink);
    }

    #[inline]
    fn fingerprint(&self, id: Id) -> (usize, u64) {
        self.hasher.fingerprint(hash_id(id))
    }

    #[inline]
    fn home(&self, table: usize, tag: u64) -> usize {
        self.hasher.home(tag, self.tables[table].homes)
    }

    /// Start to load the entry of an id into the processor's cache.
    #[inline]
    pub fn prefetch(&self, id: Id) {
        let (table, tag) = self.fingerprint(id);
        let at = self.home(table, tag);
        if let Some(&page) = self.tables[table].pages.get(at / PAGE_ENTRIES) {
            prefetch(self.pool.page(page), at % PAGE_ENTRIES);
        }
    }

    /// The position of `tag` and its entry; `Err` with the position where it belongs.
    #[inline]
    fn find(&self, table: usize, tag: u64) -> Result<(usize, u64), usize> {
        let least = tag << LOCATION_BITS;
        let mut at = self.home(table, tag);
        while let Some(&page) = self.tables[table].pages.get(at / PAGE_ENTRIES) {
            for &entry in &self.pool.page(page)[at % PAGE_ENTRIES..] {
                if entry >= least {
                    return if entry ^ least <= LOCATION_MASK && entry != EMPTY { Ok((at, entry)) } else { Err(at) };
                }
                at += 1;
            }
        }
        Err(at)
    }

    fn entry_mut(&mut self, table: usize, at: usize) -> &mut u64 {
        &mut self.pool.page_mut(self.tables[table].pages[at / PAGE_ENTRIES])[at % PAGE_ENTRIES]
    }

    /// Put `entry` at `at`. Entries from there to the next gap move on by one.
    fn shift_in(&mut self, table: usize, mut at: usize, mut entry: u64) {
        while entry != EMPTY {
            if at / PAGE_ENTRIES == self.tables[table].pages.len() {
                let page = self.pool.take();
                self.tables[table].pages.push(page);
            }
            std::mem::swap(self.entry_mut(table, at), &mut entry);
            at += 1;
        }
    }

    /// Take out the entry at `at`. Those behind it that are not at home move back by one.
    fn shift_out(&mut self, table: usize, mut at: usize) {
        loop {
            let next = at + 1;
            let entry = match self.tables[table].pages.get(next / PAGE_ENTRIES) {
                Some(&page) => self.pool.page(page)[next % PAGE_ENTRIES],
                None => EMPTY,
            };
            if entry == EMPTY || self.home(table, entry >> LOCATION_BITS) == next {
                *self.entry_mut(table, at) = EMPTY;
                return;
            }
            *self.entry_mut(table, at) = entry;
            at = next;
        }
    }

    /// Make a sub-table larger by a step.
    fn grow(&mut self, table: usize) {
        let mut entries = std::mem::take(&mut self.scratch);
        for &page in &self.tables[table].pages {
            entries.extend(self.pool.page(page).iter().filter(|entry| **entry != EMPTY));
            self.pool.page_mut(page).fill(EMPTY);
        }
        let grown = &mut self.tables[table];
        grown.level += 1;
        (grown.homes, grown.limit) = sub_table_size(table, grown.level);
        self.set_pages(table);
        // Ascending tags: each entry goes to its home or right behind the one before it.
        let mut at = 0;
        for entry in entries.drain(..) {
            at = at.max(self.home(table, entry >> LOCATION_BITS));
            self.shift_in(table, at, entry);
            at += 1;
        }
        self.scratch = entries;
    }

    /// Give a sub-table the pages of its homes.
    fn set_pages(&mut self, table: usize) {
        let grown = &mut self.tables[table];
        let pages = (grown.homes as usize).div_ceil(PAGE_ENTRIES);
        grown.pages.reserve_exact(pages.saturating_sub(grown.pages.len()));
        while grown.pages.len() < pages {
            grown.pages.push(self.pool.take());
        }
    }
}

/// Homes of a sub-table at a level from 1 on, in its geometric series, and the most entries that it takes then.
fn sub_table_size(table: usize, level: u32) -> (u32, u32) {
    // Multiples of the golden ratio spread the phases evenly for any number of sub-tables.
    let phase = (table as f64 * 0.618_033_988_749_894_9).fract();
    let size = MIN_HOMES * GROWTH.powf(f64::from(level - 1) + phase);
    (size as u32, (size * MAX_LOAD) as u32)
}

mod batch;
mod exact;
mod fill;
mod location;
mod pages;
mod prints;
#[cfg(test)]
mod tests;

pub use batch::TagMatch;
pub use fill::{BuiltSubTable, SubTableBuilder};
pub use location::RecordLocation;
pub use prints::FingerprintHasher;
