//! Values of which a process has one, made when first asked for and never freed.
//!
//! A forked child has its parent's memory but none of its threads, and a lock that another thread held at the fork stays locked in
//! the child: so a child makes values of its own, and there is no lock here.
#![allow(unsafe_code)]

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::error::Result;

/// A place for one value a process. For statics: what is made is leaked.
pub(crate) struct PerProcess<T>(AtomicPtr<Made<T>>);

struct Made<T> {
    process: u32,
    value: T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Nothing made yet.
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// This process's value. Of several threads that make one at the same time, one wins and the others' values are dropped.
    pub(crate) fn get(&'static self, make: impl FnOnce() -> Result<T>) -> Result<&'static T> {
        let process = std::process::id();
        let seen = self.0.load(Ordering::Acquire);
        // SAFETY: null, or a value that was published below and is never freed.
        if let Some(made) = unsafe { seen.as_ref() }
            && made.process == process
        {
            return Ok(&made.value);
        }
        let fresh = Box::into_raw(Box::new(Made { process, value: make()? }));
        match self.0.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published just now, and never freed from here on.
            Ok(_) => Ok(&unsafe { &*fresh }.value),
            Err(other) => {
                // SAFETY: `fresh` comes from the box above and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: another thread of this process published it, and it is never freed.
                Ok(&unsafe { &*other }.value)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::error::{Error, Kind};

    #[test]
    fn threads_that_ask_at_once_get_the_same_value() {
        static ONE: PerProcess<Arc<AtomicUsize>> = PerProcess::new();
        let values: Vec<Arc<AtomicUsize>> = std::thread::scope(|scope| {
            let asking: Vec<_> =
                (0..8).map(|_| scope.spawn(|| ONE.get(|| Ok(Arc::default())).unwrap().clone())).collect();
            asking.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(values.iter().all(|value| Arc::ptr_eq(value, &values[0])));
    }

    #[test]
    fn what_could_not_be_made_is_tried_again() {
        static ONE: PerProcess<u32> = PerProcess::new();
        assert!(ONE.get(|| Err(Error::new(Kind::Storage, "no threads"))).is_err());
        assert_eq!(*ONE.get(|| Ok(7)).unwrap(), 7);
    }
}
