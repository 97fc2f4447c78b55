//! Scans and passes in progress: the live records that a scan has still to find, the consumers that may block it, and
//! the position of an eviction or expiry pass.
//!
//! The index does not store ids, so a scan reads them from the records. A record with a corrupted id therefore looks
//! like a dead one. So the number of live records that a scan finds in a segment is compared with the tier's count.
//! Fewer are corruption.
//!
//! A slow consumer may block a scan, and then the files that it pins cannot be removed; under space pressure the scan is
//! cancelled.

use std::sync::Arc;

use crate::runtime::sync::{AtomicBool, AtomicU32, Mutex, Ordering, lock};
use crate::ssd::index::RecordLocation;
use crate::ssd::segment::SegmentPart;
use crate::types::Id;

/// The records that one scan has still to find. It changes only under the tier's lock: held for writing when a record
/// becomes dead, held for reading when the scan finds records.
#[derive(Debug)]
pub(crate) struct ScanTally {
    /// By segment number.
    segments: Vec<Option<ScanTallyCounts>>,
    ended: AtomicBool,
}

#[derive(Debug)]
struct ScanTallyCounts {
    /// Records of the segment that the scan reads.
    records: u32,
    /// The next record of the scan.
    next: AtomicU32,
    /// Live records that the scan has not found yet.
    remaining: AtomicU32,
}

impl ScanTally {
    /// Creates the tally of a scan of `parts`. Must be called under the tier's lock.
    pub(crate) fn of(parts: &[SegmentPart]) -> Self {
        let mut segments: Vec<Option<ScanTallyCounts>> = Vec::new();
        for SegmentPart { segment, records } in parts {
            let slot = segment.slot as usize;
            if segments.len() <= slot {
                segments.resize_with(slot + 1, || None);
            }
            let left = AtomicU32::new(segment.live());
            segments[slot] = Some(ScanTallyCounts { records: *records, next: AtomicU32::new(0), remaining: left });
        }
        Self { segments, ended: AtomicBool::new(false) }
    }

    fn counts(&self, slot: u32) -> Option<&ScanTallyCounts> {
        self.segments.get(slot as usize).and_then(Option::as_ref)
    }

    /// Subtracts a record that the index does not point to.
    pub(crate) fn remove_dead(&self, location: RecordLocation) {
        if let Some(counts) = self.counts(location.segment)
            && (counts.next.load(Ordering::Relaxed)..counts.records).contains(&location.record)
        {
            counts.subtract_found(1);
        }
    }

    /// Records that the scan has read all records of a segment before `next`, and found `live` more live ones.
    pub(crate) fn add_found(&self, slot: u32, next: u32, live: u32) {
        if let Some(counts) = self.counts(slot) {
            counts.next.store(next, Ordering::Relaxed);
            counts.subtract_found(live);
        }
    }

    /// Number of a segment's live records that were not found, once the scan has read all of its records.
    pub(crate) fn missing(&self, slot: u32) -> u32 {
        let left = self.counts(slot).map_or(0, |counts| counts.remaining.load(Ordering::Relaxed));
        if self.ended.load(Ordering::Relaxed) { 0 } else { left }
    }

    /// Ends the tally when all rows are removed, so that nothing is missing.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl ScanTallyCounts {
    fn subtract_found(&self, live: u32) {
        let left = self.remaining.load(Ordering::Relaxed);
        self.remaining.store(left.saturating_sub(live), Ordering::Relaxed);
    }
}

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
        let consumers = lock(&self.0).clone();
        // Every consumer must be called: `any` would stop at the first.
        consumers.iter().filter(|consumer| consumer.cancel_if_waiting()).count() > 0
    }
}

impl Drop for ScanConsumerGuard<'_> {
    fn drop(&mut self) {
        let mut consumers = lock(&self.consumers.0);
        let own = consumers.iter().position(|other| Arc::ptr_eq(other, self.consumer));
        own.map(|at| consumers.swap_remove(at));
    }
}

/// A pass over the segments of rows by ascending serial, which continues where it stopped. So the footer of a segment
/// is read only once, even if many calls process its records.
#[derive(Debug, Default)]
pub(crate) struct SegmentCursor {
    /// Serial of the current segment.
    pub(crate) serial: u64,
    /// Its records that were live and are still to be processed. The next one is the last here.
    pub(crate) remaining: Vec<CursorRecord>,
}

/// A record that a pass has still to process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CursorRecord {
    pub(crate) id: Id,
    /// Its number in the segment.
    pub(crate) record: u32,
    pub(crate) modified_epoch: u32,
}
