use super::*;

fn decay(half_life: u64) -> ScoreDecay {
    ScoreDecay::new(half_life).expect("in range")
}

fn assert_same(left: f32, right: f32, what: &str) {
    assert_eq!(left.to_bits(), right.to_bits(), "{what}: {left} and {right}");
}

#[test]
fn a_score_halves_over_each_half_life_from_any_step() {
    for half_life in [1, 3, 1000, 1024, ScoreDecay::LONGEST] {
        for (from, halvings) in
            (0..100).flat_map(|halvings| [(0, halvings), (half_life / 3, halvings), (half_life, halvings)])
        {
            let left = decay(half_life).of(3.0, from, from + half_life * halvings);
            assert_same(left, 3.0 * 0.5_f32.powi(halvings as i32), &format!("{half_life}, {from}, {halvings}"));
        }
    }
}

#[test]
fn the_state_kept_between_rows_changes_no_bit() {
    for half_life in [1, 7, 1000, ScoreDecay::LONGEST] {
        let mut to = ScoreDecayTo::new(decay(half_life), 1000);
        for from in [0, 0, 3, 3, 0, 999, 999, 1000, 1000, 2000, 999, 3] {
            for score in [0.0, -0.0, 1.0, -3.5, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN] {
                assert_same(to.of(score, from), decay(half_life).of(score, from, 1000), "the same");
            }
        }
        assert_same(ScoreDecayTo::new(decay(half_life), 0).of(5.0, 0), 5.0, "step 0");
    }
}

#[test]
fn scores_decay_to_zero_monotonically() {
    assert_same(decay(1).of(f32::MAX, 0, 281), 0.0, "281 halvings");
    assert_same(decay(1).of(f32::MAX, 1 << 62, u64::MAX), 0.0, "the last step");
    assert_same(decay(10).of(7.0, 100, 50), 7.0, "a step counter that was set back");
    assert!(decay(1).of(f32::MAX, 0, 276) > 0.0);
}

#[test]
fn many_short_times_are_one_long_time() {
    for (half_life, between) in [(1000, 1), (1000, 999), (1024, 1023), (100_000, 1), (100_000, 97), (7, 3)] {
        let decay = decay(half_life);
        let end = 10 * half_life / between * between;
        let steps: Vec<u64> = (0..=end).step_by(between as usize).collect();
        let left = steps.windows(2).fold(1024.0, |score, pair| decay.of(score, pair[0], pair[1]));
        let ratio = f64::from(left) / f64::from(decay.of(1024.0, 0, end));
        // Each interval rounds to a float32.
        assert!((ratio - 1.0).abs() < steps.len() as f64 * 6e-8, "{half_life}, {between}: {ratio}");
    }
}

#[test]
fn it_is_the_formula_to_a_1024th_of_a_half_life() {
    for half_life in [7, 100, 1023, 1024, 1025, 65_537] {
        for (from, to) in [(0, 1), (3, 9), (99, 100), (1000, 1024), (5, 100_000)] {
            let exact = (-((to - from) as f64) / half_life as f64).exp2();
            let left = f64::from(decay(half_life).of(1.0, from, to));
            // Values below the smallest float32 become 0.
            assert!((left - exact).abs() <= exact * 0.0007 + 1e-44, "{half_life}, {from}..{to}: {left}, not {exact}");
        }
    }
}

#[test]
fn it_never_rises() {
    for half_life in [3, 1000, 1024, 5000] {
        let decay = decay(half_life);
        let left: Vec<f32> = (17..20_000).map(|to| decay.of(0.7, 17, to)).collect();
        assert!(left.windows(2).all(|pair| pair[1] <= pair[0]), "with the step, {half_life}");
        let left: Vec<f32> = (0..20_000).map(|from| decay.of(0.7, from, 20_000)).collect();
        assert!(left.windows(2).all(|pair| pair[0] <= pair[1]), "with the first step, {half_life}");
    }
    assert!(FACTORS.windows(2).all(|pair| pair[1] < pair[0]));
}

#[test]
fn half_lives_out_of_range_are_rejected() {
    for half_life in [0, ScoreDecay::LONGEST + 1, u64::MAX] {
        let error = ScoreDecay::new(half_life).expect_err("out of range");
        assert!(error.kind() == Kind::Config && error.to_string().contains("score_half_life_steps"), "{error}");
    }
}

/// Each line: the half life, the bits of the score, the first step, the last step, and the bits of the decayed
/// score.
#[test]
fn decays_are_those_of_format_1() {
    let fixture = include_str!("../../../../../tests/fixtures/v1/decay.txt");
    let lines: Vec<&str> = fixture.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines.len(), 360);
    for line in lines {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let bits = |field: usize| f32::from_bits(u32::from_str_radix(fields[field], 16).expect("hexadecimal"));
        let step = |field: usize| fields[field].parse::<u64>().expect("a step");
        assert_same(decay(step(0)).of(bits(1), step(2), step(3)), bits(4), line);
    }
}
