use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Every id must be in its home line, or behind full lines.
fn check_structure(index: &HostIndex) {
    let lines = index.lines();
    let mut len = 0;
    for (at, line) in lines.iter().enumerate() {
        for entry in 0..line.len() {
            assert_eq!(index.find(line.ids[entry]), Some((at, entry)));
        }
        assert!(line.tags[line.len()..].iter().all(|tag| *tag == 0), "entries in use come first");
        len += line.len();
    }
    assert_eq!(len, index.len());
    assert!(len <= index.limit);
}

#[test]
fn ids_like_any_sentinel_are_ids() {
    let mut index = HostIndex::new(4);
    let ids = [0, -1, i64::MIN, i64::MAX];
    let mut slots = [7; 4];
    index.get_batch(&ids, &mut slots);
    assert_eq!(slots, [NO_SLOT; 4]);
    for (slot, &id) in ids.iter().enumerate() {
        assert!(index.insert_new(id, slot as u32) && !index.insert_new(id, 9));
        assert_eq!(index.get(0), 0);
    }
    index.get_batch(&ids, &mut slots);
    assert_eq!(slots, [0, 1, 2, 3]);
    assert_eq!(index.remove(0), 0);
    assert_eq!((index.get(0), index.remove(0), index.len()), (NO_SLOT, NO_SLOT, 3));
    index.get_batch(&ids, &mut slots);
    assert_eq!(slots, [NO_SLOT, 1, 2, 3]);
}

#[test]
fn the_index_takes_its_capacity_in_the_bytes_it_says_and_goes_on_past_it() {
    let mut index = HostIndex::new(10_000);
    for id in 0..10_000 {
        index.insert(id * 3, id as u32);
    }
    assert!(index.bytes() <= 10_000 * HostIndex::bytes_per_entry());
    for id in 10_000..20_000 {
        assert!(index.insert_new(id * 3, id as u32) && !index.insert_new(id * 3, 1));
    }
    assert!((0..20_000).all(|id| index.get(id * 3) == id as u32 && index.get(id * 3 + 1) == NO_SLOT));
    check_structure(&index);
}

/// The number of lines that ids lie past their homes: the sum, and the maximum.
fn steps_past_homes(index: &HostIndex) -> (usize, usize) {
    let lines = index.lines();
    let steps = lines.iter().enumerate().flat_map(|(at, line)| {
        line.ids[..line.len()].iter().map(move |&id| distance(home(index.hash, lines.len(), id), at, lines.len()))
    });
    steps.fold((0, 0), |(sum, most), steps| (sum + steps, most.max(steps)))
}

#[test]
fn ids_at_any_stride_lie_three_lines_past_their_homes_on_average_at_most() {
    const IDS: u64 = 7680;
    let fibonacci = (0..85).scan((1_u64, 1_u64), |(one, two), _| {
        (*one, *two) = (*two, *one + *two);
        Some(*one)
    });
    let powers = (0..64).map(|bit| 1 << bit);
    let others = [3, 5, 60, 3600, 86_400, 4093, 65_537, 0x9e37_79b9_7f4a_7c15, 0xffff_ffff, u64::MAX];
    for stride in fibonacci.chain(powers).chain(others) {
        for seed in [0x1234_5678_9abc_def1, 0xd1b5_4a32_d192_ed03, 0x9e37_79b9_7f4a_7c15] {
            // This makes the index as full as it gets.
            let mut index = HostIndex { hash: IdHash::new(seed), ..HostIndex::new(IDS as usize) };
            for n in 0..IDS {
                index.insert_new(n.wrapping_mul(stride) as Id, n as u32);
            }
            let (sum, most) = steps_past_homes(&index);
            assert!(sum < 3 * index.len() && most < 64, "stride {stride}, seed {seed:x}: {sum} steps, {most} for one");
        }
    }
}

#[test]
fn ids_chosen_against_one_index_do_not_meet_in_another() {
    let (mut one, mut other) = (HostIndex::new(4000), HostIndex::new(4000));
    one.reserve(4000).expect("memory");
    other.reserve(4000).expect("memory");
    let lines = one.lines;
    let chosen: Vec<Id> = (0..).filter(|&id| home(one.hash, lines, id) < 8).take(1500).collect();
    for (slot, &id) in chosen.iter().enumerate() {
        other.insert(id, slot as u32);
    }
    let past = |&id: &Id| other.find(id).map(|(line, _)| distance(home(other.hash, lines, id), line, lines));
    let steps: usize = chosen.iter().filter_map(past).sum();
    assert!(steps < chosen.len(), "{steps} lines past the homes of {} ids", chosen.len());
}

#[test]
fn removal_around_the_end_leaves_no_gap() {
    let mut index = HostIndex::new(0);
    index.grow(index.limit + 1).expect("memory");
    let (lines, hash) = (index.lines, index.hash);
    let last: Vec<Id> = (0..100_000).filter(|&id| home(hash, lines, id) >= lines - 2).take(40).collect();
    for &removed in &last {
        for (slot, &id) in last.iter().enumerate() {
            index.insert(id, slot as u32);
        }
        assert_ne!(index.remove(removed), NO_SLOT);
        check_structure(&index);
        for &id in last.iter().filter(|id| **id != removed) {
            assert_ne!(index.remove(id), NO_SLOT);
            check_structure(&index);
        }
    }
    assert_eq!(index.lines, lines, "the index did not grow, so all ids are in lines around the end");
}

proptest! {
    #[test]
    fn behaves_as_a_map(
        capacity in 0_usize..600,
        steps in prop::collection::vec((0_u8..5, prop_oneof![-500_i64..500, Just(i64::MIN), Just(i64::MAX)]), 1..3000),
    ) {
        let mut index = HostIndex::new(capacity);
        let mut model = BTreeMap::new();
        for (slot, (step, id)) in steps.into_iter().enumerate() {
            let slot = slot as u32;
            if step == 0 {
                prop_assert_eq!(index.remove(id), model.remove(&id).unwrap_or(NO_SLOT));
            } else if model.insert(id, slot).is_some() {
                index.replace(id, slot);
            } else {
                index.insert(id, slot);
            }
            prop_assert_eq!(index.get(id), model.get(&id).copied().unwrap_or(NO_SLOT));
        }
        check_structure(&index);
        let ids: Vec<Id> = (-520..520).collect();
        let mut slots = vec![0; ids.len()];
        index.get_batch(&ids, &mut slots);
        for (id, slot) in ids.iter().zip(&slots) {
            prop_assert_eq!(*slot, model.get(id).copied().unwrap_or(NO_SLOT));
        }
        let mut one_by_one = vec![0; ids.len()];
        if !index.is_empty() {
            slots_ahead(index.hash, index.lines(), &ids, &mut one_by_one, Line::tag);
            prop_assert_eq!(slots, one_by_one, "every instruction set finds the same slots");
        }
        let gone: Vec<Id> = ids.iter().copied().filter(|id| id % 3 == 0).collect();
        index.remove_batch(&gone);
        model.retain(|id, _| !gone.contains(id));
        check_structure(&index);
        prop_assert_eq!(index.len(), model.len());
        for (id, slot) in model {
            prop_assert_eq!(index.get(id), slot);
        }
    }
}

#[test]
fn ids_are_found_and_missed_behind_long_runs_of_full_lines() {
    let ids_there = 3000;
    let mut index = HostIndex::new(ids_there);
    index.reserve(ids_there).expect("memory");
    let (hash, lines) = (index.hash, index.lines().len());
    // All homes are in the first half, so that the lines are full from there on to far behind it.
    let mut ids = (0..).filter(|&id| home(hash, lines, id) < lines / 2);
    let mut asked: Vec<Id> = ids.by_ref().take(ids_there).collect();
    asked.iter().enumerate().for_each(|(slot, &id)| index.insert(id, slot as CacheSlot));
    assert_eq!(index.lines().len(), lines, "it need not grow");
    asked.extend(ids.take(1000));
    asked.reverse();
    let mut slots = vec![0; asked.len()];
    index.get_batch(&asked, &mut slots);
    let one_by_one: Vec<CacheSlot> = asked.iter().map(|&id| index.get(id)).collect();
    assert_eq!(slots, one_by_one);
    assert_eq!(slots.iter().filter(|&&slot| slot == NO_SLOT).count(), 1000);
}
