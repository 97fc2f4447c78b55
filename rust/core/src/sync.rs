//! Synchronisation types: the standard library's, or loom's when a model test is built (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Lock, also after a panic elsewhere: the data's own invariants are checked where they are used.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
