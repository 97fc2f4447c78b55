//! Insertion of many ids.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_cmpeq_epi64_mask, _mm512_load_si512, _mm512_set1_epi64, _mm512_test_epi32_mask};

use super::super::hash::IdHash;
use super::{IndexLine, SlotIndex, WIDTH, following, home};
use crate::prefetch::prefetch;
use crate::simd::InstructionSet;
use crate::types::{CacheSlot, Id};

/// Distance, in ids, at which the line of an id is prefetched.
const AHEAD: usize = 64;
/// Distance, in ids, at which the next line is prefetched if that line is full.
const FOLLOWING_AHEAD: usize = 16;

/// The result of a lookup in a line.
struct LineLookup {
    /// True if the id is in the line.
    has: bool,
    /// Number of entries in use.
    len: usize,
}

impl IndexLine {
    /// Puts an id into a free entry.
    #[inline]
    fn set(&mut self, entry: usize, id: Id, tag: u32) {
        self.ids[entry] = id;
        self.tags[entry] = tag;
    }

    fn look(&self, id: Id) -> LineLookup {
        let len = self.len();
        LineLookup { has: self.ids[..len].contains(&id), len }
    }

    /// Like `look`, for all entries in parallel.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn look_at_once(&self, id: Id) -> LineLookup {
        // SAFETY: a line has 64 bytes and is aligned to 64.
        let line = unsafe { _mm512_load_si512((&raw const *self).cast()) };
        let equal = u32::from(_mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(id)));
        // The tags of the entries follow the ids, each of which has two words of 32 bits. Entries in use come first.
        let used = (u32::from(_mm512_test_epi32_mask(line, line)) >> (2 * WIDTH)) & ((1 << WIDTH) - 1);
        LineLookup { has: equal & used != 0, len: used.trailing_ones() as usize }
    }
}

impl SlotIndex {
    /// Adds ids at slots, none of which is `NO_SLOT`, up to the first id that is present. `ids` and `slots` are `[n]`.
    /// Returns the number added. Lines are prefetched.
    ///
    /// # Panics
    /// As [`SlotIndex::insert`], and if `ids` and `slots` differ in length.
    pub fn insert_new_batch(&mut self, ids: &[Id], slots: &[CacheSlot]) -> usize {
        assert_eq!(ids.len(), slots.len(), "slots and ids must have the same length");
        if ids.is_empty() {
            return 0;
        }
        self.reserve(ids.len()).unwrap_or_else(|refused| panic!("{refused}"));
        let (hash, lines) = (self.hash, self.lines_mut());
        let added = match InstructionSet::best() {
            // SAFETY: `InstructionSet::best` has checked that the CPU has AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { put_at_once(hash, lines, ids, slots) },
            _ => put_ahead(hash, lines, ids, slots, IndexLine::look),
        };
        self.len += added;
        added
    }
}

/// Like [`put_ahead`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn put_at_once(hash: IdHash, lines: &mut [IndexLine], ids: &[Id], slots: &[CacheSlot]) -> usize {
    put_ahead(hash, lines, ids, slots, |line, id| line.look_at_once(id))
}

/// Adds ids up to the first one that is present, and returns the number added. All of them must fit.
#[inline(always)]
#[allow(clippy::inline_always)] // The caller is compiled for a specific instruction set, and this with it.
fn put_ahead(
    hash: IdHash,
    lines: &mut [IndexLine],
    ids: &[Id],
    slots: &[CacheSlot],
    look: impl Fn(&IndexLine, Id) -> LineLookup,
) -> usize {
    let count = lines.len();
    let mut homes = [0; AHEAD];
    for (id, ahead) in ids.iter().zip(&mut homes) {
        *ahead = home(hash, count, *id);
        prefetch(lines, *ahead);
    }
    for (done, (&id, &slot)) in ids.iter().zip(slots).enumerate() {
        let ahead = home(hash, count, ids[(done + AHEAD).min(ids.len() - 1)]);
        prefetch(lines, ahead);
        let near = homes[(done + FOLLOWING_AHEAD) % AHEAD];
        if lines[near].is_full() {
            prefetch(lines, following(near, count));
        }
        let first = std::mem::replace(&mut homes[done % AHEAD], ahead);
        let LineLookup { has, len } = look(&lines[first], id);
        if has || len == WIDTH && !put_past(lines, first, id, slot + 1, &look) {
            return done;
        }
        if len < WIDTH {
            lines[first].set(len, id, slot + 1);
        }
    }
    ids.len()
}

/// Adds an id whose home is full and does not have it. Returns false, without a change, if a later line has it.
#[inline(always)]
#[allow(clippy::inline_always)] // As `put_ahead`.
fn put_past(
    lines: &mut [IndexLine],
    first: usize,
    id: Id,
    tag: u32,
    look: &impl Fn(&IndexLine, Id) -> LineLookup,
) -> bool {
    let count = lines.len();
    let mut line = following(first, count);
    loop {
        let LineLookup { has, len } = look(&lines[line], id);
        if has {
            return false;
        }
        if len < WIDTH {
            lines[line].set(len, id, tag);
            break;
        }
        line = following(line, count);
    }
    let mut passed = first;
    while passed != line {
        lines[passed].tags[WIDTH] += 1;
        passed = following(passed, count);
    }
    true
}

/// The results of all implementations of a lookup in a line: true if it has the id, and its number of entries.
#[cfg(test)]
pub(super) fn looks_of(line: &IndexLine, id: Id) -> Vec<(bool, usize)> {
    let mut looks = vec![line.look(id)];
    #[cfg(target_arch = "x86_64")]
    if InstructionSet::best() == InstructionSet::Avx512 {
        // SAFETY: the CPU has AVX-512 F.
        looks.push(unsafe { line.look_at_once(id) });
    }
    looks.into_iter().map(|LineLookup { has, len }| (has, len)).collect()
}
