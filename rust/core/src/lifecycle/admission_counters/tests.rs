//! Tests of the admission counts without a table.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;
use crate::types::hash_id;

fn bucketing() -> BucketMapper {
    BucketMapper::new(13)
}

fn all(pending: &AdmissionCounters) -> BTreeMap<Id, (u32, bool)> {
    let found = pending.buckets.clone().flat_map(|bucket| pending.of_bucket(bucket));
    found.map(|found| (found.id, (found.count, found.is_older))).collect()
}

fn step_ends(pending: &mut AdmissionCounters, step: u64) {
    pending.ending(step).into_iter().for_each(|bucket| pending.end_generation(bucket));
}

fn window(steps: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(steps)
}

#[test]
fn occurrences_add_up_until_the_id_has_a_row() {
    let mut pending = AdmissionCounters::new(0..13, bucketing(), 1 << 20, None);
    for (id, occurrences) in [(7, 2), (-7, 1), (7, 3), (i64::MIN, u32::MAX), (0, 1), (i64::MIN, 1)] {
        pending.add(id, CounterSpot::NOWHERE, occurrences, 0);
    }
    let mut counts = [9; 5];
    pending.get_batch(&[7, -7, i64::MIN, 0, 8], &mut counts);
    assert_eq!(counts, [5, 1, MOST_COUNT, 1, 0]);
    pending.remove(7);
    pending.remove(8);
    pending.get_batch(&[7], &mut counts[..1]);
    assert_eq!((counts[0], pending.len(), pending.forgotten()), (0, 3, 0));
    pending.clear();
    assert_eq!((pending.len(), pending.bytes()), (0, 0));
}

#[test]
fn full_buckets_forget_the_same_ids_for_any_number_of_ranks() {
    let memory = 13 * 2 * 10 * BYTES_PER_ID;
    let mut whole = AdmissionCounters::new(0..13, bucketing(), memory, window(50));
    let mut shards =
        [0..5, 5..6, 6..13].map(|buckets| AdmissionCounters::new(buckets, bucketing(), memory, window(50)));
    for step in 1..=400_u64 {
        let mut batch = Vec::new();
        for at in 0..20 {
            // Some ids occur often, and others once.
            let random = hash_id((step * 20 + at) as Id);
            batch.push(if random & 1 == 0 { (random >> 60) as Id } else { (random >> 32) as Id });
        }
        for &id in &batch {
            whole.add(id, CounterSpot::NOWHERE, 1, 0);
        }
        for &id in batch.iter().rev() {
            let bucket = bucketing().of(id);
            let owner = shards.iter_mut().find(|shard| shard.buckets.contains(&bucket));
            owner.expect("one owns it").add(id, CounterSpot::NOWHERE, 1, 0);
        }
        step_ends(&mut whole, step);
        for shard in &mut shards {
            step_ends(shard, step);
        }
        let mut together = BTreeMap::new();
        for shard in &shards {
            together.extend(all(shard));
        }
        assert_eq!(all(&whole), together, "{step}");
    }
    assert!(whole.forgotten() > 1000);
    assert_eq!(whole.forgotten(), shards.iter().map(AdmissionCounters::forgotten).sum::<u64>());
    assert!(whole.len() <= 13 * 20 + 20, "{} ids", whole.len());
    assert!(all(&whole).values().any(|(count, _)| *count > 10), "ids that come often are remembered");
}

#[test]
fn an_id_is_remembered_for_one_to_two_windows() {
    let mut pending = AdmissionCounters::new(0..13, bucketing(), 1 << 20, window(100));
    for id in 0..200 {
        pending.add(id, CounterSpot::NOWHERE, 1, 0);
    }
    for step in 1..=100 {
        step_ends(&mut pending, step);
    }
    assert_eq!(pending.len(), 200);
    assert!(all(&pending).values().all(|(_, is_older)| *is_older));
    pending.add(3, CounterSpot::NOWHERE, 1, 0);
    for step in 101..=200 {
        step_ends(&mut pending, step);
    }
    assert_eq!(all(&pending), BTreeMap::from([(3, (2, true))]));
    assert_eq!(pending.forgotten(), 199);
}

#[test]
fn a_full_bucket_whose_window_ends_keeps_the_counts_of_the_step() {
    let memory = 13 * 2 * 10 * BYTES_PER_ID;
    let bucketing = bucketing();
    let ids: Vec<Id> = (0..).filter(|&id| bucketing.of(id) == 4).take(12).collect();
    // Bucket 4's window ends with step 17, and not with step 20.
    for step in [17, 20] {
        for count in 1..=12 {
            let mut pending = AdmissionCounters::new(0..13, bucketing, memory, window(13));
            ids[..count].iter().for_each(|&id| pending.add(id, CounterSpot::NOWHERE, 1, 0));
            step_ends(&mut pending, step);
            assert_eq!((pending.len(), pending.forgotten()), (count as u64, 0), "{count} ids in step {step}");
        }
    }
}

#[test]
fn memory_without_end_takes_no_more_maps_than_there_may_be() {
    for buckets in [1, 13, 1 << 15, 1 << 20] {
        let bucketing = BucketMapper::new(buckets);
        for memory in [1 << 40, 1 << 62, u64::MAX] {
            let mut pending = AdmissionCounters::new(0..buckets, bucketing, memory, None);
            assert!(pending.maps.len() as u64 <= MOST_MAPS.max(u64::from(buckets)), "{} maps", pending.maps.len());
            pending.reserve(100).expect("memory");
            (0..100).for_each(|id| pending.add(id, CounterSpot::NOWHERE, 1, 0));
            assert_eq!(pending.len(), 100);
        }
    }
}

#[test]
fn every_bucket_ends_one_window_in_each() {
    for steps in [1, 7, 13, 100] {
        let mut pending = AdmissionCounters::new(0..13, bucketing(), 1 << 20, window(steps));
        for step in 5..5 + 3 * steps {
            step_ends(&mut pending, step);
        }
        assert!(pending.generations.iter().all(|bucket| bucket.ended == 3), "{steps}");
    }
}

#[test]
fn ids_counted_since_an_epoch_are_listed_for_any_number_of_epochs() {
    let mut pending = AdmissionCounters::new(0..13, bucketing(), 1 << 20, None);
    for epoch in 0..1000_u32 {
        pending.add(Id::from(epoch), CounterSpot::NOWHERE, 1, epoch);
        pending.add(-1, CounterSpot::NOWHERE, 1, epoch);
        let newest = epoch.saturating_sub(20);
        let since: Vec<Id> =
            (0..13).flat_map(|bucket| pending.of_bucket_since(bucket, newest)).map(|count| count.id).collect();
        for id in newest..=epoch {
            assert!(since.contains(&Id::from(id)), "{id} in {epoch}");
        }
        assert!(since.contains(&-1));
        assert!(since.len() <= 22, "{} of {epoch}", since.len());
    }
    let first: Vec<AdmissionCount> = (0..13).flat_map(|bucket| pending.of_bucket_since(bucket, 0)).collect();
    assert_eq!(first.len(), 1001);
}

/// A step of a random program.
#[derive(Clone, Debug)]
enum CounterStep {
    Find(Vec<Id>),
    /// Ids, each with an id whose spot is used as a hint instead of its own, and its occurrences.
    Count(Vec<(Id, Id, u32)>),
    Remove(Vec<Id>),
    EndGeneration(u32),
    Clear,
}

fn any_step() -> impl Strategy<Value = CounterStep> {
    let id = || prop_oneof![2 => -10_i64..10, 1 => -300_i64..300, 1 => any::<Id>()];
    // Most spots belong to the id itself.
    let counted = prop_oneof![
        4 => (id(), 1_u32..5).prop_map(|(id, occurrences)| (id, id, occurrences)),
        1 => (id(), id(), any::<u32>()),
    ];
    prop_oneof![
        4 => prop::collection::vec(id(), 0..200).prop_map(CounterStep::Find),
        4 => prop::collection::vec(counted, 0..200).prop_map(CounterStep::Count),
        2 => prop::collection::vec(id(), 0..50).prop_map(CounterStep::Remove),
        2 => (0_u32..3).prop_map(CounterStep::EndGeneration),
        1 => Just(CounterStep::Clear),
    ]
}

proptest! {
    /// Spots are kept across all steps, so that most belong to pages that were returned, or taken by another table.
    #[test]
    fn it_is_a_map_whatever_spots_it_is_given(
        steps in prop::collection::vec(any_step(), 1..40),
        memory in prop_oneof![Just(1_u64 << 20), Just(20 << 20)],
    ) {
        let bucketing = BucketMapper::new(3);
        let mut pending = AdmissionCounters::new(0..3, bucketing, memory, None);
        let (mut model, mut spots) = (BTreeMap::<Id, (u32, bool)>::new(), HashMap::new());
        for step in steps {
            match step {
                CounterStep::Find(ids) => {
                    let mut found: Vec<(Id, u32)> = ids.iter().map(|&id| (id, u32::MAX)).collect();
                    let mut order = Vec::new();
                    pending.find_batch(&mut found, |pair| pair.0, |pair, found| {
                        pair.1 = found.count;
                        order.push(pair.0);
                        spots.insert(pair.0, found.spot);
                    });
                    prop_assert_eq!(order, ids);
                    for (id, count) in found {
                        prop_assert_eq!(count, model.get(&id).map_or(0, |known| known.0));
                    }
                }
                CounterStep::Count(counted) => {
                    for (id, other, occurrences) in counted {
                        let spot = spots.get(&other).copied().unwrap_or(CounterSpot::NOWHERE);
                        pending.prefetch(id, spot);
                        pending.add(id, spot, occurrences, 0);
                        let count = model.get(&id).map_or(0, |known| known.0).saturating_add(occurrences);
                        model.insert(id, (count.min(MOST_COUNT), false));
                    }
                }
                CounterStep::Remove(ids) => {
                    for id in ids {
                        pending.remove(id);
                        model.remove(&id);
                    }
                }
                CounterStep::EndGeneration(bucket) => {
                    pending.end_generation(bucket);
                    model.retain(|&id, known| bucketing.of(id) != bucket || !std::mem::replace(&mut known.1, true));
                }
                CounterStep::Clear => {
                    pending.clear();
                    model.clear();
                }
            }
            prop_assert_eq!(pending.len(), model.len() as u64);
            prop_assert_eq!(&all(&pending), &model);
        }
    }
}

#[test]
fn forgetting_is_independent_of_order_and_spots() {
    let memory = 13 * 2 * 30 * BYTES_PER_ID;
    let mut pairs = [(); 2].map(|()| AdmissionCounters::new(0..13, bucketing(), memory, window(40)));
    for step in 1..=200_u64 {
        let random = |at: u64| hash_id((step * 100 + at) as Id);
        let mut batch: Vec<(Id, CounterSpot)> =
            (0..100).map(|at| ((random(at) >> (58 - at % 20)) as Id, CounterSpot::NOWHERE)).collect();
        let [plain, spotted] = &mut pairs;
        for &(id, _) in &batch {
            plain.add(id, CounterSpot::NOWHERE, 1, 0);
        }
        spotted.find_batch(&mut batch, |pair| pair.0, |pair, found| pair.1 = found.spot);
        for &(id, spot) in batch.iter().rev() {
            spotted.add(id, spot, 1, 0);
        }
        for pending in &mut pairs {
            step_ends(pending, step);
        }
        assert_eq!(all(&pairs[0]), all(&pairs[1]), "{step}");
    }
    assert!(pairs[0].forgotten() > 1000);
    assert_eq!(pairs[0].forgotten(), pairs[1].forgotten());
}

#[test]
fn counts_age_by_the_generations_that_have_ended_since() {
    let pending = [(1, false), (2, true)].map(|(id, is_older)| CountedId { id, shows: 3, clicks: 1, is_older });
    let counts = BucketCounts { bucket: 5, generation: u32::MAX, ids: pending.to_vec() };
    assert_eq!(counts.clone().aged_to(u32::MAX), counts);
    let aged = counts.clone().aged_to(0);
    assert_eq!((aged.generation, aged.ids), (0, vec![CountedId { is_older: true, ..pending[0] }]));
    assert!(counts.aged_to(1).ids.is_empty());
}
