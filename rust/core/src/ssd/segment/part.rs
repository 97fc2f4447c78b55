//! A segment that a scan, a moment or a holder of segments is to read.

use std::sync::Arc;

use crate::ssd::segment::file::Segment;

/// A segment to read: its first `records` records. While this lives compaction leaves the segment alone, and it stays in the current set.
pub(crate) struct SegmentPart {
    pub(crate) segment: Arc<Segment>,
    pub(crate) records: u32,
}

impl SegmentPart {
    /// All records that a segment has now. To be called under the tier's lock.
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
