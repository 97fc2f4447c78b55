//! Which thread works in whose place.
//!
//! The holder of a lock may have code that is not this crate's run on another thread, and wait for it. That code then works in the
//! holder's place: it would wait for ever if it asked for the same lock, just as if it ran on the holder's own thread.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Kind};
use crate::memory;
use crate::process::{PerProcess, is_main_thread};

/// A thread, together with all threads that work in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogicalThread(NonZeroU64);

thread_local! {
    static CURRENT: Cell<Option<LogicalThread>> = const { Cell::new(None) };
}

impl LogicalThread {
    /// The one that the calling thread belongs to.
    pub fn current() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        CURRENT.get().unwrap_or_else(|| {
            let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            let new = Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN));
            CURRENT.set(Some(new));
            new
        })
    }

    /// Do `work` on the calling thread in the place of this one.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> T {
        struct Before(Option<LogicalThread>);
        impl Drop for Before {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _before = Before(CURRENT.replace(Some(self)));
        work()
    }
}

/// Do `work` and wait for it: on a thread of its own where the caller is the process's main thread, else on the caller's.
///
/// An interpreter may run code of its user's, such as a signal handler, on the main thread whenever it runs anything there. Work that
/// is done while a lock is held is kept away from that thread, so that such code runs before or after it and can use the lock. Where
/// the system gives no thread, the caller does the work.
pub fn off_main_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    static ASIDE: PerProcess<ThreadPool> = PerProcess::new();
    if !is_main_thread() {
        return work();
    }
    let pool = ASIDE.get(|| {
        memory::room("start a thread beside the main one", memory::ROOM_FOR_THREADS)?;
        let builder = ThreadPoolBuilder::new().num_threads(1).thread_name(|_| "embcache-aside".into());
        builder.build().map_err(|error| Error::new(Kind::Storage, format!("cannot start a thread: {error}")))
    });
    let me = LogicalThread::current();
    match pool {
        Ok(pool) => pool.install(|| me.run(work)),
        Err(_) => work(),
    }
}

/// Stands beside a lock and says whether its holder is running code that is not this crate's.
#[derive(Debug, Default)]
pub(crate) struct ForeignCode(AtomicU64);

/// The foreign code has not returned yet.
pub(crate) struct Running<'a>(&'a ForeignCode);

impl ForeignCode {
    /// The calling thread, which holds the lock, begins to run foreign code.
    pub(crate) fn begin(&self) -> Running<'_> {
        self.0.store(LogicalThread::current().0.get(), Ordering::Relaxed);
        Running(self)
    }

    /// Whether the calling thread is within that code: whatever it asks the lock for, it would wait for itself.
    pub(crate) fn is_calling(&self) -> bool {
        // Only the holder writes the number, so that a thread finds its own number exactly when it is the holder.
        let holder = self.0.load(Ordering::Relaxed);
        holder != 0 && holder == LogicalThread::current().0.get()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_works_in_anothers_place_is_the_other_until_it_is_done() {
        let mine = LogicalThread::current();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = LogicalThread::current();
                assert_ne!(own, mine);
                mine.run(|| assert_eq!(LogicalThread::current(), mine));
                assert_eq!(LogicalThread::current(), own);
            });
        });
    }

    #[test]
    fn foreign_code_calls_only_from_the_thread_that_runs_it_and_until_it_returns() {
        let foreign = ForeignCode::default();
        assert!(!foreign.is_calling());
        let running = foreign.begin();
        assert!(foreign.is_calling());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!foreign.is_calling()));
        });
        drop(running);
        assert!(!foreign.is_calling());
    }
}
