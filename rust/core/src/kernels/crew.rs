//! Threads that help with a call, and that the call does not wait for where they have not begun.
//!
//! A thread of a pool may be busy, or may take long to wake up. So the threads that a call asks for come in by a door ([`Door`]). When the
//! caller has ended its own part, all work is taken: it shuts the door, and waits only for those that are inside. A thread that comes
//! later finds the door shut and does nothing, as does one that comes when the call has as many helpers as it wants.
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

    /// How many threads it has.
    pub(super) fn size(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// Do `caller_work`, which is given a function that asks a thread of the pool to do `work` once. At most `most` threads do it at a time. No thread does
    /// it when this returns.
    ///
    /// # Panics
    /// With the panic of `caller_work`, or of a thread that helped.
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
        // `help` is borrowed until here. No thread uses it after this.
        drop(open);
        if let Some(panic) = way_in.latch.panic() {
            resume_unwind(panic);
        }
        done
    }
}

/// The way to the work of one call.
#[derive(Clone)]
struct HelperTask {
    latch: Arc<CallLatch>,
    work: HelperWork,
}

impl HelperTask {
    /// Do the work, unless the door to it is shut or the call has all its helpers.
    fn run(&self) {
        // SAFETY: the call borrows the work until its door is shut and nobody is inside. This runs inside.
        self.latch.enter(|| unsafe { self.work.run() });
    }
}

/// A door that is shut when this is dropped, also by a panic.
struct OpenLatch<'a>(&'a CallLatch);

impl Drop for OpenLatch<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What a thread does that helps.
#[derive(Clone, Copy)]
struct HelperWork(*const (dyn Fn() + Sync));

impl HelperWork {
    fn of(work: &(dyn Fn() + Sync)) -> Self {
        let work: *const (dyn Fn() + Sync + '_) = work;
        #[allow(clippy::transmute_ptr_to_ptr)] // A cast may not change the lifetime.
        // SAFETY: the types differ in a lifetime alone, of which a pointer promises nothing. `run` asks for what it needs.
        Self(unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work) })
    }

    /// # Safety
    /// What this was made of is still borrowed.
    unsafe fn run(self) {
        // SAFETY: the caller promises that the reference from which the pointer came is valid.
        unsafe { (*self.0)() }
    }
}

// SAFETY: what it points to is `Sync`, so that any thread may call it. Whoever does promises that it is there.
unsafe impl Send for HelperWork {}
// SAFETY: as for `Send`.
unsafe impl Sync for HelperWork {}

/// The door to the work of one call.
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
    /// The first panic of one of them.
    panic: Option<Box<dyn Any + Send>>,
}

impl CallLatch {
    fn for_threads(most: usize) -> Self {
        Self { most, state: Mutex::default(), empty: Condvar::default() }
    }

    /// Do `work` inside, unless the door is shut or `most` threads are inside.
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

    /// Let nobody in any more, and wait until nobody is inside.
    fn close(&self) {
        let mut inside = lock(&self.state);
        inside.is_closed = true;
        while inside.threads > 0 {
            inside = wait(&self.empty, inside);
        }
    }

    /// The panic of a thread that was inside.
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

    /// Whoever comes in leaves before the door is shut for good: what is behind it is gone then.
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
        // The crew's only thread is busy with one call, so another one is served by its caller alone.
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
                // The first two and the caller meet here. Meanwhile the other threads are refused.
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
