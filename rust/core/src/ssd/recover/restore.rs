//! Restores the index of a set of segments from their footers only.
//!
//! Each of several threads processes a range of hashes, which is some sub-tables of the index. It reads that part of
//! all footers in parallel, sub-table after sub-table. All entries of one id are in one sub-table, where the latest
//! wins, and each sub-table is built at its final size. Memory other than the index does not grow with the rows.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, IoFile, IoOpenMode, open_files};
use crate::runtime::sync::lock;
use crate::ssd::bucket_sort::bucket_sort;
use crate::ssd::format::footer::{MAX_ENTRY_BYTES, TRAILER_BYTES, decode_trailer};
use crate::ssd::format::record::RecordFormat;
use crate::ssd::format::segment_file::{MAX_HEADER_BYTES, SegmentContent, max_padding_bytes, segment_path};
use crate::ssd::format::state_file::{SegmentDescriptor, StateFile};
use crate::ssd::index::{RecordLocation, SubTableBuilder, TagIndex};
use crate::ssd::segment::footer_reader::{FooterHashRange, FooterReader, bound_positions, check_crc};
use crate::ssd::segment::{SealedInfo, Segment, SegmentContext};
use crate::ssd::store::state::TierState;

/// Approximate number of entries that a thread processes at a time.
const RANGE_ENTRIES: u64 = 1 << 16;
/// Bytes of all footers that are read ahead, by all threads together.
const READ_AHEAD_BYTES: u64 = 64 << 20;
/// Maximum bytes of one read, which has at least a page. Larger reads hardly increase a disk's throughput.
const READ_BYTES: u64 = 60 << 10;
/// Number of entries per thread.
const ENTRIES_PER_THREAD: u64 = 1 << 18;
/// Maximum number of threads. Each waits for its reads, and sorts its entries while others wait, so that the disk is
/// kept busy.
const MAX_THREADS: u64 = 4;

/// The file of a segment that a state references. All of it was checked except entries and records.
struct CheckedSegmentFile {
    serial: u64,
    content: SegmentContent,
    format: RecordFormat,
    file: Arc<dyn IoFile>,
    sealed: SealedInfo,
}

impl CheckedSegmentFile {
    /// Converts it to a segment, which occupies its bytes of the cap.
    fn into_segment(self, context: &SegmentContext) -> Result<Arc<Segment>> {
        let Self { serial, content, format, file, sealed } = self;
        Segment::reopened(context, serial, (content, format), file, sealed).map(Arc::new)
    }
}

/// Opens a segment that a state references, and checks all of it except entries and records.
pub(crate) fn open_segment(
    context: &SegmentContext,
    descriptor: &SegmentDescriptor,
    path: &Path,
) -> Result<Arc<Segment>> {
    check_segment_file(context, descriptor, path)?.into_segment(context)
}

fn check_segment_file(
    context: &SegmentContext,
    descriptor: &SegmentDescriptor,
    path: &Path,
) -> Result<CheckedSegmentFile> {
    if !context.engine.exists(path)? {
        return Err(Error::corruption(path, 0, "a segment that the state names", "there", "missing"));
    }
    open_files::check_reserve(&context.dir)?;
    let file = context.engine.open(path, IoOpenMode::Read)?;
    let file_bytes = file.len()?;
    if file_bytes != descriptor.file_bytes {
        return Err(Error::corruption(path, 0, "the file's length", descriptor.file_bytes, file_bytes));
    }
    let header_bytes = context.schema.header_bytes();
    let least = (header_bytes + TRAILER_BYTES) as u64;
    if file_bytes < least {
        return Err(Error::corruption(path, 0, "the file's length", format!("at least {least}"), file_bytes));
    }
    debug_assert!(header_bytes <= MAX_HEADER_BYTES);
    let mut header = vec![0; header_bytes];
    file.read_at(0, &mut header)?;
    let (content, format) = context.schema.check_header(&header, path, descriptor.serial)?;
    if (content == SegmentContent::Tombstones) != descriptor.tombstones {
        let expected = if descriptor.tombstones { "tombstones" } else { "rows" };
        return Err(Error::corruption(path, 12, "the segment's content", expected, format!("{content:?}")));
    }
    let mut trailer = [0; TRAILER_BYTES];
    let at = file_bytes - TRAILER_BYTES as u64;
    file.read_at(at, &mut trailer)?;
    let trailer = decode_trailer(&trailer, path, at, descriptor.serial)?;
    if trailer.crc != descriptor.crc {
        let (expected, got) = (format!("{:08x}", descriptor.crc), format!("{:08x}", trailer.crc));
        return Err(Error::corruption(path, at, "the footer's checksum named by the state", expected, got));
    }
    let record_bytes = context.schema.record_bytes(content, format.widths);
    let records = u64::from(trailer.records) * (record_bytes + trailer.entry_format().bytes()) as u64;
    let padded_from = header_bytes as u64 + records;
    if trailer.records > RecordLocation::MAX_RECORDS
        || padded_from > at
        || at - padded_from > max_padding_bytes(file_bytes)
    {
        let expected = format!("that of {file_bytes} bytes");
        return Err(Error::corruption(path, at + 8, "the number of records", expected, trailer.records));
    }
    let mut padding = vec![0; (at - padded_from) as usize];
    file.read_at(padded_from, &mut padding)?;
    if let Some(byte) = padding.iter().position(|byte| *byte != 0) {
        return Err(Error::corruption(path, padded_from + byte as u64, "a byte of padding", 0, padding[byte]));
    }
    Ok(CheckedSegmentFile {
        serial: descriptor.serial,
        content,
        format,
        file,
        sealed: SealedInfo { trailer, file_bytes },
    })
}

/// The segments that states reference, each of which is opened once.
#[derive(Default)]
pub(crate) struct OpenedSegments {
    by_serial: HashMap<u64, Arc<Segment>>,
}

impl OpenedSegments {
    /// Opens the segments of `state`, all or none. If the state is corrupted, no file of it occupies bytes of the cap.
    pub(crate) fn segments_of(&mut self, context: &SegmentContext, state: &StateFile) -> Result<Vec<Arc<Segment>>> {
        let new = state.segments.iter().filter(|named| !self.contains(named.serial));
        let find =
            |named: &SegmentDescriptor| check_segment_file(context, named, &segment_path(&context.dir, named.serial));
        let found: Vec<CheckedSegmentFile> = new.map(find).collect::<Result<_>>()?;
        for found in found {
            self.by_serial.insert(found.serial, found.into_segment(context)?);
        }
        Ok(state.segments.iter().map(|named| self.by_serial[&named.serial].clone()).collect())
    }

    /// True if one of them has this serial.
    pub(crate) fn contains(&self, serial: u64) -> bool {
        self.by_serial.contains_key(&serial)
    }
}

#[derive(Clone, Copy, Default)]
struct RestoreCandidate {
    hash: u64,
    write_seq: u64,
    /// Position among the segments.
    segment: u32,
    record: u32,
}

/// Results of a thread for its part of the footers, except the rows.
struct RestorePart {
    /// This part's contribution to the checksum of each segment's footer. The exclusive or of the contributions of all
    /// parts is the checksum.
    checksums: Vec<u32>,
    /// The live records of each segment.
    live: Vec<u32>,
    highest_epoch: u32,
}

/// The data that all threads of a restore share.
struct RestoreJob<'a> {
    engine: &'a dyn IoEngine,
    segments: &'a [Arc<Segment>],
    /// Entries with a larger `write_seq` do not belong to the state.
    write_seq: u64,
    /// Entries per read of a footer.
    read_ahead: u32,
    /// Number of sub-tables that are processed at a time.
    tables_at_once: usize,
    filler: SubTableBuilder,
    index: Mutex<&'a mut TagIndex>,
}

/// Sorts candidates by hash, and those with the same hash from latest to oldest.
#[derive(Default)]
struct CandidateSorter {
    candidates: Vec<RestoreCandidate>,
    sorted: Vec<RestoreCandidate>,
    ends: Vec<u32>,
}

impl CandidateSorter {
    /// Sorts and removes the candidates, whose hashes are `begin..end`.
    fn sorted(&mut self, (begin, end): FooterHashRange) -> &[RestoreCandidate] {
        let buckets = (self.candidates.len() / 4).max(2).next_power_of_two();
        let width = end.unwrap_or(0).wrapping_sub(begin).wrapping_sub(1);
        // The least shift that results in at most `buckets` buckets.
        let shift = (64 - width.leading_zeros()).saturating_sub(buckets.trailing_zeros());
        self.ends.clear();
        self.ends.resize(buckets, 0);
        self.sorted.clear();
        self.sorted.resize(self.candidates.len(), RestoreCandidate::default());
        let items = self.candidates.iter().map(|candidate| (((candidate.hash - begin) >> shift) as usize, *candidate));
        bucket_sort(items, &mut self.ends, &mut self.sorted, |a, b| {
            a.hash.cmp(&b.hash).then_with(|| b.write_seq.cmp(&a.write_seq))
        });
        self.candidates.clear();
        &self.sorted
    }
}

impl RestoreJob<'_> {
    /// Fills the sub-tables `tables` from the part of the footers with their `hashes`. `begin` and `end` are the bounds
    /// of the part by segment.
    fn restore_part(
        &self,
        tables: Range<usize>,
        (begin, end): (&[u32], &[u32]),
        hashes: FooterHashRange,
    ) -> Result<RestorePart> {
        let mut footers = FooterReader::new(self.engine, self.segments, (begin, end), hashes, self.read_ahead)?;
        let mut live = vec![0; self.segments.len()];
        let mut highest_epoch = 0;
        let mut sorter = CandidateSorter::default();
        let mut rows: Vec<(u64, RecordLocation)> = Vec::new();
        for first in tables.clone().step_by(self.tables_at_once) {
            let end_hash = self.filler.first_hash(tables.end.min(first + self.tables_at_once));
            footers.for_each_below(end_hash, |segment, hash, entry| {
                if entry.write_seq <= self.write_seq {
                    highest_epoch = highest_epoch.max(entry.modified_epoch);
                    let (segment, record) = (segment as u32, entry.record);
                    sorter.candidates.push(RestoreCandidate { hash, write_seq: entry.write_seq, segment, record });
                }
            })?;
            let mut last = None;
            for candidate in sorter.sorted((self.filler.first_hash(first).unwrap_or(0), end_hash)) {
                // The latest record of an id comes first. If it is a tombstone there is no row.
                let newest = last.replace(candidate.hash) != Some(candidate.hash);
                let segment = &self.segments[candidate.segment as usize];
                if newest && segment.content == SegmentContent::Rows {
                    rows.push((candidate.hash, segment.location(candidate.record)));
                    live[candidate.segment as usize] += 1;
                }
            }
            let filled = self.filler.build(&rows);
            lock(&self.index).adopt(&filled)?;
            rows.clear();
        }
        Ok(RestorePart { checksums: footers.finish()?, live, highest_epoch })
    }

    /// Fills the entire index with `threads` threads.
    fn run(&self, threads: usize) -> Result<Vec<RestorePart>> {
        let bounds: Vec<usize> = (0..=threads).map(|thread| self.filler.sub_tables() * thread / threads).collect();
        let hashes: Vec<Option<u64>> = bounds.iter().map(|&bound| self.filler.first_hash(bound)).collect();
        let inner: Vec<u64> = hashes[1..threads].iter().flatten().copied().collect();
        let mut starts = vec![vec![0; self.segments.len()]];
        starts.extend(bound_positions(self.engine, self.segments, &inner)?);
        starts.push(self.segments.iter().map(|segment| segment.records()).collect());
        let part = |thread: usize| {
            let places = (starts[thread].as_slice(), starts[thread + 1].as_slice());
            self.restore_part(
                bounds[thread]..bounds[thread + 1],
                places,
                (hashes[thread].unwrap_or(0), hashes[thread + 1]),
            )
        };
        if threads == 1 {
            return Ok(vec![part(0)?]);
        }
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..threads)
                .map(|thread| std::thread::Builder::new().spawn_scoped(scope, move || part(thread)))
                .collect();
            let ended = started.into_iter().map(|started| {
                let failed = |what: String| Kind::Storage.error(format!("a thread that reopens {what}"));
                let thread = started.map_err(|error| failed(format!("could not be started: {error}")))?;
                thread.join().map_err(|_| failed("ended in a panic".into()))?
            });
            // All threads are joined, even after the first error.
            let ended: Vec<Result<RestorePart>> = ended.collect();
            ended.into_iter().collect()
        })
    }
}

/// Returns the number of threads for `entries` entries. `threads` overrides the usual number.
fn threads_for(entries: u64, tables: usize, threads: Option<usize>) -> usize {
    let usual = (entries / ENTRIES_PER_THREAD).clamp(1, MAX_THREADS);
    threads.unwrap_or(usual as usize).clamp(1, tables)
}

/// The expected contents of segments according to the file at `path`.
pub(crate) struct ExpectedSegments<'a> {
    pub(crate) write_seq: u64,
    pub(crate) rows: u64,
    pub(crate) path: &'a Path,
}

/// Restores the state of a tier with `segments`, and checks it against `expected`. `index` is empty.
pub(crate) fn restore(
    mut index: TagIndex,
    expected: &ExpectedSegments<'_>,
    segments: &[Arc<Segment>],
    context: &SegmentContext,
    threads: Option<usize>,
) -> Result<TierState> {
    let entries: u64 = segments.iter().map(|s| u64::from(s.records())).sum();
    let filler = index.sub_table_builder();
    let tables = filler.sub_tables();
    let threads = threads_for(entries, tables, threads);
    let read_bytes = (READ_AHEAD_BYTES / (segments.len().max(1) * threads) as u64).clamp(4096, READ_BYTES);
    let tables_at_once = (RANGE_ENTRIES * tables as u64).div_ceil(entries.max(1)).clamp(1, tables as u64) as usize;
    let restore = RestoreJob {
        engine: &*context.engine,
        segments,
        write_seq: expected.write_seq,
        read_ahead: read_bytes as u32 / MAX_ENTRY_BYTES as u32,
        tables_at_once,
        filler,
        index: Mutex::new(&mut index),
    };
    let parts = restore.run(threads)?;
    for (at, segment) in segments.iter().enumerate() {
        check_crc(segment, parts.iter().fold(0, |crc, part| crc ^ part.checksums[at]))?;
        segment.set_live(parts.iter().map(|part| part.live[at]).sum());
    }
    let rows = index.len() as u64;
    if rows != expected.rows {
        return Err(Error::corruption(expected.path, 0, "the rows that the footers hold", expected.rows, rows));
    }
    let highest_epoch = parts.iter().map(|part| part.highest_epoch).max().unwrap_or(0);
    Ok(TierState::restored(index, segments, (expected.write_seq, highest_epoch)))
}
