//! Values of which a process has one, made when first asked for and never freed.
//!
//! A forked child has its parent's memory but none of its threads, and a lock that another thread held at the fork stays locked in
//! the child: so a child makes values, and the lock that they are made under, of its own.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::error::Result;
use crate::sync::lock;

thread_local! {
    static BEHIND: Cell<bool> = const { Cell::new(false) };
}

/// From now on this thread works while others leave it time: it, and threads that it starts, have the lowest priority, and it asks no
/// other threads for help.
pub fn work_behind() {
    BEHIND.set(true);
    #[cfg(target_os = "linux")]
    // SAFETY: changes the calling thread's priority (0, on Linux) and touches no memory. Where it is refused the priority stays.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
    }
}

/// Whether this thread is to work alone; see [`work_behind`].
pub(crate) fn works_behind() -> bool {
    BEHIND.get()
}

/// Whether the caller is on the thread that the process began with, or in a child the one that forked.
pub fn is_main_thread() -> bool {
    #[cfg(target_os = "linux")]
    return rustix::thread::gettid() == rustix::process::getpid();
    #[cfg(target_os = "macos")]
    // SAFETY: asks about the calling thread and touches no memory.
    return unsafe { libc::pthread_main_np() } != 0;
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    return true;
}

/// A place for one value a process. For statics: what is made is leaked.
pub(crate) struct PerProcess<T>(AtomicPtr<Place<T>>);

struct Place<T> {
    process: u32,
    making: Mutex<()>,
    value: OnceLock<T>,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Nothing made yet.
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// This process's value. Of several threads that ask first at the same time, one makes it and the others wait; what could not be
    /// made is tried again when next asked for.
    pub(crate) fn get(&'static self, make: impl FnOnce() -> Result<T>) -> Result<&'static T> {
        let place = self.place();
        if let Some(value) = place.value.get() {
            return Ok(value);
        }
        let _making = lock(&place.making);
        if let Some(value) = place.value.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(place.value.get_or_init(|| value))
    }

    fn place(&'static self) -> &'static Place<T> {
        let process = std::process::id();
        let seen = self.0.load(Ordering::Acquire);
        // SAFETY: null, or a place that was published below and is never freed.
        if let Some(place) = unsafe { seen.as_ref() }
            && place.process == process
        {
            return place;
        }
        let fresh = Box::into_raw(Box::new(Place { process, making: Mutex::new(()), value: OnceLock::new() }));
        match self.0.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published just now, and never freed from here on.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: `fresh` comes from the box above and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: another thread of this process published it, and it is never freed.
                unsafe { &*other }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::error::{Error, Kind};

    #[test]
    fn of_threads_that_ask_at_once_one_makes_the_value() {
        static ONE: PerProcess<u32> = PerProcess::new();
        static MADE: AtomicU32 = AtomicU32::new(0);
        let asking = Barrier::new(8);
        let ask = || {
            asking.wait();
            *ONE.get(|| {
                std::thread::yield_now();
                Ok(MADE.fetch_add(1, Ordering::Relaxed))
            })
            .unwrap()
        };
        let values: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((values, MADE.load(Ordering::Relaxed)), (vec![0; 8], 1));
    }

    #[test]
    fn what_could_not_be_made_is_tried_again() {
        static ONE: PerProcess<u32> = PerProcess::new();
        assert!(ONE.get(|| Err(Error::new(Kind::Storage, "no threads"))).is_err());
        assert_eq!(*ONE.get(|| Ok(7)).unwrap(), 7);
    }
}
