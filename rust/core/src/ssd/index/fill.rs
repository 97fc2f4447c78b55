//! Fills an empty index from ids, one sub-table after the other. Each is built at its final size, and several threads
//! may build some in parallel.

use super::location::RecordLocation;
use super::pages::{EMPTY, PAGE_ENTRIES};
use super::prints::FingerprintHasher;
use super::{LOCATION_BITS, SubTable, TagIndex, sub_table_size};
use crate::error::Result;
use crate::types::{Id, id_of_hash};

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

    /// Returns the entries of ids, with their hashes, by ascending tag. Tags are evenly distributed, so nearly all of
    /// the work is putting each into its bucket.
    fn sorted_by_tag(self, ids: &[(u64, RecordLocation)]) -> Vec<(u64, u64)> {
        let buckets = (ids.len() / 4).next_power_of_two().min(1 << self.hasher.tag_bits);
        let shift = self.hasher.tag_bits - buckets.trailing_zeros();
        let bucket = |entry: u64| (entry >> LOCATION_BITS >> shift) as usize;
        let entry = |(hash, location): (u64, RecordLocation)| {
            (self.hasher.fingerprint(hash).1 << LOCATION_BITS | location.bits(), hash)
        };
        let mut ends = vec![0_u32; buckets];
        for &id in ids {
            ends[bucket(entry(id).0)] += 1;
        }
        let mut before = 0;
        for end in &mut ends {
            before += std::mem::replace(end, before);
        }
        // At first these are starts. Each moves to its end as the bucket fills.
        let mut sorted = vec![(0, 0); ids.len()];
        for &id in ids {
            let (entry, hash) = entry(id);
            let end = &mut ends[bucket(entry)];
            sorted[*end as usize] = (entry, hash);
            *end += 1;
        }
        let mut start = 0;
        for &end in &ends {
            sorted[start..end as usize].sort_unstable();
            start = end as usize;
        }
        sorted
    }
}

impl TagIndex {
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
}
