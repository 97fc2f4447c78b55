//! The location of a record, in 40 bits.

/// The location of a record: the number of its segment, below 2²⁰ − 1, and its own number there, below 2²⁰.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordLocation {
    /// Number of the segment.
    pub segment: u32,
    /// Number of the record in its segment.
    pub record: u32,
}

impl RecordLocation {
    /// Upper bound (exclusive) of segment numbers.
    pub const MAX_SEGMENTS: u32 = (1 << 20) - 1;
    /// Upper bound (exclusive) of record numbers.
    pub const MAX_RECORDS: u32 = 1 << 20;

    #[inline]
    pub(super) fn bits(self) -> u64 {
        assert!(self.segment < Self::MAX_SEGMENTS && self.record < Self::MAX_RECORDS, "{self:?} has more than 40 bits");
        u64::from(self.segment) << 20 | u64::from(self.record)
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        Self { segment: (bits >> 20) as u32 & 0xf_ffff, record: bits as u32 & 0xf_ffff }
    }
}
