//! The position of a pass over the segments of rows.

use crate::types::Id;

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
