//! Which pages of a mapped file were in memory when they were looked at last.
//!
//! Touching a page that is not in memory reads it from the disk, and the next one only after that. So a lookup first finds the pages that
//! it cannot be sure of and asks for all of them together. A page that was seen in memory is taken to be there for two *generations*. A
//! generation ends when pages had to be read although they were taken to be there: then the system takes pages back, and those that
//! nobody used lately may be gone.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page for this bookkeeping. The system's pages may be larger.
pub(super) const PAGE_BITS: u32 = 12;

/// One bit a page in each of two generations.
#[derive(Debug)]
pub(super) struct Pages {
    seen: [Box<[AtomicU64]>; 2],
    always: bool,
}

impl Pages {
    /// Of a file of so many bytes. With `always` its bytes cannot leave memory.
    pub(super) fn new(bytes: usize, always: bool) -> Self {
        let words = if always { 0 } else { (bytes >> PAGE_BITS) / 64 + 1 };
        let zeros = || (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { seen: [zeros(), zeros()], always }
    }

    /// The words of both generations, a bit for each page of the file; null where all pages are always near.
    pub(super) fn words(&self) -> [*const AtomicU64; 2] {
        if self.always { [std::ptr::null(); 2] } else { [self.seen[0].as_ptr(), self.seen[1].as_ptr()] }
    }

    /// Whether the pages of a range that is no longer than a row were seen lately.
    #[inline]
    pub(super) fn are_near(&self, start: usize, bytes: usize, generation: usize) -> bool {
        let (first, last) = (start >> PAGE_BITS, (start + bytes.max(1) - 1) >> PAGE_BITS);
        self.always || (first..=last).all(|page| self.is_near(page, generation))
    }

    #[inline]
    fn is_near(&self, page: usize, generation: usize) -> bool {
        let (word, bit) = (page / 64, 1_u64 << (page % 64));
        let (now, before) = (&self.seen[generation & 1], &self.seen[(generation + 1) & 1]);
        if now[word].load(Ordering::Relaxed) & bit != 0 {
            return true;
        }
        let was = before[word].load(Ordering::Relaxed) & bit != 0;
        if was {
            now[word].fetch_or(bit, Ordering::Relaxed);
        }
        was
    }

    /// The pages of a range are in memory.
    pub(super) fn see(&self, start: usize, bytes: usize, generation: usize) {
        if self.always {
            return;
        }
        for page in start >> PAGE_BITS..=(start + bytes.max(1) - 1) >> PAGE_BITS {
            self.seen[generation & 1][page / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }

    /// Begin `generation`: forget the pages that were seen in the one before the last.
    pub(super) fn begin(&self, generation: usize) {
        self.seen[generation & 1].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_near_for_two_generations_and_longer_where_it_is_used() {
        let pages = Pages::new(1 << 20, false);
        assert!(!pages.are_near(5000, 8, 0));
        pages.see(4090, 10, 0);
        assert!(pages.are_near(4090, 10, 0) && pages.are_near(0, 1, 0) && !pages.are_near(8192, 1, 0));
        pages.begin(1);
        assert!(pages.are_near(0, 1, 1), "it was seen in the generation before");
        pages.begin(2);
        assert!(pages.are_near(0, 1, 2), "it was used in the generation before");
        assert!(!pages.are_near(4096, 1, 2), "nobody used it");
        pages.begin(3);
        pages.begin(4);
        assert!(!pages.are_near(0, 1, 4));
    }

    #[test]
    fn bytes_that_cannot_leave_memory_are_always_near() {
        assert!(Pages::new(100, true).are_near(0, 100, 7));
    }
}
