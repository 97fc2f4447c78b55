//! What plans and moments let go of when they are dropped.
//!
//! They may be dropped anywhere: by a garbage collector that runs while somebody, perhaps the same thread, has the table's lock. So whoever
//! drops them never waits for that lock. What is to be done under it is left here. It is done at once where the lock is free; else whoever
//! takes the lock next does it before anything else.

use std::time::Duration;

use crate::cache::residency::Hold;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, lock, wait, wait_at_most};

/// What was left for whoever takes the table's lock next.
#[derive(Default)]
pub(crate) struct Left {
    /// Its lock is held for no longer than it takes to add to the list or to empty it.
    list: Mutex<List>,
    /// Whether there is anything in the list.
    any: AtomicBool,
    moment_gone: Condvar,
}

#[derive(Default)]
struct List {
    holds: Vec<Hold>,
    moment: bool,
    /// How many moments were let go of so far.
    moments_gone: u64,
}

impl Left {
    /// A plan gives back what it holds.
    pub(crate) fn hold(&self, hold: Hold) {
        let mut list = lock(&self.list);
        list.holds.push(hold);
        self.any.store(true, Ordering::Release);
    }

    /// The moment of the table is let go of.
    pub(crate) fn moment(&self) {
        {
            let mut list = lock(&self.list);
            list.moment = true;
            list.moments_gone += 1;
            self.any.store(true, Ordering::Release);
        }
        self.moment_gone.notify_all();
    }

    /// Whether there is anything to take.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Take what was left: what plans held, and whether the moment was let go of.
    pub(crate) fn take(&self) -> (Vec<Hold>, bool) {
        let mut list = lock(&self.list);
        self.any.store(false, Ordering::Release);
        (std::mem::take(&mut list.holds), std::mem::take(&mut list.moment))
    }

    /// How many moments were let go of so far.
    pub(crate) fn moments_gone(&self) -> u64 {
        lock(&self.list).moments_gone
    }

    /// Wait until more than `gone` moments were let go of.
    pub(crate) fn wait_for_moment(&self, gone: u64) {
        let mut list = lock(&self.list);
        while list.moments_gone == gone {
            list = wait(&self.moment_gone, list);
        }
    }

    /// As [`Left::wait_for_moment`], for about `most` at most.
    pub(crate) fn wait_for_moment_at_most(&self, gone: u64, most: Duration) {
        let list = lock(&self.list);
        if list.moments_gone == gone {
            drop(wait_at_most(&self.moment_gone, list, most));
        }
    }
}
