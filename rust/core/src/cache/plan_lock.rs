//! A plan is used by one thread at a time.
//!
//! Calls of a plan first take exclusive access to the plan, and then the locks of tables. So does
//! [`Plan::exclusively`](crate::cache::Plan), which keeps it while it runs its caller's code: calls of the same plan by
//! that code find that they have exclusive access, and calls by another thread wait for it without holding a lock.
//! Locking rows of a table for writing requires a [`PlanGuard`], so that no code can take the locks in the other order.

use std::sync::TryLockError;

use crate::runtime::call_context::ForeignCode;
use crate::runtime::sync::{Mutex, MutexGuard, lock};

/// The state of a plan, and the lock for exclusive access to it.
pub(crate) struct PlanLock<S> {
    access: Mutex<()>,
    /// Tracks whether the holder of exclusive access runs code of its caller.
    exclusive: ForeignCode,
    /// Locked by the holder of exclusive access, or for a short read during which no other lock is taken.
    state: Mutex<S>,
}

/// Exclusive access to a plan.
pub(crate) struct PlanGuard<'a, S> {
    plan_lock: &'a PlanLock<S>,
    /// `None` if the caller's caller has exclusive access.
    _access: Option<MutexGuard<'a, ()>>,
}

impl<S> PlanLock<S> {
    pub(crate) fn new(state: S) -> Self {
        Self { access: Mutex::new(()), exclusive: ForeignCode::default(), state: Mutex::new(state) }
    }

    /// Waits for exclusive access, unless the caller has it already.
    pub(crate) fn lock(&self) -> PlanGuard<'_, S> {
        self.reenter().unwrap_or_else(|| PlanGuard { plan_lock: self, _access: Some(lock(&self.access)) })
    }

    /// Exclusive access, if the caller is code that [`PlanGuard::run`] runs.
    pub(crate) fn reenter(&self) -> Option<PlanGuard<'_, S>> {
        self.exclusive.is_calling().then_some(PlanGuard { plan_lock: self, _access: None })
    }

    /// Exclusive access without waiting; `None` if another thread has it.
    pub(crate) fn try_lock(&self) -> Option<PlanGuard<'_, S>> {
        self.reenter().or_else(|| Some(PlanGuard { plan_lock: self, _access: Some(try_lock(&self.access)?) }))
    }

    /// The state, for a short read. The caller must not take a table lock while it holds the guard.
    pub(crate) fn peek(&self) -> MutexGuard<'_, S> {
        lock(&self.state)
    }

    /// The state of a plan without other references.
    #[cfg(not(loom))]
    pub(crate) fn get_mut(&mut self) -> &mut S {
        self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl<S> PlanGuard<'_, S> {
    /// The state of the plan, until the guard is dropped. The guard cannot outlive the exclusive access: the next
    /// holder takes locks of tables and then the state, so no other thread may hold the state and wait for those locks.
    pub(crate) fn state(&self) -> MutexGuard<'_, S> {
        lock(&self.plan_lock.state)
    }

    /// Like [`PlanGuard::state`]; `None` if it is locked, perhaps by the caller's caller.
    pub(crate) fn try_state(&self) -> Option<MutexGuard<'_, S>> {
        try_lock(&self.plan_lock.state)
    }

    /// Runs code of the caller that may use the plan. Keeps exclusive access.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let _foreign = self.plan_lock.exclusive.begin();
        work()
    }
}

/// Locks without waiting, and ignores poisoning.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
