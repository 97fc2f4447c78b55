//! Where the last eviction stopped.

use crate::types::Id;

/// A sweep over the segments, oldest first. An eviction goes on where the last one stopped, so that the footer of a segment is read once
/// for all rows that leave it.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    /// Serial of the segment.
    pub(crate) serial: u64,
    /// Ids and numbers of those of its records that were live and are still to be looked at. The next one is the last here.
    pub(crate) ahead: Vec<(Id, u32)>,
}
