//! Synchronization types: those of the standard library, or loom's in model tests (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use std::sync::PoisonError;
use std::time::Duration;

/// A mutex of the standard library or of loom.
pub(crate) trait MutexLike {
    /// Holds the mutex until it is dropped.
    type Guard<'a>
    where
        Self: 'a;
    /// See [`lock`].
    fn guard(&self) -> Self::Guard<'_>;
}

impl<T> MutexLike for std::sync::Mutex<T> {
    type Guard<'a>
        = std::sync::MutexGuard<'a, T>
    where
        T: 'a;
    fn guard(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: MutexLike> MutexLike for std::sync::Arc<M> {
    type Guard<'a>
        = M::Guard<'a>
    where
        M: 'a;
    fn guard(&self) -> Self::Guard<'_> {
        M::guard(self)
    }
}

#[cfg(loom)]
impl<T> MutexLike for loom::sync::Mutex<T> {
    type Guard<'a>
        = loom::sync::MutexGuard<'a, T>
    where
        T: 'a;
    fn guard(&self) -> Self::Guard<'_> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Locks a mutex, even if a panic poisoned it. The users of the data check its invariants.
pub(crate) fn lock<M: MutexLike>(mutex: &M) -> M::Guard<'_> {
    mutex.guard()
}

/// True if a panic interrupted a change of the data that the lock protects. (In a loom model a panic stops the model,
/// so this is false.)
pub(crate) fn was_poisoned<T>(lock: &RwLock<T>) -> bool {
    #[cfg(not(loom))]
    return lock.is_poisoned();
    #[cfg(loom)]
    return std::mem::size_of_val(lock) == 0;
}

/// Waits for a notification.
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, but at most for `most`. (A loom model has no time, and waits for the notification.)
pub(crate) fn wait_at_most<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>, most: Duration) -> MutexGuard<'a, T> {
    #[cfg(not(loom))]
    return condition.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner).0;
    #[cfg(loom)]
    return {
        let _ = most;
        wait(condition, guard)
    };
}
