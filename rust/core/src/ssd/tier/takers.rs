//! Cancellable scans. A slow consumer may block a scan, and then the files that it pins cannot be removed; under space
//! pressure the scan is cancelled.

use std::sync::Arc;

use crate::sync::{Mutex, lock};

/// Consumes the rows of a scan, and may block it indefinitely.
pub trait ScanConsumer: std::fmt::Debug + Send + Sync {
    /// Cancels the scan if it is blocked. Returns true if it was blocked. Must not wait, because the tier's lock is
    /// held.
    fn cancel_if_waiting(&self) -> bool;
}

/// The consumers of scans in progress.
#[derive(Debug, Default)]
pub(crate) struct ScanConsumers(Mutex<Vec<Arc<dyn ScanConsumer>>>);

/// Registration of a consumer. Dropping it unregisters the consumer.
pub(crate) struct ScanConsumerGuard<'a> {
    consumers: &'a ScanConsumers,
    consumer: &'a Arc<dyn ScanConsumer>,
}

impl ScanConsumers {
    /// Registers a consumer for the duration of its scan.
    pub(crate) fn register<'a>(&'a self, consumer: &'a Arc<dyn ScanConsumer>) -> ScanConsumerGuard<'a> {
        lock(&self.0).push(Arc::clone(consumer));
        ScanConsumerGuard { consumers: self, consumer }
    }

    /// Number of consumers.
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Cancels the blocked scans, which release their files soon. Returns true if there are any.
    pub(crate) fn cancel_waiting(&self) -> bool {
        let takers = lock(&self.0).clone();
        // Every consumer must be called: `any` would stop at the first.
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
