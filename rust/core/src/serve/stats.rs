//! What a server counts.

use std::sync::atomic::AtomicU64;

use crate::checkpoint::CheckpointName;

/// Figures of a server, as of one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingStats {
    /// The checkpoint that is served.
    pub version: CheckpointName,
    /// Seconds since the checkpoint was published.
    pub staleness_seconds: f64,
    /// Looks for a newer checkpoint.
    pub polls: u64,
    /// How often another checkpoint was served than before, after a rollback too. The same one with a new index does not count.
    pub swaps: u64,
    /// Looks that ended with an error. The version before serves on.
    pub failed_polls: u64,
    /// The error of the last look, if it failed.
    pub last_error: Option<String>,
    /// Versions that a request or the server holds.
    pub versions: u64,
    /// Calls of lookups.
    pub lookups: u64,
    /// Ids that were looked up.
    pub ids: u64,
    /// Those of them that have no row.
    pub missing: u64,
    /// Rows whose pages were not seen in memory lately, and were asked for.
    pub cold_rows: u64,
    /// Rows of all tables.
    pub rows: u64,
    /// Ids that the deltas after the indexes changed.
    pub overlay_ids: u64,
    /// Bytes of indexes that all processes of the machine share.
    pub shared_index_bytes: u64,
    /// Bytes of indexes and overlays in this process's own memory.
    pub private_bytes: u64,
}

/// What the looks for newer checkpoints count.
#[derive(Debug, Default)]
pub(super) struct PollCounts {
    pub(super) polls: AtomicU64,
    pub(super) swaps: AtomicU64,
    pub(super) failed: AtomicU64,
}
