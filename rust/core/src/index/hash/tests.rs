use super::*;

#[test]
fn each_hash_is_its_own_and_tells_ids_apart_that_differ_in_any_bit() {
    let (one, other) = (IdHash::random(), IdHash::random());
    assert_ne!(one.of(1), other.of(1));
    for bit in 0..64 {
        let (upper, lower) = (one.of(1 << bit) >> 44, one.of(0) >> 44);
        assert!(upper != lower || one.of(1 << bit) != one.of(0), "bit {bit}");
    }
    assert_ne!(one.hash_one(5_i64), one.hash_one(6_i64));
}
