//! Where a walk over the segments of rows stopped.

use crate::types::Id;

/// A walk over the segments of rows by rising serial, which goes on where it stopped. So the footer of a segment is read once for all of
/// its records, however many calls look at them.
#[derive(Debug, Default)]
pub(crate) struct SegmentCursor {
    /// Serial of the segment that the walk is at.
    pub(crate) serial: u64,
    /// Those of its records that were live and are still to be looked at. The next one is the last here.
    pub(crate) remaining: Vec<CursorRecord>,
}

/// A record that a walk has still to look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CursorRecord {
    pub(crate) id: Id,
    /// Its number in the segment.
    pub(crate) record: u32,
    pub(crate) modified_epoch: u32,
}
