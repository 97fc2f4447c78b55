//! The memory of an index's entries: pages of one pool, so that growing does not fragment the heap.

use crate::error::Result;
use crate::runtime::mapping::ZeroedSlice;
use crate::runtime::simd::prefetch;

/// No entry. It is larger than every entry, because no location has all bits set.
pub(super) const EMPTY: u64 = u64::MAX;
/// Entries of a page.
pub(super) const PAGE_ENTRIES: usize = 128;
/// Pages per allocation: 32 MiB in a separate mapping, with huge pages. Unused pages cost no memory. In the heap, such
/// long-lived memory would cause fragmentation.
const PAGES_PER_CHUNK: usize = 32 << 10;
const ENTRIES_PER_CHUNK: u64 = (PAGES_PER_CHUNK * PAGE_ENTRIES) as u64;

/// Pages of entries.
#[derive(Debug, Default)]
pub(super) struct IndexPages {
    chunks: Vec<ZeroedSlice<u64>>,
    /// Number of pages in use.
    used: u32,
    /// Number of times that the index was cleared, so that stale places are detected.
    era: u64,
}

/// A place has the number of an entry in this many bits, and the era above them.
const PLACE_BITS: u32 = 40;

impl IndexPages {
    /// Bytes of the pages in use.
    pub(super) fn bytes(&self) -> usize {
        self.used as usize * PAGE_ENTRIES * 8
    }

    /// Number of pages with memory.
    #[cfg(test)]
    pub(super) fn reserved_pages(&self) -> usize {
        self.chunks.len() * PAGES_PER_CHUNK
    }

    /// Number of pages in use.
    pub(super) fn used(&self) -> usize {
        self.used as usize
    }

    #[inline]
    pub(super) fn page(&self, page: u32) -> &[u64] {
        let start = page as usize % PAGES_PER_CHUNK * PAGE_ENTRIES;
        &self.chunks[page as usize / PAGES_PER_CHUNK][start..start + PAGE_ENTRIES]
    }

    #[inline]
    pub(super) fn page_mut(&mut self, page: u32) -> &mut [u64] {
        let start = page as usize % PAGES_PER_CHUNK * PAGE_ENTRIES;
        &mut self.chunks[page as usize / PAGES_PER_CHUNK][start..start + PAGE_ENTRIES]
    }

    /// Returns an empty pool with the next era.
    pub(super) fn cleared(&self) -> Self {
        Self { era: self.era + 1, ..Self::default() }
    }

    /// Returns the place of an entry of a page, among all entries of all pages.
    #[inline]
    pub(super) fn place(&self, page: u32, entry: usize) -> u64 {
        (self.era << PLACE_BITS) + u64::from(page) * PAGE_ENTRIES as u64 + entry as u64
    }

    /// Returns the entry at a place; `None` if the index was cleared since.
    #[inline]
    pub(super) fn entry_mut(&mut self, place: u64) -> Option<&mut u64> {
        let place = place.checked_sub(self.era << PLACE_BITS)?;
        self.chunks.get_mut((place / ENTRIES_PER_CHUNK) as usize)?.get_mut((place % ENTRIES_PER_CHUNK) as usize)
    }

    /// Prefetches the entry at a place into the CPU cache.
    #[inline]
    pub(super) fn prefetch(&self, place: u64) {
        let place = place & ((1 << PLACE_BITS) - 1);
        if let Some(chunk) = self.chunks.get((place / ENTRIES_PER_CHUNK) as usize) {
            prefetch(chunk, (place % ENTRIES_PER_CHUNK) as usize);
        }
    }

    /// Reserves memory for `pages` more pages.
    pub(super) fn reserve(&mut self, pages: usize) -> Result<()> {
        while self.chunks.len() * PAGES_PER_CHUNK < self.used as usize + pages {
            self.chunks.push(ZeroedSlice::new("hold the index of the rows on SSD", PAGES_PER_CHUNK * PAGE_ENTRIES)?);
        }
        Ok(())
    }

    /// Takes a page without entries.
    pub(super) fn take(&mut self) -> u32 {
        let page = self.take_unfilled();
        self.page_mut(page).fill(EMPTY);
        page
    }

    /// Takes a page with unspecified contents.
    pub(super) fn take_unfilled(&mut self) -> u32 {
        let page = self.used;
        if page as usize == self.chunks.len() * PAGES_PER_CHUNK {
            self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        }
        self.used += 1;
        page
    }
}
