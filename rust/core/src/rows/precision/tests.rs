use std::cmp::Ordering;

use super::*;
use crate::types::hash_id;

fn f16_value(half: u16) -> f64 {
    let (exponent, fraction) = (i32::from(half >> 10 & 0x1f), f64::from(half & 0x3ff));
    let size = match exponent {
        0 => fraction * 2.0_f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + fraction) * 2.0_f64.powi(exponent - 25),
    };
    if half >> 15 == 1 { -size } else { size }
}

/// Floats of every sign and exponent, with the fractions at which roundings to 10 and to 7 bits differ, and random
/// ones.
fn floats() -> impl Iterator<Item = f32> {
    let near = |bits: u32| [0, 1, bits - 1, bits, bits + 1];
    let edges: Vec<u32> = [12, 13, 15, 16, 22, 23].into_iter().flat_map(|at| near(1 << at)).collect();
    (0..512_u32).flat_map(move |top| {
        let edges = edges.clone();
        let random = (0..64).map(move |n| hash_id(i64::from(top * 64 + n)) as u32 & 0x007f_ffff);
        let more = edges.into_iter().flat_map(|low| [low, 0x007f_ffff ^ low, low << 1, low | 0x2000, low | 0x1_0000]);
        more.chain(random).map(move |low| f32::from_bits(top << 23 | low & 0x007f_ffff))
    })
}

/// Finds the nearest half of a value by search among all, ties to even.
fn nearest(value: f32, all: &[(f64, u16)]) -> u16 {
    let exact = f64::from(value.abs());
    let after = all.partition_point(|(half, _)| *half < exact).min(all.len() - 1);
    let (below, above) = (all[after.saturating_sub(1)], all[after]);
    // Values that round past the largest become infinity, as if there were one more power of two.
    let size = |(value, _): (f64, u16)| if value.is_infinite() { 65536.0 } else { value };
    let (down, up) = (exact - size(below), size(above) - exact);
    let is_below = down.total_cmp(&up).then(if below.1 % 2 == 0 { Ordering::Less } else { Ordering::Greater });
    let found = if is_below == Ordering::Less { below.1 } else { above.1 };
    found | if value.is_sign_negative() { 0x8000 } else { 0 }
}

#[test]
fn every_half_reads_as_its_value_and_is_stored_as_itself() {
    for half in 0..=u16::MAX {
        let (read, expected) = (f16_to_f32(half), f16_value(half));
        assert_eq!(read.is_nan(), expected.is_nan(), "{half:04x}");
        assert_eq!(read.is_sign_negative(), half >> 15 == 1, "{half:04x}");
        if expected.is_nan() {
            assert_eq!(f32_to_f16(read), half | 0x200, "a NaN becomes quiet and keeps its payload");
        } else {
            assert_eq!(f64::from(read).to_bits(), expected.to_bits(), "{half:04x}");
            assert_eq!(f32_to_f16(read), half);
        }
    }
}

#[test]
fn floats_are_stored_as_the_nearest_half() {
    let all: Vec<(f64, u16)> = (0..=0x7c00).map(|half| (f16_value(half), half)).collect();
    for value in floats() {
        let found = f32_to_f16(value);
        if value.is_nan() {
            assert!(f16_to_f32(found).is_nan());
        } else if value.abs() >= 65536.0 {
            assert_eq!(found & 0x7fff, 0x7c00, "{value:e}");
        } else {
            assert_eq!(found, nearest(value, &all), "{value:e}");
        }
    }
}

#[test]
fn floats_are_stored_as_the_nearest_bfloat16() {
    for value in floats() {
        let (found, bits) = (f32_to_bf16(value), value.to_bits());
        let read = f32::from_bits(u32::from(found) << 16);
        if value.is_nan() {
            assert!(read.is_nan() && read.is_sign_negative() == value.is_sign_negative());
            continue;
        }
        let (down, rest) = ((bits >> 16) as u16, bits & 0xffff);
        let up = rest > 0x8000 || (rest == 0x8000 && down % 2 == 1);
        assert_eq!(found, down + u16::from(up), "{value:e}");
    }
}

/// Rows of every kind: random rows of many sizes, constant rows, tiny rows, and rows with large outliers.
fn rows() -> Vec<Vec<f32>> {
    let mut rows = vec![
        vec![0.0; 5],
        vec![-0.0; 5],
        vec![1.5; 8],
        vec![-3.7; 3],
        vec![100.04; 16],
        vec![1e-8; 4],
        vec![1e-8, 2e-8, 3e-8],
        vec![f32::from_bits(1), 0.0],
        vec![1e-3, 1.000_001e-3, 1e-3],
        vec![65_504.0, -65_504.0, 0.0],
        vec![70_000.0, 1.0],
        vec![5.0],
        vec![0.0, 255.0 * 65_504.0],
    ];
    for (number, dim) in [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 64, 65, 128, 200].into_iter().enumerate() {
        for scale in [1e-6_f32, 0.01, 1.0, 300.0] {
            let value = |at: usize| (hash_id((number * 1000 + at) as i64) as i32 as f32 / 2e9) * scale;
            rows.push((0..dim).map(value).collect());
        }
    }
    rows
}

/// Stores a row by the simplest program: the same steps as FBGEMM's reference, in its order.
fn plain(row: &[f32]) -> Vec<u8> {
    let least = row.iter().copied().fold(f32::INFINITY, f32::min);
    let greatest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let bias = f32_to_f16(least);
    let range = greatest - f16_value(bias) as f32;
    let mut scale = f16_value(f32_to_f16(if range == 0.0 { 1.0 } else { range / 255.0 })) as f32;
    if scale == 0.0 {
        scale = 1.0;
    }
    let code =
        |value: &f32| ((value - f16_value(bias) as f32) * (1.0 / scale)).round_ties_even().clamp(0.0, 255.0) as u8;
    let numbers = [f32_to_f16(scale).to_le_bytes(), bias.to_le_bytes()].concat();
    row.iter().map(code).chain(numbers).collect()
}

#[test]
fn rows_of_codes_are_stored_and_read_alike_by_every_instruction_set() {
    for row in rows() {
        let dim = row.len();
        let expected = plain(&row);
        for isa in InstructionSet::all() {
            let mut stored = vec![0; WeightPrecision::Int8.row_bytes(dim)];
            assert!(isa.run(StoreJob { precision: WeightPrecision::Int8, row: &row, into: &mut stored }), "{row:?}");
            assert_eq!(stored, expected, "{isa:?} {row:?}");
            let mut read = vec![0.0; dim];
            isa.run(LoadJob { precision: WeightPrecision::Int8, stored: &stored, into: &mut read });
            let [scale, bias] =
                [0, 2].map(|at| f16_value(u16::from_le_bytes([stored[dim + at], stored[dim + at + 1]])));
            for ((value, code), read) in row.iter().zip(&stored).zip(read) {
                assert_eq!(read.to_bits(), ((f64::from(*code) * scale + bias) as f32).to_bits());
                let within =
                    scale.abs() * 0.51 + f64::from(value.abs().max(1e-4)) * 1e-3 * 255.0_f64.min(dim as f64 + 1.0);
                assert!((f64::from(read) - f64::from(*value)).abs() <= within, "{value} reads {read}");
            }
        }
    }
}

#[test]
fn rows_of_halves_are_stored_and_read_alike_by_every_instruction_set() {
    for (precision, store) in
        [(WeightPrecision::Fp16, f32_to_f16 as fn(f32) -> u16), (WeightPrecision::Bf16, f32_to_bf16)]
    {
        for row in rows().into_iter().filter(|row| row.iter().all(|value| value.abs() < 65_000.0)) {
            let expected: Vec<u8> = row.iter().flat_map(|&value| store(value).to_le_bytes()).collect();
            for isa in InstructionSet::all() {
                let mut stored = vec![0; precision.row_bytes(row.len())];
                assert!(isa.run(StoreJob { precision, row: &row, into: &mut stored }));
                assert_eq!(stored, expected, "{isa:?}");
                let mut read = vec![0.0; row.len()];
                isa.run(LoadJob { precision, stored: &stored, into: &mut read });
                for (read, stored) in read.iter().zip(stored.as_chunks().0) {
                    let half = u16::from_le_bytes(*stored);
                    let value = if precision == WeightPrecision::Fp16 {
                        f16_to_f32(half)
                    } else {
                        f32::from_bits(u32::from(half) << 16)
                    };
                    assert_eq!(read.to_bits(), value.to_bits());
                }
            }
        }
    }
}

/// Values that a precision cannot represent are errors. Special values are kept by precisions that can represent
/// them.
#[test]
fn unrepresentable_values_are_reported_and_special_values_kept() {
    use WeightPrecision::{Bf16, Fp16, Fp32, Int8};
    let stored = |precision: WeightPrecision, weights: &[f32], dim: usize| {
        let mut bytes = vec![0; weights.len() / dim * precision.row_bytes(dim)];
        precision.store(weights, dim, &mut bytes).map(|()| {
            let mut read = vec![0.0; weights.len()];
            let rows = bytes.chunks_exact(precision.row_bytes(dim)).zip(read.chunks_exact_mut(dim));
            rows.for_each(|(stored, into)| precision.load(stored, into));
            read
        })
    };
    let special = [f32::INFINITY, f32::NEG_INFINITY, -0.0];
    for precision in [Fp32, Fp16, Bf16] {
        assert_eq!(stored(precision, &special, 3).expect("held"), special);
        assert!(stored(precision, &[f32::NAN], 1).expect("held")[0].is_nan());
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65_520.0, -65_520.0, 3e38] {
        assert_eq!(stored(Int8, &[0.5, 0.25, bad, bad, 1.0, bad], 2).expect_err("refused"), 1, "{bad}");
    }
    assert_eq!(stored(Int8, &[0.0, 1.0, f32::NAN, 0.0], 2).expect_err("refused"), 1);
    assert_eq!(stored(Int8, &[0.0, 2e7], 2).expect_err("its scale is beyond fp16"), 0);
    assert_eq!(stored(Fp16, &[1.0, 65_519.0, 65_520.0], 1).expect_err("refused"), 2);
    assert_eq!(stored(Bf16, &[1.0, 3.39e38, f32::MAX], 1).expect_err("refused"), 2);
    assert_eq!(stored(Fp32, &[f32::MAX], 1).expect("held"), [f32::MAX]);
}
