use super::*;
use crate::config::EvictionRule;
use crate::lifecycle::ExpirySweep;

#[test]
fn after_ram_was_visited_only_deferred_rows_may_match_there() {
    let matcher = SweepMatcher::new(ExpirySweep::after(9, &EvictionRule::Unused { steps: 2 }, 1), 0);
    let mut progress = SweepProgress::after(None, matcher, (4, 0), 0);
    let ids = [3, 1, 2];
    assert_eq!((&*progress.may_match_in_ram(&ids), &*progress.may_match(&ids)), (&ids[..], &ids[..]));
    progress.deferred = vec![2, 7, 3];
    progress.ram_passed = true;
    assert_eq!((&*progress.may_match_in_ram(&ids), &*progress.may_match(&ids)), (&[3, 2][..], &ids[..]));
    progress.passed = true;
    assert_eq!((&*progress.may_match_in_ram(&ids), &*progress.may_match(&ids)), (&[3, 2][..], &[3, 2][..]));
}

#[test]
fn slot_round_visits_each_slot_once_from_the_last_position() {
    let mut round = SlotRound::default().around(10);
    let mut seen = Vec::new();
    for _ in 0..2 {
        let part = round.part(4, 10);
        seen.extend(part.clone());
        round = round.after(&part);
    }
    round = round.around(10);
    while round.remaining > 0 {
        let part = round.part(4, 10);
        seen.extend(part.clone());
        round = round.after(&part);
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7]);
    let mut empty = SlotRound { next: 7, slots: 10, remaining: 3 };
    let part = empty.part(4, 0);
    empty = empty.after(&part);
    assert_eq!((part.len(), empty.remaining), (0, 0));
}

#[test]
fn slot_round_of_a_growing_tier_visits_each_initial_slot() {
    let mut round = SlotRound::default().around(10);
    let part = round.part(6, 10);
    round = round.after(&part).around(10);
    let mut seen = Vec::new();
    for slots in [10, 14, 14, 17, 17] {
        let part = round.part(3, slots);
        seen.extend(part.clone());
        round = round.after(&part);
    }
    seen.sort_unstable();
    assert_eq!((seen, round.remaining), ((0..10).collect::<Vec<CacheSlot>>(), 0));
}

#[test]
fn slice_may_take_a_sixteenth_of_the_time_since_the_last() {
    let (begin, milliseconds) = (Instant::now(), Duration::from_millis);
    let mut pace = SweepPace::default();
    assert_eq!(pace.time_for_slice(begin), Duration::ZERO);
    pace.slice_ended(begin + milliseconds(4));
    assert_eq!(pace.time_for_slice(begin + milliseconds(20)), milliseconds(1));
    assert_eq!(pace.time_for_slice(begin), Duration::ZERO, "the clock of another processor may be behind");
    pace.slice_ended(begin + milliseconds(21));
    assert_eq!(pace.time_for_slice(begin + milliseconds(53)), milliseconds(2));
}
