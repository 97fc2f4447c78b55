//! The interleavings of a latch and the threads that enter it.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::kernels::thread_pool::CallLatch;

/// A thread that enters leaves before `close` returns: the work is freed then.
#[test]
fn loom_no_thread_is_inside_a_closed_latch() {
    loom::model(|| {
        let shared = Arc::new((CallLatch::for_threads(2), UnsafeCell::new(1_u64)));
        let others = [0, 1].map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.0.enter(|| shared.1.with(|behind| assert!(!behind.is_null()))))
        });
        shared.0.close();
        shared.1.with_mut(|behind| assert!(!behind.is_null()));
        for other in others {
            other.join().expect("no panic");
        }
    });
}
