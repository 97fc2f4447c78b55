//! Locks and forks: a forked child gives up its copies of the descriptors that its parent holds locks by.
//!
//! A lock by `flock` lasts until every copy of its descriptor is closed. Without this, workers that a process forks would go on holding
//! the locks of a parent that is killed. In the child each copy is replaced by one of `/dev/null` and not closed: what owns the number
//! there may close it later, when it would be another file's.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::fs::File;
use std::os::fd::IntoRawFd as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::c_int;

/// The descriptors, and a lock that a fork can hold in the parent and let go in the child, as no mutex of the standard library can.
struct Registry {
    busy: AtomicBool,
    descriptors: UnsafeCell<Vec<c_int>>,
}

// SAFETY: `descriptors` is touched by whoever set `busy` alone.
unsafe impl Sync for Registry {}

static LOCKS: Registry = Registry { busy: AtomicBool::new(false), descriptors: UnsafeCell::new(Vec::new()) };

/// A descriptor of `/dev/null`, once forks are told of; `None` where that cannot be had.
static NOTHING: OnceLock<Option<c_int>> = OnceLock::new();

impl Registry {
    fn begin(&self) {
        while self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn end(&self) {
        self.busy.store(false, Ordering::Release);
    }

    fn with(&self, change: impl FnOnce(&mut Vec<c_int>)) {
        self.begin();
        // SAFETY: `begin` waited until nobody else is between `begin` and `end`.
        change(unsafe { &mut *self.descriptors.get() });
        self.end();
    }
}

extern "C" fn before_fork() {
    LOCKS.begin();
}

extern "C" fn in_parent() {
    LOCKS.end();
}

extern "C" fn in_child() {
    if let Some(Some(nothing)) = NOTHING.get() {
        // SAFETY: the thread that forked, the only one of the child, called `begin` before.
        for &descriptor in unsafe { &*LOCKS.descriptors.get() } {
            // SAFETY: dup3 takes two descriptors and may be called after a fork. Where it fails the child goes on holding the lock.
            unsafe { libc::dup3(*nothing, descriptor, libc::O_CLOEXEC) };
        }
    }
    LOCKS.end();
}

/// As long as this lives, a child that this process forks gives the descriptor up.
pub(super) struct GivenUpByChildren(c_int);

impl GivenUpByChildren {
    /// `None` where the system refuses: then children hold the lock until they end or execute another program.
    pub(super) fn new(descriptor: c_int) -> Option<Self> {
        let open = || {
            let nothing = File::open("/dev/null").ok()?.into_raw_fd();
            // SAFETY: the three functions live as long as the process and touch what `Registry` guards.
            let told = unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
            (told == 0).then_some(nothing)
        };
        (*NOTHING.get_or_init(open))?;
        LOCKS.with(|descriptors| descriptors.push(descriptor));
        Some(Self(descriptor))
    }
}

impl Drop for GivenUpByChildren {
    fn drop(&mut self) {
        LOCKS.with(|descriptors| {
            if let Some(place) = descriptors.iter().position(|&descriptor| descriptor == self.0) {
                descriptors.swap_remove(place);
            }
        });
    }
}
