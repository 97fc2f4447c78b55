use super::share_of;

#[test]
fn shares_follow_one_another_and_differ_by_one_at_most() {
    for (world, buckets) in [(1, 1), (3, 10), (4, 65_536), (7, 7)] {
        let shares: Vec<_> = (0..world).map(|rank| share_of(rank, world, buckets)).collect();
        assert_eq!((shares[0].start, shares[world as usize - 1].end), (0, buckets));
        assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() - pair[1].len() <= 1));
    }
}
