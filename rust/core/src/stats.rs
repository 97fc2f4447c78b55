//! Counters of a tier, copied out as plain numbers.

/// Counters of one tier of one table since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierStats {
    /// Rows in the tier now.
    pub rows: u64,
    /// Bytes the tier occupies now, its index included.
    pub bytes: u64,
    /// The tier's cap in bytes.
    pub capacity_bytes: u64,
    /// Unique ids of plans found here.
    pub hits: u64,
    /// Unique ids of plans looked for here and not found.
    pub misses: u64,
    /// Rows that left the tier to make room.
    pub evictions: u64,
    /// Bytes read from the tier to serve plans.
    pub read_bytes: u64,
    /// Bytes written into the tier.
    pub written_bytes: u64,
    /// Nanoseconds plans spent on the tier, waits included.
    pub time_ns: u64,
}

/// Further counters of the SSD tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SsdStats {
    /// The counters that every tier has.
    pub tier: TierStats,
    /// Which I/O engine runs: `io_uring` or `pread`, with `+direct` where `O_DIRECT` is in use.
    pub io_engine: String,
    /// Reads sent to the disk to serve plans: one brings all rows that lie near each other.
    pub reads: u64,
    /// Bytes of rows given to the tier (header included).
    pub row_bytes_given: u64,
    /// Bytes written by compaction.
    pub compaction_bytes: u64,
    /// Bytes of live records / bytes of sealed segments, 0 to 1.
    pub live_share: f64,
    /// Segment files.
    pub segments: u64,
    /// Bytes of RAM of the index.
    pub index_bytes: u64,
    /// Rows dropped by `on_full = evict`.
    pub dropped_rows: u64,
    /// The last published state had to be given up for want of room: until the next publish there is nothing to resume.
    pub published_given_up: bool,
}
