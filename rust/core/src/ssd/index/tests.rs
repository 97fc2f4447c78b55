use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn at(number: u64) -> RecordLocation {
    RecordLocation { segment: (number >> 10) as u32 & 0xffff, record: number as u32 & 0x3ff }
}

/// Checks that tags are sorted, that each can be reached from its home slot without a gap, and that counts are right.
fn check_structure(index: &TagIndex) {
    let mut tagged = 0;
    for (table, sub) in index.tables.iter().enumerate() {
        let entries: Vec<u64> = sub.pages.iter().flat_map(|page| index.pool.page(*page)).copied().collect();
        let mut last = None;
        let mut gap_before = 0;
        let mut len = 0;
        for (position, &entry) in entries.iter().enumerate() {
            if entry == EMPTY {
                gap_before = position + 1;
                continue;
            }
            let tag = entry >> LOCATION_BITS;
            assert!(last < Some(tag), "tags ascend, each once");
            last = Some(tag);
            let home = index.home(table, tag);
            assert!(gap_before <= home && home <= position, "no gap between home and entry");
            len += 1;
        }
        assert_eq!(len, sub.len);
        assert!(sub.len <= sub.limit);
        tagged += len as usize;
    }
    assert_eq!(tagged, index.tagged);
}

#[test]
fn colliding_ids_keep_their_locations() {
    let mut index = TagIndex::with_sub_tables(0, 1);
    let ids: Vec<Id> = [0, -1, i64::MIN, i64::MAX, 7, 1 << 40].to_vec();
    for (number, &id) in ids.iter().enumerate() {
        index.insert(id, at(number as u64));
    }
    assert_eq!(index.len(), 6);
    assert!(index.exact_len() >= 4, "two prints only");
    for (number, &id) in ids.iter().enumerate() {
        assert!(index.is_at(id, at(number as u64)));
    }
}

#[test]
fn exact_map_id_survives_removal_of_its_fingerprint_owner() {
    let mut index = TagIndex::with_sub_tables(0, 1);
    let same: Vec<Id> = (0..).filter(|&id| index.fingerprint(id).1 == 1).take(3).collect();
    index.insert(same[0], at(10));
    index.insert(same[1], at(11));
    assert_eq!(index.remove(same[0]), Some(at(10)));
    assert_eq!(index.get(same[0]), None);
    assert_eq!(index.get(same[1]), Some(at(11)));
    index.insert(same[2], at(12));
    assert_eq!(index.get(same[1]), Some(at(11)));
    assert_eq!(index.get(same[2]), Some(at(12)));
    assert_eq!(index.remove(same[1]), Some(at(11)));
    assert_eq!(index.get(same[2]), Some(at(12)));
    assert!(!index.relocate(same[2], at(11), at(13)));
    assert!(index.relocate(same[2], at(12), at(13)));
    assert!(index.is_at(same[2], at(13)));
}

#[test]
fn largest_tag_and_location_are_not_empty() {
    let largest = RecordLocation { segment: RecordLocation::MAX_SEGMENTS - 1, record: RecordLocation::MAX_RECORDS - 1 };
    let mut index = TagIndex::with_sub_tables(0, 4);
    let id = (0..1000).find(|&id| index.fingerprint(id).1 == 15).expect("one id in sixteen");
    assert_eq!(index.get(id), None);
    index.insert(id, largest);
    assert_eq!(index.get(id), Some(largest));
    check_structure(&index);
}

#[test]
#[should_panic(expected = "more than 40 bits")]
fn a_location_that_does_not_fit_is_refused() {
    TagIndex::new(24).insert(1, RecordLocation { segment: RecordLocation::MAX_SEGMENTS, record: 0 });
}

#[test]
fn id_takes_at_most_12_bytes_and_growth_is_gradual() {
    let mut index = TagIndex::new(24);
    let mut worst = 0.0_f64;
    let mut most_growths_in_a_percent = 0;
    let mut growths_before = 0;
    for id in 0..1_500_000 {
        index.insert(id * 977 - 5, at(id as u64));
        if id >= 1_000_000 && id % 10_000 == 0 {
            worst = worst.max(index.bytes() as f64 / index.len() as f64);
            let growths: u32 = index.tables.iter().map(|table| table.level).sum();
            if growths_before > 0 {
                most_growths_in_a_percent = most_growths_in_a_percent.max(growths - growths_before);
            }
            growths_before = growths;
        }
    }
    assert!(worst <= 12.0, "{worst} bytes an id");
    assert!(most_growths_in_a_percent < 150, "{most_growths_in_a_percent} of 1024 sub-tables grew within 1%");
    check_structure(&index);
    let mut seen = BTreeSet::new();
    index.visit(&mut |location| assert!(seen.insert(location)));
    assert_eq!(seen.len(), index.len());
    index.clear();
    assert_eq!((index.len(), index.get(-5)), (0, None));
}

proptest! {
    #[test]
    fn behaves_as_a_map_under_collisions(
        sub_table_bits in 0_u32..3,
        tag_bits in prop_oneof![1_u32..8, Just(24)],
        steps in prop::collection::vec((0_u8..4, -400_i64..400), 1..1500),
    ) {
        let mut index = TagIndex::with_sub_tables(sub_table_bits, tag_bits);
        let mut model = BTreeMap::new();
        for (number, (step, id)) in steps.into_iter().enumerate() {
            let location = at(number as u64);
            match (step, model.get(&id).copied()) {
                (0 | 1, None) => {
                    index.insert(id, location);
                    model.insert(id, location);
                }
                (0, Some(old)) => {
                    prop_assert_eq!(index.replace(id, location), Some(old));
                    model.insert(id, location);
                }
                (1, Some(old)) => {
                    prop_assert!(!index.relocate(id, location, location));
                    prop_assert!(index.relocate(id, old, location));
                    model.insert(id, location);
                }
                (_, Some(old)) => {
                    prop_assert_eq!(index.remove(id), Some(old));
                    model.remove(&id);
                }
                (_, None) => {
                    // A match for an absent id is the location of a present id with the same fingerprint.
                    let found = index.get(id);
                    prop_assert!(found.is_none_or(|location| model.values().any(|other| *other == location)));
                }
            }
        }
        check_structure(&index);
        prop_assert_eq!(index.len(), model.len());
        let ids: Vec<Id> = model.keys().copied().collect();
        let mut found = vec![None; ids.len()];
        index.get_batch(&ids, &mut found);
        prop_assert_eq!(found, model.values().copied().map(Some).collect::<Vec<_>>());
    }
}

proptest! {
    /// The index changes between a lookup and the update of its result.
    #[test]
    fn match_stays_usable_after_other_changes(
        sub_table_bits in 0_u32..3,
        tag_bits in prop_oneof![1_u32..8, Just(24)],
        ids in prop::collection::btree_set(-400_i64..400, 1..600),
        changes in prop::collection::vec((0_u8..3, -400_i64..400), 0..600),
        clears: bool,
    ) {
        let mut index = TagIndex::with_sub_tables(sub_table_bits, tag_bits);
        let mut model: BTreeMap<Id, RecordLocation> = ids.iter().enumerate().map(|(n, id)| (*id, at(n as u64))).collect();
        for (id, place) in &model {
            index.insert(*id, *place);
        }
        let asked: Vec<Id> = (-410..410).collect();
        let mut found = vec![TagMatch::NONE; asked.len()];
        index.find_batch(&asked, &mut found);
        let one_by_one: Vec<Option<RecordLocation>> = asked.iter().map(|id| index.get(*id)).collect();
        prop_assert_eq!(found.iter().map(TagMatch::location).collect::<Vec<_>>(), one_by_one);
        let mut portable = vec![None; asked.len()];
        index.for_each_match_portable(&asked, &mut |at, found| portable[at] = found.location());
        prop_assert_eq!(found.iter().map(TagMatch::location).collect::<Vec<_>>(), portable);
        if clears {
            index.clear();
            model.clear();
        }
        for (number, (step, id)) in changes.into_iter().enumerate() {
            let location = at(10_000 + number as u64);
            match (step, model.contains_key(&id)) {
                (0, true) => { index.remove(id); model.remove(&id); }
                (_, true) => { index.replace(id, location); model.insert(id, location); }
                (_, false) => { index.insert(id, location); model.insert(id, location); }
            }
        }
        for (number, (id, found)) in asked.iter().zip(&found).enumerate() {
            let location = at(20_000 + number as u64);
            let Some(before) = model.get_mut(id) else { continue };
            prop_assert!(index.is_match_at(*id, found, *before));
            prop_assert!(!index.is_match_at(*id, found, location));
            prop_assert_eq!(index.replace_match(*id, found, location), Some(*before));
            *before = location;
        }
        check_structure(&index);
        for (id, place) in &model {
            prop_assert_eq!(index.get(*id), Some(*place));
        }
    }
}

proptest! {
    #[test]
    fn bulk_build_equals_inserting(
        sub_table_bits in 0_u32..3,
        tag_bits in prop_oneof![1_u32..10, Just(24)],
        ids in prop::collection::btree_set(any::<i64>(), 0..3000),
        more in prop::collection::vec(any::<i64>(), 0..300),
    ) {
        let mut model: BTreeMap<Id, RecordLocation> = ids.iter().enumerate().map(|(n, id)| (*id, at(n as u64))).collect();
        let mut sorted: Vec<(u64, RecordLocation)> = model.iter().map(|(id, place)| (hash_id(*id), *place)).collect();
        sorted.sort_unstable();
        let mut index = TagIndex::with_sub_tables(sub_table_bits, tag_bits);
        let filler = index.sub_table_builder();
        for table in 0..filler.sub_tables() {
            let end = filler.first_hash(table + 1);
            let rows: Vec<_> = sorted.iter().copied().filter(|(hash, _)| {
                filler.first_hash(table).is_some_and(|first| *hash >= first) && end.is_none_or(|end| *hash < end)
            }).collect();
            index.adopt(&filler.build(&rows)).unwrap();
        }
        check_structure(&index);
        for (number, id) in more.into_iter().enumerate() {
            if model.insert(id, at(number as u64)).is_some() {
                index.replace(id, at(number as u64));
            } else {
                index.insert(id, at(number as u64));
            }
        }
        check_structure(&index);
        prop_assert_eq!(index.len(), model.len());
        for (id, place) in &model {
            prop_assert!(index.is_at(*id, *place));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn reserved_inserts_allocate_nothing(before in 0_usize..60_000, more in 1_usize..60_000, salt: u64) {
        let mut index = TagIndex::new(24);
        for number in 0..before as u64 {
            index.insert((number ^ salt) as i64, at(number));
        }
        let promised = {
            let pool = index.pool.used();
            index.reserve(more).unwrap();
            let grown = 2 * index.tables.len().min(more) + more / (PAGE_ENTRIES / 2) + pool / 4;
            prop_assert!(index.pool.reserved_pages() >= pool + grown);
            pool + grown
        };
        for number in 0..more as u64 {
            let number = before as u64 + number;
            index.insert((number ^ salt) as i64, at(number));
        }
        prop_assert!(index.pool.used() <= promised, "{} pages and {promised} promised", index.pool.used());
        check_structure(&index);
    }
}

/// Hashes that an attacker would choose who knows the fingerprints of an index without a secret.
fn chosen(which: &str, number: u64) -> u64 {
    match which {
        "one print" => 5 << 54 | number,
        _ => number << 30,
    }
}

#[test]
fn adversarial_ids_are_spread_over_their_sub_table() {
    const IDS: u64 = 60_000;
    for which in ["one print", "tags side by side"] {
        let mut index = TagIndex::new(24);
        let mut filled = TagIndex::new(24);
        let ids: Vec<Id> = (0..IDS).map(|number| crate::types::id_of_hash(chosen(which, number))).collect();
        let tables: BTreeSet<usize> = ids.iter().map(|id| index.fingerprint(*id).0).collect();
        index.reserve(ids.len()).unwrap();
        for (number, &id) in ids.iter().enumerate() {
            index.insert(id, at(number as u64));
        }
        let mut sorted: Vec<(u64, RecordLocation)> = (0..).zip(&ids).map(|(n, id)| (hash_id(*id), at(n))).collect();
        sorted.sort_unstable();
        filled.adopt(&filled.sub_table_builder().build(&sorted)).unwrap();
        for index in [&index, &filled] {
            check_structure(index);
            assert!(ids.iter().enumerate().all(|(number, id)| index.is_at(*id, at(number as u64))));
            // With all ids in one sub-table, 107 of them share a tag on average.
            assert!(index.exact_len() < 300, "{} of {which} share a tag", index.exact_len());
            let mut farthest = 0;
            for &table in &tables {
                let entries: Vec<u64> =
                    index.tables[table].pages.iter().flat_map(|page| index.pool.page(*page)).copied().collect();
                let away = |(at, entry): (usize, &u64)| at - index.home(table, entry >> LOCATION_BITS);
                let most = entries.iter().enumerate().filter(|(_, entry)| **entry != EMPTY).map(away).max();
                farthest = farthest.max(most.unwrap_or(0));
            }
            assert!(farthest < 1500, "an entry of {which} lies {farthest} places from its home");
        }
    }
}

#[test]
fn many_colliding_ids_are_found() {
    let mut index = TagIndex::with_sub_tables(0, 1);
    let ids: Vec<Id> = (0..100_000_u64).map(|number| crate::types::id_of_hash(number << 20)).collect();
    for (number, &id) in ids.iter().enumerate() {
        if number % 1000 == 0 {
            index.reserve(1000).unwrap();
        }
        index.insert(id, at(number as u64));
    }
    assert_eq!(index.exact_len(), ids.len() - 2);
    for (number, &id) in ids.iter().enumerate() {
        assert!(index.is_at(id, at(number as u64)));
    }
    for &id in ids.iter().step_by(2) {
        assert!(index.remove(id).is_some());
    }
    assert_eq!(index.len(), ids.len() / 2);
    let mut seen = 0;
    index.visit(&mut |_| seen += 1);
    assert_eq!(seen, index.len());
}
