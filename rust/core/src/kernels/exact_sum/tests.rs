use super::*;

fn sum_of(numbers: &[f32]) -> f32 {
    let mut sums = vec![0; EXACT_PLACES];
    for &number in numbers {
        add_row(&mut sums, &[number]);
    }
    rounded_row(&sums)[0]
}

#[test]
fn a_single_number_keeps_its_bits() {
    let smallest = f32::from_bits(1);
    for number in [0.0, 1.0, -1.5, 0.1, -0.3, f32::MAX, f32::MIN, f32::MIN_POSITIVE, smallest, -smallest, 1e-40, 3e38] {
        assert_eq!(sum_of(&[number]).to_bits(), number.to_bits(), "{number}");
    }
}

#[test]
fn what_float32_would_lose_is_there() {
    assert_eq!(sum_of(&[f32::MAX, 1.0, -f32::MAX]).to_bits(), 1.0_f32.to_bits());
    assert_eq!(sum_of(&[-1.0, f32::from_bits(1), 1.0]).to_bits(), 1);
    assert_eq!(sum_of(&[f32::MAX, f32::MAX, -f32::MAX]).to_bits(), f32::MAX.to_bits());
    assert_eq!(sum_of(&[-f32::MAX, -f32::MAX]).to_bits(), f32::NEG_INFINITY.to_bits());
    assert!(sum_of(&[1.0, f32::INFINITY]).is_nan() && sum_of(&[f32::NAN]).is_nan());
}

#[test]
fn a_sum_is_rounded_once() {
    let tiny = 2.0_f32.powi(-100);
    let half = 2.0_f32.powi(-24);
    let next = 1.0 + f32::EPSILON;
    // Half of a unit is rounded to the even value. Any additional value decides, however small.
    for (numbers, nearest) in [
        (vec![1.0, half], 1.0),
        (vec![1.0, half, tiny], next),
        (vec![1.0, half, f32::from_bits(1)], next),
        (vec![1.0, half, -tiny], 1.0),
        (vec![next, half], 1.0 + 2.0 * f32::EPSILON),
        (vec![next, half, -tiny], next),
        (vec![f32::MAX, 2.0_f32.powi(103)], f32::INFINITY),
        (vec![f32::MAX, 2.0_f32.powi(103), -tiny], f32::MAX),
        (vec![2.0_f32.powi(90), 2.0_f32.powi(66), f32::from_bits(3)], 2.0_f32.powi(90) * next),
    ] {
        assert_eq!(sum_of(&numbers).to_bits(), nearest.to_bits(), "{numbers:?}");
        let negative: Vec<f32> = numbers.iter().map(|number| -number).collect();
        assert_eq!(sum_of(&negative).to_bits(), (-nearest).to_bits(), "{negative:?}");
    }
}

#[test]
fn the_order_and_the_parts_do_not_matter() {
    let mut state = 1_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (state >> 32) as u32;
        // Exponents near the exponent of 1, so that the sum is neither dominated by one value nor infinite.
        f32::from_bits(bits & 0x87ff_ffff | 0x3800_0000)
    };
    let numbers: Vec<f32> = (0..10_000).map(|_| draw()).collect();
    let whole = sum_of(&numbers);
    let exact: f64 = numbers.iter().map(|&number| f64::from(number)).sum();
    assert!((f64::from(whole) - exact).abs() <= exact.abs() * 1e-6, "{whole} {exact}");
    let backwards: Vec<f32> = numbers.iter().rev().copied().collect();
    assert_eq!(sum_of(&backwards).to_bits(), whole.to_bits());
    let mut parts = vec![0; EXACT_PLACES];
    for part in numbers.chunks(77) {
        let mut sums = vec![0; EXACT_PLACES];
        for &number in part {
            add_row(&mut sums, &[number]);
        }
        parts.iter_mut().zip(sums).for_each(|(all, some)| *all += some);
    }
    assert_eq!(rounded_row(&parts)[0].to_bits(), whole.to_bits());
}
