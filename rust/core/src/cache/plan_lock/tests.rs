use super::*;

#[test]
fn plan_lock_excludes_threads_and_admits_the_code_that_it_runs() {
    let plan_lock = PlanLock::new(0);
    assert!(plan_lock.reenter().is_none());
    let guard = plan_lock.lock();
    *guard.state() += 1;
    assert!(plan_lock.reenter().is_none(), "it runs nobody's code");
    assert!(plan_lock.try_lock().is_none(), "it is taken, also for the thread that has it");
    guard.run(|| {
        *plan_lock.lock().state() += 1;
        assert!(plan_lock.reenter().is_some());
        let state = plan_lock.peek();
        assert!(plan_lock.try_lock().expect("its own").try_state().is_none(), "the state is in use");
        drop(state);
        std::thread::scope(|scope| scope.spawn(|| assert!(plan_lock.try_lock().is_none())).join()).expect("refused");
    });
    drop(guard);
    assert_eq!(*plan_lock.try_lock().expect("free again").state(), 2);
}

#[test]
fn plan_lock_is_released_after_a_panic() {
    let plan_lock = PlanLock::new(0);
    let run = || plan_lock.lock().run(|| panic!("as planned"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
    assert!(plan_lock.reenter().is_none());
    assert_eq!(*plan_lock.try_lock().expect("free again").state(), 0);
}
