//! Fills an empty index from ids, sub-table after sub-table. Each is made at its final size, and several threads may make some at the same
//! time.

use super::location::Location;
use super::pages::{EMPTY, PAGE};
use super::prints::Prints;
use super::{LOCATION_BITS, SubTable, TagIndex, size};
use crate::error::Result;
use crate::types::{Id, id_of_hash};

/// Makes sub-tables for one index. It is cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Filler {
    prints: Prints,
}

/// A sub-table that was made and is to be put into its index.
#[derive(Debug)]
pub struct Filled {
    table: usize,
    sub_table: SubTable,
    /// All positions, a whole number of pages.
    entries: Vec<u64>,
    exact: Vec<(Id, Location)>,
}

impl Filler {
    /// Sub-tables of the index.
    pub fn sub_tables(self) -> usize {
        1 << self.prints.sub_table_bits
    }

    /// The least hash of the ids of a sub-table; `None` past the last.
    pub fn first_hash(self, table: usize) -> Option<u64> {
        (table < self.sub_tables()).then(|| ((table as u64) << 48) << (16 - self.prints.sub_table_bits))
    }

    /// Make the sub-tables of `ids`, which are distinct. All ids of a sub-table are in one call, and lie side by side.
    pub fn fill(self, ids: &[(u64, Location)]) -> Vec<Filled> {
        let same_table =
            |a: &(u64, Location), b: &(u64, Location)| self.prints.print(a.0).0 == self.prints.print(b.0).0;
        ids.chunk_by(same_table).map(|ids| self.fill_one(ids)).collect()
    }

    fn fill_one(self, ids: &[(u64, Location)]) -> Filled {
        let table = self.prints.print(ids[0].0).0;
        let mut sub_table = SubTable::default();
        while (sub_table.limit as usize) < ids.len() {
            sub_table.level += 1;
            (sub_table.homes, sub_table.limit) = size(table, sub_table.level);
        }
        // Room for the overhang in most cases.
        let mut entries = vec![EMPTY; (sub_table.homes as usize + PAGE / 2).next_multiple_of(PAGE)];
        let mut exact = Vec::new();
        let (mut next, mut last) = (0, None);
        for (entry, hash) in self.by_tag(ids) {
            let tag = entry >> LOCATION_BITS;
            if last == Some(tag) {
                exact.push((id_of_hash(hash), Location::from_bits(entry)));
                continue;
            }
            last = Some(tag);
            // Ascending tags: each entry goes to its home or right behind the one before it.
            let at = self.prints.home(tag, sub_table.homes).max(next);
            if at == entries.len() {
                entries.resize(at + PAGE, EMPTY);
            }
            entries[at] = entry;
            next = at + 1;
            sub_table.len += 1;
        }
        // As many pages as growing would give it.
        entries.truncate(next.max(sub_table.homes as usize).next_multiple_of(PAGE));
        Filled { table, sub_table, entries, exact }
    }

    /// The entries of ids, with their hashes, by ascending tag. Tags are spread evenly, so nearly all of it is putting each into its
    /// bucket.
    fn by_tag(self, ids: &[(u64, Location)]) -> Vec<(u64, u64)> {
        let buckets = (ids.len() / 4).next_power_of_two().min(1 << self.prints.tag_bits);
        let shift = self.prints.tag_bits - buckets.trailing_zeros();
        let bucket = |entry: u64| (entry >> LOCATION_BITS >> shift) as usize;
        let entry =
            |(hash, location): (u64, Location)| (self.prints.print(hash).1 << LOCATION_BITS | location.bits(), hash);
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
    /// Makes sub-tables for this index.
    pub fn filler(&self) -> Filler {
        Filler { prints: self.prints }
    }

    /// Put sub-tables made by its [`TagIndex::filler`] in the place of empty ones.
    ///
    /// Errors: `Kind::Memory`; then the index is of no use.
    ///
    /// # Panics
    /// When a sub-table of theirs is not empty.
    pub fn adopt(&mut self, filled: &[Filled]) -> Result<()> {
        self.pool.reserve(filled.iter().map(|table| table.entries.len() / PAGE).sum())?;
        for Filled { table, sub_table, entries, exact } in filled {
            assert!(self.tables[*table].pages.is_empty(), "sub-table {table} is not empty");
            let mut pages = Vec::with_capacity(entries.len() / PAGE);
            for page_entries in entries.chunks_exact(PAGE) {
                let page = self.pool.take_as_it_is();
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
