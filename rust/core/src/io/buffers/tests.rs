use super::*;

#[test]
fn returned_buffers_are_reused_up_to_the_limit() {
    let pool = Arc::new(BufPool::new(ALIGNMENT, 1));
    let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
    let start = first.as_ptr();
    drop(first);
    drop(second);
    let again = pool.take().unwrap();
    assert_eq!(again.as_ptr(), start);
    assert_ne!(pool.take().unwrap().as_ptr(), start);
    assert_eq!(pool.take_at_least(ALIGNMENT + 1).unwrap().len(), ALIGNMENT + 1);
}

#[test]
fn buffers_start_at_multiples_of_the_alignment_and_are_zero() {
    for len in [0, 1, ALIGNMENT, 3 * ALIGNMENT + 5, MAPPED_FROM_BYTES, MAPPED_FROM_BYTES + 5] {
        for buf in [AlignedBuf::zeroed(len), AlignedBuf::try_contiguous(len).unwrap()] {
            assert!(buf.as_ptr().addr().is_multiple_of(ALIGNMENT));
            assert!(buf.len() == len && buf.iter().all(|byte| *byte == 0));
        }
    }
}
