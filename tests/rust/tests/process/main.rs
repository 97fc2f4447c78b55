//! Tests that depend on their process: they fork, limit its memory or measure it. Cases that other tests would disturb
//! run in a child process.

use embcache::runtime::memory::ReservingAllocator;

mod fork;
mod io;
mod many_buckets;
mod memory;
mod out_of_memory;

/// The allocator of the extension. Without a reserve, which only some cases use, it is the system allocator.
#[global_allocator]
static ALLOCATOR: ReservingAllocator = ReservingAllocator;
