//! Decay of row scores: by half over each half life, in steps of a 1024th of it.
//!
//! The 1024ths are counted from step 0 and not from the row's last step. So the decay over many short intervals equals
//! the decay over the entire time, independent of the number of uses, and only the row's last step must be stored.
//!
//! All arithmetic is IEEE multiplication and square root of float64 in a fixed order, and division of integers. So a
//! score is bitwise identical on every machine. Golden vectors (`tests/fixtures/v1/decay.txt`) pin the function.

use std::sync::LazyLock;

use crate::error::{Kind, Result};

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
            return Err(
                Kind::Config.error(format!("score_half_life_steps={half_life} is out of range: give 1 to 2^53 steps"))
            );
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
mod tests;
