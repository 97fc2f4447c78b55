//! Makes forked children release the locks of their parent.
//!
//! A lock by `flock` lasts until every copy of its descriptor is closed. Without this module, the workers that a
//! process forks would keep holding its locks after it was killed. The child replaces its copy of each locked
//! descriptor by one of `/dev/null`. It does not close the copy: the object that owns the number may close it later,
//! when another file may have the number.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::fs::File;
use std::os::fd::IntoRawFd as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::c_int;

/// The locked descriptors, and a spin lock on them. A fork acquires the spin lock in the parent and releases it also in
/// the child, which the standard library's mutexes do not permit.
struct ForkLockRegistry {
    busy: AtomicBool,
    descriptors: UnsafeCell<Vec<c_int>>,
}

// SAFETY: only the thread that set `busy` accesses `descriptors`.
unsafe impl Sync for ForkLockRegistry {}

static LOCKS: ForkLockRegistry =
    ForkLockRegistry { busy: AtomicBool::new(false), descriptors: UnsafeCell::new(Vec::new()) };

/// A descriptor of `/dev/null`, once the fork handlers are installed; `None` if that failed.
static DEV_NULL: OnceLock<Option<c_int>> = OnceLock::new();

impl ForkLockRegistry {
    fn lock(&self) {
        while self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.busy.store(false, Ordering::Release);
    }

    fn with(&self, change: impl FnOnce(&mut Vec<c_int>)) {
        self.lock();
        // SAFETY: `lock` returned, so no other thread is between `lock` and `unlock`.
        change(unsafe { &mut *self.descriptors.get() });
        self.unlock();
    }
}

extern "C" fn before_fork() {
    LOCKS.lock();
}

extern "C" fn after_fork_in_parent() {
    LOCKS.unlock();
}

extern "C" fn after_fork_in_child() {
    if let Some(Some(nothing)) = DEV_NULL.get() {
        // SAFETY: `before_fork` called `lock` in the thread that forked, and that is the child's only thread.
        for &descriptor in unsafe { &*LOCKS.descriptors.get() } {
            // SAFETY: dup3 takes two descriptors and is safe to call after a fork. If it fails the child keeps holding
            // the lock.
            unsafe { libc::dup3(*nothing, descriptor, libc::O_CLOEXEC) };
        }
    }
    LOCKS.unlock();
}

/// Makes every child that this process forks release a descriptor, for as long as this value lives.
pub(super) struct ForkReleaseGuard(c_int);

impl ForkReleaseGuard {
    /// `None` if the handlers cannot be installed. Then children hold the lock until they exit or execute another
    /// program.
    pub(super) fn new(descriptor: c_int) -> Option<Self> {
        let open = || {
            let nothing = File::open("/dev/null").ok()?.into_raw_fd();
            // SAFETY: the three functions live as long as the process, and access only data that the spin lock of
            // `ForkLockRegistry` guards.
            let told = unsafe {
                libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child))
            };
            (told == 0).then_some(nothing)
        };
        (*DEV_NULL.get_or_init(open))?;
        LOCKS.with(|descriptors| descriptors.push(descriptor));
        Some(Self(descriptor))
    }
}

impl Drop for ForkReleaseGuard {
    fn drop(&mut self) {
        LOCKS.with(|descriptors| {
            if let Some(index) = descriptors.iter().position(|&descriptor| descriptor == self.0) {
                descriptors.swap_remove(index);
            }
        });
    }
}
