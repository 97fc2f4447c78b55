//! Statistics of a server.

use std::sync::atomic::AtomicU64;

use crate::checkpoint::CheckpointName;

/// Statistics of a server at the time of the call.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingStats {
    /// The served checkpoint.
    pub version: CheckpointName,
    /// Seconds since the checkpoint was published.
    pub staleness_seconds: f64,
    /// Number of polls for a newer checkpoint.
    pub polls: u64,
    /// Number of times that the served checkpoint was replaced by another, including rollbacks. The same one with a new
    /// index does not count.
    pub swaps: u64,
    /// Number of polls that failed. The previous version remains served.
    pub failed_polls: u64,
    /// The error of the last poll, if it failed.
    pub last_error: Option<String>,
    /// Number of versions that a request or the server holds.
    pub versions: u64,
    /// Number of lookup calls.
    pub lookups: u64,
    /// Number of ids looked up.
    pub ids: u64,
    /// Number of these ids that are missing.
    pub missing: u64,
    /// Number of rows whose pages were not recently seen in memory, and were prefetched.
    pub cold_rows: u64,
    /// Number of rows of all tables.
    pub rows: u64,
    /// Number of ids that the deltas after the indexes changed.
    pub overlay_ids: u64,
    /// Bytes of indexes that all processes of the machine share.
    pub shared_index_bytes: u64,
    /// Bytes of indexes and overlays in this process's own memory.
    pub private_bytes: u64,
}

/// Counters of polls for newer checkpoints.
#[derive(Debug, Default)]
pub(super) struct PollCounts {
    pub(super) polls: AtomicU64,
    pub(super) swaps: AtomicU64,
    pub(super) failed: AtomicU64,
}
