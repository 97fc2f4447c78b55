use proptest::prelude::*;

use super::*;

/// Values of every size.
fn values() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0..u64::BITS).prop_map(|(value, shift)| value >> shift)
}

#[test]
fn the_bounds_rise_through_every_power_of_two() {
    let bounds: Vec<u64> = (0..BUCKETS).map(bound_of).collect();
    assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{bounds:?}");
    assert_eq!((bounds[0], bounds[BUCKETS - 1]), (1, u64::MAX));
    let powers = (0..u64::BITS).map(|power| 1 << power);
    assert!(powers.into_iter().all(|power| bounds.binary_search(&power).is_ok()));
}

#[test]
fn the_smallest_and_the_largest_value_have_a_bucket() {
    let histogram = DurationHistogram::default();
    for ns in [0, 1, 2, u64::MAX] {
        histogram.record(Duration::from_nanos(ns));
    }
    let found = histogram.snapshot();
    assert_eq!((found.bounds, found.counts), (vec![1, 2, u64::MAX], vec![2, 1, 1]));
    assert_eq!(found.count, 4);
}

#[test]
fn threads_lose_no_duration() {
    let histogram = DurationHistogram::default();
    std::thread::scope(|scope| {
        for thread in 1..=4 {
            let histogram = &histogram;
            scope.spawn(move || (0..1000).for_each(|_| histogram.record(Duration::from_nanos(thread * 100))));
        }
    });
    let found = histogram.snapshot();
    assert_eq!((found.count, found.sum_ns), (4000, 1_000_000));
    assert_eq!(found.counts, vec![1000; 4]);
}

proptest! {
    #[test]
    fn a_value_is_within_the_bounds_of_its_bucket(value in values()) {
        let bucket = bucket_of(value);
        prop_assert!(value <= bound_of(bucket));
        prop_assert!(bucket == 0 || value > bound_of(bucket - 1));
    }

    #[test]
    fn a_bound_is_at_most_an_eighth_above_its_values(value in values()) {
        let above = bound_of(bucket_of(value)) - value.max(1);
        prop_assert!(u128::from(above) * PER_POWER as u128 <= u128::from(value), "{above} above {value}");
    }

    #[test]
    fn everything_that_was_recorded_is_counted_once(recorded in proptest::collection::vec(0..1_u64 << 40, 0..200)) {
        let histogram = DurationHistogram::default();
        for &ns in &recorded {
            histogram.record(Duration::from_nanos(ns));
        }
        let found = histogram.snapshot();
        prop_assert_eq!(found.count, recorded.len() as u64);
        prop_assert_eq!(found.sum_ns, recorded.iter().sum::<u64>());
        prop_assert!(found.counts.iter().all(|&count| count > 0));
        let mut seen = 0;
        for (bound, count) in found.bounds.iter().zip(&found.counts) {
            seen += count;
            prop_assert_eq!(recorded.iter().filter(|ns| *ns <= bound).count() as u64, seen);
        }
    }
}
