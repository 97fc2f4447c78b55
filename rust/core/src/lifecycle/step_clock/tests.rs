use super::*;

/// The clock of steps by definition: `times[s]` is the time of step s + 1.
fn clock_of(times: &[u64]) -> StepClock {
    let mut clock = StepClock::default();
    times.iter().zip(1..).for_each(|(&time, step)| clock.record(step, time));
    clock
}

/// Several thousand times that increase by up to `most` milliseconds each.
fn times(count: u64, most: u64, seed: u64) -> Vec<u64> {
    let (mut random, mut time) = (seed, 1_700_000_000_000);
    (0..count)
        .map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            time += (random >> 33) % (most + 1);
            time
        })
        .collect()
}

#[test]
fn clock_keeps_pairs_per_second_then_minute_then_hour() {
    for (count, most) in [(5000, 100), (5000, 3000), (5000, 200_000), (5000, 4_000_000)] {
        let times = times(count, most, count + most);
        let clock = clock_of(&times);
        let (minute, hour) = (times[times.len() - 1] / MINUTE, times[times.len() - 1] / HOUR);
        // The last step of each unit, and the step before the first, whose time is not known.
        let mut expected: Vec<(u64, u64)> = Vec::new();
        for (step, time) in std::iter::once((0, times[0])).chain((1..).zip(times.iter().copied())) {
            let unit = match (minute - time / MINUTE < 2, hour - time / HOUR <= HOURS) {
                (true, _) => SECOND,
                (false, true) => MINUTE,
                _ => HOUR,
            };
            if expected.last().is_some_and(|&(_, before)| before / unit == time / unit) {
                expected.pop();
            }
            expected.push((step, time));
        }
        assert_eq!(clock.pairs, expected, "{most}");
    }
}

#[test]
fn a_month_at_a_hundred_steps_a_second_stays_below_the_documented_bytes() {
    let mut clock = StepClock::default();
    for second in 0..31 * 24 * 3600 {
        clock.record(100 * second + 1, 1_700_000_000_000 + second * SECOND);
    }
    assert!(clock.pairs.len() <= 31 * 24 * 60 + 120, "{}", clock.pairs.len());
    let bytes = clock.encode(usize::MAX);
    assert!(bytes.len() < 700_000, "{}", bytes.len());
    let in_a_manifest = serde_json::to_vec_pretty(&clock).expect("text");
    assert_eq!(in_a_manifest.len(), bytes.len(), "manifests are written like this");
    assert_eq!(serde_json::from_slice::<StepClock>(&bytes).expect("a clock"), clock);
}

#[test]
fn threshold_selects_no_younger_step_and_all_older_by_a_unit() {
    for most in [100, 3000, 200_000] {
        let times = times(4000, most, most);
        let clock = clock_of(&times);
        let now = times[times.len() - 1];
        for seconds in [0, 1, 30, 59, 61, 200, 5000, 100_000] {
            let cut = now - seconds * SECOND;
            let unit = if seconds < 60 { SECOND } else { MINUTE };
            let made = |by: u64| times.partition_point(|&time| time <= by) as u64;
            let step = clock.step_at(cut).unwrap_or(0);
            assert!(step <= made(cut), "{most} {seconds}");
            assert!(step >= made(cut.saturating_sub(unit)) || cut < times[0], "{most} {seconds}: {step}");
        }
    }
    let clock = clock_of(&[10_000, 12_000]);
    let steps = [9_999, 10_000, 11_999, 12_000].map(|cut| clock.step_at(cut));
    assert_eq!(steps, [None, Some(1), Some(1), Some(2)]);
    assert_eq!(StepClock::default().step_at(u64::MAX), None);
}

#[test]
fn time_is_monotonic_and_unknown_steps_get_next_time() {
    let mut clock = clock_of(&[10_000, 5_000, 12_000]);
    assert_eq!(clock.pairs, [(2, 10_000), (3, 12_000)]);
    clock.record(9, 20_000);
    assert_eq!((clock.step_at(19_999), clock.step_at(20_000)), (Some(3), Some(9)));
    // Steps that are made again after loading an older checkpoint have the current time.
    clock.record(3, 25_000);
    assert_eq!(clock.pairs, [(2, 10_000), (3, 25_000)]);
    let mut late = StepClock::default();
    late.record(500, 7_000);
    assert_eq!((late.step_at(6_999), late.step_at(7_000)), (None, Some(500)));
}

#[test]
fn joined_clock_has_greatest_time_of_each_step() {
    for most in [300, 70_000] {
        let ranks = [1, 2, 3].map(|rank| times(3000, most, rank));
        let clocks = ranks.each_ref().map(|times| clock_of(times));
        let joined = StepClock::join(clocks.iter());
        assert_eq!(joined, StepClock::join([&clocks[2], &StepClock::default(), &clocks[0], &clocks[1]].into_iter()));
        assert_eq!(joined, StepClock::join([&joined, &clocks[1]].into_iter()));
        for cut in (0..3000).step_by(7).map(|step| ranks[0][step]) {
            let least = clocks.iter().map(|clock| clock.step_at(cut).unwrap_or(0)).min();
            let step = joined.step_at(cut).unwrap_or(0);
            let made = ranks.iter().map(|times| times.partition_point(|&time| time <= cut) as u64).min();
            assert!(Some(step) <= made && Some(step) <= least, "{most} {cut}: {step} {least:?} {made:?}");
        }
        let latest = ranks.iter().map(|times| times[2999]).max();
        assert_eq!((joined.step_at(u64::MAX), Some(joined.latest())), (Some(3000), latest));
    }
    assert_eq!(StepClock::join(std::iter::empty()), StepClock::default());
}

#[test]
fn bytes_that_would_be_too_many_have_fewer_pairs_and_the_last_one() {
    let clock = clock_of(&times(300, 200_000, 5));
    assert!(clock.encode(2).is_empty() && StepClock::default().encode(100).is_empty());
    for most in [100, 300, 1000, 3000, 100_000] {
        let bytes = clock.encode(most);
        assert!(bytes.len() <= most);
        let back: StepClock = serde_json::from_slice(&bytes).expect("a clock");
        assert_eq!(back.pairs.last(), clock.pairs.last());
        assert!(back.pairs.iter().all(|pair| clock.pairs.contains(pair)));
    }
    assert_eq!(serde_json::from_slice::<StepClock>(&clock.encode(100_000)).expect("a clock"), clock);
}

#[test]
fn invalid_clocks_are_rejected() {
    for text in [
        "",
        "2",
        "0 1",
        "0 1 1 0 5",
        "0 1 18446744073709551615",
        "1 9223372036854775807 1",
        "0 -1 2",
        "0 +1 2",
        "0  1 2",
        "0 1 2 ",
    ] {
        assert!(serde_json::from_value::<StepClock>(text.into()).is_err(), "{text:?}");
    }
    assert!(serde_json::from_str::<StepClock>("[0, 1, 2]").is_err());
    assert_eq!(serde_json::from_str::<StepClock>("\"1 0 5 3 0\"").expect("a clock").pairs, [(0, 5), (3, 5)]);
}
