use super::*;
use crate::types::NO_SLOT;

#[test]
fn transposing_lists_each_rows_occurrences_in_order() {
    let index = TransposedIndex::from_inverse(&[2, 0, NO_SLOT, 2, 1, 2, NO_SLOT, 0], 4, 1);
    assert_eq!(index.starts, [0, 2, 3, 6, 6]);
    assert_eq!(index.occurrences, [1, 7, 4, 0, 3, 5]);
}

#[test]
fn transposing_nothing_gives_nothing() {
    assert_eq!(TransposedIndex::from_inverse(&[], 0, 2).starts, [0]);
    assert_eq!(TransposedIndex::from_inverse(&[], 3, 2).starts, [0, 0, 0, 0]);
}

#[test]
fn the_transposed_index_is_the_same_with_any_number_of_threads() {
    let of = |seed: u32, at: u32| (seed.wrapping_mul(at + 7).wrapping_mul(0x9e37_79b9)) >> 28;
    for (len, unique) in [(1, 1), (2, 16), (3, 16), (7, 9), (100, 16), (1001, 12)] {
        let row = |at| Some(of(len, at)).filter(|&row| row < unique).unwrap_or(NO_SLOT);
        let inverse: Vec<u32> = (0..len).map(row).collect();
        let one = TransposedIndex::from_inverse(&inverse, unique as usize, 1);
        for row in 0..unique {
            let found = &one.occurrences[one.starts[row as usize] as usize..one.starts[row as usize + 1] as usize];
            let expected: Vec<u32> = (0..len).filter(|&at| inverse[at as usize] == row).collect();
            assert_eq!(found, expected);
        }
        for threads in 2..7 {
            assert_eq!(TransposedIndex::from_inverse(&inverse, unique as usize, threads), one, "{threads} threads");
        }
    }
}

#[test]
fn occurrences_find_their_bag_and_share() {
    let weights = [2.0, 3.0, 4.0];
    let features = [
        PooledFeature { column: 0, offsets: &[0, 2, 2, 3], weights: Some(&weights), mean: false },
        PooledFeature { column: 8, offsets: &[0, 0, 1, 5], weights: None, mean: true },
    ];
    let gradient = PooledGradient::new(16, &features, 2).expect("small");
    assert_eq!(gradient.starts, [0, 0, 32, 24, 40, 40, 40, 40]);
    assert_eq!(gradient.scale, [2.0, 3.0, 4.0, 1.0, 0.25, 0.25, 0.25, 0.25]);
    assert_eq!(gradient.divisor, [1.0, 1.0, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25]);
}

#[test]
fn plain_sums_need_no_scale() {
    let features = [PooledFeature { column: 4, offsets: &[0, 1, 3], weights: None, mean: false }];
    let gradient = PooledGradient::new(8, &features, 1).expect("small");
    let GradientView::Pooled { starts, scale: None, .. } = gradient.of_rows(&[]) else { panic!("a scale of ones") };
    assert_eq!(starts, [4, 12, 12]);
}

/// Offsets that do not start at 0, or decrease, are invalid.
#[test]
fn invalid_offsets_panic_and_never_expose_unwritten_memory() {
    for offsets in [&[1, 2][..], &[0, 3, 2], &[0, -1]] {
        let features = [PooledFeature { column: 0, offsets, weights: None, mean: false }];
        assert!(std::panic::catch_unwind(|| PooledGradient::new(8, &features, 1)).is_err(), "{offsets:?}");
    }
}

#[test]
fn an_output_past_u32_is_refused() {
    let offsets = vec![0; 70_000];
    let features = [PooledFeature { column: 0, offsets: &offsets, weights: None, mean: false }];
    assert_eq!(PooledGradient::new(70_000, &features, 1).expect_err("too large").kind(), Kind::Input);
}
