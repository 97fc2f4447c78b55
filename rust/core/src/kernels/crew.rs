//! Threads that help with a call. The call does not wait for threads that have not started.
//!
//! A pool thread may be busy, or may take long to wake up. So the threads that a call requests enter through a
//! [`CallLatch`]. When the caller has finished its own part, all work is taken: it closes the latch, and waits only for
//! the threads inside. A thread that arrives later finds the latch closed and does nothing, as does one that arrives
//! when the call has its maximum number of helpers.
#![allow(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use rayon::ThreadPool;

use crate::sync::{Condvar, Mutex, lock, wait};

/// A pool of threads that help with calls, one call or several at a time.
pub(super) struct WorkerSet {
    threads: ThreadPool,
}

impl WorkerSet {
    pub(super) fn new(threads: ThreadPool) -> Self {
        Self { threads }
    }

    /// Number of threads.
    pub(super) fn size(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// Runs `caller_work`, which receives a function that requests a pool thread to run `work` once. At most `most`
    /// threads run it at a time. No thread runs it when this returns.
    ///
    /// # Panics
    /// Panics with the panic of `caller_work`, or of a helper thread.
    pub(super) fn run_with_helpers<R>(
        &self,
        most: usize,
        work: &(dyn Fn() + Sync),
        caller_work: impl FnOnce(&dyn Fn()) -> R,
    ) -> R {
        let way_in = HelperTask { latch: Arc::new(CallLatch::for_threads(most)), work: HelperWork::of(work) };
        let open = OpenLatch(&way_in.latch);
        let done = caller_work(&|| {
            let way_in = way_in.clone();
            self.threads.spawn(move || way_in.run());
        });
        // The borrow of `work` ends here. No thread uses it afterwards.
        drop(open);
        if let Some(panic) = way_in.latch.panic() {
            resume_unwind(panic);
        }
        done
    }
}

/// A request to help with one call.
#[derive(Clone)]
struct HelperTask {
    latch: Arc<CallLatch>,
    work: HelperWork,
}

impl HelperTask {
    /// Runs the work, unless its latch is closed or the call has all its helpers.
    fn run(&self) {
        // SAFETY: the call borrows the work until its latch is closed and no thread is inside. This runs inside.
        self.latch.enter(|| unsafe { self.work.run() });
    }
}

/// Closes the latch when it is dropped, also by a panic.
struct OpenLatch<'a>(&'a CallLatch);

impl Drop for OpenLatch<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The work of a helper thread.
#[derive(Clone, Copy)]
struct HelperWork(*const (dyn Fn() + Sync));

impl HelperWork {
    fn of(work: &(dyn Fn() + Sync)) -> Self {
        let work: *const (dyn Fn() + Sync + '_) = work;
        #[allow(clippy::transmute_ptr_to_ptr)] // A cast may not change the lifetime.
        // SAFETY: the types differ only in a lifetime, about which a pointer guarantees nothing. `run` states its
        // requirements.
        Self(unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work) })
    }

    /// # Safety
    /// The reference passed to `of` is still borrowed.
    unsafe fn run(self) {
        // SAFETY: the caller guarantees that the reference behind the pointer is valid.
        unsafe { (*self.0)() }
    }
}

// SAFETY: the referent is `Sync`, so any thread may call it. The caller of `run` guarantees that it is valid.
unsafe impl Send for HelperWork {}
// SAFETY: as for `Send`.
unsafe impl Sync for HelperWork {}

/// The latch of the work of one call.
struct CallLatch {
    /// The number of threads that may be inside at a time.
    most: usize,
    state: Mutex<LatchState>,
    empty: Condvar,
}

#[derive(Default)]
struct LatchState {
    is_closed: bool,
    threads: usize,
    /// The first panic of a thread inside.
    panic: Option<Box<dyn Any + Send>>,
}

impl CallLatch {
    fn for_threads(most: usize) -> Self {
        Self { most, state: Mutex::default(), empty: Condvar::default() }
    }

    /// Runs `work` inside, unless the latch is closed or `most` threads are inside.
    fn enter(&self, work: impl FnOnce()) {
        {
            let mut inside = lock(&self.state);
            if inside.is_closed || inside.threads >= self.most {
                return;
            }
            inside.threads += 1;
        }
        let done = catch_unwind(AssertUnwindSafe(work));
        let mut inside = lock(&self.state);
        inside.threads -= 1;
        if let Err(panic) = done {
            inside.panic.get_or_insert(panic);
        }
        if inside.threads == 0 {
            self.empty.notify_all();
        }
    }

    /// Closes the latch, and waits until no thread is inside.
    fn close(&self) {
        let mut inside = lock(&self.state);
        inside.is_closed = true;
        while inside.threads > 0 {
            inside = wait(&self.empty, inside);
        }
    }

    /// Returns the panic of a thread that was inside.
    fn panic(&self) -> Option<Box<dyn Any + Send>> {
        lock(&self.state).panic.take()
    }
}

#[cfg(loom)]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// A thread that enters leaves before `close` returns: the work is freed then.
    #[test]
    fn loom_nobody_is_behind_a_door_that_is_shut() {
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
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rayon::ThreadPoolBuilder;

    use super::*;

    fn crew(threads: usize) -> WorkerSet {
        WorkerSet::new(ThreadPoolBuilder::new().num_threads(threads).build().expect("threads"))
    }

    #[test]
    fn a_call_waits_for_who_has_begun_and_for_nobody_else() {
        let crew = crew(1);
        let (begun, rest) = (Barrier::new(2), Barrier::new(2));
        // The only thread of the set is busy with one call, so the other call is served only by its caller.
        crew.run_with_helpers(
            1,
            &|| {
                begun.wait();
                rest.wait();
            },
            |ask| {
                ask();
                begun.wait();
                let helped = AtomicUsize::new(0);
                let help = || {
                    helped.fetch_add(1, Ordering::Relaxed);
                };
                crew.run_with_helpers(1, &help, |ask| (0..5).for_each(|_| ask()));
                assert_eq!(helped.into_inner(), 0, "nobody was free");
                rest.wait();
            },
        );
        let ended = AtomicUsize::new(0);
        for _ in 0..2000 {
            let entered = AtomicUsize::new(0);
            let help = || {
                entered.fetch_add(1, Ordering::Relaxed);
                std::hint::spin_loop();
                ended.fetch_add(1, Ordering::Relaxed);
            };
            let before = ended.load(Ordering::Relaxed);
            crew.run_with_helpers(1, &help, |ask| ask());
            assert_eq!(ended.load(Ordering::Relaxed) - before, entered.into_inner());
        }
    }

    #[test]
    fn no_more_threads_help_at_a_time_than_a_call_wants() {
        let crew = crew(8);
        for _ in 0..200 {
            let (came, inside, highest) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
            let all = Barrier::new(3);
            let help = || {
                highest.fetch_max(inside.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                // The first two and the caller meet here. The other threads are rejected in the meantime.
                if came.fetch_add(1, Ordering::Relaxed) < 2 {
                    all.wait();
                }
                inside.fetch_sub(1, Ordering::Relaxed);
            };
            crew.run_with_helpers(2, &help, |ask| {
                (0..20).for_each(|_| ask());
                all.wait();
            });
            assert_eq!(highest.into_inner(), 2);
        }
    }

    #[test]
    fn panics_of_who_helps_and_of_the_caller_are_the_calls() {
        let crew = crew(2);
        let said = |panic: Box<dyn Any + Send>| panic.downcast_ref::<&str>().copied().unwrap_or_default().to_owned();
        let begun = Barrier::new(2);
        let helping = || {
            crew.run_with_helpers(
                1,
                &|| {
                    begun.wait();
                    panic!("of who helps")
                },
                |ask| {
                    ask();
                    begun.wait();
                },
            );
        };
        assert_eq!(said(catch_unwind(AssertUnwindSafe(helping)).expect_err("a panic")), "of who helps");
        let calling = || crew.run_with_helpers(1, &|| {}, |_| panic!("of the caller"));
        assert_eq!(said(catch_unwind(AssertUnwindSafe(calling)).expect_err("a panic")), "of the caller");
    }
}
