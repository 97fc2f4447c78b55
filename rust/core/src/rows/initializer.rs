//! Initializers of new rows: the weights are a counter-based random function of (seed, table key, id, column).
//!
//! All arithmetic here is IEEE addition, multiplication, division and square root in a fixed order, so a row is bitwise
//! identical on every machine. Golden vectors (`tests/fixtures/v1/births.txt`) pin the function.
#![allow(clippy::inline_always, unsafe_code)] // Compiled for every instruction set; see `simd`.

use serde::{Deserialize, Serialize};

use super::philox::{BLOCKS, PhiloxBlock, blocks_of};
#[cfg(target_arch = "x86_64")]
use super::philox::{avx2, wide};
use crate::error::{Error, Kind, Result};
use crate::runtime::simd::{InstructionSet, SimdJob};
use crate::types::{Id, hash_id};

/// Φ(2), the cumulative probability at the upper end of the truncated normal distribution.
const NORMAL_CDF_AT_TWO: f64 = 0.977_249_868_051_820_8;

/// Number of columns whose weights are computed together.
const COLUMNS: usize = 4 * BLOCKS;

/// The distribution of initial weights. Optimizer slots are initialized to zeros.
///
/// Its serde form is part of a checkpoint's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name", deny_unknown_fields)]
pub enum InitializerSpec {
    /// Every weight is `value`.
    Constant {
        /// The value.
        value: f32,
    },
    /// Uniform in `[low, high)`. Every weight is `low` if both are equal.
    Uniform {
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
    },
    /// Normal. Weights are within 6.34 standard deviations of the mean, because they are derived from 32 random bits.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Normal within `mean ± 2 std`, as if redrawn until inside, like TensorFlow's `truncated_normal`.
    TruncatedNormal {
        /// Mean.
        mean: f32,
        /// Standard deviation before truncation.
        std: f32,
    },
    /// The same ramp for every id: `low + column / (D − 1) × (high − low)`, or `low` if `D` is 1. This is LINEAR of
    /// `RecSDK`.
    Linear {
        /// Value of the first column.
        low: f32,
        /// Value of the last column.
        high: f32,
    },
}

impl InitializerSpec {
    fn check(&self) -> Result<()> {
        match *self {
            Self::Constant { value } => check_finite("value", value),
            Self::Uniform { low, high } => {
                check_finite("low", low)?;
                check_finite("high", high)?;
                if low > high {
                    return Err(value_error("low", low, &format!("must not be above high, which is {high}")));
                }
                check_ordered(low, high)
            }
            Self::Normal { mean, std } | Self::TruncatedNormal { mean, std } => {
                check_finite("mean", mean)?;
                check_finite("std", std)?;
                if std < 0.0 {
                    return Err(value_error("std", std, "must not be negative"));
                }
                if !(mean.abs() + 7.0 * std).is_finite() {
                    return Err(value_error("std", std, "makes weights past the range of float32: use a smaller one"));
                }
                Ok(())
            }
            Self::Linear { low, high } => {
                check_finite("low", low)?;
                check_finite("high", high)?;
                check_ordered(low, high)
            }
        }
    }
}

fn value_error(field: &str, value: f32, problem: &str) -> Error {
    Kind::Config.error(format!("initializer.{field} is {value}: it {problem}"))
}

fn check_finite(field: &str, value: f32) -> Result<()> {
    if value.is_finite() { Ok(()) } else { Err(value_error(field, value, "must be finite")) }
}

fn check_ordered(low: f32, high: f32) -> Result<()> {
    if (high - low).is_finite() {
        Ok(())
    } else {
        Err(value_error("high", high, &format!("is further from low ({low}) than float32 can hold: bring them closer")))
    }
}

/// Computes the initial weights of one table's rows.
#[derive(Clone, Copy, Debug)]
pub struct RowInitializer {
    initializer: InitializerSpec,
    /// The key of Philox, derived from the seed and the table key.
    key: [u32; 2],
}

impl RowInitializer {
    /// Creates the initializer of a table with this seed and table key. Returns `Kind::Config` if a parameter of the
    /// initializer is not finite or out of order.
    pub fn new(initializer: InitializerSpec, seed: u64, key: u64) -> Result<Self> {
        initializer.check()?;
        // Philox has a key of 64 bits, and seed and table key have 128. The table key is hashed before it is combined
        // with the seed, so that tables with adjacent keys and seeds do not share a random stream.
        let mixed = hash_id((seed ^ hash_id(key as Id)) as Id);
        Ok(Self { initializer, key: [mixed as u32, (mixed >> 32) as u32] })
    }

    /// Writes the initial weights of `id` to `weights`, which is `[D]`.
    ///
    /// Column `c` uses word `c mod 4` of the Philox4x32-10 block with counter `(c / 4, 0, low half of id, high half of
    /// id)`.
    pub fn fill(&self, id: Id, weights: &mut [f32]) {
        self.fill_all(std::iter::once((id, weights)));
    }

    /// Like [`RowInitializer::fill`], for many rows. The instruction set is selected once for all of them.
    pub fn fill_all<'a>(&self, rows: impl Iterator<Item = (Id, &'a mut [f32])>) {
        self.fill_all_on(InstructionSet::best(), rows);
    }

    fn fill_all_on<'a>(&self, isa: InstructionSet, rows: impl Iterator<Item = (Id, &'a mut [f32])>) {
        #[cfg(target_arch = "x86_64")]
        if isa == InstructionSet::Avx512 {
            // SAFETY: `isa` guarantees that the CPU has AVX-512 F.
            let blocks_of = |first, id, key| unsafe { wide::blocks_of(first, id, key) };
            return isa.run(InitializeJob { initializer: self, rows, blocks_of });
        }
        #[cfg(target_arch = "x86_64")]
        if isa == InstructionSet::Avx2 {
            // SAFETY: `isa` guarantees that the CPU has AVX2.
            let blocks_of = |first, id, key| unsafe { avx2::blocks_of(first, id, key) };
            return isa.run(InitializeJob { initializer: self, rows, blocks_of });
        }
        isa.run(InitializeJob { initializer: self, rows, blocks_of });
    }
}

/// Initializes the rows of ids. `blocks_of` is [`philox::blocks_of`](super::philox::blocks_of).
struct InitializeJob<'a, R, B> {
    initializer: &'a RowInitializer,
    rows: R,
    blocks_of: B,
}

impl<'w, R, B> SimdJob for InitializeJob<'_, R, B>
where
    R: Iterator<Item = (Id, &'w mut [f32])>,
    B: Fn(u32, u64, [u32; 2]) -> [PhiloxBlock; BLOCKS],
{
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.initializer.initializer {
            InitializerSpec::Constant { value } => self.rows.for_each(|(_, weights)| weights.fill(value)),
            InitializerSpec::Uniform { low, high } => {
                let width = high - low;
                // The sum may round up to `high`, which is outside the interval.
                let last = if low < high { high.next_down() } else { low };
                self.each(|word| {
                    // 24 bits give exact values in the unit interval.
                    let unit = (word >> 8) as f32 * (1.0 / 16_777_216.0);
                    (low + width * unit).min(last)
                });
            }
            InitializerSpec::Normal { mean, std } => {
                let (mean, std) = (f64::from(mean), f64::from(std));
                self.each(|word| (mean + std * normal_quantile(open_unit(word))) as f32);
            }
            InitializerSpec::TruncatedNormal { mean, std } => {
                let (mean, std) = (f64::from(mean), f64::from(std));
                let from = 1.0 - NORMAL_CDF_AT_TWO;
                let width = NORMAL_CDF_AT_TWO - from;
                self.each(|word| {
                    let standard = normal_quantile(from + width * open_unit(word)).clamp(-2.0, 2.0);
                    (mean + std * standard) as f32
                });
            }
            InitializerSpec::Linear { low, high } => {
                let (low, width) = (f64::from(low), f64::from(high) - f64::from(low));
                self.rows.for_each(|(_, weights)| {
                    let last = weights.len().saturating_sub(1).max(1) as f64;
                    for (column, weight) in weights.iter_mut().enumerate() {
                        *weight = (low + column as f64 / last * width) as f32;
                    }
                });
            }
        }
    }
}

impl<'w, R, B> InitializeJob<'_, R, B>
where
    R: Iterator<Item = (Id, &'w mut [f32])>,
    B: Fn(u32, u64, [u32; 2]) -> [PhiloxBlock; BLOCKS],
{
    /// Converts the random word of each column of each row to the column's weight.
    #[inline(always)]
    fn each(self, weight_of: impl Fn(u32) -> f32) {
        for (id, weights) in self.rows {
            for (chunk, weights) in weights.chunks_mut(COLUMNS).enumerate() {
                let blocks = (self.blocks_of)((chunk * BLOCKS) as u32, id as u64, self.initializer.key);
                for (weight, &word) in weights.iter_mut().zip(blocks.as_flattened()) {
                    *weight = weight_of(word);
                }
            }
        }
    }
}

/// The middle of the word's interval, if the unit interval is divided into 2³² parts. It is exact, and never 0 or 1.
#[inline(always)]
fn open_unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

/// The `x` for which Φ(x) = `p`, accurate to one part in 5 million. `p` is between 2⁻³³ and 1 − 2⁻³³.
///
/// This is PPND7 of algorithm AS 241 (Wichura, "The percentage points of the normal distribution", Applied Statistics
/// 37, 1988), evaluated in float64. Its third interval is omitted, because it is beyond the bounds of `p`.
#[inline(always)]
fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        let numerator = ((59.109_374_720 * r + 159.291_132_02) * r + 50.434_271_938) * r + 3.387_132_717_9;
        let denominator = ((67.187_563_600 * r + 78.757_757_664) * r + 17.895_169_469) * r + 1.0;
        return q * numerator / denominator;
    }
    let r = (-ln(if q < 0.0 { p } else { 1.0 - p })).sqrt() - 1.6;
    let numerator = ((0.170_238_211_03 * r + 1.306_728_481_6) * r + 2.756_815_390_0) * r + 1.423_437_277_7;
    let denominator = (0.120_211_329_75 * r + 0.737_001_642_50) * r + 1.0;
    (numerator / denominator).copysign(q)
}

/// The natural logarithm of a positive normal number, to about 1e-14.
#[inline(always)]
fn ln(value: f64) -> f64 {
    // value = mantissa × 2^exponent, with the mantissa in [√½, √2).
    const SQRT_HALF_BITS: u64 = 0x3fe6_a09e_667f_3bcd;
    let shifted = value.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let exponent = (shifted as i64) >> 52;
    let mantissa = f64::from_bits((shifted & ((1 << 52) - 1)).wrapping_add(SQRT_HALF_BITS));
    // ln(m) = 2 artanh(z) with z = (m − 1) / (m + 1), as a power series; |z| ≤ 0.172.
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let square = z * z;
    let mut series = 1.0 / 19.0;
    for odd in [17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = 1.0 / odd + series * square;
    }
    f64::from(exponent as i32) * std::f64::consts::LN_2 + 2.0 * z * series
}

#[cfg(test)]
mod tests;
