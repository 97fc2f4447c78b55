//! Measures the largest single allocation, by any thread and by one.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

static LARGEST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static LARGEST_HERE: Cell<usize> = const { Cell::new(0) };
}

/// The system allocator, which records the largest request.
struct Noting;

#[global_allocator]
static ALLOCATOR: Noting = Noting;

fn note(bytes: usize) {
    LARGEST.fetch_max(bytes, Ordering::Relaxed);
    // A thread that is stopping has no record.
    let _ = LARGEST_HERE.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: every call is forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is System's own.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is System's own.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        note(bytes);
        // SAFETY: the caller keeps the contract of `realloc`, which is System's own.
        unsafe { System.realloc(at, layout, bytes) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, and the block came from System.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The largest request since the start.
pub(crate) fn largest() -> usize {
    LARGEST.load(Ordering::Relaxed)
}

/// The result of `work`, and the largest request of this thread during it.
pub(crate) fn largest_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    LARGEST_HERE.with(|largest| largest.set(0));
    let result = work();
    (result, LARGEST_HERE.with(Cell::get))
}
