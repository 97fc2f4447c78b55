//! Adding many ids at once.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm512_cmpeq_epi64_mask, _mm512_load_si512, _mm512_set1_epi64, _mm512_test_epi32_mask};

use super::super::hash::IdHash;
use super::{IndexLine, SlotIndex, WIDTH, following, home};
use crate::prefetch::prefetch;
use crate::simd::InstructionSet;
use crate::types::{CacheSlot, Id};

/// The line of an id is prefetched this many ids before its turn.
const AHEAD: usize = 64;
/// Where that line is full by then, the one after it is prefetched this many ids before.
const FOLLOWING_AHEAD: usize = 16;

/// What a line says of an id.
struct LineLookup {
    /// Whether the id is there.
    has: bool,
    /// How many entries are in use.
    len: usize,
}

impl IndexLine {
    /// Put an id into a free entry.
    #[inline]
    fn set(&mut self, entry: usize, id: Id, tag: u32) {
        self.ids[entry] = id;
        self.tags[entry] = tag;
    }

    fn look(&self, id: Id) -> LineLookup {
        let len = self.len();
        LineLookup { has: self.ids[..len].contains(&id), len }
    }

    /// Does what [`Line::look`] does, for all entries at once.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn look_at_once(&self, id: Id) -> LineLookup {
        // SAFETY: a line has 64 bytes and is aligned to 64.
        let line = unsafe { _mm512_load_si512((&raw const *self).cast()) };
        let equal = u32::from(_mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(id)));
        // The tags of the entries follow the ids, each of which is two words of 32 bits. Entries in use come first.
        let used = (u32::from(_mm512_test_epi32_mask(line, line)) >> (2 * WIDTH)) & ((1 << WIDTH) - 1);
        LineLookup { has: equal & used != 0, len: used.trailing_ones() as usize }
    }
}

impl SlotIndex {
    /// Add ids at slots, none of which is `NO_SLOT`, up to the first id that is present. `ids` and `slots` are `[n]`. The result is how many
    /// were added. Lines are prefetched.
    ///
    /// # Panics
    /// Panics as [`SlotIndex::insert`] does, and when `ids` and `slots` differ in length.
    pub fn insert_new_batch(&mut self, ids: &[Id], slots: &[CacheSlot]) -> usize {
        assert_eq!(ids.len(), slots.len(), "slots and ids must have the same length");
        if ids.is_empty() {
            return 0;
        }
        self.reserve(ids.len()).unwrap_or_else(|refused| panic!("{refused}"));
        let (hash, lines) = (self.hash, self.lines_mut());
        let added = match InstructionSet::best() {
            // SAFETY: `InstructionSet::best` found that the processor has AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { put_at_once(hash, lines, ids, slots) },
            _ => put_ahead(hash, lines, ids, slots, IndexLine::look),
        };
        self.len += added;
        added
    }
}

/// Does what [`put_ahead`] does, with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn put_at_once(hash: IdHash, lines: &mut [IndexLine], ids: &[Id], slots: &[CacheSlot]) -> usize {
    put_ahead(hash, lines, ids, slots, |line, id| line.look_at_once(id))
}

/// Add ids up to the first one that is present, and return how many were added. There is room for all of them.
#[inline(always)]
#[allow(clippy::inline_always)] // The caller is compiled for a certain instruction set, and this with it.
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

/// Add an id whose home is full and does not have it. False says that a later line has it, and that nothing has changed.
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

/// What each way to look at a line says of an id: whether it has it, and how many entries it has.
#[cfg(test)]
pub(super) fn looks_of(line: &IndexLine, id: Id) -> Vec<(bool, usize)> {
    let mut looks = vec![line.look(id)];
    #[cfg(target_arch = "x86_64")]
    if InstructionSet::best() == InstructionSet::Avx512 {
        // SAFETY: the processor has AVX-512 F.
        looks.push(unsafe { line.look_at_once(id) });
    }
    looks.into_iter().map(|LineLookup { has, len }| (has, len)).collect()
}
