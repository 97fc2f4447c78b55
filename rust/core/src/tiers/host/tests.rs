use super::*;

fn tier(kernels_elsewhere: bool) -> (HostTier, CacheSlot) {
    let layout = RowLayout { dim: 2, vector_slots: 0, scalar_slot: false };
    let bytes = 4 * HostTier::bytes_per_row(&layout, PolicyKind::Lru);
    let budget = HostBudget::new(bytes, None);
    let mut tier = HostTier::new("t", layout, PolicyKind::Lru, budget, kernels_elsewhere).expect("four rows");
    let taken = tier.take(false).expect("no memory is needed").expect("an empty slot");
    let header = RowHeader { id: 7, ..RowHeader::default() };
    tier.insert_row(&taken, RowRef { header: &header, vector: &[1.0, 2.0] }, RowState::DIRTY);
    (tier, taken.slot())
}

#[test]
fn a_pinned_row_is_writable_only_if_kernels_run_elsewhere() {
    for kernels_elsewhere in [false, true] {
        let (mut tier, slot) = tier(kernels_elsewhere);
        assert!(tier.unpinned(slot).is_some_and(|idle| tier.row(idle.read_access()).vector == [1.0, 2.0]));
        tier.slots.pin(slot);
        assert!(tier.unpinned(slot).is_none());
        assert_eq!(tier.unused_by_kernels(slot).is_some(), kernels_elsewhere);
        assert_eq!(tier.no_kernel_writes().is_some(), kernels_elsewhere);
    }
}

#[test]
fn old_rows_and_rows_that_are_not_current_are_found_in_the_overflow() {
    let (mut tier, slot) = tier(false);
    for id in 1..7 {
        let taken = tier.take(true).expect("memory").expect("a slot");
        let header = RowHeader { id, last_step: id as u64, ..RowHeader::default() };
        let state = if id == 5 { RowState::PROVISIONAL } else { RowState::DIRTY };
        tier.insert_row(&taken, RowRef { header: &header, vector: &[0.0; 2] }, state);
    }
    tier.remove(tier.slots.get(2), false);
    let found = |latest, slots| -> Vec<Id> {
        tier.trained_until(latest, slots).into_iter().map(|slot| tier.id(slot)).collect()
    };
    assert_eq!(found(3, 0..100), [7, 1, 3, 5], "row 7 was trained last at step 0");
    assert_eq!(found(0, slot + 1..tier.slots.high_water()), [5]);
    assert!(found(9, tier.slots.high_water()..100).is_empty());
}

#[test]
fn a_relocated_row_is_unchanged_and_a_kept_victim_stays() {
    let (mut tier, slot) = tier(false);
    let victim = tier.victims(1).pop().expect("the only row");
    assert_eq!(victim.slot(), slot);
    tier.keep_victim(&victim);
    let to = tier.take(false).expect("no memory is needed").expect("an empty slot");
    tier.relocate(&victim, &to);
    assert_eq!(tier.slots.get(7), to.slot());
    let row = tier.row(to.read_access());
    assert_eq!((row.header.id, row.vector), (7, &[1.0, 2.0][..]));
}
