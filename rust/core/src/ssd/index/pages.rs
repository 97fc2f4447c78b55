//! The memory of an index's entries: pages of one pool, so that growing leaves no holes in the heap.

use crate::error::Result;
use crate::memory::zeros;

/// No entry. It is larger than every entry, because no location has all bits set.
pub(super) const EMPTY: u64 = u64::MAX;
/// Entries of a page.
pub(super) const PAGE: usize = 128;
/// Pages that are asked from the system at once: 33 MiB. That is more than any allocator keeps in its heap, where what stays for good
/// leaves holes between what comes and goes. It comes untouched from the system, so that what is not used costs no memory.
const PAGES_PER_CHUNK: usize = 33 << 10;

/// Pages of entries.
#[derive(Debug, Default)]
pub(super) struct Pages {
    chunks: Vec<Box<[u64]>>,
    /// Pages that were taken.
    used: u32,
}

impl Pages {
    /// Bytes of the pages that were taken.
    pub(super) fn bytes(&self) -> usize {
        self.used as usize * PAGE * 8
    }

    /// Pages that there is memory for.
    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.chunks.len() * PAGES_PER_CHUNK
    }

    /// Pages that were taken.
    pub(super) fn used(&self) -> usize {
        self.used as usize
    }

    #[inline]
    pub(super) fn page(&self, page: u32) -> &[u64] {
        let start = page as usize % PAGES_PER_CHUNK * PAGE;
        &self.chunks[page as usize / PAGES_PER_CHUNK][start..start + PAGE]
    }

    #[inline]
    pub(super) fn page_mut(&mut self, page: u32) -> &mut [u64] {
        let start = page as usize % PAGES_PER_CHUNK * PAGE;
        &mut self.chunks[page as usize / PAGES_PER_CHUNK][start..start + PAGE]
    }

    /// Have memory for `pages` more to be taken.
    pub(super) fn reserve(&mut self, pages: usize) -> Result<()> {
        while self.chunks.len() * PAGES_PER_CHUNK < self.used as usize + pages {
            let chunk = zeros("hold the index of the rows on SSD", PAGES_PER_CHUNK * PAGE)?;
            self.chunks.push(chunk.into_boxed_slice());
        }
        Ok(())
    }

    /// Take a page without entries.
    pub(super) fn take(&mut self) -> u32 {
        let page = self.take_as_it_is();
        self.page_mut(page).fill(EMPTY);
        page
    }

    /// Take a page with any contents.
    pub(super) fn take_as_it_is(&mut self) -> u32 {
        let page = self.used;
        if page as usize == self.chunks.len() * PAGES_PER_CHUNK {
            self.reserve(1).unwrap_or_else(|refused| panic!("{refused}"));
        }
        self.used += 1;
        page
    }
}
