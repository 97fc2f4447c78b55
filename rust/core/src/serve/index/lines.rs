//! The lines of an index: a hash table whose entries name places, and hold 16 bits of the hash of an id instead of the id.

use super::super::files::Place;
use crate::index::IdHash;
use crate::prefetch::prefetch;
use crate::types::Id;

/// Entries of a line.
pub(super) const WIDTH: usize = 10;
/// Lines are made for this share of their entries, in percent. What does not fit a line goes on to the next one.
const FULL_PERCENT: usize = 75;

/// A cache line of entries. The entries in use come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line {
    /// 16 bits of the hash of each id, its *print*.
    prints: [u16; WIDTH],
    /// The place of each id plus one; 0 where there is no entry.
    tags: [u32; WIDTH],
    /// How many ids lie past this line although their home is this line or one before it. Where it is 0, nobody has to look further.
    passed: u32,
}

impl Line {
    /// A bit for each entry in use whose print is `print`.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[allow(unsafe_code)]
    fn matches(&self, print: u16) -> u32 {
        use std::arch::x86_64::{_mm_cmpeq_epi16, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set1_epi16};
        // SAFETY: a line has 64 bytes, of which the first 32 are loaded. Every processor of this architecture has SSE2.
        let mask = unsafe {
            let line: *const std::arch::x86_64::__m128i = (&raw const *self).cast();
            let wanted = _mm_set1_epi16(print.cast_signed());
            let first = _mm_cmpeq_epi16(_mm_loadu_si128(line), wanted);
            let second = _mm_cmpeq_epi16(_mm_loadu_si128(line.add(1)), wanted);
            _mm_movemask_epi8(_mm_packs_epi16(first, second))
        };
        mask.cast_unsigned() & ((1 << WIDTH) - 1)
    }

    /// A bit for each entry in use whose print is `print`.
    #[cfg(not(target_arch = "x86_64"))]
    #[inline]
    fn matches(&self, print: u16) -> u32 {
        (0..WIDTH).fold(0, |mask, entry| mask | u32::from(self.prints[entry] == print) << entry)
    }

    fn len(&self) -> usize {
        self.tags.iter().position(|&tag| tag == 0).unwrap_or(WIDTH)
    }
}

/// Where an id belongs: the number of its home line, and its print.
#[derive(Clone, Copy, Debug)]
pub(super) struct Home {
    line: usize,
    print: u16,
}

impl Home {
    /// The home line is `hash * lines / 2^64` (Lemire, "Fast random integer generation in an interval", 2019).
    #[inline]
    pub(super) fn of(hash: IdHash, lines: usize, id: Id) -> Self {
        let hash = hash.of(id);
        Self { line: ((u128::from(hash) * lines as u128) >> 64) as usize, print: (hash >> 20) as u16 }
    }

    #[inline]
    pub(super) fn prefetch(self, lines: &[Line]) {
        prefetch(lines, self.line);
    }
}

/// How many lines hold so many ids.
pub(super) fn lines_for(ids: u64) -> u64 {
    ids.saturating_mul(100).div_ceil((WIDTH * FULL_PERCENT) as u64).max(1)
}

/// The first place whose print is that of the id; [`Place::NONE`] where there is none. Another entry may have the same print.
#[inline]
pub(super) fn first(lines: &[Line], home: Home) -> Place {
    let here = &lines[home.line];
    let mask = here.matches(home.print);
    if mask != 0 {
        let tag = here.tags[mask.trailing_zeros() as usize];
        // An entry that is not in use holds zeros, as a print may.
        return Place(tag.wrapping_sub(1));
    }
    if here.passed == 0 { Place::NONE } else { find(lines, home, |_| true) }
}

/// The first place whose print is that of the id and that `is_it`; [`Place::NONE`] where there is none.
pub(super) fn find(lines: &[Line], home: Home, mut is_it: impl FnMut(Place) -> bool) -> Place {
    let mut line = home.line;
    // However a file was damaged, no line is looked at twice.
    for _ in 0..lines.len() {
        let here = &lines[line];
        let mut mask = here.matches(home.print);
        while mask != 0 {
            let tag = here.tags[mask.trailing_zeros() as usize];
            if tag != 0 && is_it(Place(tag - 1)) {
                return Place(tag - 1);
            }
            mask &= mask - 1;
        }
        if here.passed == 0 {
            return Place::NONE;
        }
        line = if line + 1 == lines.len() { 0 } else { line + 1 };
    }
    Place::NONE
}

/// Add an entry. Fewer entries than [`lines_for`] was asked for are there, so that one is free.
pub(super) fn insert(lines: &mut [Line], home: Home, place: Place) {
    let mut line = home.line;
    loop {
        let here = &mut lines[line];
        let len = here.len();
        if len < WIDTH {
            here.prints[len] = home.print;
            here.tags[len] = place.0 + 1;
            return;
        }
        here.passed += 1;
        line = if line + 1 == lines.len() { 0 } else { line + 1 };
    }
}
