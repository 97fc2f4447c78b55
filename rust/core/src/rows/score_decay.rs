//! Decay of row scores: by half over each half life, in steps of a 1024th of it.
//!
//! The 1024ths are counted from step 0 and not from the row's last step. So the decay over many short intervals equals
//! the decay over the entire time, independent of the number of uses, and only the row's last step must be stored.
//!
//! All arithmetic is IEEE multiplication and square root of float64 in a fixed order, and division of integers. So a
//! score is bitwise identical on every machine. Golden vectors (`tests/fixtures/v1/decay.txt`) pin the function.

use std::sync::LazyLock;

use crate::error::{Error, Kind, Result};

/// The parts of a half life.
const PARTS: u64 = 1024;
/// After this number of halvings, the largest float32 has decayed to less than half of the smallest float32 above 0.
const MOST_HALVINGS: u64 = 280;

/// The factors after 0, 1, ... 1023 parts of a half life: `2^(-part / 1024)`. They are strictly decreasing.
static FACTORS: LazyLock<[f64; PARTS as usize]> = LazyLock::new(|| {
    let mut factors = [1.0; PARTS as usize];
    // The factor of a half of a half life, of a quarter, and so on: each is the square root of the previous one.
    let mut root = 0.5_f64;
    let mut bit = PARTS as usize / 2;
    while bit > 0 {
        root = root.sqrt();
        for (part, factor) in factors.iter_mut().enumerate() {
            if part & bit != 0 {
                *factor *= root;
            }
        }
        bit /= 2;
    }
    factors
});

/// The decay of scores by a half life.
#[derive(Clone, Copy, Debug)]
pub struct ScoreDecay {
    half_life: u64,
    factors: &'static [f64; PARTS as usize],
}

impl ScoreDecay {
    /// The longest half life, in steps.
    pub const LONGEST: u64 = 1 << 53;

    /// Creates the decay of scores that halve every `half_life` steps.
    ///
    /// Errors: `Config` if `half_life` is 0 or more than [`ScoreDecay::LONGEST`].
    pub fn new(half_life: u64) -> Result<Self> {
        if !(1..=Self::LONGEST).contains(&half_life) {
            let message = format!("score_half_life_steps={half_life} is out of range: give 1 to 2^53 steps");
            return Err(Error::new(Kind::Config, message));
        }
        Ok(Self { half_life, factors: &FACTORS })
    }

    /// Decays a `score` from step `from` to step `to`. The score is unchanged if `to` is not after `from`.
    ///
    /// The result is non-increasing in `to`, and non-decreasing in `from` and in `score`.
    #[inline]
    pub fn of(&self, score: f32, from: u64, to: u64) -> f32 {
        if to <= from {
            return score;
        }
        (f64::from(score) * self.factor(from, to)) as f32
    }

    #[inline]
    fn factor(&self, from: u64, to: u64) -> f64 {
        let (before, after) = (self.point(from), self.point(to));
        let halvings = after.0 - before.0;
        if halvings > MOST_HALVINGS {
            return 0.0;
        }
        let parts = halvings * PARTS + after.1 - before.1;
        // A float64 with this exponent and a zero fraction: the power of two is exact, and so is the product.
        let power = f64::from_bits((1023 - parts / PARTS) << 52);
        self.factors[(parts % PARTS) as usize] * power
    }

    /// The number of complete half lives at a step, and of parts of the next one.
    #[inline]
    fn point(&self, step: u64) -> (u64, u64) {
        (step / self.half_life, step % self.half_life * PARTS / self.half_life)
    }
}

/// Decays scores up to one step. Consecutive rows of a batch often have the same last step, so the latest factor is
/// cached. A new row has the score 0, which needs no factor.
#[derive(Clone, Debug)]
pub struct ScoreDecayTo {
    decay: ScoreDecay,
    step: u64,
    from: u64,
    factor: f64,
}

impl ScoreDecayTo {
    /// Creates the decay up to `step`.
    pub fn new(decay: ScoreDecay, step: u64) -> Self {
        Self { decay, step, from: step, factor: 1.0 }
    }

    /// The step.
    #[inline]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Like [`ScoreDecay::of`], with bitwise identical results.
    #[inline]
    pub fn of(&mut self, score: f32, from: u64) -> f32 {
        if self.step <= from || score == 0.0 {
            return score;
        }
        if from != self.from {
            (self.from, self.factor) = (from, self.decay.factor(from, self.step));
        }
        (f64::from(score) * self.factor) as f32
    }
}

#[cfg(test)]
mod tests {
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
                assert!(
                    (left - exact).abs() <= exact * 0.0007 + 1e-44,
                    "{half_life}, {from}..{to}: {left}, not {exact}"
                );
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
        let fixture = include_str!("../../../../tests/fixtures/v1/decay.txt");
        let lines: Vec<&str> = fixture.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines.len(), 360);
        for line in lines {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let bits = |field: usize| f32::from_bits(u32::from_str_radix(fields[field], 16).expect("hexadecimal"));
            let step = |field: usize| fields[field].parse::<u64>().expect("a step");
            assert_same(decay(step(0)).of(bits(1), step(2), step(3)), bits(4), line);
        }
    }
}
