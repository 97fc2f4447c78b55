//! Makes memory that the system refuses an error instead of the end of the process.
//!
//! Large memory (rows, indexes, staging buffers) is requested before anything changes. For the many small allocations in between
//! there is a reserve of address space. When the allocator gets no more memory the reserve is given up, so that the current
//! operation can end. The next operation is refused ([`check`]) until the reserve can be set aside again.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::error::{Error, Result};

/// Bytes of the reserve. It is address space only, and is never written.
const RESERVE_BYTES: usize = 32 << 20;
/// Requests for fewer bytes than this are not checked, and may use the reserve.
const SMALL_BYTES: usize = 1 << 20;

/// Bytes that new threads need, for their stacks and for what the system's allocator keeps for each.
pub(crate) const THREAD_START_BYTES: usize = 64 << 20;

static RESERVE: AtomicPtr<libc::c_void> = AtomicPtr::new(null_mut());
static SPENT: AtomicBool = AtomicBool::new(false);

fn map(bytes: usize) -> io::Result<*mut libc::c_void> {
    // SAFETY: this makes a new anonymous mapping at an address of the system's choice, so it replaces no other.
    let at = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), bytes, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at) }
}

/// Set the reserve aside, unless it is there.
fn restore_reserve() -> io::Result<()> {
    let made = map(RESERVE_BYTES)?;
    if RESERVE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: the mapping was made above, has RESERVE_BYTES, and nobody else has its address.
        unsafe { libc::munmap(made, RESERVE_BYTES) };
    }
    Ok(())
}

/// The system's allocator with a reserve for when it has no more memory. It is meant to be the global allocator.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReservingAllocator;

impl ReservingAllocator {
    /// Set the reserve aside, if the system permits.
    pub fn keep_reserve() {
        let _ = restore_reserve();
    }

    /// Give the reserve up. The result is whether there was one.
    #[cold]
    fn spend() -> bool {
        let held = RESERVE.swap(null_mut(), Ordering::AcqRel);
        if held.is_null() {
            // Another thread may have given it up a moment ago, which serves both.
            return SPENT.load(Ordering::Acquire);
        }
        SPENT.store(true, Ordering::Release);
        // SAFETY: the mapping has RESERVE_BYTES, and the swap made this thread its only owner.
        unsafe { libc::munmap(held, RESERVE_BYTES) };
        true
    }
}

// SAFETY: every call goes to the system's allocator with the caller's own arguments. Calling it twice breaks none of its rules.
unsafe impl GlobalAlloc for ReservingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's own.
        with_reserve(layout.size(), || unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is the system's own.
        with_reserve(layout.size(), || unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `realloc`. When that fails the old block stays as it was, so it may be called
        // again.
        with_reserve(size, || unsafe { System.realloc(at, layout, size) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, and the block came from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Allocate `bytes`. Where the system has no more memory, try again without the reserve, if that could help.
#[inline]
fn with_reserve(bytes: usize, allocate: impl Fn() -> *mut u8) -> *mut u8 {
    let got = allocate();
    if got.is_null() && bytes < RESERVE_BYTES && ReservingAllocator::spend() { allocate() } else { got }
}

/// The result of `make`. Where the system refuses it memory that does not come from the allocator, try again without the reserve.
pub(crate) fn or_from_reserve<T>(make: impl Fn() -> Result<T>) -> Result<T> {
    make().or_else(|refused| if ReservingAllocator::spend() { make() } else { Err(refused) })
}

/// `Kind::Memory` when the reserve was given up and cannot be set aside again. Operations call this when they begin.
pub fn check() -> Result<()> {
    if !SPENT.load(Ordering::Acquire) {
        return Ok(());
    }
    restore_reserve().map_err(|e| Error::memory("go on", RESERVE_BYTES, &e))?;
    SPENT.store(false, Ordering::Release);
    Ok(())
}

/// `Kind::Memory` unless the system has about `bytes` of memory now, for `purpose` (in the infinitive).
pub fn check_available(purpose: &str, bytes: usize) -> Result<()> {
    check()?;
    check_system_memory(purpose, bytes)
}

/// Like [`check_room`], but does not ask whether the reserve is there. This is for operations that save rows.
pub(crate) fn check_system_memory(purpose: &str, bytes: usize) -> Result<()> {
    if bytes < SMALL_BYTES {
        return Ok(());
    }
    let made = map(bytes).map_err(|e| Error::memory(purpose, bytes, &e))?;
    // SAFETY: the mapping was made above, has `bytes`, and nobody else has its address.
    unsafe { libc::munmap(made, bytes) };
    Ok(())
}

/// Like [`room`], and uses the reserve where needed. This is for operations that save rows and cannot be refused any more.
pub(crate) fn check_system_memory_or_reserve(purpose: &str, bytes: usize) -> Result<()> {
    or_from_reserve(|| check_system_memory(purpose, bytes))
}

/// Whether there is memory to start threads. A thread that gets no memory when it starts ends the process.
pub fn can_start_threads() -> bool {
    check_system_memory("start threads", THREAD_START_BYTES).is_ok()
}

/// `len` zeros for `purpose` (in the infinitive). `Kind::Memory` where the system refuses.
pub(crate) fn zeros<T: bytemuck::Zeroable>(purpose: &str, len: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| refused_error(purpose, len.saturating_mul(size_of::<T>())))
}

/// Reserve room in `all` for `more` elements, for `purpose` (in the infinitive). `Kind::Memory` where the system refuses.
pub(crate) fn reserve<T>(all: &mut Vec<T>, purpose: &str, more: usize) -> Result<()> {
    all.try_reserve(more)
        .map_err(|_| refused_error(purpose, (all.len().saturating_add(more)).saturating_mul(size_of::<T>())))
}

/// An empty vector with room for `len` elements. Where the system refuses, it has no room, and elements that are pushed ask again.
pub(crate) fn vec_with_capacity<T>(len: usize) -> Vec<T> {
    let mut all = Vec::new();
    let _ = all.try_reserve_exact(len);
    all
}

/// The error for `bytes` of memory that an allocator refused.
pub(crate) fn refused_error(purpose: &str, bytes: usize) -> Error {
    Error::memory(purpose, bytes, &io::Error::from_raw_os_error(libc::ENOMEM))
}

#[cfg(test)]
mod tests {
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
        // The system refuses once memory that is mapped and does not come from the allocator.
        let refused = std::cell::Cell::new(true);
        let once = || if refused.replace(false) { Err(super::refused_error("map", 1 << 20)) } else { Ok(7) };
        assert_eq!(or_from_reserve(once).unwrap(), 7);
        assert!(SPENT.load(Ordering::Acquire), "the reserve was given up for it");
        check().unwrap();
        assert!(!RESERVE.load(Ordering::Acquire).is_null() && !SPENT.load(Ordering::Acquire));
    }
}
