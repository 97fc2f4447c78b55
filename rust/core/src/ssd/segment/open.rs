//! A segment that takes records. They go into a write buffer; full buffers go to the writers.

use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, AlignedBuf};
use crate::ssd::format::footer::{Entry, LastStep, TRAILER_BYTES, most_entry_bytes, most_entry_bytes_with_steps};
use crate::ssd::format::head::{Highest, Widths};
use crate::ssd::format::names::segment_path;
use crate::ssd::format::segment::Content;
use crate::ssd::index::Location;
use crate::ssd::room::geometry::Geometry;
use crate::ssd::segment::buffer::{Block, Pool};
use crate::ssd::segment::file::{Purpose, Segment};
use crate::ssd::segment::home::Home;
use crate::ssd::segment::unwritten::Job;
use crate::ssd::workers::Workers;
use crate::types::Id;

/// A segment that takes records. The tier's state owns it, so it changes under the tier's lock.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    segment: Arc<Segment>,
    /// The footer's entries of the records so far, in the order of writing.
    entries: Vec<Entry>,
    /// Its first `filled` bytes are those of the file from `start` on.
    buffer: AlignedBuf,
    start: u64,
    filled: usize,
    /// The most bytes of the file.
    room: u64,
    /// So many rows fit in any case, if need be without their last steps in the footer. Tombstones have none there.
    sure_records: u32,
    block_bytes: usize,
    workers: &'static Workers,
}

/// A record as it goes into an open segment, before it is bound to its place there.
#[derive(Clone, Copy)]
pub(crate) struct NewRecord<'a> {
    pub(crate) id: Id,
    pub(crate) write_seq: u64,
    pub(crate) modified_epoch: u32,
    pub(crate) last_step: u64,
    pub(crate) bytes: &'a [u8],
}

impl OpenSegment {
    /// Make the file of segment `serial`, for records whose heads have these widths. The current set names it. `None` where files that could
    /// not be removed hold the room for it.
    pub(crate) fn create(home: &Home, (serial, widths): (u64, Widths), purpose: Purpose) -> Result<Option<Self>> {
        let content = purpose.0;
        let path = segment_path(&home.dir, serial);
        let room = home.geometry.segment_bytes;
        let Some(file) = home.make_file(&path, room)? else { return Ok(None) };
        let format = home.schema.record_format(serial, widths);
        let segment = Segment::make(home, (serial, format), purpose, file, room)?;
        segment.name();
        let header = home.schema.header(serial, content, widths);
        let mut buffer = AlignedBuf::zeroed(header.len().next_multiple_of(ALIGNMENT));
        buffer[..header.len()].copy_from_slice(&header);
        Ok(Some(Self {
            segment: Arc::new(segment),
            entries: Vec::new(),
            buffer,
            start: 0,
            filled: header.len(),
            room,
            sure_records: if content == Content::Rows { home.geometry.rows_per_segment } else { u32::MAX },
            block_bytes: home.block_bytes,
            workers: home.workers,
        }))
    }

    /// The segment, as readers share it.
    #[inline]
    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// The footer's entries of the records so far, in the order of writing.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes of RAM that the entries take.
    pub(crate) fn entries_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    /// Widths of its records' heads where none has more than this.
    pub(crate) fn widths_for(content: Content, highest: &Highest) -> Widths {
        match content {
            Content::Rows => Widths::of_rows(highest),
            Content::Tombstones => Widths::of_tombstones(highest),
        }
    }

    /// Whether its records' heads are as wide as those that are written now, where none has more than this.
    #[inline]
    pub(crate) fn has_current_widths(&self, highest: &Highest) -> bool {
        self.segment.format.widths == Self::widths_for(self.segment.content, highest)
    }

    /// Rows that it takes at least, beside those in it, where none has more than this.
    pub(crate) fn rows_left(&self, geometry: &Geometry, highest: &Highest) -> u64 {
        if !self.has_current_widths(highest) {
            return 0;
        }
        geometry.rows_in(highest).saturating_sub(self.entries.len() as u64)
    }

    /// Whether it takes no more record, where none has more than this.
    #[inline]
    pub(crate) fn is_full(&self, highest: &Highest) -> bool {
        !self.has_current_widths(highest) || !self.has_room_for(self.entries.len() as u32 + 1, highest)
    }

    /// How many more records it takes, where none has more than this.
    pub(crate) fn records_left(&self, highest: &Highest) -> usize {
        if !self.has_current_widths(highest) {
            return 0;
        }
        let held = self.entries.len() as u32;
        let (mut fit, mut too_many) = (held, Location::MAX_RECORDS + 1);
        while fit + 1 < too_many {
            let middle = u32::midpoint(fit, too_many);
            if self.has_room_for(middle, highest) { fit = middle } else { too_many = middle }
        }
        (fit - held) as usize
    }

    /// Whether so many records have room in all.
    #[inline]
    fn has_room_for(&self, records: u32, highest: &Highest) -> bool {
        let (frame, each) = (self.segment.header_bytes, self.segment.record_bytes);
        let fits = |entry| (frame + TRAILER_BYTES) as u64 + u64::from(records) * (each + entry) as u64 <= self.room;
        records <= Location::MAX_RECORDS
            && (fits(most_entry_bytes_with_steps(records, highest))
                || (records <= self.sure_records && fits(most_entry_bytes(records, highest))))
    }

    /// Room for one more record, and its number. The caller fills all of its bytes.
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
            self.make_room(len);
        }
        let record = self.entries.len() as u32;
        if self.entries.len() == self.entries.capacity() {
            self.make_room_for_entries();
        }
        self.entries.push(Entry { id, write_seq, last_step, modified_epoch, record });
        self.segment.count_record(record, write_seq, modified_epoch);
        let at = self.filled;
        self.filled += len;
        (record, &mut self.buffer[at..at + len])
    }

    /// Add a row's record, for which there is room. It counts as live.
    #[inline]
    pub(crate) fn write_row(&mut self, row: NewRecord<'_>) -> Location {
        let binding = self.segment.format.binding;
        self.add_row(row, |record, bytes| binding.bind(record, bytes))
    }

    /// As [`OpenSegment::write_row`], of a copy of record `number` of `victim`, which was checked, and whose head lies as here.
    pub(crate) fn copy_row(&mut self, row: NewRecord<'_>, (victim, number): (&Segment, u32)) -> Location {
        debug_assert_eq!(victim.format.widths, self.segment.format.widths, "else it is written again");
        let binding = self.segment.format.binding;
        self.add_row(row, |record, bytes| victim.format.binding.rebind(number, (binding, record), bytes))
    }

    #[inline]
    fn add_row(&mut self, row: NewRecord<'_>, bind: impl FnOnce(u32, &mut [u8])) -> Location {
        let (record, room) = self.push(row.id, row.write_seq, row.modified_epoch, LastStep::of(row.last_step));
        room.copy_from_slice(row.bytes);
        bind(record, room);
        self.segment.add_live(1);
        self.segment.location(record)
    }

    /// Bytes of RAM that the entries will take beside those they have, where `more` records follow.
    pub(crate) fn entries_to_come(&self, more: usize) -> usize {
        let (entries, room) = (self.entries.len(), self.entries.capacity());
        if entries.saturating_add(more) <= room {
            0
        } else {
            entries.max(more.min(self.most_entries())) * size_of::<Entry>()
        }
    }

    fn most_entries(&self) -> usize {
        self.room as usize / (self.segment.record_bytes + most_entry_bytes(0, &Highest::default())) + 1
    }

    /// Make room for twice as many entries, or as many as the file's records can have.
    #[cold]
    fn make_room_for_entries(&mut self) {
        let entries = self.entries.len();
        self.entries.reserve_exact(entries.max(64).min(self.most_entries().saturating_sub(entries)).max(1));
    }

    #[cold]
    fn make_room(&mut self, len: usize) {
        if self.buffer.len() < self.block_bytes {
            let mut larger = Pool::of_process().take(self.block_bytes);
            larger[..self.filled].copy_from_slice(&self.buffer[..self.filled]);
            self.buffer = larger;
        }
        if self.filled + len > self.buffer.len() {
            let usual = self.block_bytes;
            self.hand_in(|_| usual);
        }
    }

    /// Give the whole sectors of the buffer to the writers. The bytes that follow go into the next buffer, which has `size(bytes left)`
    /// bytes. It begins with the sector in which the record begins that straddles the end of what is written, so that each record is whole
    /// in a block or in the buffer.
    fn hand_in(&mut self, size: impl Fn(usize) -> usize) {
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
        let mut next = Pool::of_process().take(size(left));
        next[..left].copy_from_slice(&self.buffer[self.filled - left..self.filled]);
        let buffer = std::mem::replace(&mut self.buffer, next);
        let to_write = (whole - self.start) as usize;
        let block = Arc::new(Block::new(buffer, self.start, self.filled, to_write));
        self.start = carry;
        self.filled = left;
        self.segment.submit(block.clone(), Job::Write(block), self.workers);
    }

    /// Keep no more memory than for the bytes that cannot be written yet.
    pub(crate) fn spill(&mut self) {
        if self.buffer.len() == self.block_bytes {
            self.hand_in(|left| left.next_multiple_of(ALIGNMENT).max(ALIGNMENT));
        }
    }

    /// The record at `offset`, if it is in the buffer.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<&[u8]> {
        let at = offset.checked_sub(self.start)? as usize;
        let end = at + self.segment.record_bytes;
        (end <= self.filled).then(|| &self.buffer[at..end])
    }

    /// Give the buffer back. Nothing of the segment is wanted any more.
    pub(crate) fn abandon(self) {
        Pool::of_process().give(self.buffer);
    }

    /// Take no more records. The writers write the rest and the footer, and the segment is [`Segment::sealed`] when that is done.
    pub(crate) fn seal(self) -> Arc<Segment> {
        let tail = Arc::new(Block::new(self.buffer, self.start, self.filled, 0));
        self.segment.submit(tail.clone(), Job::Seal { tail, entries: self.entries }, self.workers);
        self.segment
    }
}
