//! Passes over segments of rows: the next segment, its remaining records, and reads of selected records.
//!
//! The ids and numbers of records are known from a segment's entries. Records are found in its file, in blocks being
//! written, and in its write buffer.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::io::IoReadRequest;
use crate::ssd::format::footer::FooterEntry;
use crate::ssd::format::record::{ID_AT, Record};
use crate::ssd::format::segment_file::SegmentContent;
use crate::ssd::segment::footer_reader::read_entries;
use crate::ssd::segment::{Segment, SegmentByteSource};
use crate::ssd::store::TierInner;
use crate::ssd::store::scan_state::{CursorRecord, SegmentCursor};
use crate::ssd::store::state::TierState;
use crate::types::Id;

/// Bytes of a segment per read.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Maximum bytes between two requested records that are read together.
const MAX_GAP_BYTES: u64 = 16 << 10;
/// Maximum bytes of a read of several requested records.
const MAX_RUN_BYTES: u64 = 128 << 10;

impl SegmentCursor {
    /// Returns the current segment, if records of it remain and some row of it is still live. Otherwise the remaining
    /// records are dropped.
    pub(crate) fn current_segment(&mut self, tier: &TierInner) -> Option<Arc<Segment>> {
        if !self.remaining.is_empty() {
            let current = live_segments(&tier.view()).find(|segment| segment.serial == self.serial).cloned();
            if current.is_some() {
                return current;
            }
        }
        self.remaining = Vec::new();
        None
    }

    /// Moves to `segment`, with these of its records remaining, in the order of the file.
    pub(crate) fn enter(&mut self, segment: &Segment, mut records: Vec<CursorRecord>) {
        records.reverse();
        records.shrink_to_fit();
        self.serial = segment.serial;
        self.remaining = records;
    }

    /// Returns the next records, at most `count`, in the order of the file.
    pub(crate) fn peek(&self, count: usize) -> Vec<CursorRecord> {
        self.remaining.iter().rev().take(count).copied().collect()
    }

    /// Skips the next `count` records.
    pub(crate) fn advance(&mut self, count: usize) {
        self.remaining.truncate(self.remaining.len().saturating_sub(count));
    }
}

impl From<&FooterEntry> for CursorRecord {
    fn from(entry: &FooterEntry) -> Self {
        Self { id: entry.id, record: entry.record, modified_epoch: entry.modified_epoch }
    }
}

/// The entries of a segment's present records, in the order of writing.
pub(crate) struct SegmentEntries {
    pub(crate) entries: Vec<FooterEntry>,
    /// True if more records may follow, because the segment is open.
    pub(crate) is_open: bool,
}

/// Returns the segments of rows that have live ones.
pub(crate) fn live_segments(state: &TierState) -> impl Iterator<Item = &Arc<Segment>> {
    state.segments().iter().filter(|segment| segment.content == SegmentContent::Rows && segment.live() > 0)
}

/// Returns the segment with the smallest serial.
pub(crate) fn oldest<'a>(segments: impl Iterator<Item = &'a Arc<Segment>>) -> Option<Arc<Segment>> {
    segments.min_by_key(|segment| segment.serial).cloned()
}

/// Returns the entries of a segment's present records. Waits for a footer that is being written.
pub(crate) fn entries_of(tier: &TierInner, segment: &Arc<Segment>) -> Result<SegmentEntries> {
    loop {
        let generation = tier.context.space.generation();
        if let Some(open) = tier.view().open().find(segment) {
            return Ok(SegmentEntries { entries: open.entries().to_vec(), is_open: true });
        }
        if segment.sealed().is_some() {
            let mut entries = read_entries(&*tier.context.engine, segment)?;
            entries.sort_unstable_by_key(|entry| entry.record);
            return Ok(SegmentEntries { entries, is_open: false });
        }
        tier.check_writable()?;
        tier.context.space.wait_change(generation);
    }
}

/// Number of a segment's records per read.
pub(crate) fn records_per_read(segment: &Segment) -> usize {
    (CHUNK_BYTES / segment.record_bytes).max(1)
}

/// Divides the first `records` records of a segment into reads. Returns the first record of each, and its number of
/// records.
pub(crate) fn record_chunks(segment: &Segment, records: u32) -> impl Iterator<Item = (u32, u32)> + use<> {
    let per_read = records_per_read(segment) as u32;
    (0..records).step_by(per_read as usize).map(move |first| (first, per_read.min(records - first)))
}

/// Returns those of `records` that the index points to.
pub(crate) fn live_among(tier: &TierInner, segment: &Segment, records: &[CursorRecord]) -> Vec<CursorRecord> {
    let ids: Vec<Id> = records.iter().map(|at| at.id).collect();
    let mut locations = vec![None; ids.len()];
    tier.view().index().get_batch(&ids, &mut locations);
    let located = records.iter().zip(locations);
    located.filter(|(at, location)| *location == Some(segment.location(at.record))).map(|(at, _)| *at).collect()
}

/// Reads `records`, which are in the order of the file, and calls `each` with each of them, checked and decoded.
pub(crate) fn read_each(
    tier: &TierInner,
    segment: &Arc<Segment>,
    records: &[CursorRecord],
    mut each: impl FnMut(CursorRecord, &Record<'_>) -> Result<()>,
) -> Result<()> {
    let bytes = read_requested(tier, segment, records)?;
    for (at, bytes) in records.iter().zip(bytes.chunks_exact(segment.record_bytes)) {
        let record = segment.decode(at.record, bytes)?;
        if record.head.id != at.id {
            let offset = segment.offset(at.record) + ID_AT as u64;
            return Err(Error::corruption(segment.path(), offset, "the record's id", at.id, record.head.id));
        }
        each(*at, &record)?;
    }
    Ok(())
}

/// Reads the records from number `first` on. Records of a segment that was dropped with its buffer are read as zeros.
pub(crate) fn read_records(tier: &TierInner, segment: &Arc<Segment>, first: u32, into: &mut [u8]) -> Result<()> {
    let start = segment.offset(first);
    if segment.locate(start, into.len(), &mut |_| {}) == SegmentByteSource::File {
        return segment.file.read_at(start, into);
    }
    for (at, record) in into.chunks_exact_mut(segment.record_bytes).enumerate() {
        let offset = segment.offset(first + at as u32);
        let state = tier.view();
        match segment.locate(offset, record.len(), &mut |bytes| record.copy_from_slice(bytes)) {
            SegmentByteSource::Block => {}
            SegmentByteSource::File => {
                drop(state);
                segment.file.read_at(offset, record)?;
            }
            SegmentByteSource::Buffer => match state.open().find(segment).and_then(|open| open.get(offset)) {
                Some(bytes) => record.copy_from_slice(bytes),
                None => record.fill(0),
            },
        }
    }
    Ok(())
}

/// Reads the requested records, which are in the order of the file, into contiguous memory.
fn read_requested(tier: &TierInner, segment: &Arc<Segment>, requested: &[CursorRecord]) -> Result<Vec<u8>> {
    let runs = coalesced_runs(segment, requested);
    let start = |run: &Range<usize>| segment.offset(requested[run.start].record);
    let end = |run: &Range<usize>| segment.offset(requested[run.end - 1].record + 1);
    let mut records = vec![0; requested.len() * segment.record_bytes];
    let mut take = |run: &Range<usize>, bytes: &[u8]| {
        for at in run.clone() {
            let from = (segment.offset(requested[at].record) - start(run)) as usize;
            let to = &mut records[at * segment.record_bytes..][..segment.record_bytes];
            to.copy_from_slice(&bytes[from..from + segment.record_bytes]);
        }
    };
    if segment.sealed().is_none() {
        let mut bytes = Vec::new();
        for run in &runs {
            bytes.resize((end(run) - start(run)) as usize, 0);
            read_records(tier, segment, requested[run.start].record, &mut bytes)?;
            take(run, &bytes);
        }
        return Ok(records);
    }
    let read = |run: &Range<usize>| {
        let offset = start(run);
        IoReadRequest { file: segment.file.clone(), offset, len: (end(run) - offset) as usize }
    };
    let reads: Vec<IoReadRequest> = runs.iter().map(read).collect();
    let mut outcome = Ok(());
    tier.context.engine.read_batch(&reads, &mut |number, bytes, _| {
        let copied = bytes.map(|bytes| take(&runs[number], bytes));
        if outcome.is_ok() {
            outcome = copied;
        }
    });
    outcome.map(|()| records)
}

/// Groups records that are read together, as ranges of `requested`, which is in the order of the file. If a corrupted
/// footer names a record twice, each of them is a separate run.
fn coalesced_runs(segment: &Segment, requested: &[CursorRecord]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, CursorRecord { record, .. }) in requested.iter().enumerate() {
        let (start, end) = (segment.offset(*record), segment.offset(record + 1));
        let gap = |run: &Range<usize>| start.checked_sub(segment.offset(requested[run.end - 1].record + 1));
        match runs.last_mut() {
            Some(run)
                if gap(run).is_some_and(|bytes| bytes <= MAX_GAP_BYTES)
                    && end - segment.offset(requested[run.start].record) <= MAX_RUN_BYTES =>
            {
                run.end = at + 1;
            }
            _ => runs.push(at..at + 1),
        }
    }
    runs
}
