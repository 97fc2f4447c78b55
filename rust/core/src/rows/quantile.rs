//! The quantile function of the standard normal distribution. It uses only basic arithmetic, so its results are bitwise
//! identical on every machine.
#![allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.

/// Φ(2), the cumulative probability at the upper end of the truncated normal distribution.
pub(super) const NORMAL_CDF_AT_TWO: f64 = 0.977_249_868_051_820_8;

/// The `x` for which Φ(x) = `p`, accurate to one part in 5 million. `p` is between 2⁻³³ and 1 − 2⁻³³.
///
/// This is PPND7 of algorithm AS 241 (Wichura, "The percentage points of the normal distribution", Applied Statistics
/// 37, 1988), evaluated in float64. Its third interval is omitted, because it is beyond the bounds of `p`.
#[inline(always)]
pub(super) fn normal_quantile(p: f64) -> f64 {
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
