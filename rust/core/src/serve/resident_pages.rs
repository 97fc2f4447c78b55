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
mod tests;
