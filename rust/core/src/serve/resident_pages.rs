//! Tracks the pages of a mapped file that were recently seen in memory.
//!
//! Touching a page that is not in memory reads it from disk, one page after the other. So a lookup first finds the
//! pages that may not be resident and prefetches all of them together. A page that was seen in memory is assumed
//! resident for two *generations*. A generation ends when pages had to be read although they were assumed resident: the
//! OS then reclaims pages, and those that were not used recently may be gone.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Log2 of the page size used for this bookkeeping. The OS may use larger pages.
pub(super) const PAGE_BITS: u32 = 12;

/// One bit per page in each of two generations.
#[derive(Debug)]
pub(super) struct ResidentPages {
    seen: [Box<[AtomicU64]>; 2],
    /// The pages of all weights.
    weights: Range<usize>,
    /// True if all of these were seen.
    all_weights: [AtomicBool; 2],
    always_resident: bool,
}

impl ResidentPages {
    /// Creates the bitmaps of a file of `bytes` bytes with weights in the range `weights`. With `always_resident` its
    /// bytes cannot leave memory.
    pub(super) fn new(bytes: usize, weights: &Range<usize>, always_resident: bool) -> Self {
        let words = if always_resident { 0 } else { (bytes >> PAGE_BITS) / 64 + 1 };
        let zeros = || (0..words).map(|_| AtomicU64::new(0)).collect();
        let weights = weights.start >> PAGE_BITS..((weights.end.max(1) - 1) >> PAGE_BITS) + 1;
        Self { seen: [zeros(), zeros()], weights, all_weights: [false.into(), false.into()], always_resident }
    }

    /// The bitmaps of both generations, with a bit per page of the file; null if all pages are always resident.
    pub(super) fn words(&self) -> [*const AtomicU64; 2] {
        if self.always_resident { [std::ptr::null(); 2] } else { [self.seen[0].as_ptr(), self.seen[1].as_ptr()] }
    }

    /// True if the pages of all weights were seen in this generation.
    pub(super) fn have_all_weights(&self, generation: usize) -> bool {
        self.always_resident || self.all_weights[generation & 1].load(Ordering::Relaxed)
    }

    /// True if the pages of a range that is no longer than a row were recently seen.
    #[inline]
    pub(super) fn are_resident(&self, start: usize, bytes: usize, generation: usize) -> bool {
        let (first, last) = (start >> PAGE_BITS, (start + bytes.max(1) - 1) >> PAGE_BITS);
        self.always_resident || (first..=last).all(|page| self.is_resident(page, generation))
    }

    #[inline]
    fn is_resident(&self, page: usize, generation: usize) -> bool {
        let (word, bit) = (page / 64, 1_u64 << (page % 64));
        let (now, before) = (&self.seen[generation & 1], &self.seen[(generation + 1) & 1]);
        if now[word].load(Ordering::Relaxed) & bit != 0 {
            return true;
        }
        let was = before[word].load(Ordering::Relaxed) & bit != 0;
        if was {
            self.mark(page, generation);
        }
        was
    }

    fn mark(&self, page: usize, generation: usize) {
        let seen = &self.seen[generation & 1];
        seen[page / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
        let has_all = |word: usize| seen[word].load(Ordering::Relaxed) & self.mask(word) == self.mask(word);
        if has_all(page / 64) && (self.weights.start / 64..=(self.weights.end - 1) / 64).all(has_all) {
            self.all_weights[generation & 1].store(true, Ordering::Relaxed);
        }
    }

    /// The bits of a word that are pages of weights.
    fn mask(&self, word: usize) -> u64 {
        let below = |page: usize| match page.saturating_sub(word * 64) {
            bits @ 0..64 => (1_u64 << bits) - 1,
            _ => u64::MAX,
        };
        below(self.weights.end) & !below(self.weights.start)
    }

    /// Records that the pages of a range are in memory.
    pub(super) fn mark_resident(&self, start: usize, bytes: usize, generation: usize) {
        if self.always_resident {
            return;
        }
        for page in start >> PAGE_BITS..=(start + bytes.max(1) - 1) >> PAGE_BITS {
            self.mark(page, generation);
        }
    }

    /// Starts `generation`: clears the pages of the generation before the previous one.
    pub(super) fn begin_generation(&self, generation: usize) {
        self.seen[generation & 1].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.all_weights[generation & 1].store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_resident_for_two_generations_and_longer_if_used() {
        let pages = ResidentPages::new(1 << 20, &(0..1 << 20), false);
        assert!(!pages.are_resident(5000, 8, 0));
        pages.mark_resident(4090, 10, 0);
        assert!(pages.are_resident(4090, 10, 0) && pages.are_resident(0, 1, 0) && !pages.are_resident(8192, 1, 0));
        pages.begin_generation(1);
        assert!(pages.are_resident(0, 1, 1), "it was seen in the generation before");
        pages.begin_generation(2);
        assert!(pages.are_resident(0, 1, 2), "it was used in the generation before");
        assert!(!pages.are_resident(4096, 1, 2), "it was not used");
        pages.begin_generation(3);
        pages.begin_generation(4);
        assert!(!pages.are_resident(0, 1, 4));
    }

    #[test]
    fn bytes_that_cannot_leave_memory_are_always_resident() {
        let pages = ResidentPages::new(100, &(0..100), true);
        assert!(pages.are_resident(0, 100, 7) && pages.have_all_weights(7));
    }

    #[test]
    fn all_weights_are_resident_once_each_of_their_pages_was_seen() {
        const PAGE: usize = 1 << PAGE_BITS;
        for (first, last) in [(0, 0), (3, 5), (0, 63), (60, 70), (64, 127), (10, 199), (1, 128)] {
            let pages = ResidentPages::new(200 * PAGE, &(first * PAGE + 7..last * PAGE + 9), false);
            for page in (first..=last).rev() {
                assert!(!pages.have_all_weights(0), "page {page} of {first} to {last} was not seen");
                pages.mark_resident(page * PAGE, 8, 0);
            }
            assert!(pages.have_all_weights(0) && !pages.have_all_weights(1));
            pages.begin_generation(1);
            assert!(!pages.have_all_weights(1));
            assert!(
                (first..=last).all(|page| pages.are_resident(page * PAGE, 8, 1)),
                "they were seen in the generation before"
            );
            assert!(pages.have_all_weights(1));
            pages.begin_generation(2);
            assert!(!pages.have_all_weights(2));
        }
    }
}
