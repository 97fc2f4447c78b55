//! Storage formats of the weights of a row in serving checkpoints: float32, or fewer bytes.
//!
//! | precision | bytes of a row of `D` weights | |
//! | --- | --- | --- |
//! | fp32 | 4 `D` | |
//! | fp16 | 2 `D` | IEEE 754 binary16, rounded to nearest, ties to even |
//! | bf16 | 2 `D` | the upper half of a float32, rounded to nearest, ties to even |
//! | int8 | `D` + 4 | a code of 8 bits for each weight, then the row's scale and its bias, both fp16 |
//!
//! Int8 rows have the format of FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, 8)`, and are read by its
//! `FusedNBitRowwiseQuantizedSBHalfToFloat(rows, 8)`. A weight reads as `code × scale + bias`. The product has at most
//! 19 significant bits, so it is exact, and reads are bitwise identical with and without fused multiply-add.

#![allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.

use serde::{Deserialize, Serialize};

use crate::runtime::simd::{InstructionSet, SimdJob};

/// The storage format of a row's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightPrecision {
    /// Float32, as in training.
    Fp32,
    /// IEEE 754 binary16.
    Fp16,
    /// The upper half of a float32.
    Bf16,
    /// A code of 8 bits for each weight, and a scale and a bias per row.
    Int8,
}

/// Bytes of the scale and the bias of an int8 row.
const SCALE_AND_BIAS: usize = 4;
/// Rows of up to this many bytes are rounded without allocating memory.
const SMALL_ROW: usize = 1024;
/// The largest code.
const MAX_CODE: f32 = 255.0;

impl WeightPrecision {
    /// Every precision.
    pub const ALL: [Self; 4] = [Self::Fp32, Self::Fp16, Self::Bf16, Self::Int8];

    /// The name in manifests and in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// The inverse of [`WeightPrecision::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|precision| precision.name() == name)
    }

    /// The safetensors type of the column of weights.
    pub fn dtype(self) -> &'static str {
        match self {
            Self::Fp32 => "F32",
            Self::Fp16 => "F16",
            Self::Bf16 => "BF16",
            Self::Int8 => "U8",
        }
    }

    /// Number of values of that type in a row of `dim` weights.
    pub fn columns(self, dim: usize) -> usize {
        if self == Self::Int8 { dim + SCALE_AND_BIAS } else { dim }
    }

    /// Number of bytes of a row of `dim` weights.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::Fp32 => 4 * dim,
            Self::Fp16 | Self::Bf16 => 2 * dim,
            Self::Int8 => dim + SCALE_AND_BIAS,
        }
    }

    /// Stores rows of `dim` weights: `weights` is `[n, dim]`, and `into` has [`WeightPrecision::row_bytes`] for each of
    /// them.
    ///
    /// The error is the index of the first row that this precision cannot represent: for fp16 and bf16 a row with a
    /// finite weight that would become infinite; for int8 a row with a weight that is not finite, or whose bias or
    /// scale would be infinite in fp16. Other rows may have been stored.
    ///
    /// # Panics
    /// Panics if the lengths do not match.
    pub fn store(self, weights: &[f32], dim: usize, into: &mut [u8]) -> Result<(), usize> {
        assert_eq!(weights.len() / dim * self.row_bytes(dim), into.len(), "as many rows as there is room for");
        let mut rows = weights.chunks_exact(dim).zip(into.chunks_exact_mut(self.row_bytes(dim)));
        let isa = InstructionSet::best();
        match rows.position(|(row, into)| !isa.run(StoreJob { precision: self, row, into })) {
            Some(number) => Err(number),
            None => Ok(()),
        }
    }

    /// Rounds a row of weights to the values that are read after storing it. A row that cannot be represented is
    /// unchanged.
    pub(crate) fn round(self, row: &mut [f32]) {
        let bytes = self.row_bytes(row.len());
        let (mut small, mut large) = ([0; SMALL_ROW], Vec::new());
        let stored = if bytes <= SMALL_ROW {
            &mut small[..bytes]
        } else {
            large.resize(bytes, 0);
            &mut large[..]
        };
        if self.store(row, row.len(), stored).is_ok() {
            self.load(stored, row);
        }
    }

    /// Reads a stored row with the number of weights that `into` has.
    ///
    /// # Panics
    /// Panics if the length of `stored` is not [`WeightPrecision::row_bytes`].
    #[inline]
    pub fn load(self, stored: &[u8], into: &mut [f32]) {
        assert_eq!(stored.len(), self.row_bytes(into.len()), "the bytes of one row");
        match self {
            // A copy does not depend on the instruction set.
            Self::Fp32 => bytemuck::cast_slice_mut(into).copy_from_slice(stored),
            _ => InstructionSet::best().run(LoadJob { precision: self, stored, into }),
        }
    }
}

struct StoreJob<'a> {
    precision: WeightPrecision,
    row: &'a [f32],
    into: &'a mut [u8],
}

impl SimdJob for StoreJob<'_> {
    /// True if the row can be represented.
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        match self.precision {
            WeightPrecision::Fp32 => {
                self.into.copy_from_slice(bytemuck::cast_slice(self.row));
                true
            }
            WeightPrecision::Fp16 => store_halves(self.row, self.into, f32_to_f16, 0x7c00),
            WeightPrecision::Bf16 => store_halves(self.row, self.into, f32_to_bf16, 0x7f80),
            WeightPrecision::Int8 => store_codes(self.row, self.into),
        }
    }
}

/// Stores weights in two bytes each. Returns false if a finite one becomes `infinity`.
#[inline(always)]
fn store_halves(row: &[f32], into: &mut [u8], convert: impl Fn(f32) -> u16, infinity: u16) -> bool {
    let (pairs, _) = into.as_chunks_mut::<2>();
    let mut lost = false;
    for (weight, into) in row.iter().zip(pairs) {
        let half = convert(*weight);
        lost |= (half & 0x7fff == infinity) & weight.is_finite();
        *into = half.to_le_bytes();
    }
    !lost
}

/// Stores codes, a scale and a bias. Returns false if a weight, the scale or the bias is not finite.
#[inline(always)]
fn store_codes(row: &[f32], into: &mut [u8]) -> bool {
    let (codes, numbers) = into.split_at_mut(row.len());
    let (mut least, mut greatest, mut finite) = (f32::INFINITY, f32::NEG_INFINITY, true);
    for &weight in row {
        least = if weight < least { weight } else { least };
        greatest = if weight > greatest { weight } else { greatest };
        finite &= weight.is_finite();
    }
    let bias = f32_to_f16(least);
    let lowest = f16_to_f32(bias);
    let range = greatest - lowest;
    let exact = if range == 0.0 { 1.0 } else { range / MAX_CODE };
    let rounded = f16_to_f32(f32_to_f16(exact));
    // If all values of a row are equal, any scale works. If fp16 has no scale for the range, every code is 0.
    let scale = if rounded == 0.0 { 1.0 } else { rounded };
    let inverse = 1.0 / scale;
    for (weight, code) in row.iter().zip(codes) {
        // The clamp is by comparison, so that the conversion is vectorized.
        let rounded = ((weight - lowest) * inverse).round_ties_even();
        let rounded = if rounded > 0.0 { rounded } else { 0.0 };
        *code = if rounded < MAX_CODE { rounded as u8 } else { 255 };
    }
    numbers[..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
    numbers[2..].copy_from_slice(&bias.to_le_bytes());
    finite && lowest.is_finite() && scale.is_finite()
}

struct LoadJob<'a> {
    precision: WeightPrecision,
    stored: &'a [u8],
    into: &'a mut [f32],
}

impl SimdJob for LoadJob<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (pairs, _) = self.stored.as_chunks::<2>();
        match self.precision {
            WeightPrecision::Fp32 => bytemuck::cast_slice_mut(self.into).copy_from_slice(self.stored),
            WeightPrecision::Fp16 => {
                for (stored, into) in pairs.iter().zip(self.into) {
                    *into = f16_to_f32(u16::from_le_bytes(*stored));
                }
            }
            WeightPrecision::Bf16 => {
                for (stored, into) in pairs.iter().zip(self.into) {
                    *into = f32::from_bits(u32::from(u16::from_le_bytes(*stored)) << 16);
                }
            }
            WeightPrecision::Int8 => {
                let (codes, numbers) = self.stored.split_at(self.into.len());
                let scale = f16_to_f32(u16::from_le_bytes([numbers[0], numbers[1]]));
                let bias = f16_to_f32(u16::from_le_bytes([numbers[2], numbers[3]]));
                for (code, into) in codes.iter().zip(self.into) {
                    *into = f32::from(*code) * scale + bias;
                }
            }
        }
    }
}

/// Converts to the nearest binary16, ties to even. Values beyond the range become infinity; a NaN keeps its sign and
/// the upper part of its payload and becomes quiet.
#[inline(always)]
fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
    let nan = 0x7e00 | (magnitude >> 13) & 0x1ff;
    // The last bit of 0.5 is 2^-24, as for a subnormal, so the addition rounds correctly.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let is_odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + is_odd) >> 13;
    // Every compiler turns the following expressions into selections without branches.
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    let all = if magnitude >= 143 << 23 { 0x7c00 } else { finite };
    (sign | if magnitude > 0x7f80_0000 { nan } else { all }) as u16
}

/// Converts to the same value; a NaN becomes quiet.
#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    let (sign, magnitude) = ((u32::from(half) & 0x8000) << 16, u32::from(half) & 0x7fff);
    // The exponent bias of a half is smaller by 112 than that of a float. Subnormals become normal by the
    // multiplication.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
    let special = 0x7f80_0000 | (magnitude << 13) | quiet;
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

/// Converts to the nearest bfloat16, ties to even. Values beyond the range become infinity; a NaN keeps its sign and
/// becomes quiet.
#[inline(always)]
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { (bits >> 16) | 0x40 } else { rounded }) as u16
}

#[cfg(test)]
mod tests;
