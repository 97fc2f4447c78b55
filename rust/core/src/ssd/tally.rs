//! What a scan has still to find: the live records of each segment, counted when it begins.
//!
//! The index keeps no ids, so a scan learns them from the records, and a record whose id is damaged looks like a dead one. Therefore the
//! live records that a scan finds in a segment are held against those that the tier counts there. Fewer are damage.

use super::index::Location;
use super::scan::Part;
use crate::sync::{AtomicBool, AtomicU32, Ordering};

/// Of one scan. It changes under the table's lock alone: when a record dies, with the lock to write; when the scan finds some, to read.
#[derive(Debug)]
pub(super) struct Tally {
    /// By segment number.
    segments: Vec<Option<Counts>>,
    ended: AtomicBool,
}

#[derive(Debug)]
struct Counts {
    /// How many records of the segment the scan reads.
    records: u32,
    /// The record that the scan comes to next.
    next: AtomicU32,
    /// Live records that it has not found yet.
    left: AtomicU32,
}

impl Tally {
    /// Of a scan of `parts`; to be called under the table's lock.
    pub(super) fn of(parts: &[Part]) -> Self {
        let mut segments: Vec<Option<Counts>> = Vec::new();
        for Part { segment, records } in parts {
            let slot = segment.slot as usize;
            if segments.len() <= slot {
                segments.resize_with(slot + 1, || None);
            }
            let left = AtomicU32::new(segment.live.load(Ordering::Relaxed));
            segments[slot] = Some(Counts { records: *records, next: AtomicU32::new(0), left });
        }
        Self { segments, ended: AtomicBool::new(false) }
    }

    fn counts(&self, slot: u32) -> Option<&Counts> {
        self.segments.get(slot as usize).and_then(Option::as_ref)
    }

    /// The index points to this record no longer.
    pub(super) fn died(&self, location: Location) {
        if let Some(counts) = self.counts(location.segment)
            && (counts.next.load(Ordering::Relaxed)..counts.records).contains(&location.record)
        {
            counts.found(1);
        }
    }

    /// The scan has looked at all records of a segment that are before `next`, and found so many more live ones.
    pub(super) fn found(&self, slot: u32, next: u32, live: u32) {
        if let Some(counts) = self.counts(slot) {
            counts.next.store(next, Ordering::Relaxed);
            counts.found(live);
        }
    }

    /// Live records of a segment that were not found, once the scan has looked at all.
    pub(super) fn missing(&self, slot: u32) -> u32 {
        let left = self.counts(slot).map_or(0, |counts| counts.left.load(Ordering::Relaxed));
        if self.ended.load(Ordering::Relaxed) { 0 } else { left }
    }

    /// All rows are forgotten: nothing is left to be found.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Counts {
    fn found(&self, live: u32) {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(live), Ordering::Relaxed);
    }
}
