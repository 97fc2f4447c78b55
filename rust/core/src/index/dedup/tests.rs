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
    let inverse = (0..6).fold(1_u64, |x, _| x.wrapping_mul(2_u64.wrapping_sub(hash.seed().wrapping_mul(x))));
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
        assert_ne!(deduper.hash.seed(), hash.seed(), "it went on with another hash, under which they do not collide");
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
