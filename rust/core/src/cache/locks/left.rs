//! Deferred releases of dropped plans and snapshots.
//!
//! They may be dropped anywhere: by a garbage collector that runs while a thread, perhaps the same one, holds the
//! table's lock. So a drop never waits for that lock. The work under the lock is deferred here. It is done immediately
//! if the lock is free; else the next holder of the lock does it before anything else.

use std::time::Duration;

use crate::cache::residency::PlanPins;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, lock, wait, wait_at_most};

/// Work for the next holder of the table's lock.
#[derive(Default)]
pub(crate) struct DeferredReleases {
    /// Locked only to add to the list or to empty it.
    list: Mutex<DeferredList>,
    /// True if the list is not empty.
    has_any: AtomicBool,
    snapshot_ended: Condvar,
}

#[derive(Default)]
struct DeferredList {
    pins: Vec<PlanPins>,
    snapshot_ended: bool,
    /// Number of ended snapshots.
    snapshots_ended: u64,
}

impl DeferredReleases {
    /// Adds the pins of a plan to release.
    pub(crate) fn add_pins(&self, pins: PlanPins) {
        let mut list = lock(&self.list);
        list.pins.push(pins);
        self.has_any.store(true, Ordering::Release);
    }

    /// Adds the end of the table's snapshot.
    pub(crate) fn add_snapshot_end(&self) {
        {
            let mut list = lock(&self.list);
            list.snapshot_ended = true;
            list.snapshots_ended += 1;
            self.has_any.store(true, Ordering::Release);
        }
        self.snapshot_ended.notify_all();
    }

    /// True if there is deferred work.
    #[inline]
    pub(crate) fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    /// Takes the deferred work: the pins of plans, and true if the snapshot has ended.
    pub(crate) fn take(&self) -> (Vec<PlanPins>, bool) {
        let mut list = lock(&self.list);
        self.has_any.store(false, Ordering::Release);
        (std::mem::take(&mut list.pins), std::mem::take(&mut list.snapshot_ended))
    }

    /// Number of ended snapshots.
    pub(crate) fn snapshots_ended(&self) -> u64 {
        lock(&self.list).snapshots_ended
    }

    /// Waits until more than `ended` snapshots have ended.
    pub(crate) fn wait_for_snapshot_end(&self, ended: u64) {
        let mut list = lock(&self.list);
        while list.snapshots_ended == ended {
            list = wait(&self.snapshot_ended, list);
        }
    }

    /// Like [`DeferredReleases::wait_for_snapshot_end`], for about `most` at most.
    pub(crate) fn wait_for_snapshot_end_at_most(&self, ended: u64, most: Duration) {
        let list = lock(&self.list);
        if list.snapshots_ended == ended {
            drop(wait_at_most(&self.snapshot_ended, list, most));
        }
    }
}
