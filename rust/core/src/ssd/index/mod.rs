//! The index of the SSD tier. It maps an id to its location in about ten bytes per id, and does not store the ids.
//!
//! The index identifies an id by its *fingerprint*: the first bits of its hash, which select a sub-table, and its
//! *tag*, bits of another hash. That hash depends on a secret of the index, so that ids with equal or adjacent tags
//! cannot be chosen. An entry is 8 bytes: the tag (24 bits) and the location (40 bits).
//!
//! The tag determines the entry's home slot, `tag * homes / 2^tag_bits`, which preserves the order of tags at any size.
//! So a sub-table is the sorted list of its tags with gaps (ordered linear probing; Amble and Knuth 1974). It grows
//! without the ids, and a search ends at the first tag that is not smaller.
//!
//! A fingerprint has at most one entry. An id whose fingerprint is taken goes to a small exact map (see `exact`), which
//! is searched first. So a search has at most one candidate. For an absent id the candidate may be another id with the
//! same fingerprint; the reader of the record detects that.
//!
//! Sub-tables grow by `GROWTH` when `MAX_LOAD` is reached, each at different counts, so that neither memory nor time of
//! growing is spent all at once. They are stored in pages of one pool, so that growing does not fragment the heap.
//!
//! With 2³⁴ fingerprints, 3 of 100 ids are in the exact map at 10⁹ ids, and 12 of 100 at [`TagIndex::MAX_IDS`]. An id
//! uses at most 12 bytes up to 2 × 10⁹ ids, and 14 at the limit.

mod batch;
mod exact;
mod fingerprint;
mod pages;
#[cfg(test)]
mod tests;

pub use batch::TagMatch;
pub use fingerprint::FingerprintHasher;

use exact::ExactMap;
use pages::{EMPTY, IndexPages, PAGE_ENTRIES};

use crate::error::Result;
use crate::runtime::simd::prefetch;
use crate::ssd::bucket_sort::bucket_sort;
use crate::types::{Id, hash_id, id_of_hash};

/// Bits of a tag. With 1024 sub-tables there are 2³⁴ fingerprints.
pub(crate) const TAG_BITS: u32 = 24;

/// Bits of a location in an entry.
const LOCATION_BITS: u32 = 40;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
/// Factor by which a sub-table grows.
const GROWTH: f64 = 1.2;
/// Home slots of the smallest sub-table.
const MIN_HOMES: f64 = 64.0;
/// A sub-table grows when its entries reach 0.9 of its home slots.
const MAX_LOAD: f64 = 0.9;
/// A search prefetches the memory of the id that follows 16 searches later.
pub(crate) const PREFETCH_DISTANCE: usize = 16;

/// Maps ids to locations. See the module.
#[derive(Debug)]
pub struct TagIndex {
    hasher: FingerprintHasher,
    tables: Vec<SubTable>,
    pool: IndexPages,
    exact: ExactMap,
    tagged: usize,
    scratch: Vec<u64>,
}

/// The entries of one sub-table. Position `p` is in `pages[p / PAGE_ENTRIES]`. Positions `0..homes` are home slots, and
/// those that follow are overflow.
#[derive(Clone, Debug, Default)]
struct SubTable {
    homes: u32,
    len: u32,
    limit: u32,
    level: u32,
    pages: Vec<u32>,
}

/// The location of a record: the number of its segment, below 2²⁰ − 1, and its own number there, below 2²⁰.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordLocation {
    /// Number of the segment.
    pub segment: u32,
    /// Number of the record in its segment.
    pub record: u32,
}

impl RecordLocation {
    /// Upper bound (exclusive) of segment numbers.
    pub const MAX_SEGMENTS: u32 = (1 << 20) - 1;
    /// Upper bound (exclusive) of record numbers.
    pub const MAX_RECORDS: u32 = 1 << 20;

    #[inline]
    fn bits(self) -> u64 {
        assert!(self.segment < Self::MAX_SEGMENTS && self.record < Self::MAX_RECORDS, "{self:?} has more than 40 bits");
        u64::from(self.segment) << 20 | u64::from(self.record)
    }

    fn from_bits(bits: u64) -> Self {
        Self { segment: (bits >> 20) as u32 & 0xf_ffff, record: bits as u32 & 0xf_ffff }
    }
}

impl TagIndex {
    /// Maximum number of ids. Above it the exact map would hold too large a fraction of them.
    pub const MAX_IDS: u64 = 1 << 32;

    /// Creates an index with 1024 sub-tables and tags of `tag_bits` bits, 1 to 24. With few bits, as in tests, many ids
    /// collide.
    pub fn new(tag_bits: u32) -> Self {
        Self::with_sub_tables(10, tag_bits)
    }

    /// Creates an index with 2^`sub_table_bits` (at most 16) sub-tables and tags of `tag_bits` (1 to 24) bits.
    ///
    /// # Panics
    /// If the widths are out of these ranges.
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

    /// Returns the hasher of its fingerprints. [`TagIndex::clear`] keeps it.
    pub fn fingerprint_hasher(&self) -> FingerprintHasher {
        self.hasher
    }

    /// Number of ids in the index.
    pub fn len(&self) -> usize {
        self.tagged + self.exact.len()
    }

    /// True if the index is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of ids in the exact map, whose fingerprints other ids have too.
    pub fn exact_len(&self) -> usize {
        self.exact.len()
    }

    /// Bytes of RAM in use.
    pub fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.tables.iter().map(|table| size_of::<SubTable>() + table.pages.capacity() * 4).sum::<usize>()
            + self.pool.bytes()
            + self.exact.bytes()
            + self.scratch.capacity() * 8
    }

    /// Returns the only possible location of `id`. For an id in the index it is the id's own. For another id it is
    /// `None`, or the location of an id with the same fingerprint.
    #[inline]
    pub fn get(&self, id: Id) -> Option<RecordLocation> {
        if let Some(location) = self.exact.get(id) {
            return Some(location);
        }
        let (table, tag) = self.fingerprint(id);
        self.find(table, tag).ok().map(|(_, entry)| RecordLocation::from_bits(entry))
    }

    /// Reserves memory for `more` ids, so that [`TagIndex::insert`] of them allocates no large block.
    ///
    /// Errors: `Kind::Memory`, without any change.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        // Each sub-table that receives an entry may grow by a step, and by the entries themselves.
        let grown = 2 * self.tables.len().min(more) + more / (PAGE_ENTRIES / 2) + self.pool.used() / 4;
        self.pool.reserve(grown)?;
        // Tags depend on a secret, so that ids of a sub-table collide only by chance. All ids may be in one sub-table.
        let pairs = more as u128 * (self.len() + more) as u128;
        let met = (pairs >> self.hasher.tag_bits).min(more as u128) as usize;
        self.exact.reserve(more.min(2 * met + 8))
    }

    /// Adds an absent id.
    ///
    /// # Panics
    /// If the location needs more than 40 bits, or if memory was not reserved and the allocation fails.
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

    /// Changes the location of a present id. Returns the previous location.
    pub fn replace(&mut self, id: Id, location: RecordLocation) -> Option<RecordLocation> {
        if let Some(place) = self.exact.get_mut(id) {
            return Some(std::mem::replace(place, location));
        }
        let (table, tag) = self.fingerprint(id);
        let (at, entry) = self.find(table, tag).ok()?;
        *self.entry_mut(table, at) = tag << LOCATION_BITS | location.bits();
        Some(RecordLocation::from_bits(entry))
    }

    /// Removes a present id. Returns its location.
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

    /// True if the index maps `id` to `location`, where a record of `id` is stored.
    pub fn is_at(&self, id: Id, location: RecordLocation) -> bool {
        // An entry with this location belongs to this id, because the record does. So the exact map is searched only if
        // there is no such entry.
        self.is_tagged_at(id, location) || self.exact.get(id) == Some(location)
    }

    fn is_tagged_at(&self, id: Id, location: RecordLocation) -> bool {
        let (table, tag) = self.fingerprint(id);
        self.find(table, tag).is_ok_and(|(_, entry)| RecordLocation::from_bits(entry) == location)
    }

    /// Changes the location of `id` to `to` if it is `from`. Returns true if it was.
    pub fn relocate(&mut self, id: Id, from: RecordLocation, to: RecordLocation) -> bool {
        self.is_at(id, from) && self.replace(id, to).is_some()
    }

    /// Removes all ids and frees the memory.
    pub fn clear(&mut self) {
        let (hasher, pool) = (self.hasher, self.pool.cleared());
        *self = Self { hasher, pool, ..Self::with_sub_tables(hasher.sub_table_bits, hasher.tag_bits) };
    }

    /// Calls `sink` once per location, in unspecified order.
    pub fn visit(&self, sink: &mut dyn FnMut(RecordLocation)) {
        for page in self.tables.iter().flat_map(|table| &table.pages) {
            for &entry in self.pool.page(*page).iter().filter(|entry| **entry != EMPTY) {
                sink(RecordLocation::from_bits(entry));
            }
        }
        self.exact.locations().for_each(sink);
    }

    /// Creates a builder for this index.
    pub fn sub_table_builder(&self) -> SubTableBuilder {
        SubTableBuilder { hasher: self.hasher }
    }

    /// Replaces empty sub-tables by those built by [`TagIndex::sub_table_builder`].
    ///
    /// Errors: `Kind::Memory`; then the index is unusable.
    ///
    /// # Panics
    /// If one of the replaced sub-tables is not empty.
    pub fn adopt(&mut self, filled: &[BuiltSubTable]) -> Result<()> {
        self.pool.reserve(filled.iter().map(|table| table.entries.len() / PAGE_ENTRIES).sum())?;
        for BuiltSubTable { table, sub_table, entries, exact } in filled {
            assert!(self.tables[*table].pages.is_empty(), "sub-table {table} is not empty");
            let mut pages = Vec::with_capacity(entries.len() / PAGE_ENTRIES);
            for page_entries in entries.chunks_exact(PAGE_ENTRIES) {
                let page = self.pool.take_unfilled();
                self.pool.page_mut(page).copy_from_slice(page_entries);
                pages.push(page);
            }
            self.tagged += sub_table.len as usize;
            self.tables[*table] = SubTable { pages, ..*sub_table };
            self.exact.reserve(exact.len())?;
            exact.iter().try_for_each(|&(id, location)| self.exact.insert(id, location))?;
        }
        Ok(())
    }

    #[inline]
    fn fingerprint(&self, id: Id) -> (usize, u64) {
        self.hasher.fingerprint(hash_id(id))
    }

    #[inline]
    fn home(&self, table: usize, tag: u64) -> usize {
        self.hasher.home(tag, self.tables[table].homes)
    }

    /// Prefetches the entry of an id into the CPU cache.
    #[inline]
    pub fn prefetch(&self, id: Id) {
        let (table, tag) = self.fingerprint(id);
        let at = self.home(table, tag);
        if let Some(&page) = self.tables[table].pages.get(at / PAGE_ENTRIES) {
            prefetch(self.pool.page(page), at % PAGE_ENTRIES);
        }
    }

    /// Returns the position of `tag` and its entry, or `Err` with the insert position.
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

    /// Inserts `entry` at `at`. Entries from there to the next gap shift up by one.
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

    /// Removes the entry at `at`. Following entries that are not in their home slots shift down by one.
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

    /// Grows a sub-table by a step.
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
        // Tags ascend: each entry goes to its home slot or right after the previous entry.
        let mut at = 0;
        for entry in entries.drain(..) {
            at = at.max(self.home(table, entry >> LOCATION_BITS));
            self.shift_in(table, at, entry);
            at += 1;
        }
        self.scratch = entries;
    }

    /// Allocates the pages of a sub-table's home slots.
    fn set_pages(&mut self, table: usize) {
        let grown = &mut self.tables[table];
        let pages = (grown.homes as usize).div_ceil(PAGE_ENTRIES);
        grown.pages.reserve_exact(pages.saturating_sub(grown.pages.len()));
        while grown.pages.len() < pages {
            grown.pages.push(self.pool.take());
        }
    }
}

/// Builds sub-tables for one index. It is cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct SubTableBuilder {
    hasher: FingerprintHasher,
}

/// A sub-table to be put into its index.
#[derive(Debug)]
pub struct BuiltSubTable {
    table: usize,
    sub_table: SubTable,
    /// All positions, a whole number of pages.
    entries: Vec<u64>,
    exact: Vec<(Id, RecordLocation)>,
}

impl SubTableBuilder {
    /// Number of sub-tables of the index.
    pub fn sub_tables(self) -> usize {
        1 << self.hasher.sub_table_bits
    }

    /// Returns the smallest hash of a sub-table's ids; `None` past the last.
    pub fn first_hash(self, table: usize) -> Option<u64> {
        (table < self.sub_tables()).then(|| ((table as u64) << 48) << (16 - self.hasher.sub_table_bits))
    }

    /// Builds the sub-tables of `ids`, which are distinct. All ids of a sub-table must be adjacent in one call.
    pub fn build(self, ids: &[(u64, RecordLocation)]) -> Vec<BuiltSubTable> {
        let same_table = |a: &(u64, RecordLocation), b: &(u64, RecordLocation)| {
            self.hasher.fingerprint(a.0).0 == self.hasher.fingerprint(b.0).0
        };
        ids.chunk_by(same_table).map(|ids| self.build_one(ids)).collect()
    }

    fn build_one(self, ids: &[(u64, RecordLocation)]) -> BuiltSubTable {
        let table = self.hasher.fingerprint(ids[0].0).0;
        let mut sub_table = SubTable::default();
        while (sub_table.limit as usize) < ids.len() {
            sub_table.level += 1;
            (sub_table.homes, sub_table.limit) = sub_table_size(table, sub_table.level);
        }
        // Usually sufficient for the overflow.
        let mut entries = vec![EMPTY; (sub_table.homes as usize + PAGE_ENTRIES / 2).next_multiple_of(PAGE_ENTRIES)];
        let mut exact = Vec::new();
        let (mut next, mut last) = (0, None);
        for (entry, hash) in self.sorted_by_tag(ids) {
            let tag = entry >> LOCATION_BITS;
            if last == Some(tag) {
                exact.push((id_of_hash(hash), RecordLocation::from_bits(entry)));
                continue;
            }
            last = Some(tag);
            // Tags ascend: each entry goes to its home slot or right after the previous entry.
            let at = self.hasher.home(tag, sub_table.homes).max(next);
            if at == entries.len() {
                entries.resize(at + PAGE_ENTRIES, EMPTY);
            }
            entries[at] = entry;
            next = at + 1;
            sub_table.len += 1;
        }
        // The same number of pages as after growing.
        entries.truncate(next.max(sub_table.homes as usize).next_multiple_of(PAGE_ENTRIES));
        BuiltSubTable { table, sub_table, entries, exact }
    }

    /// Returns the entries of ids, with their hashes, by ascending tag.
    fn sorted_by_tag(self, ids: &[(u64, RecordLocation)]) -> Vec<(u64, u64)> {
        let buckets = (ids.len() / 4).next_power_of_two().min(1 << self.hasher.tag_bits);
        let shift = self.hasher.tag_bits - buckets.trailing_zeros();
        let items = ids.iter().map(|&(hash, location)| {
            let tag = self.hasher.fingerprint(hash).1;
            ((tag >> shift) as usize, (tag << LOCATION_BITS | location.bits(), hash))
        });
        let mut sorted = vec![(0, 0); ids.len()];
        bucket_sort(items, &mut vec![0; buckets], &mut sorted, Ord::cmp);
        sorted
    }
}

/// Returns the home slots of a sub-table at `level` (from 1), in a geometric series, and its maximum number of entries.
fn sub_table_size(table: usize, level: u32) -> (u32, u32) {
    // Multiples of the golden ratio distribute the phases evenly for any number of sub-tables.
    let phase = (table as f64 * 0.618_033_988_749_894_9).fract();
    let size = MIN_HOMES * GROWTH.powf(f64::from(level - 1) + phase);
    (size as u32, (size * MAX_LOAD) as u32)
}
