use super::PinTable;

#[test]
fn a_pinned_slot_is_not_claimed_and_a_claimed_slot_is_not_pinned() {
    let pins = PinTable::new(2);
    assert!(pins.pin(0) && pins.pin(0));
    assert!(pins.is_pinned(0) && !pins.is_pinned(1));
    assert!(!pins.try_claim(0));
    assert!(!pins.unpin(0));
    assert!(!pins.try_claim(0));
    assert!(pins.unpin(0));
    assert!(pins.try_claim(0));
    assert!(!pins.try_claim(0) && !pins.pin(0) && !pins.is_pinned(0));
    pins.unclaim(0);
    assert!(pins.pin(0));
}

#[test]
fn growing_keeps_pins_and_never_shrinks() {
    let mut pins = PinTable::new(1);
    assert!(pins.pin(0));
    pins.grow(3);
    pins.grow(2);
    assert_eq!(pins.len(), 3);
    assert!(pins.is_pinned(0) && !pins.is_pinned(2));
}

#[test]
#[should_panic(expected = "not pinned")]
fn a_pin_taken_away_twice_is_caught() {
    PinTable::new(1).unpin(0);
}

#[test]
#[should_panic(expected = "not claimed")]
fn a_slot_without_a_claim_is_not_unclaimed() {
    PinTable::new(1).unclaim(0);
}
