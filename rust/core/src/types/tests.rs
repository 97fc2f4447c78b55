use super::*;

#[test]
fn buckets_are_remainders_of_the_hashes_of_all_ids() {
    for divisor in [1, 2, 3, 7, 641, DEFAULT_TOTAL_NUM_BUCKETS, 1 << 16, (1 << 31) - 1, 1 << 31, u32::MAX] {
        let bucketing = BucketMapper::new(divisor);
        let near = |hash: u64| (-2..3).map(move |off| hash.wrapping_add_signed(off));
        let multiples = [0, 1, 2, u64::MAX / u64::from(divisor)].map(|by| by * u64::from(divisor));
        let hashes = multiples.into_iter().chain([1 << 63, u64::MAX]).flat_map(near);
        for hash in hashes.chain((0..1000).map(hash_id)) {
            let bucket = (hash % u64::from(divisor)) as u32;
            assert_eq!(bucketing.of(id_of_hash(hash)), bucket, "{hash} by {divisor}");
        }
    }
}

#[test]
fn a_hash_gives_its_id_back() {
    for bit in 0..64 {
        for id in [1_i64 << bit, (1_i64 << bit).wrapping_sub(1), !(1_i64 << bit), hash_id(bit) as i64] {
            assert_eq!(id_of_hash(hash_id(id)), id);
        }
    }
}

#[test]
fn buckets_of_ranks_follow_one_another_and_differ_by_one_at_most() {
    for (world, buckets) in [(1, 1), (3, 10), (4, 65_536), (7, 7)] {
        let shares: Vec<_> = (0..world).map(|rank| buckets_of_rank(buckets, rank, world)).collect();
        assert_eq!((shares[0].start, shares[world as usize - 1].end), (0, buckets));
        assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() - pair[1].len() <= 1));
    }
}
