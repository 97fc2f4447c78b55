use super::*;

const CLASSES: HotnessClasses = HotnessClasses { count: MAX_HOTNESS_CLASSES, rows: 1000 };

/// Fraction of calls that send a row to each group, for evenly distributed dithers.
fn shares(hotness: u8, interval: u64) -> [f32; MAX_HOTNESS_CLASSES as usize] {
    let mut shares = [0.0; MAX_HOTNESS_CLASSES as usize];
    for dither in 0..100 {
        shares[CLASSES.after_rewrite(hotness, interval, dither as f32 / 100.0) as usize] += 0.01;
    }
    shares
}

#[test]
fn a_row_rewritten_as_expected_stays() {
    for (class, interval) in [(0, 500), (1, 1000), (2, 2000), (3, 4000)] {
        assert!(shares(class, interval)[class as usize] > 0.98, "{class}");
    }
}

#[test]
fn early_or_late_rewrite_moves_a_fraction_of_a_class() {
    let early = shares(3, 500);
    assert!(early[2] > 0.7 && early[3] > 0.2, "{early:?}");
    let late = shares(0, 1 << 40);
    assert!(late[0] > 0.2 && late[1] > 0.7, "{late:?}");
    assert!(shares(0, 0)[0] > 0.98);
}

#[test]
fn long_lived_row_moves_one_class_and_stops_at_the_last() {
    assert_eq!(CLASSES.after_move(0, 1000), 0);
    assert_eq!(CLASSES.after_move(0, 1001), 1);
    assert_eq!(CLASSES.after_move(1, 1500), 1);
    assert_eq!(CLASSES.after_move(3, u64::MAX), 3);
    assert_eq!(HotnessClasses { count: 2, rows: 10 }.after_move(1, u64::MAX), 1);
    assert_eq!(HotnessClasses { count: 2, rows: 0 }.after_rewrite(1, u64::MAX, 0.99), 1);
}

#[test]
fn rows_rewritten_together_share_a_class() {
    let at = |segment, record| Some(RecordLocation { segment, record });
    // First two of a cluster, one between them, and another of the cluster. Then rows that nothing links. Then two
    // far apart in one segment.
    let older = [at(1, 10), at(2, 7), at(1, 12), at(1, 30), None, at(3, 1), at(4, 0), at(4, 1000)];
    let mut classes = [0, 3, 0, 1, 1, 2, 0, 3];
    keep_neighbours_together(&mut classes, &older);
    assert_eq!(classes, [0, 0, 0, 0, 1, 2, 0, 3]);
    // Overlapping links join. A neighbour too many rows later does not.
    let older = [at(1, 0), at(2, 0), at(1, 5), at(2, 5), None, None, None, None, None, None, None, None, at(2, 6)];
    let mut classes = [1, 2, 3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3];
    keep_neighbours_together(&mut classes, &older);
    assert_eq!(classes, [2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    keep_neighbours_together(&mut [], &[]);
}
