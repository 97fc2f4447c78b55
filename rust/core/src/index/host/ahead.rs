//! Lookup of the slots of many ids.

use std::hint::select_unpredictable;

use super::super::hash::IdHash;
use super::{IndexLine, following, home};
use crate::prefetch::prefetch;
use crate::simd::InstructionSet;
use crate::types::{CacheSlot, Id};

/// Distance, in ids, at which [`slots_ahead`] prefetches the line of an id.
const AHEAD: usize = 64;
/// Distance, in ids, at which it prefetches the line again, because a CPU drops some of many prefetches. It costs
/// nearly nothing for a line in the cache.
const ASKED_AGAIN: usize = 16;
/// Number of queued ids whose home line does not have them and was passed, before half of them are looked up together
/// in a later line. The latest prefetches complete in the meantime, and are used with the other half.
const PAST: usize = 64;
/// Distance, in ids, at which [`slots_past`] prefetches a line again.
const PAST_AGAIN: usize = 6;

/// Writes the slot of `ids[i]` to `slots[i]`, or `NO_SLOT` if the lines do not have the id. There must be at least one
/// line. Lines are prefetched. They may come from a file: for any contents, this terminates if a line states that no id
/// has passed it.
pub(crate) fn slots_of(hash: IdHash, lines: &[IndexLine], ids: &[Id], slots: &mut [CacheSlot]) {
    match InstructionSet::best() {
        // SAFETY: `InstructionSet::best` has checked that the CPU has AVX-512 F.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { slots_at_once(hash, lines, ids, slots) },
        _ => slots_ahead(hash, lines, ids, slots, IndexLine::tag),
    }
}

/// Like [`slots_ahead`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn slots_at_once(hash: IdHash, lines: &[IndexLine], ids: &[Id], slots: &mut [CacheSlot]) {
    slots_ahead(hash, lines, ids, slots, |line, id| line.tag_at_once(id));
}

/// Looks up `ids`, with `NO_SLOT` for missing ones. `tag_of` looks an id up in one line. Lines are prefetched [`AHEAD`]
/// ids ahead.
#[inline(always)]
#[allow(clippy::inline_always)] // The caller is compiled for a specific instruction set, and this with it.
pub(super) fn slots_ahead(
    hash: IdHash,
    lines: &[IndexLine],
    ids: &[Id],
    slots: &mut [CacheSlot],
    tag_of: impl Fn(&IndexLine, Id) -> u32,
) {
    let mut homes = [0; AHEAD];
    for (id, ahead) in ids.iter().zip(&mut homes) {
        *ahead = home(hash, lines.len(), *id);
        prefetch(lines, *ahead);
    }
    // Positions of ids to look up in a later line, and those lines, which are being prefetched: oldest first.
    let mut past = [(0, 0); PAST];
    let mut waiting = 0;
    for (done, &id) in ids.iter().enumerate() {
        let ahead = home(hash, lines.len(), ids[(done + AHEAD).min(ids.len() - 1)]);
        prefetch(lines, ahead);
        prefetch(lines, homes[(done + ASKED_AGAIN) % AHEAD]);
        let line = std::mem::replace(&mut homes[done % AHEAD], ahead);
        let here = &lines[line];
        let tag = tag_of(here, id);
        slots[done] = tag.wrapping_sub(1);
        // Branchless, because it is unpredictable which ids need a further lookup. The others prefetch the line ahead
        // again.
        let goes_on = (tag == 0) & (here.passed() != 0);
        let next = following(line, lines.len());
        prefetch(lines, select_unpredictable(goes_on, next, ahead));
        past[waiting] = (done, next);
        waiting += usize::from(goes_on);
        // If all of these ids need a further lookup, no place is free yet.
        while waiting == PAST {
            waiting = slots_past(lines, ids, slots, &mut past, PAST / 2);
        }
    }
    while waiting > 0 {
        waiting = slots_past(lines, ids, slots, &mut past[..waiting], waiting.div_ceil(2));
    }
}

/// Looks up the first `count` of the ids at some positions, each in one line. Those that may be in the next line are
/// moved behind the others, which were prefetched earlier, and all move to the front. Returns their number.
#[inline(never)]
fn slots_past(
    lines: &[IndexLine],
    ids: &[Id],
    slots: &mut [CacheSlot],
    past: &mut [(usize, usize)],
    count: usize,
) -> usize {
    let mut further = 0;
    for at in 0..count {
        if let Some((_, later)) = past.get(at + PAST_AGAIN) {
            prefetch(lines, *later);
        }
        let (position, line) = past[at];
        let here = &lines[line];
        let tag = here.tag(ids[position]);
        slots[position] = tag.wrapping_sub(1);
        if tag == 0 && here.passed() != 0 {
            let next = following(line, lines.len());
            prefetch(lines, next);
            past[further] = (position, next);
            further += 1;
        }
    }
    past.rotate_left(count);
    past.len() - (count - further)
}
