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
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn model(ids: &[Id]) -> DedupedIds {
        let mut indexes = HashMap::new();
        let mut unique = Vec::new();
        let inverse = ids
            .iter()
            .map(|&id| {
                *indexes.entry(id).or_insert_with(|| {
                    unique.push(id);
                    unique.len() as u32 - 1
                })
            })
            .collect();
        DedupedIds { unique, inverse }
    }

    #[test]
    fn ids_keep_the_order_of_their_first_occurrence() {
        let deduped = dedupe(&[7, -1, 7, i64::MIN, 0, i64::MAX, -1, 0]);
        assert_eq!(deduped.unique, [7, -1, i64::MIN, 0, i64::MAX]);
        assert_eq!(deduped.inverse, [0, 1, 0, 2, 3, 4, 1, 3]);
        assert_eq!(dedupe(&[]), DedupedIds::default());
    }

    #[test]
    fn entries_of_earlier_batches_are_empty_after_the_base_wraps() {
        let mut deduper = IdDeduper::default();
        let mut deduped = DedupedIds::default();
        let ids: Vec<Id> = (0..200).map(|id| id % 60 - 30).collect();
        deduper.dedupe(&ids, &mut deduped);
        deduper.base = u32::MAX - 450;
        for _ in 0..20 {
            deduper.dedupe(&ids, &mut deduped);
            assert_eq!(deduped, model(&ids));
            deduper.dedupe(&ids[..7], &mut deduped);
            assert_eq!(deduped, model(&ids[..7]));
        }
        assert!(deduper.base < 10_000, "the base wrapped");
    }

    #[test]
    fn ids_with_one_home_are_distinguished() {
        let hash = IdHash::new(0x1234_5678_9abc_def1);
        let mut ids = chosen_against(hash, 1000);
        ids.extend([0, 5]);
        assert!(ids[..1000].iter().all(|&id| position(hash, id, 12) == 0), "all of them have home 0");
        let (mut deduper, mut deduped) = (IdDeduper { hash, ..IdDeduper::default() }, DedupedIds::default());
        assert!(deduper.pass(&ids, &mut deduped, true), "the pass ends under the hash with which they collide");
        assert_eq!(deduped, model(&ids));
    }

    /// Returns ids whose home is position 0 under `hash` in a table of any size: small multiples of the multiplier's
    /// inverse.
    fn chosen_against(hash: IdHash, count: u64) -> Vec<Id> {
        let inverse = (0..6).fold(1_u64, |x, _| x.wrapping_mul(2_u64.wrapping_sub(hash.multiplier().wrapping_mul(x))));
        let chosen = |k: u64| {
            let folded = k.wrapping_mul(inverse);
            (folded ^ (folded >> 32)) as Id
        };
        (0..count).map(chosen).collect()
    }

    #[test]
    fn ids_chosen_against_a_known_hash_take_no_more_steps_than_others() {
        for seed in [1, 0x1234_5678_9abc_def1, u64::MAX] {
            let hash = IdHash::new(seed);
            let ids = chosen_against(hash, 80_000);
            assert!(ids.iter().all(|&id| position(hash, id, 18) == 0), "all of them have home 0");
            let (mut deduper, mut deduped) = (IdDeduper { hash, ..IdDeduper::default() }, DedupedIds::default());
            let mut doubled = ids.clone();
            doubled.extend(ids.iter().rev());
            deduper.dedupe(&doubled, &mut deduped);
            assert_eq!(deduped, model(&doubled));
            assert_ne!(
                deduper.hash.multiplier(),
                hash.multiplier(),
                "it went on with another hash, under which they do not collide"
            );
            assert!(deduper.pass(&doubled, &mut deduped, false));
        }
    }

    #[test]
    fn ids_at_any_natural_stride_meet_as_seldom_as_random_ones() {
        let fibonacci = (0..85).scan((1_u64, 1_u64), |(one, two), _| {
            (*one, *two) = (*two, *one + *two);
            Some(*one)
        });
        let powers = (0..60).map(|bit| 1_u64 << bit).chain((0..19).map(|power| 10_u64.pow(power)));
        let mut deduped = DedupedIds::default();
        for stride in fibonacci.chain(powers).chain([3, 7, 60, 3600, 86_400, 4093, 65_537]) {
            let ids: Vec<Id> = (0..20_000_u64).map(|n| n.wrapping_mul(stride) as Id).collect();
            // A multiplier may match a stride by chance, but not three consecutive random ones.
            let mut deduper = IdDeduper::default();
            let ended = (1..HASHES).any(|_| {
                deduper.hash = IdHash::random();
                deduper.pass(&ids, &mut deduped, false)
            });
            assert!(ended, "stride {stride} under {:?}", deduper.hash);
        }
    }

    #[test]
    fn stretches_of_new_and_of_known_ids_alternate() {
        let ids: Vec<Id> = (0..40_000).map(|id| if id / 5000 % 2 == 0 { id * 7919 } else { id % 100 * 7919 }).collect();
        assert_eq!(dedupe(&ids), model(&ids));
    }

    proptest! {
        #[test]
        fn equals_a_map_batch_after_batch(
            batches in prop::collection::vec(
                prop::collection::vec(
                    prop_oneof![
                        4 => -20_i64..20,
                        2 => any::<i64>(),
                        1 => (0_i64..50).prop_map(|id| id << 32),
                        1 => (0_i64..50).prop_map(|id| id << 52),
                    ],
                    0..300,
                ),
                1..8,
            ),
        ) {
            let mut deduper = IdDeduper::default();
            let mut deduped = DedupedIds::default();
            for ids in &batches {
                deduper.dedupe(ids, &mut deduped);
                prop_assert_eq!(&deduped, &model(ids));
            }
        }
    }
}
