//! The memory of an index's entries: pages of one pool, so that growing leaves no holes in the heap.

use crate::error::Result;
use crate::mapping::ZeroedSlice;
use crate::prefetch::prefetch;

/// No entry. It is larger than every entry, because no location has all bits set.
pub(super) const EMPTY: u64 = u64::MAX;
/// Entries of a page.
pub(super) const PAGE_ENTRIES: usize = 128;
/// Pages that are asked from the system at once: 32 MiB in a mapping of their own, in huge pages. What is not used costs no memory. In the
/// heap, what stays for good would leave holes between what comes and goes.
const PAGES_PER_CHUNK: usize = 32 << 10;
const ENTRIES_PER_CHUNK: u64 = (PAGES_PER_CHUNK * PAGE_ENTRIES) as u64;

/// Pages of entries.
#[derive(Debug, Default)]
pub(super) struct IndexPages {
    chunks: Vec<ZeroedSlice<u64>>,
    /// Pages that were taken.
    used: u32,
    /// How often the index was cleared, so that no place of before is taken for one of now.
    era: u64,
}

/// A place has the number of an entry in so many bits, and the era above them.
const PLACE_BITS: u32 = 40;

impl IndexPages {
    /// Bytes of the pages that were taken.
    pub(super) fn bytes(&self) -> usize {
        self.used as usize * PAGE_ENTRIES * 8
    }

    /// Pages that there is memory for.
    #[cfg(test)]
    pub(super) fn reserved_pages(&self) -> usize {
        self.chunks.len() * PAGES_PER_CHUNK
    }

    /// Pages that were taken.
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

    /// No pages, of the era after these.
    pub(super) fn cleared(&self) -> Self {
        Self { era: self.era + 1, ..Self::default() }
    }

    /// The place of an entry of a page, among all entries of all pages.
    #[inline]
    pub(super) fn place(&self, page: u32, entry: usize) -> u64 {
        (self.era << PLACE_BITS) + u64::from(page) * PAGE_ENTRIES as u64 + entry as u64
    }

    /// The entry at a place; `None` where the index was cleared since.
    #[inline]
    pub(super) fn entry_mut(&mut self, place: u64) -> Option<&mut u64> {
        let place = place.checked_sub(self.era << PLACE_BITS)?;
        self.chunks.get_mut((place / ENTRIES_PER_CHUNK) as usize)?.get_mut((place % ENTRIES_PER_CHUNK) as usize)
    }

    /// Start to load the entry at a place into the processor's cache.
    #[inline]
    pub(super) fn prefetch(&self, place: u64) {
        let place = place & ((1 << PLACE_BITS) - 1);
        if let Some(chunk) = self.chunks.get((place / ENTRIES_PER_CHUNK) as usize) {
            prefetch(chunk, (place % ENTRIES_PER_CHUNK) as usize);
        }
    }

    /// Have memory for `pages` more to be taken.
    pub(super) fn reserve(&mut self, pages: usize) -> Result<()> {
        while self.chunks.len() * PAGES_PER_CHUNK < self.used as usize + pages {
            self.chunks.push(ZeroedSlice::new("hold the index of the rows on SSD", PAGES_PER_CHUNK * PAGE_ENTRIES)?);
        }
        Ok(())
    }

    /// Take a page without entries.
    pub(super) fn take(&mut self) -> u32 {
        let page = self.take_unfilled();
        self.page_mut(page).fill(EMPTY);
        page
    }

    /// Take a page with any contents.
    pub(super) fn take_unfilled(&mut self) -> u32 {
        let page = self.used;
        if page as usize == self.chunks.len() * PAGES_PER_CHUNK {
            self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        }
        self.used += 1;
        page
    }
}
