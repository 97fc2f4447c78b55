//! CPU prefetches of memory before it is used.
#![allow(unsafe_code)]

/// Prefetches the cache line of `slice[index]`. The index may be out of range. On CPUs other than x86-64 and aarch64
/// this does nothing.
#[inline]
pub(crate) fn prefetch<T>(slice: &[T], index: usize) {
    prefetch_address(slice.as_ptr().wrapping_add(index));
}

/// Prefetches the cache line at `address`, which need not be valid.
#[inline]
pub(crate) fn prefetch_address<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults and changes no memory, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[cfg(target_arch = "aarch64")]
    {
        // SAFETY: the instruction is a prefetch, which never faults and changes no memory, for any address.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nostack, preserves_flags, readonly))
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Prefetches the cache lines of the `bytes` bytes at `address`. They need not be valid.
#[inline]
pub(crate) fn prefetch_range(address: *const u8, bytes: usize) {
    const LINE: usize = 64;
    let end = address.addr() + bytes;
    let mut line = address.wrapping_sub(address.addr() % LINE);
    while line.addr() < end {
        prefetch_address(line);
        line = line.wrapping_add(LINE);
    }
}
