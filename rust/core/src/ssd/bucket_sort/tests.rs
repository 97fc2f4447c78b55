use super::*;

#[test]
fn items_are_sorted_by_bucket_and_then_by_comparison() {
    for len in [0, 1, 2, 63, 1000] {
        let items: Vec<u64> = (0..len).map(|at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7).collect();
        let bits = 57 - 4;
        let (mut ends, mut sorted) = ([0; 16], vec![0; items.len()]);
        let bucketed = items.iter().map(|item| ((item >> bits) as usize, *item));
        bucket_sort(bucketed, &mut ends, &mut sorted, Ord::cmp);
        let mut expected = items;
        expected.sort_unstable();
        assert_eq!(sorted, expected, "{len} items");
    }
}
