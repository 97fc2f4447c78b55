//! Turns failed allocations into errors instead of aborts.
//!
//! Large memory (rows, indexes, staging buffers) is requested before anything changes. A reserve of address space
//! covers the many small allocations in between. When the allocator runs out of memory, the reserve is released, so
//! that the current operation can finish. The next operation fails ([`check`]) until the reserve can be mapped again.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::error::{Error, Result};

/// Bytes of the reserve. It is only address space, and is never written.
const RESERVE_BYTES: usize = 32 << 20;
/// Smaller requests are not checked, and may use the reserve.
const SMALL_BYTES: usize = 1 << 20;

/// Bytes that new threads need, for their stacks and the per-thread state of the system allocator.
pub(crate) const THREAD_START_BYTES: usize = 64 << 20;

static RESERVE: AtomicPtr<libc::c_void> = AtomicPtr::new(null_mut());
static SPENT: AtomicBool = AtomicBool::new(false);

fn map(bytes: usize) -> io::Result<*mut libc::c_void> {
    // SAFETY: this creates an anonymous mapping at an address that the OS chooses, so it replaces no other mapping.
    let at = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), bytes, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at) }
}

/// Maps the reserve if it is not mapped.
fn restore_reserve() -> io::Result<()> {
    let made = map(RESERVE_BYTES)?;
    if RESERVE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: the mapping was created above, has RESERVE_BYTES, and no other code has its address.
        unsafe { libc::munmap(made, RESERVE_BYTES) };
    }
    Ok(())
}

/// The system allocator with a reserve for when it is out of memory. It is meant to be the global allocator.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReservingAllocator;

impl ReservingAllocator {
    /// Maps the reserve, if the OS permits.
    pub fn keep_reserve() {
        let _ = restore_reserve();
    }

    /// Releases the reserve. Returns true if there was one.
    #[cold]
    fn spend() -> bool {
        let held = RESERVE.swap(null_mut(), Ordering::AcqRel);
        if held.is_null() {
            // Another thread may have just released it, which serves both.
            return SPENT.load(Ordering::Acquire);
        }
        SPENT.store(true, Ordering::Release);
        // SAFETY: the mapping has RESERVE_BYTES, and the swap made this thread its only owner.
        unsafe { libc::munmap(held, RESERVE_BYTES) };
        true
    }
}

// SAFETY: every call is forwarded to the system allocator with the caller's own arguments. A second call breaks none of
// its rules.
unsafe impl GlobalAlloc for ReservingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system allocator.
        with_reserve(layout.size(), || unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is that of the system allocator.
        with_reserve(layout.size(), || unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `realloc`. If it fails, the old block is unchanged, so it may be
        // called again.
        with_reserve(size, || unsafe { System.realloc(at, layout, size) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, and the block came from the system allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Allocates `bytes`. If that fails, releases the reserve and tries again, if that could help.
#[inline]
fn with_reserve(bytes: usize, allocate: impl Fn() -> *mut u8) -> *mut u8 {
    let got = allocate();
    if got.is_null() && bytes < RESERVE_BYTES && ReservingAllocator::spend() { allocate() } else { got }
}

/// Returns the result of `make`. If `make` fails to get memory that does not come from the allocator, releases the
/// reserve and tries again.
pub(crate) fn or_from_reserve<T>(make: impl Fn() -> Result<T>) -> Result<T> {
    make().or_else(|refused| if ReservingAllocator::spend() { make() } else { Err(refused) })
}

/// Returns `Kind::Memory` if the reserve was released and cannot be mapped again. Operations call this when they start.
pub fn check() -> Result<()> {
    if !SPENT.load(Ordering::Acquire) {
        return Ok(());
    }
    restore_reserve().map_err(|e| Error::memory("continue", RESERVE_BYTES, &e))?;
    SPENT.store(false, Ordering::Release);
    Ok(())
}

/// Returns `Kind::Memory` unless the OS has about `bytes` of free memory, for `purpose` (in the infinitive).
pub fn check_available(purpose: &str, bytes: usize) -> Result<()> {
    check()?;
    check_system_memory(purpose, bytes)
}

/// Like [`check_available`], but does not check for the reserve. For operations that save rows.
pub(crate) fn check_system_memory(purpose: &str, bytes: usize) -> Result<()> {
    if bytes < SMALL_BYTES {
        return Ok(());
    }
    let made = map(bytes).map_err(|e| Error::memory(purpose, bytes, &e))?;
    // SAFETY: the mapping was created above, has `bytes`, and no other code has its address.
    unsafe { libc::munmap(made, bytes) };
    Ok(())
}

/// Like [`check_system_memory`], and uses the reserve if needed. For operations that save rows and cannot be cancelled.
pub(crate) fn check_system_memory_or_reserve(purpose: &str, bytes: usize) -> Result<()> {
    or_from_reserve(|| check_system_memory(purpose, bytes))
}

/// True if there is memory to start threads. A thread that gets no memory when it starts aborts the process.
pub fn can_start_threads() -> bool {
    check_system_memory("start threads", THREAD_START_BYTES).is_ok()
}

/// Allocates `len` zeros for `purpose` (in the infinitive). Returns `Kind::Memory` if the allocation fails.
pub(crate) fn zeros<T: bytemuck::Zeroable>(purpose: &str, len: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| refused_error(purpose, len.saturating_mul(size_of::<T>())))
}

/// Reserves capacity in `all` for `more` elements, for `purpose` (in the infinitive). Returns `Kind::Memory` if the
/// allocation fails.
pub(crate) fn reserve<T>(all: &mut Vec<T>, purpose: &str, more: usize) -> Result<()> {
    all.try_reserve(more)
        .map_err(|_| refused_error(purpose, (all.len().saturating_add(more)).saturating_mul(size_of::<T>())))
}

/// Returns an empty vector with capacity for `len` elements. If the allocation fails, the capacity is 0, and pushes
/// allocate again.
pub(crate) fn vec_with_capacity<T>(len: usize) -> Vec<T> {
    let mut all = Vec::new();
    let _ = all.try_reserve_exact(len);
    all
}

/// Creates the error of a failed allocation of `bytes`.
pub(crate) fn refused_error(purpose: &str, bytes: usize) -> Error {
    Error::memory(purpose, bytes, &io::Error::from_raw_os_error(libc::ENOMEM))
}

#[cfg(test)]
mod tests;
