//! The state of a snapshot: the records that belong to it, and the segments that are still to be read for it.
//!
//! A snapshot starts with a list of the segments. Afterwards every record that the index starts or ceases to point to
//! is marked, by one bit per record in segments that have any. A record belongs to the snapshot if the index points to
//! it and it is not marked; or if it is marked and the index does not point to it, because it was the latest of its id
//! only at the start.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::Error;
use crate::rows::RowRef;
use crate::runtime::sync::{Mutex, lock};
use crate::ssd::index::RecordLocation;
use crate::ssd::segment::SegmentPart;

/// Receives rows of a snapshot that are read out of order.
pub type EarlyRowSink = dyn Fn(RowRef<'_>) + Send + Sync;

/// The snapshot of a tier, in the tier's state.
pub(crate) struct SsdSnapshotState {
    /// By segment number, until the segment's rows are read.
    marks: Vec<Option<SegmentMarks>>,
    unread: Arc<UnreadSegments>,
}

/// The marked ones of a segment's first `records` records.
struct SegmentMarks {
    records: u32,
    /// Records that belong to the snapshot.
    live: u32,
    /// Empty as long as no record is marked.
    bits: Vec<u64>,
}

/// Segments whose rows were not read yet, and the sink for rows that are read out of order.
pub(crate) struct UnreadSegments {
    parts: Mutex<VecDeque<SegmentPart>>,
    /// Rows that were modified before this epoch are skipped.
    pub(crate) since: u32,
    /// The first error of an out-of-order read.
    failed: Mutex<Option<Error>>,
    early_rows: Box<EarlyRowSink>,
}

opaque_debug!(SsdSnapshotState, self, segments = self.marks.iter().flatten().count());

impl SsdSnapshotState {
    /// Starts a snapshot with the rows of `parts`. All segment numbers are below `slots`.
    pub(crate) fn new(parts: Vec<SegmentPart>, slots: usize, since: u32, early_rows: Box<EarlyRowSink>) -> Self {
        let mut marks: Vec<Option<SegmentMarks>> = Vec::new();
        marks.resize_with(slots, || None);
        for part in &parts {
            let live = part.segment.live();
            marks[part.segment.slot as usize] = Some(SegmentMarks { records: part.records, live, bits: Vec::new() });
        }
        let unread = UnreadSegments { parts: Mutex::new(parts.into()), since, failed: Mutex::default(), early_rows };
        Self { marks, unread: Arc::new(unread) }
    }

    /// The segments that are still to be read.
    pub(crate) fn unread(&self) -> &Arc<UnreadSegments> {
        &self.unread
    }

    /// Marks a record that the index starts or ceases to point to.
    #[inline]
    pub(crate) fn mark(&mut self, location: RecordLocation) {
        let Some(Some(marks)) = self.marks.get_mut(location.segment as usize) else { return };
        if location.record < marks.records {
            if marks.bits.is_empty() {
                marks.bits = vec![0; marks.records.div_ceil(64) as usize];
            }
            marks.bits[location.record as usize / 64] ^= 1 << (location.record % 64);
        }
    }

    /// Excludes the record at `location` from the snapshot, because the latest version of its row is in another tier.
    pub(crate) fn exclude(&mut self, location: RecordLocation) {
        self.mark(location);
        if let Some(Some(marks)) = self.marks.get_mut(location.segment as usize)
            && location.record < marks.records
        {
            marks.live = marks.live.saturating_sub(1);
        }
    }

    /// Number of a segment's records that belong to the snapshot; `None` if the segment was read.
    pub(crate) fn live_records(&self, slot: u32) -> Option<u32> {
        self.marks.get(slot as usize).and_then(Option::as_ref).map(|marks| marks.live)
    }

    /// True if a record of a segment that is being read is marked.
    pub(crate) fn is_marked(&self, location: RecordLocation) -> bool {
        let marks = self.marks.get(location.segment as usize).and_then(Option::as_ref);
        let word = marks.and_then(|marks| marks.bits.get(location.record as usize / 64));
        word.is_some_and(|word| word >> (location.record % 64) & 1 == 1)
    }

    /// True if rows are still to be read, or are being read.
    pub(crate) fn has_unread(&self) -> bool {
        self.marks.iter().any(Option::is_some)
    }

    /// Marks the segment `slot` as read, even after a failed read. Does nothing if `unread` belongs to another
    /// snapshot.
    pub(crate) fn end_read(&mut self, unread: &Arc<UnreadSegments>, slot: u32) {
        if Arc::ptr_eq(&self.unread, unread) {
            self.marks[slot as usize] = None;
        }
    }
}

impl UnreadSegments {
    /// Number of segments that no thread has started to read.
    pub(crate) fn len(&self) -> usize {
        lock(&self.parts).len()
    }

    /// Takes the next segment to read, which is the oldest.
    pub(crate) fn take_next(&self) -> Option<SegmentPart> {
        lock(&self.parts).pop_front()
    }

    /// Takes the segment with the fewest live rows, which is the fastest to free.
    pub(crate) fn take_emptiest(&self) -> Option<SegmentPart> {
        let mut parts = lock(&self.parts);
        let emptiest = (0..parts.len()).min_by_key(|&at| parts[at].segment.live());
        emptiest.and_then(|at| parts.remove(at))
    }

    /// Takes all segments that no thread has started to read.
    pub(crate) fn take_all(&self) -> VecDeque<SegmentPart> {
        std::mem::take(&mut *lock(&self.parts))
    }

    /// Passes a row that is read out of order to the snapshot's owner.
    pub(crate) fn keep_early_row(&self, row: RowRef<'_>) {
        (self.early_rows)(row);
    }

    /// Records a failed out-of-order read. The snapshot's owner gets the error, not the thread that waits for free
    /// space.
    pub(crate) fn fail(&self, error: Error) {
        lock(&self.failed).get_or_insert(error);
    }

    /// The first error of an out-of-order read.
    pub(crate) fn failed(&self) -> Option<Error> {
        lock(&self.failed).clone()
    }
}
