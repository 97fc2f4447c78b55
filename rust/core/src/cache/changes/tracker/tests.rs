use super::*;

#[test]
fn rows_are_recorded_from_the_start_to_the_stop_of_a_sweep() {
    let mut moved = MovedRows::default();
    moved.record([1].into_iter());
    assert!(moved.is_empty(), "no sweep is in progress");
    moved.start();
    moved.record([2, 3].into_iter());
    moved.record([2].into_iter());
    let mut ids = vec![9];
    moved.append_to(&mut ids);
    assert_eq!(ids, [9, 2, 3, 2]);
    assert!(moved.is_empty());
    moved.record([4].into_iter());
    moved.stop();
    moved.record([5].into_iter());
    assert!(!moved.is_empty(), "the recorded rows are kept");
    moved.append_to(&mut ids);
    assert_eq!(ids, [9, 2, 3, 2, 4]);
}

#[test]
fn the_start_of_a_sweep_drops_the_rows_of_the_previous_one() {
    let mut moved = MovedRows::default();
    moved.start();
    moved.record([1].into_iter());
    moved.start();
    assert!(moved.is_empty());
    moved.record([2].into_iter());
    let mut ids = Vec::new();
    moved.append_to(&mut ids);
    assert_eq!(ids, [2]);
}
