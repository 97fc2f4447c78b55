//! A plan is used by one thread at a time.
//!
//! A plan's calls take the plan's *turn* first, and the locks of tables after that. So does [`Plan::exclusively`](crate::cache::Plan),
//! which keeps the turn while it runs its caller's code: calls of the same plan by that code find that the turn is theirs, and calls by
//! another thread wait for it with no lock in their hands. Table locks that are taken for writing rows ask for a [`PlanGuard`], so that no
//! code can take them the other way round.

use std::sync::TryLockError;

use crate::logical_thread::ForeignCode;
use crate::sync::{Mutex, MutexGuard, lock};

/// The state of a plan, and whose turn it is to use it.
pub(crate) struct PlanLock<S> {
    access: Mutex<()>,
    /// Whether the holder of the turn runs code of his caller's.
    exclusive: ForeignCode,
    /// Locked by the holder of the turn, or to look at it briefly with no other lock taken meanwhile.
    state: Mutex<S>,
}

/// The turn to use a plan.
pub(crate) struct PlanGuard<'a, S> {
    plan_lock: &'a PlanLock<S>,
    /// `None` where the caller's own caller has the turn.
    _access: Option<MutexGuard<'a, ()>>,
}

impl<S> PlanLock<S> {
    pub(crate) fn new(state: S) -> Self {
        Self { access: Mutex::new(()), exclusive: ForeignCode::default(), state: Mutex::new(state) }
    }

    /// Wait for the turn, unless it is the caller's already.
    pub(crate) fn lock(&self) -> PlanGuard<'_, S> {
        self.reenter().unwrap_or_else(|| PlanGuard { plan_lock: self, _access: Some(lock(&self.access)) })
    }

    /// The turn, where the caller is code that [`PlanGuard::run`] runs.
    pub(crate) fn reenter(&self) -> Option<PlanGuard<'_, S>> {
        self.exclusive.is_calling().then_some(PlanGuard { plan_lock: self, _access: None })
    }

    /// The turn, without waiting for it; `None` where somebody else has it.
    pub(crate) fn try_lock(&self) -> Option<PlanGuard<'_, S>> {
        self.reenter().or_else(|| Some(PlanGuard { plan_lock: self, _access: Some(try_lock(&self.access)?) }))
    }

    /// Look at the state. No lock of a table may be taken meanwhile.
    pub(crate) fn peek(&self) -> MutexGuard<'_, S> {
        lock(&self.state)
    }

    /// The state of a plan that nobody else knows of any more.
    #[cfg(not(loom))]
    pub(crate) fn get_mut(&mut self) -> &mut S {
        self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl<S> PlanGuard<'_, S> {
    /// The state of the plan, until the guard is dropped. The guard cannot outlive the turn: whoever takes the turn next takes locks of
    /// tables and then the state, so nobody else may have the state and wait for those locks.
    pub(crate) fn state(&self) -> MutexGuard<'_, S> {
        lock(&self.plan_lock.state)
    }

    /// As [`PlanGuard::state`]; `None` where somebody has it, perhaps the caller's own caller.
    pub(crate) fn try_state(&self) -> Option<MutexGuard<'_, S>> {
        try_lock(&self.plan_lock.state)
    }

    /// Run code of the caller's that may use the plan. It keeps the turn.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let _foreign = self.plan_lock.exclusive.begin();
        work()
    }
}

/// Lock without waiting, also after a panic elsewhere.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_for_one_thread_and_stays_with_the_code_that_it_runs() {
        let turns = PlanLock::new(0);
        assert!(turns.reenter().is_none());
        let turn = turns.lock();
        *turn.state() += 1;
        assert!(turns.reenter().is_none(), "it runs nobody's code");
        assert!(turns.try_lock().is_none(), "it is taken, also for the thread that has it");
        turn.run(|| {
            *turns.lock().state() += 1;
            assert!(turns.reenter().is_some());
            let state = turns.peek();
            assert!(turns.try_lock().expect("its own").try_state().is_none(), "the state is in use");
            drop(state);
            std::thread::scope(|scope| scope.spawn(|| assert!(turns.try_lock().is_none())).join()).expect("refused");
        });
        drop(turn);
        assert_eq!(*turns.try_lock().expect("free again").state(), 2);
    }

    #[test]
    fn a_turn_comes_back_after_a_panic_of_the_code_that_it_runs() {
        let turns = PlanLock::new(0);
        let run = || turns.lock().run(|| panic!("as planned"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
        assert!(turns.reenter().is_none());
        assert_eq!(*turns.try_lock().expect("free again").state(), 0);
    }
}
