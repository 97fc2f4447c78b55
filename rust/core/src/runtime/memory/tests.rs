use super::*;
use crate::error::Kind;

#[test]
fn what_no_machine_has_is_refused_and_not_the_end() {
    let error = zeros::<f32>("hold rows", usize::MAX / 16).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (Kind::Memory, Some(libc::ENOMEM)), "{error}");
    assert!(error.to_string().contains("hold rows"), "{error}");
    assert_eq!(reserve(&mut vec![1_u64], "hold rows", usize::MAX / 8).unwrap_err().kind(), Kind::Memory);
    assert_eq!(check_available("hold rows", usize::MAX / 4).unwrap_err().kind(), Kind::Memory);
    check_available("hold rows", 4 << 20).unwrap();
    assert_eq!(zeros::<u64>("hold rows", 5).unwrap(), [0; 5]);
}

#[test]
fn the_reserve_is_given_up_once_and_taken_back_when_there_is_memory() {
    ReservingAllocator::keep_reserve();
    ReservingAllocator::keep_reserve();
    assert!(ReservingAllocator::spend());
    assert!(RESERVE.load(Ordering::Acquire).is_null());
    check().unwrap();
    // Simulates one failed mapping, which does not come from the allocator.
    let refused = std::cell::Cell::new(true);
    let once = || if refused.replace(false) { Err(super::refused_error("map", 1 << 20)) } else { Ok(7) };
    assert_eq!(or_from_reserve(once).unwrap(), 7);
    assert!(SPENT.load(Ordering::Acquire), "the reserve was given up for it");
    check().unwrap();
    assert!(!RESERVE.load(Ordering::Acquire).is_null() && !SPENT.load(Ordering::Acquire));
}
