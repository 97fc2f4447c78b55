use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// The results of all implementations of a lookup in a line: true if it has the id, and its number of entries.
fn looks_of(line: &IndexLine, id: Id) -> Vec<(bool, usize)> {
    let mut looks = vec![line.look(id)];
    #[cfg(target_arch = "x86_64")]
    if InstructionSet::best() == InstructionSet::Avx512 {
        // SAFETY: the CPU has AVX-512 F.
        looks.push(unsafe { line.look_at_once(id) });
    }
    looks.into_iter().map(|LineLookup { has, len }| (has, len)).collect()
}

/// Checks that every id is in its home line, or behind full lines, each of which counts it.
fn check_structure(index: &SlotIndex) {
    let lines = index.lines();
    let mut len = 0;
    let mut passed = vec![0; lines.len()];
    for (at, line) in lines.iter().enumerate() {
        for entry in 0..line.len() {
            assert_eq!(index.find(line.ids[entry]), Some((at, entry)));
            let mut before = home(index.hash, lines.len(), line.ids[entry]);
            while before != at {
                passed[before] += 1;
                before = following(before, lines.len());
            }
        }
        assert!(line.tags[line.len()..WIDTH].iter().all(|tag| *tag == 0), "entries in use come first");
        len += line.len();
    }
    for (line, passed) in lines.iter().zip(passed) {
        assert_eq!(line.passed(), passed, "the line counts the ids that have passed it");
        assert!(passed == 0 || line.is_full(), "only full lines are passed");
    }
    assert_eq!(len, index.len());
    assert!(len <= index.limit);
}

#[test]
fn ids_like_any_sentinel_are_ids() {
    let mut index = SlotIndex::new(4);
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
fn the_index_grows_past_its_capacity_within_its_bytes() {
    let mut index = SlotIndex::new(10_000);
    for id in 0..10_000 {
        index.insert(id * 3, id as u32);
    }
    assert!(index.bytes() <= 10_000 * SlotIndex::bytes_per_entry());
    for id in 10_000..20_000 {
        assert!(index.insert_new(id * 3, id as u32) && !index.insert_new(id * 3, 1));
    }
    assert!((0..20_000).all(|id| index.get(id * 3) == id as u32 && index.get(id * 3 + 1) == NO_SLOT));
    check_structure(&index);
}

#[test]
fn many_ids_are_added_in_order_up_to_the_first_that_is_there() {
    for capacity in [7, 300, 5000] {
        let mut index = SlotIndex::new(capacity);
        let ids: Vec<Id> = (0..capacity as Id).map(|n| n * 7 - 40).collect();
        let slots: Vec<u32> = (0..ids.len() as u32).collect();
        assert_eq!(index.insert_new_batch(&ids[..ids.len() / 2], &slots[..ids.len() / 2]), ids.len() / 2);
        check_structure(&index);
        // The id in the middle is present already, and the batch has one id twice.
        let later: Vec<Id> = ids[ids.len() / 2..].iter().copied().chain([ids[0], 1 << 40]).collect();
        let places: Vec<u32> = (ids.len() as u32 / 2..).take(later.len()).collect();
        assert_eq!(index.insert_new_batch(&later, &places), later.len() - 2);
        assert_eq!(index.insert_new_batch(&[5 << 40, 5 << 40, 6 << 40], &[1, 2, 3]), 1);
        assert_eq!(index.insert_new_batch(&[], &[]), 0);
        check_structure(&index);
        let mut found = vec![0; ids.len()];
        index.get_batch(&ids, &mut found);
        assert_eq!(found, slots);
        assert_eq!((index.get(1 << 40), index.get(5 << 40), index.get(6 << 40)), (NO_SLOT, 1, NO_SLOT));
    }
}

#[test]
fn all_lookups_of_a_line_agree() {
    let mut line: IndexLine = bytemuck::Zeroable::zeroed();
    for len in 0..=WIDTH {
        // A removed id may remain in a free entry, and the count of passed ids may look like half of one.
        line.ids[len..].fill(77);
        line.tags[WIDTH] = len as u32;
        for id in [0, 1, 77, 3 << 32, -1, i64::from(line.tags[0])] {
            let expected = (line.ids[..len].contains(&id), len);
            for look in looks_of(&line, id) {
                assert_eq!(look, expected, "{len} entries, id {id}");
            }
        }
        if len < WIDTH {
            line.push([0, 3 << 32, -1, 1, 9][len], 5);
        }
    }
}

/// The number of lines between ids and their homes: the sum, and the maximum.
fn steps_past_homes(index: &SlotIndex) -> (usize, usize) {
    let lines = index.lines();
    let steps = lines.iter().enumerate().flat_map(|(at, line)| {
        line.ids[..line.len()].iter().map(move |&id| distance(home(index.hash, lines.len(), id), at, lines.len()))
    });
    steps.fold((0, 0), |(sum, most), steps| (sum + steps, most.max(steps)))
}

#[test]
fn ids_at_any_stride_are_at_most_three_lines_past_their_homes() {
    const IDS: u64 = 7680;
    let fibonacci = (0..85).scan((1_u64, 1_u64), |(one, two), _| {
        (*one, *two) = (*two, *one + *two);
        Some(*one)
    });
    let powers = (0..64).map(|bit| 1 << bit);
    let others = [3, 5, 60, 3600, 86_400, 4093, 65_537, 0x9e37_79b9_7f4a_7c15, 0xffff_ffff, u64::MAX];
    for stride in fibonacci.chain(powers).chain(others) {
        for seed in [0x1234_5678_9abc_def1, 0xd1b5_4a32_d192_ed03, 0x9e37_79b9_7f4a_7c15] {
            // This fills the index to its maximum.
            let mut index = SlotIndex { hash: IdHash::new(seed), ..SlotIndex::new(IDS as usize) };
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
    let (mut one, mut other) = (SlotIndex::new(4000), SlotIndex::new(4000));
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
fn ids_far_past_their_homes_are_found_in_a_batch() {
    let mut index = SlotIndex::new(4000);
    index.reserve(4000).expect("memory");
    let (lines, hash) = (index.lines, index.hash);
    let mut chosen = (0..).filter(|&id| home(hash, lines, id) < 8);
    let present: Vec<Id> = chosen.by_ref().take(1500).collect();
    let absent: Vec<Id> = chosen.take(500).collect();
    for (slot, &id) in present.iter().enumerate() {
        index.insert(id, slot as u32);
    }
    check_structure(&index);
    let ids: Vec<Id> = absent.iter().chain(present.iter().rev()).chain(&absent).copied().collect();
    let expected: Vec<CacheSlot> = ids.iter().map(|&id| index.get(id)).collect();
    assert_eq!(expected[500..2000], (0..1500).rev().collect::<Vec<_>>());
    let mut slots = vec![0; ids.len()];
    index.get_batch(&ids, &mut slots);
    assert_eq!(slots, expected);
    slots_ahead(index.hash, index.lines(), &ids, &mut slots, IndexLine::tag);
    assert_eq!(slots, expected);
    index.remove_batch(&present[..1000]);
    check_structure(&index);
    index.get_batch(&ids, &mut slots);
    assert_eq!(slots, ids.iter().map(|&id| index.get(id)).collect::<Vec<_>>());
}

#[test]
fn removal_around_the_end_leaves_no_gap() {
    let mut index = SlotIndex::new(0);
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
        let mut index = SlotIndex::new(capacity);
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
            slots_ahead(index.hash, index.lines(), &ids, &mut one_by_one, IndexLine::tag);
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
