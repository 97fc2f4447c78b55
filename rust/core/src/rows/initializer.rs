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
    Error::new(Kind::Config, format!("initializer.{field} is {value}: it {problem}"))
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
mod tests {
    use super::*;

    fn rejects(initializer: InitializerSpec, words: &[&str]) {
        let error = RowInitializer::new(initializer, 0, 0).expect_err("a bad initializer must be refused");
        assert_eq!(error.kind(), Kind::Config);
        for word in words {
            assert!(error.to_string().contains(word), "{error} should say {word}");
        }
    }

    #[test]
    fn invalid_values_are_rejected_by_field_and_value() {
        rejects(InitializerSpec::Constant { value: f32::NAN }, &["value", "NaN"]);
        rejects(InitializerSpec::Uniform { low: 0.5, high: 0.25 }, &["low", "0.5", "0.25"]);
        rejects(InitializerSpec::Uniform { low: f32::MIN, high: f32::MAX }, &["high"]);
        rejects(InitializerSpec::Uniform { low: 0.0, high: f32::INFINITY }, &["high", "inf"]);
        rejects(InitializerSpec::Normal { mean: 0.0, std: -1.0 }, &["std", "-1"]);
        rejects(InitializerSpec::Normal { mean: 0.0, std: 1e38 }, &["std"]);
        rejects(InitializerSpec::TruncatedNormal { mean: f32::NEG_INFINITY, std: 1.0 }, &["mean", "-inf"]);
        rejects(InitializerSpec::Linear { low: 0.0, high: f32::NAN }, &["high", "NaN"]);
    }

    #[test]
    fn initial_values_are_bitwise_equal_on_every_instruction_set() {
        for initializer in [
            InitializerSpec::Uniform { low: -0.3, high: 0.7 },
            InitializerSpec::Normal { mean: 0.1, std: 0.3 },
            InitializerSpec::TruncatedNormal { mean: 0.1, std: 0.3 },
            InitializerSpec::Linear { low: 0.1, high: 0.7 },
        ] {
            let birth = RowInitializer::new(initializer, 1, 2).expect("valid");
            for id in -500..500 {
                let rows = InstructionSet::all().into_iter().map(|isa| {
                    let mut weights = [0.0; 77];
                    birth.fill_all_on(isa, std::iter::once((id, &mut weights[..])));
                    weights.map(f32::to_bits)
                });
                let rows: Vec<_> = rows.collect();
                assert!(rows.windows(2).all(|pair| pair[0] == pair[1]), "{initializer:?} id {id}");
            }
        }
    }

    #[test]
    fn rows_initialized_in_a_batch_equal_rows_initialized_alone() {
        for initializer in [
            InitializerSpec::Constant { value: 0.5 },
            InitializerSpec::Uniform { low: -0.3, high: 0.7 },
            InitializerSpec::Normal { mean: 0.1, std: 0.3 },
            InitializerSpec::TruncatedNormal { mean: 0.1, std: 0.3 },
            InitializerSpec::Linear { low: 0.1, high: 0.7 },
        ] {
            let birth = RowInitializer::new(initializer, 1, 2).expect("valid");
            for dim in [1, 16, 64, 77, 130] {
                let ids = [-5, 7, i64::MAX, 0, i64::MIN];
                let (mut together, mut alone) = (vec![f32::NAN; ids.len() * dim], vec![f32::NAN; ids.len() * dim]);
                birth.fill_all(ids.into_iter().zip(together.chunks_mut(dim)));
                ids.into_iter().zip(alone.chunks_mut(dim)).for_each(|(id, weights)| birth.fill(id, weights));
                let bits = |rows: &[f32]| rows.iter().map(|weight| weight.to_bits()).collect::<Vec<u32>>();
                assert_eq!(bits(&together), bits(&alone), "{initializer:?} of width {dim}");
            }
        }
    }

    #[test]
    fn a_uniform_weight_never_reaches_the_upper_bound() {
        // Just above 1, float32 is coarser than 24 bits of this interval, so half of the topmost words would round up
        // to the bound.
        let (low, high) = (1.0, 1.000_000_2);
        let birth = RowInitializer::new(InitializerSpec::Uniform { low, high }, 1, 2).expect("valid");
        let mut weights = vec![0.0; 10_000];
        birth.fill(5, &mut weights);
        assert!(weights.iter().all(|&weight| (low..high).contains(&weight)));
    }

    #[test]
    fn ln_agrees_with_the_platforms() {
        let mut value = 1e-12_f64;
        while value < 1e3 {
            assert!((ln(value) - value.ln()).abs() <= 1e-14 * value.ln().abs().max(1.0), "ln({value})");
            value *= 1.001;
        }
    }

    /// The expected values are those of Python's `statistics.NormalDist().inv_cdf`, which are accurate to 1e-15.
    #[test]
    fn quantiles_agree_with_a_double_precision_source() {
        for (p, expected) in [
            (0.5, 0.0),
            (0.975, 1.959_963_984_540_054),
            (0.841_344_746_068_542_9, 1.0),
            (0.99, 2.326_347_874_040_841),
            (0.999_9, 3.719_016_485_455_709),
            (1e-6, -4.753_424_308_822_899),
            (1.164_153_218_269_348_1e-10, -6.337_957_754_553_789),
            (NORMAL_CDF_AT_TWO, 2.0),
        ] {
            let got = normal_quantile(p);
            assert!(
                (got - expected).abs() <= 2e-7 * f64::max(1.0, expected.abs()),
                "quantile({p}) is {got}, not {expected}"
            );
            let mirrored = normal_quantile(1.0 - p);
            assert!(
                (got + mirrored).abs() < 1e-7 * f64::max(1.0, got.abs()),
                "quantile({p}) and its mirror image {mirrored}"
            );
        }
    }
}
