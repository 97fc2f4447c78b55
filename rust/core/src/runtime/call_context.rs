//! Threads that work on behalf of other threads.
//!
//! The holder of a lock may run foreign code (code outside this crate) on another thread and wait for it. That code
//! works on behalf of the holder. If it acquired the same lock, it would deadlock, as it would on the holder's own
//! thread.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Kind;
use crate::runtime::memory;
use crate::runtime::process::{PerProcess, is_main_thread};
use crate::runtime::sync::{Mutex, lock};

/// A thread, together with all threads that work on its behalf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallContext(NonZeroU64);

#[cfg(not(loom))]
thread_local! {
    static CURRENT: Cell<Option<CallContext>> = const { Cell::new(None) };
}
// The threads of a loom model share one OS thread.
#[cfg(loom)]
loom::thread_local! {
    static CURRENT: Cell<Option<CallContext>> = Cell::new(None);
}

impl CallContext {
    /// The logical thread to which the calling thread belongs.
    pub fn current() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        CURRENT.with(Cell::get).unwrap_or_else(|| {
            let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            let new = Self(NonZeroU64::new(number).unwrap_or(NonZeroU64::MIN));
            CURRENT.with(|current| current.set(Some(new)));
            new
        })
    }

    /// Runs `work` on the calling thread, on behalf of this logical thread.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> T {
        struct ContextGuard(Option<CallContext>);
        impl Drop for ContextGuard {
            fn drop(&mut self) {
                CURRENT.with(|current| current.set(self.0));
            }
        }
        let _before = ContextGuard(CURRENT.with(|current| current.replace(Some(self))));
        work()
    }
}

/// Runs `work` and waits for its result. If the caller is the process's main thread, the work runs on another thread.
///
/// An interpreter may run user code, such as a signal handler, on the main thread whenever it runs anything there. Work
/// under a lock is kept off that thread, so that such code runs before or after it and can use the lock. If the OS
/// cannot start a thread, the caller runs the work.
pub fn off_main_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    static ASIDE: PerProcess<ThreadPool> = PerProcess::new();
    if !is_main_thread() {
        return work();
    }
    let pool = ASIDE.get(|| {
        memory::check_system_memory("start a thread", memory::THREAD_START_BYTES)?;
        let builder = ThreadPoolBuilder::new().num_threads(1).thread_name(|_| "embcache-aside".into());
        builder.build().map_err(|error| Kind::Storage.error(format!("cannot start a thread: {error}")))
    });
    let me = CallContext::current();
    match pool {
        Ok(pool) => pool.install(|| me.run(work)),
        Err(_) => work(),
    }
}

/// Accompanies a lock, and records if the lock's holder is running foreign code.
#[derive(Debug, Default)]
pub(crate) struct ForeignCode(AtomicU64);

/// Exists while the foreign code runs.
pub(crate) struct ForeignCall<'a>(&'a ForeignCode);

/// Like [`ForeignCode`], for a lock that several threads may hold to read.
#[derive(Debug, Default)]
pub(crate) struct ForeignReaders {
    /// The threads that run foreign code, one entry per call. The lock is held only while the list changes.
    threads: Mutex<Vec<CallContext>>,
    /// Length of `threads`.
    count: AtomicU64,
}

/// Exists while the foreign code of one thread runs.
pub(crate) struct ForeignRead<'a>(&'a ForeignReaders, CallContext);

impl ForeignReaders {
    /// Marks that the calling thread, which holds the lock, starts to run foreign code.
    pub(crate) fn begin(&self) -> ForeignRead<'_> {
        let thread = CallContext::current();
        let mut threads = lock(&self.threads);
        threads.push(thread);
        self.count.store(threads.len() as u64, Ordering::Relaxed);
        ForeignRead(self, thread)
    }

    /// True if the calling thread is running such code. Acquiring the lock would then deadlock.
    pub(crate) fn is_calling(&self) -> bool {
        // A thread that runs such code has changed the count itself.
        self.count.load(Ordering::Relaxed) > 0 && lock(&self.threads).contains(&CallContext::current())
    }
}

impl Drop for ForeignRead<'_> {
    fn drop(&mut self) {
        let mut threads = lock(&self.0.threads);
        if let Some(at) = threads.iter().position(|thread| *thread == self.1) {
            threads.swap_remove(at);
        }
        self.0.count.store(threads.len() as u64, Ordering::Relaxed);
    }
}

impl ForeignCode {
    /// Marks that the calling thread, which holds the lock, starts to run foreign code.
    pub(crate) fn begin(&self) -> ForeignCall<'_> {
        self.0.store(CallContext::current().0.get(), Ordering::Relaxed);
        ForeignCall(self)
    }

    /// True if the calling thread is running that foreign code. Acquiring the lock would then deadlock.
    pub(crate) fn is_calling(&self) -> bool {
        // Only the holder writes the number, so a thread finds its own number here exactly if it is the holder.
        let holder = self.0.load(Ordering::Relaxed);
        holder != 0 && holder == CallContext::current().0.get()
    }
}

impl Drop for ForeignCall<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
