//! A segment to be read by a scan, a snapshot or a pin of segments.

use std::sync::Arc;

use crate::ssd::segment::file::Segment;

/// A segment to read: its first `records` records. Until this is dropped compaction skips the segment, and it stays in
/// the current set.
pub(crate) struct SegmentPart {
    pub(crate) segment: Arc<Segment>,
    pub(crate) records: u32,
}

impl SegmentPart {
    /// Selects all present records of a segment. Must be called under the tier's lock.
    pub(crate) fn of(segment: Arc<Segment>) -> Self {
        segment.begin_scan();
        let records = segment.records();
        Self { segment, records }
    }
}

impl Drop for SegmentPart {
    fn drop(&mut self) {
        self.segment.end_scan();
    }
}
