//! The counters of a tier, as plain numbers.

use std::collections::BTreeMap;

mod histogram;

pub(crate) use histogram::DurationHistogram;
pub use histogram::HistogramSnapshot;

/// Counters of one tier of one table. Event counters start when the table is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierStats {
    /// Number of rows in the tier.
    pub rows: u64,
    /// Bytes in use, including the tier's index.
    pub bytes: u64,
    /// The tier's budget in bytes.
    pub capacity_bytes: u64,
    /// Distinct ids of plans that were found in this tier.
    pub hits: u64,
    /// Distinct ids of plans that were searched in this tier and not found.
    pub misses: u64,
    /// Rows that left the tier to free space.
    pub evictions: u64,
    /// Bytes that were read from the tier for plans.
    pub read_bytes: u64,
    /// Bytes that were written into the tier.
    pub written_bytes: u64,
    /// Nanoseconds that plans spent on the tier, including waits.
    pub time_ns: u64,
}

/// Additional counters of the SSD tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SsdStats {
    /// The counters common to every tier.
    pub tier: TierStats,
    /// The I/O engine: `io_uring` or `pread`, with `+direct` if `O_DIRECT` is in use.
    pub io_engine: String,
    /// Reads that were sent to the disk for plans. One read loads all rows that are near each other.
    pub reads: u64,
    /// Latency of row reads, from submission to completion.
    pub read_latency: HistogramSnapshot,
    /// Bytes of the rows that were written to the tier by callers, including their headers.
    pub logical_written_bytes: u64,
    /// Bytes that compaction wrote.
    pub compaction_bytes: u64,
    /// Bytes of live records divided by bytes of sealed segments: 0 to 1.
    pub live_share: f64,
    /// Number of segment files.
    pub segments: u64,
    /// Bytes of RAM in use by the index.
    pub index_bytes: u64,
    /// Rows that were dropped because of `on_full = evict`.
    pub dropped_rows: u64,
    /// True if the last published state was discarded for lack of space. Nothing can be resumed until the next publish.
    pub has_lost_flush: bool,
    /// Number of calls that waited for space on the SSD tier.
    pub space_waits: u64,
    /// True if a write or a sync has failed, so that the tier is read-only.
    pub read_only: bool,
}

/// Admission counters of ids without a row in training batches, for rules that do not admit every id. Distinct ids
/// count once per batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionStats {
    /// Ids that got a row.
    pub admitted: u64,
    /// Ids that were not admitted.
    pub not_admitted: u64,
    /// Pending ids, which are counted until they get a row.
    pub pending: u64,
    /// Bytes of RAM in use by the admission counts.
    pub pending_bytes: u64,
    /// Ids whose counts were forgotten, because their memory was full or their window ended.
    pub forgotten: u64,
}

/// Rows that expired by the table's eviction rule, and rows not delivered yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvictionStats {
    /// Rows that expired since the table was opened.
    pub evicted: u64,
    /// Expired rows by kind of rule; if several match, the first of the policy. Rules without expired rows are omitted.
    pub evicted_by_rule: BTreeMap<&'static str, u64>,
    /// True if some rows of the last sweep may still be in the tiers. No batch reads them, and they still count as
    /// rows.
    pub is_sweeping: bool,
    /// Evicted rows, by the rule or because the table was full, that are not delivered yet.
    pub undelivered: u64,
}
