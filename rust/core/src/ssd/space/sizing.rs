//! Divides a table's cap into segments, and computes the number of rows that it can hold.

use crate::config::SsdConfig;
use crate::error::{Kind, Result};
use crate::io::ALIGNMENT;
use crate::ssd::format::footer::{MAX_ENTRY_BYTES, TRAILER_BYTES, max_entry_bytes_with_steps};
use crate::ssd::format::record::{HeadWidths, MAX_HEAD_BYTES, RecordMaxima};
use crate::ssd::format::segment_file::{MAX_HEADER_BYTES, SegmentContent, SegmentSchema, file_bytes};
use crate::ssd::hotness::MAX_HOTNESS_CLASSES;
use crate::ssd::index::{RecordLocation, TagIndex};
use crate::ssd::workers::COMPACTORS;

/// Maximum bytes of a segment: 64 MiB.
const LARGEST_SEGMENT: u64 = 64 << 20;
/// Minimum bytes of a segment: 8 KiB.
const SMALLEST_SEGMENT: u64 = 8 << 10;
/// A cap is divided into 512 segments if they are neither the largest nor the smallest. There are many, because some of
/// them are kept free or are half full.
const SEGMENTS_PER_CAP: u64 = 512;
/// A small cap is divided into 64 segments, or more segments of [`EFFICIENT_SEGMENT_BYTES`].
const MIN_SEGMENTS_PER_CAP: u64 = 64;
/// Segments below 4 MiB cost too much each.
const EFFICIENT_SEGMENT_BYTES: u64 = 4 << 20;
/// Hotness groups of a tier with few segments.
const FEW_HOTNESS_CLASSES: u8 = 2;
/// Segments that capacity excludes, besides the open ones of rows: that of tombstones, one that compaction writes into,
/// and one that is to be opened.
const OVERHEAD_SEGMENTS: u64 = 3;
/// 1/16 of the cap is reserved for dead records that are not compacted yet, and for tombstones. It is at least the
/// second segment that compaction needs.
const DEAD_SHARE: u64 = 16;
/// Bytes of a state's file for its fields.
const STATE_BYTES: u64 = 1024;
/// Bytes of a state's file for each segment that it references.
const STATE_BYTES_PER_SEGMENT: u64 = 64;
/// Maximum fraction of the cap for the caller's metadata blob in a state: 1/2048.
const METADATA_SHARE: u64 = 2048;
/// Maximum bytes of the caller's metadata blob in a state, for any cap: 128 MiB.
const MAX_METADATA_BYTES: u64 = 128 << 20;
/// Segments that stay free while nothing is being moved. See [`SegmentSizing::reserved_bytes`].
const RESERVED_SEGMENTS: u32 = 2;

/// Maximum bytes of a metadata blob for a cap of `cap_bytes`.
pub(crate) fn max_metadata_bytes(cap_bytes: u64) -> usize {
    (cap_bytes / METADATA_SHARE).min(MAX_METADATA_BYTES) as usize
}

/// Smallest cap that allows metadata blobs of `metadata_bytes`.
pub(crate) fn cap_for_metadata(metadata_bytes: usize) -> u64 {
    metadata_bytes as u64 * METADATA_SHARE
}

fn overhead_segments(classes: u8) -> u64 {
    OVERHEAD_SEGMENTS + u64::from(classes)
}

/// Sizes of a table's files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentSizing {
    /// Bytes for segments: the cap without the bytes of states and the lock file.
    pub(crate) cap_bytes: u64,
    /// Maximum bytes of a segment's file.
    pub(crate) segment_bytes: u64,
    pub(crate) header_bytes: usize,
    /// Maximum bytes of a row's record.
    pub(crate) row_bytes: usize,
    /// Minimum number of rows that fit a segment.
    pub(crate) rows_per_segment: u32,
    /// Hotness groups; see `hotness`.
    pub(crate) hotness_classes: u8,
    /// Number of rows that fit, without the headroom.
    pub(crate) capacity_rows: u64,
    /// Maximum bytes of the caller's metadata blob in a state.
    pub(crate) max_metadata_bytes: usize,
}

impl SegmentSizing {
    /// Divides `cap_bytes`. Tests pass `segment_bytes` to override the usual size.
    ///
    /// Errors: `Config` if the cap is too small for one row, or has more segments than an index can address.
    pub(crate) fn new(cap_bytes: u64, schema: &SegmentSchema, segment_bytes: Option<u64>) -> Result<Self> {
        let row_bytes = schema.max_record_bytes(SegmentContent::Rows);
        let header_bytes = schema.header_bytes();
        debug_assert!(header_bytes <= MAX_HEADER_BYTES);
        let frame = header_bytes + TRAILER_BYTES;
        let (segment_bytes, rows_per_segment) = segment_size(cap_bytes, frame, row_bytes, segment_bytes);
        let segments = cap_bytes / segment_bytes;
        let note_bytes = max_metadata_bytes(cap_bytes);
        let state = STATE_BYTES + STATE_BYTES_PER_SEGMENT * (segments + 64) + note_bytes as u64;
        // Two states and the one being published; the lock file.
        let fixed = 3 * state.next_multiple_of(ALIGNMENT as u64) + ALIGNMENT as u64;
        let classes = if segments < 2 * MIN_SEGMENTS_PER_CAP { FEW_HOTNESS_CLASSES } else { MAX_HOTNESS_CLASSES };
        let overhead = overhead_segments(classes);
        let usable = cap_bytes.saturating_sub(fixed + overhead * segment_bytes);
        let usable = u128::from(usable.saturating_sub(segment_bytes.max(usable / DEAD_SHARE)));
        let capacity_rows = (usable * u128::from(rows_per_segment) / u128::from(segment_bytes)) as u64;
        if segments > u64::from(RecordLocation::MAX_SEGMENTS) {
            let most = segment_bytes * u64::from(RecordLocation::MAX_SEGMENTS);
            return Err(Kind::Config.error(format!(
                "ssd_bytes = {cap_bytes} is more than an SSD tier can number: set it to {most} or less, or use more ranks"
            )));
        }
        if capacity_rows == 0 {
            let rows_bytes = segment_bytes.div_ceil(u64::from(rows_per_segment));
            let least = (fixed + (overhead + 1) * segment_bytes + 2 * rows_bytes).next_multiple_of(64 << 10);
            return Err(Kind::Config.error(format!(
                "ssd_bytes = {cap_bytes} is too small for one row of {row_bytes} bytes and the room that compaction needs: \
                 set it to {least} or more, or to 0 for no SSD tier"
            )));
        }
        Ok(Self {
            cap_bytes: cap_bytes - fixed.min(cap_bytes),
            segment_bytes,
            header_bytes,
            row_bytes,
            rows_per_segment,
            hotness_classes: classes,
            capacity_rows: capacity_rows.min(TagIndex::MAX_IDS),
            max_metadata_bytes: note_bytes,
        })
    }

    /// Bytes that capacity excludes: those of open segments, and those kept free.
    fn overhead_bytes(&self) -> u64 {
        overhead_segments(self.hotness_classes) * self.segment_bytes
    }

    /// Bytes that must stay free when a row from RAM is appended, or a publish seals an open segment.
    ///
    /// While nothing is being moved these are two segments: then either one entire segment is free, or the live rows of
    /// any segment fit the open segments. During moves these are one segment for each that can be moved at a time;
    /// otherwise rows from RAM would take the space that the moves need.
    pub(crate) fn reserved_bytes(&self, moving: u32) -> u64 {
        let segments = if moving == 0 { RESERVED_SEGMENTS } else { COMPACTORS };
        self.segment_bytes * u64::from(segments)
    }

    /// Bytes of a row's record in the current format, for rows up to the maxima `highest`.
    pub(crate) fn record_bytes(&self, highest: &RecordMaxima) -> usize {
        self.row_bytes - MAX_HEAD_BYTES + HeadWidths::of_rows(highest).bytes()
    }

    /// Minimum number of rows that fit a segment, for rows up to the maxima `highest`.
    ///
    /// [`SegmentSizing::rows_per_segment`] always fit: if their last steps do not fit, the footer omits them.
    pub(crate) fn min_rows_per_segment(&self, highest: &RecordMaxima) -> u64 {
        let record_bytes = self.record_bytes(highest);
        let most = (self.segment_bytes / record_bytes as u64).min(u64::from(RecordLocation::MAX_RECORDS));
        let entry_bytes = max_entry_bytes_with_steps(most as u32, highest);
        let room = self.segment_bytes.saturating_sub((self.header_bytes + TRAILER_BYTES) as u64);
        most.min(room / (record_bytes + entry_bytes) as u64).max(u64::from(self.rows_per_segment))
    }

    /// Bytes of a full segment, for rows up to the maxima `highest`. They are fewer than `segment_bytes` if it has as
    /// many records as an index can address.
    pub(crate) fn full_bytes(&self, highest: &RecordMaxima) -> u64 {
        let rows = self.min_rows_per_segment(highest);
        let each = self.record_bytes(highest) + max_entry_bytes_with_steps(rows as u32, highest);
        let frame = (self.header_bytes + TRAILER_BYTES) as u64;
        let least = (frame + rows * each as u64).next_multiple_of(ALIGNMENT as u64);
        file_bytes(least.min(self.segment_bytes), self.segment_bytes)
    }

    /// Returns `Config` if the cap is too small for `rows` in segments that occupy `held_bytes` bytes. The space that
    /// compaction needs is free whenever a state is published, so it must be free when the state is resumed.
    pub(crate) fn check_space(&self, config: &SsdConfig, rows: u64, held_bytes: u64) -> Result<()> {
        if rows <= self.capacity_rows && held_bytes + self.reserved_bytes(0) <= self.cap_bytes {
            return Ok(());
        }
        let overhead = config.bytes - self.cap_bytes;
        let records = rows * self.segment_bytes.div_ceil(u64::from(self.rows_per_segment));
        let least = held_bytes.max(records + records / 8) + self.overhead_bytes() + self.segment_bytes + overhead;
        Err(Kind::Config.error(format!(
            "ssd_bytes = {} is too small for the {rows} rows in {}: set it to {least} or more to resume",
            config.bytes,
            config.dir.display()
        )))
    }
}

/// Bytes of a segment and the number of rows that fit it, for a header and trailer of `frame` bytes.
fn segment_size(cap_bytes: u64, frame: usize, row_bytes: usize, segment_bytes: Option<u64>) -> (u64, u32) {
    let one_row = (frame + row_bytes + MAX_ENTRY_BYTES).next_multiple_of(ALIGNMENT) as u64;
    let target = segment_bytes
        .unwrap_or_else(|| {
            let few = (cap_bytes / MIN_SEGMENTS_PER_CAP).min(EFFICIENT_SEGMENT_BYTES);
            (cap_bytes / SEGMENTS_PER_CAP).max(few).clamp(SMALLEST_SEGMENT, LARGEST_SEGMENT)
        })
        .max(one_row)
        .next_multiple_of(ALIGNMENT as u64);
    let fit = (target - frame as u64) / (row_bytes + MAX_ENTRY_BYTES) as u64;
    let rows_per_segment = fit.min(u64::from(RecordLocation::MAX_RECORDS)) as u32;
    // A segment that would reach the record limit before the byte limit is made smaller.
    let full = frame as u64 + u64::from(rows_per_segment) * (row_bytes + MAX_ENTRY_BYTES) as u64;
    (full.next_multiple_of(ALIGNMENT as u64), rows_per_segment)
}

#[cfg(test)]
mod tests;
