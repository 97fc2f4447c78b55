//! The distinct ids of a batch, and their occurrences.
#![allow(unsafe_code)]

use std::hint::select_unpredictable;

use super::hash::IdHash;
use crate::runtime::simd::prefetch;
use crate::types::Id;

/// The distinct ids of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DedupedIds {
    /// The distinct ids, in the order of their first occurrence: `[U]`.
    pub unique: Vec<Id>,
    /// For each occurrence, the index of its id in `unique`: `[N]`.
    pub inverse: Vec<u32>,
}

/// Returns the distinct ids and the inverse of `ids`: `[N]` with N below 2³⁰. An [`IdDeduper`] does the same and keeps
/// its memory for the next batch.
pub fn dedupe(ids: &[Id]) -> DedupedIds {
    let mut deduped = DedupedIds::default();
    IdDeduper::default().dedupe(ids, &mut deduped);
    deduped
}

/// Distance, in ids, at which the table position of an id is prefetched.
const AHEAD: usize = 32;
/// Number of ids after which the fraction of new ids among them decides how the next ones are looked up.
const STRETCH: usize = 2048;
/// Number of table positions per id of a batch, before rounding up to a power of two.
const POSITIONS_PER_ID: usize = 2;
const LEAST_BITS: u32 = 6;
/// Exclusive upper bound of the number of ids of a batch.
const MAX_IDS: usize = 1 << 30;

/// Steps past their home positions that the ids of a batch may take before another hash is tried: this many per
/// processed id, and an initial allowance. Ids that were not chosen against the hash take one or two steps each.
const STEPS_AN_ID: usize = 8;
const STEPS_AT_FIRST: usize = 1 << 14;
/// Number of hashes to try. The last one is used to the end.
const HASHES: usize = 4;

/// Dedupes one batch after another in the same memory.
///
/// The ids pass once through a hash table with linear probing, which has 2 to 4 positions per id of the batch. A
/// position contains `base` plus the index of its id in `unique`. After each batch `base` moves past every number in
/// use, so that entries of earlier batches read as empty and nothing must be cleared. The hash is random. If many ids
/// collide nevertheless, the pass restarts with another hash, so the time for a batch never grows with the square of
/// its ids. The result is the same with every hash.
#[derive(Debug, Default)]
pub struct IdDeduper {
    table: Vec<u32>,
    base: u32,
    hash: IdHash,
}

impl IdDeduper {
    /// Replaces the contents of `deduped` with the distinct ids and the inverse of `ids`, which is `[N]`.
    ///
    /// # Panics
    /// If there are 2³⁰ ids or more.
    pub fn dedupe(&mut self, ids: &[Id], deduped: &mut DedupedIds) {
        assert!(ids.len() < MAX_IDS, "a batch of {} ids is too large: it must have fewer than 2^30", ids.len());
        for tried in 1..=HASHES {
            if self.pass(ids, deduped, tried == HASHES) {
                return;
            }
            self.hash = IdHash::random();
        }
    }

    /// Makes one pass through `ids`. Returns `false` if the pass was aborted because too many ids collide. With
    /// `to_the_end` it never aborts.
    fn pass(&mut self, ids: &[Id], deduped: &mut DedupedIds, to_the_end: bool) -> bool {
        let bits = ((ids.len() * POSITIONS_PER_ID).max(1).next_power_of_two().trailing_zeros()).max(LEAST_BITS);
        if self.table.len() < 1 << bits {
            self.table = vec![0; 1 << bits];
            self.base = 1;
        }
        if self.base > u32::MAX - ids.len() as u32 {
            self.table.fill(0);
            self.base = 1;
        }
        let DedupedIds { unique, inverse } = deduped;
        unique.clear();
        inverse.clear();
        // The pass always writes one id behind the last, so the capacity must exceed the possible number of distinct
        // ids by one.
        unique.reserve(ids.len() + 1);
        inverse.reserve(ids.len());
        let mut pass = DedupPass {
            ids,
            bits,
            base: self.base,
            hash: self.hash,
            table: &mut self.table[..1 << bits],
            unique: unique.spare_capacity_mut().as_mut_ptr().cast(),
            inverse: inverse.spare_capacity_mut().as_mut_ptr().cast(),
            found: 0,
            steps: 0,
        };
        let mut mostly_new = false;
        for begin in (0..ids.len()).step_by(STRETCH) {
            let (end, before) = ((begin + STRETCH).min(ids.len()), pass.found as usize);
            // SAFETY: the stretches cover `ids` once, in order. `unique` and `inverse` have reserved capacity. The
            // table contains zeros or values of earlier passes, and all of these are below `base`.
            unsafe {
                if mostly_new {
                    pass.stretch::<true>(begin, end);
                } else {
                    pass.stretch::<false>(begin, end);
                }
            }
            mostly_new = (pass.found as usize - before) * 8 > (end - begin) * 7;
            if !to_the_end && pass.steps > STEPS_AT_FIRST + STEPS_AN_ID * end {
                self.base += pass.found;
                return false;
            }
        }
        let found = pass.found;
        // SAFETY: the pass wrote `found` ids to `unique` and an index for each of `ids` to `inverse`.
        unsafe {
            unique.set_len(found as usize);
            inverse.set_len(ids.len());
        }
        self.base += found;
        true
    }
}

/// A pass over one batch.
struct DedupPass<'a> {
    ids: &'a [Id],
    bits: u32,
    base: u32,
    hash: IdHash,
    table: &'a mut [u32],
    unique: *mut Id,
    inverse: *mut u32,
    found: u32,
    /// Number of steps that ids took past their home positions.
    steps: usize,
}

impl DedupPass<'_> {
    /// Processes the ids `begin..end`. In most batches it is unpredictable whether an id is new, so this is decided
    /// without a branch. With `MOSTLY_NEW` there is a branch, which is faster if it nearly always goes one way.
    ///
    /// # Safety
    /// All ids before `begin` are processed, and those from `begin` on are not. `unique` has capacity for one id more
    /// than `ids` has, and `inverse` for as many. The table has 2^`bits` positions, and those with `base` or more
    /// contain `base` plus an index below `found`.
    unsafe fn stretch<const MOSTLY_NEW: bool>(&mut self, begin: usize, end: usize) {
        let (ids, bits, base, hash) = (self.ids, self.bits, self.base, self.hash);
        let mask = (1 << bits) - 1;
        let (mut found, mut steps) = (self.found, 0);
        for done in begin..end {
            prefetch(self.table, position(hash, ids[(done + AHEAD).min(ids.len() - 1)], bits));
            let id = ids[done];
            let mut at = position(hash, id, bits);
            // SAFETY: `at` has `bits` bits, and the table has 2^bits positions. `found` is at most `done`, so
            // `unique[found]` is within its capacity. It and all entries below it were written before they are read,
            // and no other is read.
            unsafe {
                self.unique.add(found as usize).write(id);
                let index = loop {
                    let entry = *self.table.get_unchecked(at);
                    let empty = entry < base;
                    if MOSTLY_NEW && empty {
                        *self.table.get_unchecked_mut(at) = base + found;
                        found += 1;
                        break found - 1;
                    }
                    // For an empty position this is the index of the id that was just written, which compares equal.
                    let index = select_unpredictable(empty, found, entry.wrapping_sub(base));
                    if self.unique.add(index as usize).read() == id {
                        *self.table.get_unchecked_mut(at) = base + index;
                        found += u32::from(empty);
                        break index;
                    }
                    at = (at + 1) & mask;
                    steps += 1;
                };
                self.inverse.add(done).write(index);
            }
        }
        self.found = found;
        self.steps += steps;
    }
}

/// The home position of an id in a table of 2^`bits` positions.
#[inline]
fn position(hash: IdHash, id: Id, bits: u32) -> usize {
    (hash.once(id) >> (64 - bits)) as usize
}

#[cfg(test)]
mod tests;
