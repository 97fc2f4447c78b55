use std::sync::Arc;

use super::{RowState, SlotMap};
use crate::config::PolicyKind;
use crate::types::{CacheSlot, NO_SLOT};

fn filled(capacity: u32, rows: u32) -> SlotMap {
    let mut slots = SlotMap::new(capacity, PolicyKind::Lru);
    for id in 0..rows {
        let slot = slots.take().expect("an empty slot");
        slots.insert(slot, id.into(), RowState::DIRTY);
    }
    slots
}

/// The row to evict next.
fn next_victim(slots: &mut SlotMap, id_of: impl Fn(CacheSlot) -> i64) -> Option<CacheSlot> {
    slots.victims(1, id_of, |_| {}).pop()
}

#[test]
fn newest_rows_are_listed_in_order_for_any_batch_size() {
    for rows in [0, 1, 5, 3000] {
        let mut slots = filled(4096, rows);
        let newest: Vec<CacheSlot> = (0..rows).filter(|slot| slot % 7 != 3).collect();
        (0..rows)
            .filter(|slot| slot % 7 == 3)
            .for_each(|slot| slots.set_state(slot, RowState::OCCUPIED.with(RowState::ON_SSD)));
        for most in [1, 4, 1024, 5000] {
            let (mut all, mut from) = (Vec::new(), 0);
            while from < slots.high_water() {
                let mut some = Vec::new();
                from = slots.newest_from(from, most, &mut some);
                assert!(some.len() == most || from == slots.high_water(), "{} of {most}", some.len());
                all.extend(some);
            }
            assert_eq!(all, newest);
        }
    }
}

#[test]
fn marked_rows_are_found_among_any_number_of_others() {
    for rows in [0, 1, 15, 16, 17, 100] {
        let mut slots = filled(128, rows);
        let marked: Vec<CacheSlot> = (0..rows).filter(|slot| slot % 7 == 3 || slot + 1 == rows).collect();
        for &slot in &marked {
            slots.mark(slot, RowState::MODIFIED);
        }
        assert_eq!(slots.modified().collect::<Vec<_>>(), marked, "of {rows}");
        slots.clear_marks();
        assert_eq!(slots.modified().count(), 0);
    }
}

#[test]
fn rows_that_come_in_together_come_in_as_one_by_one() {
    for policy in PolicyKind::ALL {
        let [mut one_by_one, mut together] = [(); 2].map(|()| {
            let mut slots = SlotMap::new(100, policy);
            for id in 0..80 {
                let slot = slots.take().expect("an empty slot");
                slots.insert(slot, id, RowState::DIRTY);
            }
            // Some of the free slots are above the limit.
            (0..80).step_by(3).for_each(|slot| slots.remove(slot as CacheSlot, slot, false));
            slots.set_limit(70);
            slots
        });
        let ids: Vec<i64> = (1000..1040).collect();
        let (mut taken, mut single) = (Vec::new(), Vec::new());
        together.take_many(ids.len(), &mut taken);
        while single.len() < ids.len()
            && let Some(slot) = one_by_one.take()
        {
            single.push(slot);
        }
        assert_eq!(taken, single);
        assert!(!taken.is_empty() && taken.len() < ids.len() && together.free_slots() == 0);
        let ids = &ids[..taken.len()];
        assert_eq!(together.insert_all_new(&taken, ids, RowState::PROVISIONAL), taken.len());
        single.iter().zip(ids).for_each(|(&slot, &id)| one_by_one.insert(slot, id, RowState::PROVISIONAL));
        assert!(!together.all_settled() && taken.iter().all(|&slot| together.state(slot).has(RowState::OCCUPIED)));
        let of = |slots: &mut SlotMap| {
            let found: Vec<CacheSlot> = (0..1040).map(|id| slots.get(id)).collect();
            let id_of = |slot| found.iter().position(|&held| held == slot).expect("an id's") as i64;
            let mut victims = Vec::new();
            while let Some(slot) = next_victim(slots, id_of) {
                slots.remove_victims(&[slot], &[id_of(slot)]);
                victims.push(slot);
            }
            (found.clone(), victims, slots.used())
        };
        assert_eq!(of(&mut together), of(&mut one_by_one), "{policy:?}");
    }
}

#[test]
fn victims_that_are_chosen_together_are_those_that_come_one_by_one() {
    for policy in PolicyKind::ALL {
        let [mut one_by_one, mut together] = [(); 2].map(|()| {
            let mut slots = SlotMap::new(200, policy);
            let mut taken = Vec::new();
            slots.take_many(200, &mut taken);
            assert_eq!(slots.insert_all_new(&taken, &(0..200).collect::<Vec<i64>>(), RowState::DIRTY), 200);
            for step in [2, 2, 3] {
                slots.accessed(&(0..200).filter(|slot| slot % step == 0).collect::<Vec<CacheSlot>>());
            }
            slots.pin(1);
            slots.pin(7);
            slots
        });
        let leave = |slots: &mut SlotMap, together: bool| {
            let asked: Vec<CacheSlot> = if together {
                slots.victims(60, i64::from, |_| {})
            } else {
                std::iter::from_fn(|| next_victim(slots, i64::from)).take(60).collect()
            };
            let ids: Vec<i64> = asked.iter().map(|&slot| slot.into()).collect();
            slots.remove_victims(&asked, &ids);
            asked
        };
        let left = leave(&mut together, true);
        assert_eq!((left.len(), &left), (60, &leave(&mut one_by_one, false)), "{policy:?}");
        // Some are inserted again: a policy that remembers them puts them elsewhere than new ones.
        let orders = [&mut one_by_one, &mut together].map(|slots| {
            for &id in left[..30].iter().chain(&[500, 501]) {
                let slot = slots.take().expect("an empty slot");
                slots.insert(slot, id.into(), RowState::DIRTY);
            }
            let mut ids: Vec<i64> = (0..200).collect();
            (0..502).for_each(|id| {
                if slots.get(id) != NO_SLOT {
                    ids[slots.get(id) as usize] = id;
                }
            });
            std::iter::from_fn(|| next_victim(slots, |slot| ids[slot as usize])).collect::<Vec<CacheSlot>>()
        });
        assert_eq!(orders[0], orders[1], "{policy:?}");
        assert_eq!(orders[0].len(), 200 - 60 + 32 - 2, "all but those in use");
        assert!(together.victims(3, i64::from, |_| {}).is_empty());
    }
}

#[test]
fn insert_all_new_stops_at_first_known_row() {
    let mut slots = filled(16, 4);
    let mut taken = Vec::new();
    slots.take_many(3, &mut taken);
    assert_eq!(slots.insert_all_new(&taken, &[50, 2, 51], RowState::DIRTY), 1);
    taken[1..].iter().for_each(|&slot| slots.give_back(slot));
    assert_eq!((slots.get(50), slots.get(2), slots.get(51), slots.used()), (taken[0], 2, NO_SLOT, 5));
}

#[test]
fn rows_that_are_removed_together_leave_as_one_by_one() {
    for policy in PolicyKind::ALL {
        let [mut one_by_one, mut together] = [(); 2].map(|()| {
            let mut slots = SlotMap::new(200, policy);
            for id in 0..200 {
                let slot = slots.take().expect("an empty slot");
                slots.insert(slot, id, RowState::DIRTY);
            }
            slots.accessed(&(0..200).filter(|slot| slot % 3 == 0).collect::<Vec<CacheSlot>>());
            slots
        });
        let leaving: Vec<CacheSlot> = (0..200).filter(|slot| slot % 7 < 3).collect();
        let ids: Vec<i64> = leaving.iter().map(|&slot| slot.into()).collect();
        leaving.iter().zip(&ids).for_each(|(&slot, &id)| one_by_one.remove(slot, id, false));
        together.remove_batch(&leaving, &ids);
        assert_eq!(together.used(), 200 - leaving.len() as u32);
        for id in 0..200 {
            assert_eq!(together.get(id), one_by_one.get(id));
        }
        for _ in 0..together.used() {
            let victims = [&mut one_by_one, &mut together].map(|slots| {
                let victim = next_victim(slots, i64::from).expect("a row");
                slots.remove_victims(&[victim], &[victim.into()]);
                victim
            });
            assert_eq!(victims[0], victims[1], "{policy:?}");
        }
        assert_eq!(next_victim(&mut together, i64::from), None);
        assert!((0..200).all(|_| one_by_one.take() == together.take()));
    }
}

#[test]
fn no_slot_is_lost_when_the_limit_falls_and_rises_again() {
    let mut slots = filled(8, 8);
    for id in 0..8 {
        slots.remove(slots.get(id), id, false);
    }
    slots.set_limit(3);
    let taken: Vec<CacheSlot> = std::iter::from_fn(|| slots.take()).collect();
    assert_eq!(taken.len(), 3);
    assert!(taken.iter().all(|&slot| slot < 3));
    slots.set_limit(8);
    assert_eq!(std::iter::from_fn(|| slots.take()).count(), 5);
}

#[test]
fn a_kept_victim_is_found_and_can_be_a_victim_again() {
    let mut slots = filled(4, 4);
    let victim = next_victim(&mut slots, i64::from).expect("a victim");
    assert_eq!(victim, slots.get(0), "the least recently used");
    slots.keep_victim(victim, 0);
    assert_eq!(slots.get(0), victim);
    let all: Vec<CacheSlot> = std::iter::from_fn(|| next_victim(&mut slots, i64::from)).collect();
    assert_eq!(all.len(), 4);
}

#[test]
fn pinned_loading_and_shadow_rows_are_never_victims() {
    let mut slots = filled(4, 4);
    slots.pin(slots.get(0));
    slots.mark(slots.get(1), RowState::LOADING);
    slots.mark(slots.get(2), RowState::SHADOW);
    assert_eq!(next_victim(&mut slots, i64::from), Some(slots.get(3)));
    assert_eq!(next_victim(&mut slots, i64::from), None);
    assert!(slots.unpin(slots.get(0)), "the last pin");
    assert_eq!(next_victim(&mut slots, i64::from), Some(slots.get(0)));
}

#[test]
fn group_pins_protect_rows_and_count_only_on_demand() {
    let mut slots = filled(4, 4);
    let of = |slots: &SlotMap, ids: [i64; 2]| Arc::new(ids.map(|id| slots.get(id)).to_vec());
    let (first, second) = (of(&slots, [0, 1]), of(&slots, [1, 2]));
    let group = slots.pin_group(Arc::clone(&first));
    assert_eq!(slots.unpin_group(&group), Some(first.clone()), "nobody asked");
    assert_eq!(slots.pinned(), 0);
    let groups = [slots.pin_group(Arc::clone(&first)), slots.pin_group(Arc::clone(&second))];
    assert_eq!(next_victim(&mut slots, i64::from), Some(slots.get(3)));
    assert_eq!((next_victim(&mut slots, i64::from), slots.pinned()), (None, 3));
    for (group, held) in groups.iter().zip([first, second]) {
        assert_eq!(slots.unpin_group(group), None, "the victim's search counted them");
        let last: Vec<bool> = held.iter().map(|&slot| slots.unpin(slot)).collect();
        assert_eq!(last[0], held[0] == slots.get(0) || !slots.is_pinned(held[0]));
    }
    assert_eq!(slots.pinned(), 0);
}

#[test]
fn a_group_skips_missing_slots_and_keeps_single_pins() {
    let mut slots = filled(4, 3);
    let held = Arc::new(vec![NO_SLOT, slots.get(0), NO_SLOT]);
    slots.pin(slots.get(1));
    let group = slots.pin_group(Arc::clone(&held));
    assert_eq!(slots.unpin_group(&group), Some(Arc::clone(&held)));
    let group = slots.pin_group(Arc::clone(&held));
    assert_eq!(slots.pinned(), 2);
    assert_eq!(slots.unpin_group(&group), None, "somebody asked for the pins");
    assert!(slots.unpin(slots.get(0)) && slots.unpin(slots.get(1)));
    assert_eq!(slots.pinned(), 0);
}

#[test]
fn a_group_grows_in_its_list_until_its_pins_are_counted_by_slot() {
    let mut slots = filled(4, 4);
    let of = |slots: &SlotMap, id: i64| slots.get(id);
    let (first, second, third) = (of(&slots, 0), of(&slots, 1), of(&slots, 2));
    let mut list = Arc::new(vec![first, NO_SLOT, NO_SLOT]);
    let group = slots.pin_group(Arc::clone(&list));
    let place = Arc::as_ptr(&list);
    assert!(slots.extend_group(&group, &mut list, [(2, second)].into_iter()));
    assert_eq!((Arc::as_ptr(&list), &*list), (place, &vec![first, NO_SLOT, second]), "it is not copied");
    let mut copied = Arc::new(list.to_vec());
    assert!(!slots.extend_group(&group, &mut copied, [(1, third)].into_iter()), "the group has another list");
    assert_eq!(copied, list);
    assert_eq!(slots.pinned(), 2, "both are counted");
    assert!(!slots.extend_group(&group, &mut list, [(1, third)].into_iter()), "its pins were counted");
    assert_eq!(slots.unpin_group(&group), None);
    assert!(!slots.is_pinned(third) && slots.unpin(first) && slots.unpin(second));
}

#[test]
fn slots_are_settled_independent_of_other_rows() {
    let mut slots = filled(4, 3);
    let held = [slots.get(0), NO_SLOT, slots.get(1)];
    slots.mark(slots.get(2), RowState::PROVISIONAL);
    assert!(!slots.all_settled() && slots.are_settled(&held) && slots.are_settled(&[]));
    for unsettled in [RowState::PROVISIONAL, RowState::LOADING, RowState::SHADOW, RowState::FAILED] {
        slots.mark(held[2], unsettled);
        assert!(!slots.are_settled(&held), "{unsettled:?}");
        slots.unmark(held[2], unsettled);
        assert!(slots.are_settled(&held));
    }
}

#[test]
fn rows_are_settled_when_none_is_loading_provisional_shadowed_or_failed() {
    let mut slots = filled(4, 3);
    assert!(slots.all_settled());
    let slot = slots.take().expect("an empty slot");
    slots.insert(slot, 9, RowState::LOADING);
    assert!(!slots.all_settled());
    slots.mark(slot, RowState::SHADOW);
    slots.unmark(slot, RowState::LOADING);
    assert!(!slots.all_settled());
    slots.remove(slot, 9, false);
    assert!(slots.all_settled());
}

#[test]
fn overflow_slots_come_after_the_capacity_and_are_used_again() {
    let mut slots = filled(2, 2);
    assert_eq!(slots.take(), None);
    let overflow: Vec<CacheSlot> = (0..3).map(|_| slots.take_overflow()).collect();
    assert_eq!(overflow, [2, 3, 4]);
    slots.insert(3, 30, RowState::default());
    slots.give_back(2);
    assert_eq!(slots.take_overflow(), 2);
    slots.remove(3, 30, true);
    for slot in [2, 4] {
        slots.give_back(slot);
    }
    assert_eq!((slots.overflow_used(), slots.high_water()), (0, 2));
}

#[test]
fn a_row_keeps_its_state_when_it_moves() {
    let mut slots = filled(4, 2);
    let (from, to) = (slots.get(1), slots.take().expect("an empty slot"));
    slots.relocate(from, to, 1);
    assert_eq!(slots.get(1), to);
    assert!(slots.state(to).has(RowState::DIRTY) && !slots.state(from).has(RowState::OCCUPIED));
    assert_eq!(slots.used(), 2);
}
