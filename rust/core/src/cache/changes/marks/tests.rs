use super::*;
use crate::config::PolicyKind;

#[test]
fn marks_are_taken_once_in_ascending_order() {
    let mut slots = SlotMap::new(200, PolicyKind::Lru);
    (0..200).for_each(|_| assert!(slots.take().is_some()));
    let marked: Vec<CacheSlot> = (0..200).filter(|slot| slot % 3 == 0 || (60..70).contains(slot)).collect();
    for most in [1, 7, 64, 500] {
        let mut marks = SlotMarks::none_of(&slots).unwrap();
        for &slot in &marked {
            marks.set(slot);
        }
        assert!(marks.take(63) && !marks.take(63) && !marks.take(1), "by number");
        let (mut next, mut found) = (0, Vec::new());
        loop {
            let some = marks.take_next(&mut next, most);
            if some.is_empty() {
                break;
            }
            assert!(some.len() <= most);
            found.extend(some);
        }
        let expected: Vec<CacheSlot> = marked.iter().copied().filter(|&slot| slot != 63).collect();
        assert_eq!(found, expected, "{most} at a time");
    }
}

#[test]
fn export_knows_rows_passed_on_before_their_write_back() {
    let mut exports = ExportSet::default();
    let (first, seen_by_first) = exports.begin(7);
    let (second, seen_by_second) = exports.begin(7);
    let (_outdated, seen_by_outdated) = exports.begin(6);
    exports.move_cursor(first, 4);
    exports.move_cursor(second, 1);
    exports.record_written_back(7, &[0, 3, 4].into_iter(), |slot| Id::from(slot) * 10);
    let seen = |by: &WrittenBackIds| [0, 30, 40].map(|id| by.contains(id));
    assert_eq!(seen(&seen_by_first), [true, true, false]);
    assert_eq!(seen(&seen_by_second), [true, false, false]);
    assert_eq!(seen(&seen_by_outdated), [false; 3]);
    assert!(exports.keeps_rows_in_slots(7) && !exports.keeps_rows_in_slots(8));
    exports.end(first);
    exports.end(second);
    assert!(!exports.keeps_rows_in_slots(7) && !exports.are_contents_pinned(7));
    let token = exports.pin_contents(7);
    assert!(exports.are_contents_pinned(7) && !exports.are_contents_pinned(8) && !exports.keeps_rows_in_slots(7));
    drop(token);
    assert!(!exports.are_contents_pinned(7));
}
