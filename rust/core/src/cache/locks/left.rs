//! What plans and moments let go of when they are dropped.
//!
//! They may be dropped anywhere: by a garbage collector that runs while somebody, perhaps the same thread, has the table's lock. So whoever
//! drops them never waits for that lock. What is to be done under it is left here. It is done at once where the lock is free; else whoever
//! takes the lock next does it before anything else.

use std::time::Duration;

use crate::cache::residency::PlanPins;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, lock, wait, wait_at_most};

/// What was left for whoever takes the table's lock next.
#[derive(Default)]
pub(crate) struct DeferredReleases {
    /// Its lock is held for no longer than it takes to add to the list or to empty it.
    list: Mutex<DeferredList>,
    /// Whether there is anything in the list.
    has_any: AtomicBool,
    snapshot_ended: Condvar,
}

#[derive(Default)]
struct DeferredList {
    pins: Vec<PlanPins>,
    snapshot_ended: bool,
    /// How many moments were let go of so far.
    snapshots_ended: u64,
}

impl DeferredReleases {
    /// A plan gives back what it holds.
    pub(crate) fn add_pins(&self, pins: PlanPins) {
        let mut list = lock(&self.list);
        list.pins.push(pins);
        self.has_any.store(true, Ordering::Release);
    }

    /// The moment of the table is let go of.
    pub(crate) fn add_snapshot_end(&self) {
        {
            let mut list = lock(&self.list);
            list.snapshot_ended = true;
            list.snapshots_ended += 1;
            self.has_any.store(true, Ordering::Release);
        }
        self.snapshot_ended.notify_all();
    }

    /// Whether there is anything to take.
    #[inline]
    pub(crate) fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    /// Take what was left: what plans held, and whether the moment was let go of.
    pub(crate) fn take(&self) -> (Vec<PlanPins>, bool) {
        let mut list = lock(&self.list);
        self.has_any.store(false, Ordering::Release);
        (std::mem::take(&mut list.pins), std::mem::take(&mut list.snapshot_ended))
    }

    /// How many moments were let go of so far.
    pub(crate) fn snapshots_ended(&self) -> u64 {
        lock(&self.list).snapshots_ended
    }

    /// Wait until more than `ended` moments were let go of.
    pub(crate) fn wait_for_snapshot_end(&self, ended: u64) {
        let mut list = lock(&self.list);
        while list.snapshots_ended == ended {
            list = wait(&self.snapshot_ended, list);
        }
    }

    /// As [`DeferredReleases::wait_for_snapshot_end`], for about `most` at most.
    pub(crate) fn wait_for_snapshot_end_at_most(&self, ended: u64, most: Duration) {
        let list = lock(&self.list);
        if list.snapshots_ended == ended {
            drop(wait_at_most(&self.snapshot_ended, list, most));
        }
    }
}
