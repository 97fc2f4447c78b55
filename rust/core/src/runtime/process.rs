//! Values of which each process has one. They are created on first use and never freed.
//!
//! A forked child has its parent's memory but none of its threads, and a lock that another thread held at the fork
//! stays locked in the child. So a child creates its own values, under its own lock.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::error::Result;
use crate::runtime::sync::lock;

thread_local! {
    static BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// Moves this thread to the background. It gets the lowest priority, as do threads that it starts, and it uses no
/// helper threads.
pub fn work_in_background() {
    set_priority(LOWEST_PRIORITY);
}

/// Lowers the priority of this thread below the usual priority, without waiting for idle time: on a core with a busy
/// thread of usual priority it gets a tenth of the time. Threads that it starts inherit the priority, and it uses no
/// helper threads.
pub(crate) fn lower_priority() {
    set_priority(LOW_PRIORITY);
}

/// The nice values of [`work_in_background`] and [`lower_priority`].
const LOWEST_PRIORITY: i32 = 19;
const LOW_PRIORITY: i32 = 10;

fn set_priority(nice: i32) {
    BACKGROUND.set(true);
    #[cfg(target_os = "linux")]
    {
        // On Linux "no process" is the calling thread. If this fails, the priority is unchanged.
        let _ = rustix::process::setpriority_process(None, nice);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = nice;
}

/// The background flag of a thread, passed to the threads that it starts. The OS passes on the priority itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackgroundFlag(bool);

impl BackgroundFlag {
    /// Returns the flag of this thread.
    pub(crate) fn of_this_thread() -> Self {
        Self(BACKGROUND.get())
    }

    /// Sets the flag on this thread, which was started by the other thread.
    pub(crate) fn apply(self) {
        BACKGROUND.set(self.0);
    }
}

/// True after [`work_alone`] was called.
static ALONE: AtomicBool = AtomicBool::new(false);

/// Keeps foreign code (code outside this crate) off helper threads from this call on. An interpreter that is shutting
/// down passes its lock only to the main thread.
pub fn work_alone() {
    ALONE.store(true, Ordering::Release);
}

/// True if each thread must run foreign code itself; see [`work_alone`].
pub(crate) fn works_alone() -> bool {
    ALONE.load(Ordering::Acquire)
}

/// True if this thread works in the background, without helper threads; see [`work_in_background`].
pub(crate) fn works_in_background() -> bool {
    BACKGROUND.get()
}

/// True if the caller is the initial thread of the process. In a forked child that is the thread that forked.
pub fn is_main_thread() -> bool {
    #[cfg(target_os = "linux")]
    return rustix::thread::gettid() == rustix::process::getpid();
    #[cfg(target_os = "macos")]
    // SAFETY: this queries the calling thread and touches no memory.
    return unsafe { libc::pthread_main_np() } != 0;
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    return true;
}

/// Contains one value per process. It is meant for statics: the value is never freed.
///
/// ```
/// static STARTED: embcache::PerProcess<std::time::Instant> = embcache::PerProcess::new();
/// let started = STARTED.get(|| Ok(std::time::Instant::now()))?;
/// assert_eq!(started, STARTED.get(|| unreachable!("it is made once"))?);
/// # Ok::<(), embcache::Error>(())
/// ```
#[derive(Debug)]
pub struct PerProcess<T>(AtomicPtr<ProcessValue<T>>);

/// The value of one process.
struct ProcessValue<T> {
    process: u32,
    init_lock: Mutex<()>,
    value: OnceLock<T>,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Creates a holder without a value.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// Returns the value of this process, which `make` creates at the first call. If several threads make the first
    /// call at the same time, one of them creates the value and the others wait for it. After an error of `make` the
    /// next call tries again.
    pub fn get(&'static self, make: impl FnOnce() -> Result<T>) -> Result<&'static T> {
        let made = self.process_value();
        if let Some(value) = made.value.get() {
            return Ok(value);
        }
        let _making = lock(&made.init_lock);
        if let Some(value) = made.value.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(made.value.get_or_init(|| value))
    }

    fn process_value(&'static self) -> &'static ProcessValue<T> {
        let process = std::process::id();
        let seen = self.0.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or was published below and is never freed.
        if let Some(made) = unsafe { seen.as_ref() }
            && made.process == process
        {
            return made;
        }
        let fresh =
            Box::into_raw(Box::new(ProcessValue { process, init_lock: Mutex::new(()), value: OnceLock::new() }));
        match self.0.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `fresh` comes from the box above, was published by this exchange, and is never freed afterwards.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: `fresh` comes from the box above and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: another thread of this process published `other`, and it is never freed.
                unsafe { &*other }
            }
        }
    }
}

impl<T: Send + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
