//! The distinct ids of a batch, and where each occurs.
#![allow(unsafe_code)]

use crate::prefetch::prefetch;
use crate::types::Id;

/// A batch's ids without repetition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deduped {
    /// Distinct ids in the order of their first occurrence: `[U]`.
    pub unique: Vec<Id>,
    /// For each occurrence the position of its id in `unique`: `[N]`.
    pub inverse: Vec<u32>,
}

/// Distinct ids and inverse of `ids`: `[N]`, N below 2³⁰. [`Deduper`] keeps its memory for the next batch.
pub fn dedupe(ids: &[Id]) -> Deduped {
    let mut deduped = Deduped::default();
    Deduper::default().dedupe(ids, &mut deduped);
    deduped
}

/// Ids whose places in the table are asked for ahead.
const BLOCK: usize = 32;
/// Table positions for each id of a batch, before rounding up to a power of two.
const ROOM: usize = 2;
const LEAST_BITS: u32 = 6;
/// Batches of at most this many ids.
const MOST: usize = 1 << 30;

/// Dedupes batch after batch in the same memory.
///
/// One pass of a hash table with linear probing, 2 to 4 positions an id of the batch. A position holds `base` plus the place of its
/// id in `unique`; `base` moves past every number in use after each batch, so that what is left of earlier ones reads as empty and
/// nothing is cleared.
#[derive(Debug, Default)]
pub struct Deduper {
    table: Vec<u32>,
    base: u32,
}

impl Deduper {
    /// Replaces the contents of `deduped` by the distinct ids and the inverse of `ids`: `[N]`.
    ///
    /// # Panics
    /// With 2³⁰ ids or more.
    pub fn dedupe(&mut self, ids: &[Id], deduped: &mut Deduped) {
        assert!(ids.len() < MOST, "a batch of {} ids is too large", ids.len());
        let bits = ((ids.len() * ROOM).max(1).next_power_of_two().trailing_zeros()).max(LEAST_BITS);
        if self.table.len() < 1 << bits {
            self.table = vec![0; 1 << bits];
            self.base = 1;
        }
        if self.base > u32::MAX - ids.len() as u32 {
            self.table.fill(0);
            self.base = 1;
        }
        let Deduped { unique, inverse } = deduped;
        unique.clear();
        inverse.clear();
        // One place more than there can be unique ids: `pass` writes behind the last.
        unique.reserve(ids.len() + 1);
        inverse.reserve(ids.len());
        let found = self.pass(ids, bits, unique.spare_capacity_mut().as_mut_ptr().cast(), inverse.as_mut_ptr());
        // SAFETY: `pass` wrote the first `found` ids and an inverse for each id, within the capacities reserved above.
        unsafe {
            unique.set_len(found);
            inverse.set_len(ids.len());
        }
        self.base += found as u32;
    }

    /// Writes the unique ids from `unique` on and an inverse for each id from `inverse` on; returns how many are unique.
    /// `unique` has room for one id more than `ids`, `inverse` for as many; the table has 2^`bits` positions or more.
    fn pass(&mut self, ids: &[Id], bits: u32, unique: *mut Id, inverse: *mut u32) -> usize {
        let table = &mut self.table[..1 << bits];
        let mask = (1 << bits) - 1;
        let base = self.base;
        let mut found = 0_u32;
        let mut done = 0;
        let mut at = [0_usize; BLOCK];
        let mut ahead = [0_usize; BLOCK];
        let place = |block: &[Id], at: &mut [usize; BLOCK], table: &[u32]| {
            for (id, at) in block.iter().zip(at) {
                *at = position(*id, bits);
                prefetch(table, *at);
            }
        };
        let mut blocks = ids.chunks(BLOCK);
        let mut next = blocks.next();
        place(next.unwrap_or_default(), &mut ahead, table);
        while let Some(block) = next {
            next = blocks.next();
            std::mem::swap(&mut at, &mut ahead);
            place(next.unwrap_or_default(), &mut ahead, table);
            for (&id, &home) in block.iter().zip(&at) {
                // SAFETY: `home` has `bits` bits, as has every `position` below, and the table 2^bits positions. `found` is at
                // most the ids done, so `unique[found]` is within its room and every `unique[..=found]` is written before it is
                // read: a position at or past `base` holds a place below `found`. `done` counts the ids.
                unsafe {
                    unique.add(found as usize).write(id);
                    let mut position = home;
                    let index = loop {
                        let held = *table.get_unchecked(position);
                        let empty = held < base;
                        // An empty position takes the place just written, which compares equal. No branch on `empty`: whether
                        // an id was seen before is a toss-up.
                        let index = if empty { found } else { held - base };
                        if unique.add(index as usize).read() == id {
                            *table.get_unchecked_mut(position) = base + index;
                            found += u32::from(empty);
                            break index;
                        }
                        position = (position + 1) & mask;
                    };
                    inverse.add(done).write(index);
                }
                done += 1;
            }
        }
        found as usize
    }
}

/// The home of an id in a table of 2^`bits` positions: the top of a product, upper halves folded in (ids may differ there only).
#[inline]
fn position(id: Id, bits: u32) -> usize {
    let id = id as u64;
    ((id ^ (id >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn model(ids: &[Id]) -> Deduped {
        let mut places = HashMap::new();
        let mut unique = Vec::new();
        let inverse = ids
            .iter()
            .map(|&id| {
                *places.entry(id).or_insert_with(|| {
                    unique.push(id);
                    unique.len() as u32 - 1
                })
            })
            .collect();
        Deduped { unique, inverse }
    }

    #[test]
    fn ids_keep_the_order_of_their_first_occurrence() {
        let deduped = dedupe(&[7, -1, 7, i64::MIN, 0, i64::MAX, -1, 0]);
        assert_eq!(deduped.unique, [7, -1, i64::MIN, 0, i64::MAX]);
        assert_eq!(deduped.inverse, [0, 1, 0, 2, 3, 4, 1, 3]);
        assert_eq!(dedupe(&[]), Deduped::default());
    }

    #[test]
    fn numbers_left_by_earlier_batches_read_as_empty_also_after_the_base_wraps() {
        let mut deduper = Deduper::default();
        let mut deduped = Deduped::default();
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
    fn ids_of_one_home_are_told_apart() {
        let home = position(0, 12);
        let ids: Vec<Id> = (0..).filter(|&id| position(id, 12) == home).take(1000).chain([0, 5]).collect();
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
            let mut deduper = Deduper::default();
            let mut deduped = Deduped::default();
            for ids in &batches {
                deduper.dedupe(ids, &mut deduped);
                prop_assert_eq!(&deduped, &model(ids));
            }
        }
    }
}
