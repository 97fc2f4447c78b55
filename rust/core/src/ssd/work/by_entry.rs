//! Reads selected records of a segment, whose ids and numbers are known from its entries, and ranges of its records.
//! They are found in its file, in blocks being written, and in its write buffer.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::io::IoReadRequest;
use crate::ssd::format::head::ID_AT;
use crate::ssd::format::record::Record;
use crate::ssd::index::RecordLocation;
use crate::ssd::segment::file::Segment;
use crate::ssd::segment::unwritten::SegmentByteSource;
use crate::ssd::tier::inner::TierInner;
use crate::types::Id;

/// Bytes of a segment per read.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Maximum bytes between two requested records that are read together.
const MAX_GAP_BYTES: u64 = 16 << 10;
/// Maximum bytes of a read of several requested records.
const MAX_RUN_BYTES: u64 = 128 << 10;

/// The id of a requested record, and its number in the segment.
pub(crate) type RequestedRecord = (Id, u32);

/// Number of a segment's records per read.
pub(crate) fn records_per_read(segment: &Segment) -> usize {
    (CHUNK_BYTES / segment.record_bytes).max(1)
}

/// Returns the requested records that the index points to.
pub(crate) fn live_requests(
    tier: &TierInner,
    segment: &Segment,
    requested: &[RequestedRecord],
) -> Vec<RequestedRecord> {
    let ids: Vec<Id> = requested.iter().map(|(id, _)| *id).collect();
    let mut here: Vec<Option<RecordLocation>> = vec![None; ids.len()];
    tier.view().index().get_batch(&ids, &mut here);
    let here = requested.iter().zip(here);
    here.filter(|((_, record), here)| *here == Some(segment.location(*record))).map(|(wanted, _)| *wanted).collect()
}

/// Reads the requested records, which are in the order of the file, into contiguous memory.
pub(crate) fn read_requested(
    tier: &TierInner,
    segment: &Arc<Segment>,
    requested: &[RequestedRecord],
) -> Result<Vec<u8>> {
    let runs = coalesced_runs(segment, requested);
    let start = |run: &Range<usize>| segment.offset(requested[run.start].1);
    let end = |run: &Range<usize>| segment.offset(requested[run.end - 1].1 + 1);
    let mut records = vec![0; requested.len() * segment.record_bytes];
    let mut take = |run: &Range<usize>, bytes: &[u8]| {
        for at in run.clone() {
            let from = (segment.offset(requested[at].1) - start(run)) as usize;
            let to = &mut records[at * segment.record_bytes..][..segment.record_bytes];
            to.copy_from_slice(&bytes[from..from + segment.record_bytes]);
        }
    };
    if segment.sealed().is_none() {
        let mut bytes = Vec::new();
        for run in &runs {
            bytes.resize((end(run) - start(run)) as usize, 0);
            read_records(tier, segment, requested[run.start].1, &mut bytes)?;
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

/// Checks and decodes a requested record, whose bytes are `bytes`.
pub(crate) fn decode_requested<'a>(
    segment: &Segment,
    (id, number): RequestedRecord,
    bytes: &'a [u8],
) -> Result<Record<'a>> {
    let record = segment.decode(number, bytes)?;
    if record.head.id == id {
        return Ok(record);
    }
    Err(Error::corruption(segment.path(), segment.offset(number) + ID_AT as u64, "the record's id", id, record.head.id))
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

/// Groups records that are read together, as ranges of `requested`, which is in the order of the file. If a corrupted
/// footer names a record twice, each of them is a separate run.
fn coalesced_runs(segment: &Segment, requested: &[RequestedRecord]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, (_, record)) in requested.iter().enumerate() {
        let (start, end) = (segment.offset(*record), segment.offset(record + 1));
        let gap = |run: &Range<usize>| start.checked_sub(segment.offset(requested[run.end - 1].1 + 1));
        match runs.last_mut() {
            Some(run)
                if gap(run).is_some_and(|bytes| bytes <= MAX_GAP_BYTES)
                    && end - segment.offset(requested[run.start].1) <= MAX_RUN_BYTES =>
            {
                run.end = at + 1;
            }
            _ => runs.push(at..at + 1),
        }
    }
    runs
}
