//! Exact sums of float32 values, which do not depend on the order, the number of threads or the number of ranks.
//!
//! A finite float32 is an integer multiple of 2⁻¹⁴⁹. A sum is stored in limbs of 32 bits that are added without
//! carrying, each in 64 bits. So limbs of several sums can be added limb by limb, and 2³¹ values fit.

/// Number of limbs of a sum, which covers the largest and the smallest float32.
const LIMBS: usize = 9;
/// Integers of the exact sum of one column: its limbs, the lowest first, and the number of non-finite values.
pub const EXACT_PLACES: usize = LIMBS + 1;

const LIMB_BITS: u32 = 32;
const MANTISSA_BITS: u32 = 23;
/// The exponent field of non-finite values.
const NOT_FINITE: u32 = 0xff;

/// Adds a value to a sum.
#[inline]
fn add(sum: &mut [i64], number: f32) {
    let bits = number.to_bits();
    let exponent = (bits >> MANTISSA_BITS) & NOT_FINITE;
    if exponent == NOT_FINITE {
        sum[LIMBS] += 1;
        return;
    }
    let hidden = u32::from(exponent > 0) << MANTISSA_BITS;
    let mantissa = u64::from((bits & ((1 << MANTISSA_BITS) - 1)) | hidden);
    let place = exponent.max(1) - 1;
    let shifted = mantissa << (place % LIMB_BITS);
    let (low, high) = ((shifted & u64::from(u32::MAX)) as i64, (shifted >> LIMB_BITS) as i64);
    let sign = if bits >> 31 == 1 { -1 } else { 1 };
    let limb = (place / LIMB_BITS) as usize;
    sum[limb] += sign * low;
    sum[limb + 1] += sign * high;
}

/// Adds a row to the sums of its columns: `[D × EXACT_PLACES]`, column after column.
pub(crate) fn add_row(sums: &mut [i64], row: &[f32]) {
    for (sum, &number) in sums.as_chunks_mut::<EXACT_PLACES>().0.iter_mut().zip(row) {
        add(sum, number);
    }
}

/// Carries, so that each limb is within `0..2³²`. Returns the carry above the highest.
fn carried(sum: &[i64], sign: i128, limbs: &mut [u32; LIMBS]) -> i128 {
    let mut carry = 0;
    for (limb, &place) in limbs.iter_mut().zip(sum) {
        let value = sign * i128::from(place) + carry;
        *limb = value.rem_euclid(1 << LIMB_BITS) as u32;
        carry = value.div_euclid(1 << LIMB_BITS);
    }
    carry
}

/// The float32 nearest to a sum, ties to even. NaN if a value of the sum was not finite.
fn rounded(sum: &[i64]) -> f32 {
    if sum[LIMBS] != 0 {
        return f32::NAN;
    }
    let mut limbs = [0; LIMBS];
    let mut above = carried(sum, 1, &mut limbs);
    let sign = if above < 0 { -1.0 } else { 1.0 };
    if above < 0 {
        above = carried(sum, -1, &mut limbs);
    }
    if above > 0 {
        // The limbs cover values above the largest float32.
        return sign * f32::INFINITY;
    }
    // The highest two limbs that are not zero, as one integer, and the position of its lowest bit.
    let highest = limbs.iter().rposition(|&limb| limb != 0).unwrap_or(0);
    let low = highest.saturating_sub(1);
    let high = if highest > low { u64::from(limbs[highest]) << LIMB_BITS } else { 0 };
    let (mut number, mut place) = (high | u64::from(limbs[low]), low as u64 * u64::from(LIMB_BITS));
    let mut is_more = limbs[..low].iter().any(|&limb| limb != 0);
    let dropped = (u64::BITS - number.leading_zeros()).saturating_sub(f64::MANTISSA_DIGITS);
    is_more |= number & ((1 << dropped) - 1) != 0;
    (number, place) = (number >> dropped, place + u64::from(dropped));
    // A float64 represents it without rounding. Omitted bits make it odd, so that the float32 is rounded as if they
    // were included (Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums"). Subnormal sums have
    // one limb, and omit none.
    number |= u64::from(is_more);
    let unit = f64::from_bits((1023 - 149 + place) << (f64::MANTISSA_DIGITS - 1));
    sign * (number as f64 * unit) as f32
}

/// The float32 nearest to each of the sums: `[D]`.
pub(crate) fn rounded_row(sums: &[i64]) -> Vec<f32> {
    sums.as_chunks::<EXACT_PLACES>().0.iter().map(|sum| rounded(sum)).collect()
}

#[cfg(test)]
mod tests;
