//! The counters of a tier, as plain numbers.

use std::collections::BTreeMap;

mod histogram;

pub(crate) use histogram::DurationHistogram;
pub use histogram::HistogramSnapshot;

/// Counters of one tier of one table. Those that count events begin when the table is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierStats {
    /// Rows in the tier now.
    pub rows: u64,
    /// Bytes that the tier takes now, its index included.
    pub bytes: u64,
    /// The tier's budget in bytes.
    pub capacity_bytes: u64,
    /// Distinct ids of plans that were found in this tier.
    pub hits: u64,
    /// Distinct ids of plans that were looked for in this tier and not found.
    pub misses: u64,
    /// Rows that left the tier to make room.
    pub evictions: u64,
    /// Bytes that were read from the tier to serve plans.
    pub read_bytes: u64,
    /// Bytes that were written into the tier.
    pub written_bytes: u64,
    /// Nanoseconds that plans spent on the tier, waits included.
    pub time_ns: u64,
}

/// Further counters of the SSD tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SsdStats {
    /// The counters that every tier has.
    pub tier: TierStats,
    /// The I/O engine: `io_uring` or `pread`, with `+direct` where `O_DIRECT` is in use.
    pub io_engine: String,
    /// Reads that were sent to the disk to serve plans. One read brings all rows that lie near each other.
    pub reads: u64,
    /// How long reads of rows took, from when one was sent to the disk until its bytes were there.
    pub read_latency: HistogramSnapshot,
    /// Bytes of the rows that were given to the tier, their headers included.
    pub logical_written_bytes: u64,
    /// Bytes that compaction wrote.
    pub compaction_bytes: u64,
    /// Bytes of live records divided by bytes of sealed segments: 0 to 1.
    pub live_share: f64,
    /// The number of segment files.
    pub segments: u64,
    /// Bytes of RAM that the index takes.
    pub index_bytes: u64,
    /// Rows that were dropped because of `on_full = evict`.
    pub dropped_rows: u64,
    /// Whether the last published state had to be given up for want of room. Then nothing can be resumed until the next publish.
    pub has_lost_flush: bool,
    /// How often a call waited for room on the SSD tier.
    pub space_waits: u64,
    /// Whether a write or a sync has failed, so that the tier only reads.
    pub read_only: bool,
}

/// What became of ids without a row in training batches, where some get none. Distinct ids count once a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionStats {
    /// Ids that got a row.
    pub admitted: u64,
    /// Ids that got none.
    pub not_admitted: u64,
    /// Ids that are counted now, until they get a row.
    pub pending: u64,
    /// Bytes of RAM that these counts take.
    pub pending_bytes: u64,
    /// Ids whose counts were forgotten, because the memory for them was full or their window ended.
    pub forgotten: u64,
}

/// Rows that left a table by its rule of eviction, and of which somebody is to be told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvictionStats {
    /// Rows that left since the table was opened.
    pub evicted: u64,
    /// How many of them each kind of rule took; of several, the first of the policy. Rules that took none are left out.
    pub evicted_by_rule: BTreeMap<&'static str, u64>,
    /// Whether some of the rows that the last sweep takes may still be in the tiers. No batch reads them, and they still count as rows.
    pub is_sweeping: bool,
    /// Rows that were evicted, by the rule or because the table was full, and that wait to be told of.
    pub undelivered: u64,
}
