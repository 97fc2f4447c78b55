//! Scans that end for others. Whoever takes the rows of a scan may keep it waiting, and then the files that it keeps make no room.

use std::sync::Arc;

use crate::sync::{Mutex, lock};

/// Takes the rows of a scan, and may keep it waiting for as long as it likes.
pub trait ScanConsumer: std::fmt::Debug + Send + Sync {
    /// End the scan if it is kept waiting now; whether it is. It waits for nobody, because the tier's lock is held.
    fn cancel_if_waiting(&self) -> bool;
}

/// Who takes the rows of scans that are under way.
#[derive(Debug, Default)]
pub(crate) struct ScanConsumers(Mutex<Vec<Arc<dyn ScanConsumer>>>);

/// A taker on the list. Dropping it takes it off.
pub(crate) struct ScanConsumerGuard<'a> {
    consumers: &'a ScanConsumers,
    consumer: &'a Arc<dyn ScanConsumer>,
}

impl ScanConsumers {
    /// Add a taker for as long as its scan is under way.
    pub(crate) fn register<'a>(&'a self, consumer: &'a Arc<dyn ScanConsumer>) -> ScanConsumerGuard<'a> {
        lock(&self.0).push(Arc::clone(consumer));
        ScanConsumerGuard { consumers: self, consumer }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// End the scans that are kept waiting; whether there are any. They let go of their files soon.
    pub(crate) fn cancel_waiting(&self) -> bool {
        let takers = lock(&self.0).clone();
        // Every one is asked: `any` would stop at the first.
        takers.iter().filter(|taker| taker.cancel_if_waiting()).count() > 0
    }
}

impl Drop for ScanConsumerGuard<'_> {
    fn drop(&mut self) {
        let mut takers = lock(&self.consumers.0);
        let own = takers.iter().position(|other| Arc::ptr_eq(other, self.consumer));
        own.map(|at| takers.swap_remove(at));
    }
}
