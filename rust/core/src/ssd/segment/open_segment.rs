//! A segment that accepts records. They go into a write buffer; full buffers go to the writers.

use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, AlignedBuf};
use crate::ssd::format::footer::{FooterEntry, LastStep, TRAILER_BYTES, max_entry_bytes, max_entry_bytes_with_steps};
use crate::ssd::format::record::{HeadWidths, RecordMaxima};
use crate::ssd::format::segment_file::{SegmentContent, segment_path};
use crate::ssd::index::RecordLocation;
use crate::ssd::segment::write_buffer::{WriteBlock, WriteBufferPool};
use crate::ssd::segment::{Segment, SegmentContext, SegmentJob, SegmentPurpose};
use crate::ssd::space::sizing::SegmentSizing;
use crate::ssd::workers::SsdWorkers;
use crate::types::Id;

/// A segment that accepts records. The tier's state owns it, so it changes under the tier's lock.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    segment: Arc<Segment>,
    /// The footer's entries of the present records, in the order of writing.
    entries: Vec<FooterEntry>,
    /// Its first `filled` bytes are those of the file from `start` on.
    buffer: AlignedBuf,
    start: u64,
    filled: usize,
    /// Maximum bytes of the file.
    capacity_bytes: u64,
    /// Number of rows that always fit, if necessary without their last steps in the footer. Tombstones have no last
    /// steps.
    guaranteed_records: u32,
    block_bytes: usize,
    workers: &'static SsdWorkers,
}

/// A record to be added to an open segment, not yet bound to its place there.
#[derive(Clone, Copy)]
pub(crate) struct NewRecord<'a> {
    pub(crate) id: Id,
    pub(crate) write_seq: u64,
    pub(crate) modified_epoch: u32,
    pub(crate) last_step: u64,
    pub(crate) bytes: &'a [u8],
}

impl OpenSegment {
    /// Creates the file of segment `serial`, for records with heads of these widths. The current set references it.
    /// Returns `None` if files that could not be removed occupy its space.
    pub(crate) fn create(
        context: &SegmentContext,
        (serial, widths): (u64, HeadWidths),
        purpose: SegmentPurpose,
    ) -> Result<Option<Self>> {
        let content = purpose.0;
        let path = segment_path(&context.dir, serial);
        let capacity_bytes = context.sizing.segment_bytes;
        let Some(file) = context.make_file(&path, capacity_bytes)? else { return Ok(None) };
        let format = context.schema.record_format(serial, widths);
        let segment = Segment::make(context, (serial, format), purpose, file, capacity_bytes)?;
        segment.add_ref();
        let header = context.schema.header(serial, content, widths);
        let mut buffer = AlignedBuf::zeroed(header.len().next_multiple_of(ALIGNMENT));
        buffer[..header.len()].copy_from_slice(&header);
        Ok(Some(Self {
            segment: Arc::new(segment),
            entries: Vec::new(),
            buffer,
            start: 0,
            filled: header.len(),
            capacity_bytes,
            guaranteed_records: if content == SegmentContent::Rows {
                context.sizing.rows_per_segment
            } else {
                u32::MAX
            },
            block_bytes: context.block_bytes,
            workers: context.workers,
        }))
    }

    /// The shared segment, for readers.
    #[inline]
    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// The footer's entries of the present records, in the order of writing.
    pub(crate) fn entries(&self) -> &[FooterEntry] {
        &self.entries
    }

    /// Bytes of RAM of the entries.
    pub(crate) fn entries_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<FooterEntry>()
    }

    /// Returns the widths of its records' heads for records up to the maxima `highest`.
    pub(crate) fn widths_for(content: SegmentContent, highest: &RecordMaxima) -> HeadWidths {
        match content {
            SegmentContent::Rows => HeadWidths::of_rows(highest),
            SegmentContent::Tombstones => HeadWidths::of_tombstones(highest),
        }
    }

    /// True if its records' heads have the widths of new records up to the maxima `highest`.
    #[inline]
    pub(crate) fn has_current_widths(&self, highest: &RecordMaxima) -> bool {
        self.segment.format.widths == Self::widths_for(self.segment.content, highest)
    }

    /// Minimum number of further rows that fit, for rows up to the maxima `highest`.
    pub(crate) fn rows_left(&self, sizing: &SegmentSizing, highest: &RecordMaxima) -> u64 {
        if !self.has_current_widths(highest) {
            return 0;
        }
        sizing.min_rows_per_segment(highest).saturating_sub(self.entries.len() as u64)
    }

    /// True if no further record fits, for records up to the maxima `highest`.
    #[inline]
    pub(crate) fn is_full(&self, highest: &RecordMaxima) -> bool {
        !self.has_current_widths(highest) || !self.fits(self.entries.len() as u32 + 1, highest)
    }

    /// Number of further records that fit, for records up to the maxima `highest`.
    pub(crate) fn records_left(&self, highest: &RecordMaxima) -> usize {
        if !self.has_current_widths(highest) {
            return 0;
        }
        let held = self.entries.len() as u32;
        let (mut fit, mut too_many) = (held, RecordLocation::MAX_RECORDS + 1);
        while fit + 1 < too_many {
            let middle = u32::midpoint(fit, too_many);
            if self.fits(middle, highest) { fit = middle } else { too_many = middle }
        }
        (fit - held) as usize
    }

    /// True if `records` records fit in total.
    #[inline]
    fn fits(&self, records: u32, highest: &RecordMaxima) -> bool {
        let (frame, each) = (self.segment.header_bytes, self.segment.record_bytes);
        let fits =
            |entry| (frame + TRAILER_BYTES) as u64 + u64::from(records) * (each + entry) as u64 <= self.capacity_bytes;
        records <= RecordLocation::MAX_RECORDS
            && (fits(max_entry_bytes_with_steps(records, highest))
                || (records <= self.guaranteed_records && fits(max_entry_bytes(records, highest))))
    }

    /// Adds a record. Returns its number and its bytes, all of which the caller fills.
    #[inline]
    pub(crate) fn push(
        &mut self,
        id: Id,
        write_seq: u64,
        modified_epoch: u32,
        last_step: LastStep,
    ) -> (u32, &mut [u8]) {
        let len = self.segment.record_bytes;
        if self.filled + len > self.buffer.len() {
            self.make_buffer_space(len);
        }
        let record = self.entries.len() as u32;
        if self.entries.len() == self.entries.capacity() {
            self.grow_entries();
        }
        self.entries.push(FooterEntry { id, write_seq, last_step, modified_epoch, record });
        self.segment.count_record(record, write_seq, modified_epoch);
        let at = self.filled;
        self.filled += len;
        (record, &mut self.buffer[at..at + len])
    }

    /// Adds a row's record, which must fit. It counts as live.
    #[inline]
    pub(crate) fn write_row(&mut self, row: NewRecord<'_>) -> RecordLocation {
        let binding = self.segment.format.binding;
        self.add_row(row, |record, bytes| binding.bind(record, bytes))
    }

    /// Like [`OpenSegment::write_row`], for a copy of the verified record `number` of `victim`, whose head has the same
    /// layout.
    pub(crate) fn copy_row(&mut self, row: NewRecord<'_>, (victim, number): (&Segment, u32)) -> RecordLocation {
        debug_assert_eq!(victim.format.widths, self.segment.format.widths, "else it is written again");
        let binding = self.segment.format.binding;
        self.add_row(row, |record, bytes| victim.format.binding.rebind(number, (binding, record), bytes))
    }

    #[inline]
    fn add_row(&mut self, row: NewRecord<'_>, bind: impl FnOnce(u32, &mut [u8])) -> RecordLocation {
        let (record, room) = self.push(row.id, row.write_seq, row.modified_epoch, LastStep::of(row.last_step));
        room.copy_from_slice(row.bytes);
        bind(record, room);
        self.segment.add_live(1);
        self.segment.location(record)
    }

    /// Additional bytes of RAM of the entries after `more` further records.
    pub(crate) fn added_entries_bytes(&self, more: usize) -> usize {
        let (entries, room) = (self.entries.len(), self.entries.capacity());
        if entries.saturating_add(more) <= room {
            0
        } else {
            entries.max(more.min(self.max_entries())) * size_of::<FooterEntry>()
        }
    }

    fn max_entries(&self) -> usize {
        self.capacity_bytes as usize / (self.segment.record_bytes + max_entry_bytes(0, &RecordMaxima::default())) + 1
    }

    /// Doubles the capacity for entries, up to the maximum number of the file's records.
    #[cold]
    fn grow_entries(&mut self) {
        let entries = self.entries.len();
        self.entries.reserve_exact(entries.max(64).min(self.max_entries().saturating_sub(entries)).max(1));
    }

    #[cold]
    fn make_buffer_space(&mut self, len: usize) {
        if self.buffer.len() < self.block_bytes {
            let mut larger = WriteBufferPool::of_process().take(self.block_bytes);
            larger[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
            self.buffer = larger;
        }
        if self.filled + len > self.buffer.len() {
            let usual = self.block_bytes;
            self.submit_buffer(|_| usual);
        }
    }

    /// Submits the complete sectors of the buffer to the writers. The bytes that follow go into the next buffer, which
    /// has `size(bytes left)` bytes. It starts with the sector of the start of the record that straddles the end of the
    /// written bytes, so that each record is complete in a block or in the buffer.
    fn submit_buffer(&mut self, size: impl Fn(usize) -> usize) {
        let end = self.start + self.filled as u64;
        let whole = end - end % ALIGNMENT as u64;
        if whole == self.start {
            return;
        }
        let carry = if whole == end {
            end
        } else {
            let (header, record) = (self.segment.header_bytes as u64, self.segment.record_bytes as u64);
            let straddling = header + (whole - header) / record * record;
            (straddling - straddling % ALIGNMENT as u64).max(self.start)
        };
        let left = (end - carry) as usize;
        let mut next = WriteBufferPool::of_process().take(size(left));
        next[..left].copy_from_slice(&self.buffer[self.filled - left..self.filled]);
        let buffer = std::mem::replace(&mut self.buffer, next);
        let to_write = (whole - self.start) as usize;
        let block = Arc::new(WriteBlock::new(buffer, self.start, self.filled, to_write));
        self.start = carry;
        self.filled = left;
        self.segment.submit(block.clone(), SegmentJob::Write(block), self.workers);
    }

    /// Frees the memory except for the bytes that cannot be written yet.
    pub(crate) fn spill(&mut self) {
        if self.buffer.len() == self.block_bytes {
            self.submit_buffer(|left| left.next_multiple_of(ALIGNMENT).max(ALIGNMENT));
        }
    }

    /// Returns the record at `offset`, if it is in the buffer.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<&[u8]> {
        let at = offset.checked_sub(self.start)? as usize;
        let end = at + self.segment.record_bytes;
        (end <= self.filled).then(|| &self.buffer[at..end])
    }

    /// Returns the buffer to the pool. The segment's contents are not needed.
    pub(crate) fn abandon(self) {
        WriteBufferPool::of_process().give_back(self.buffer);
    }

    /// Seals the segment. The writers write the rest and the footer; [`Segment::sealed`] returns the result when that
    /// is done.
    pub(crate) fn seal(self) -> Arc<Segment> {
        let tail = Arc::new(WriteBlock::new(self.buffer, self.start, self.filled, 0));
        self.segment.submit(tail.clone(), SegmentJob::Seal { tail, entries: self.entries }, self.workers);
        self.segment
    }
}
