use super::*;

#[test]
fn powers_agree_with_repeated_multiplication() {
    for base in [0.9, 0.999, 0.0, 1.0_f64] {
        let mut expected = 1.0;
        for exponent in 0..2000 {
            assert!((power(base, exponent) - expected).abs() <= 1e-12, "{base}^{exponent}");
            expected *= base;
        }
    }
    assert!(power(0.999, u64::MAX).abs() < 1e-300);
}
