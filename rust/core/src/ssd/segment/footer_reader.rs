//! Reads the footers of sealed segments: a single one completely, or many in parallel, one range of hashes after the
//! other.
//!
//! A footer is sorted by the hashes of its ids. So the entries of a range of hashes are adjacent in each footer, and
//! all entries of one id are in the same range. Parts of footers are read independently of each other.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::io::{IoEngine, IoReadRequest};
use crate::ssd::format::footer::{EntryFormat, FooterEntry, MAX_ENTRY_BYTES};
use crate::ssd::segment::Segment;
use crate::types::hash_id;

/// Entries per read during a search in a footer. They fill a page.
const SEARCH_ENTRIES: u32 = 4096 / MAX_ENTRY_BYTES as u32;

fn entry_offset(segment: &Segment, entry: u32) -> u64 {
    segment.footer_offset() + u64::from(entry) * segment.entry_format().bytes() as u64
}

fn entries_read(segment: &Segment, first: u32, count: u32) -> IoReadRequest {
    IoReadRequest {
        file: segment.file.clone(),
        offset: entry_offset(segment, first),
        len: count as usize * segment.entry_format().bytes(),
    }
}

/// Runs a batch of reads, and calls `sink` with the number and bytes of each. Returns the first error of a read or of
/// `sink`.
fn read_each(
    engine: &dyn IoEngine,
    reads: &[IoReadRequest],
    mut sink: impl FnMut(usize, &[u8]) -> Result<()> + Send,
) -> Result<()> {
    let mut first = Ok(());
    engine.read_batch(reads, &mut |number, bytes, _| {
        let done = bytes.and_then(|bytes| sink(number, bytes));
        if first.is_ok() {
            first = done;
        }
    });
    first
}

fn unordered_error(segment: &Segment, entry: u32) -> Error {
    Error::corruption(segment.path(), entry_offset(segment, entry), "the order of the footer", "ascending", "not")
}

/// A part of a footer that is read from its start to its end.
struct FooterCursor<'a> {
    segment: &'a Arc<Segment>,
    next: u32,
    end: u32,
    crc: u32,
    /// Hash and `write_seq` of the last entry that was read.
    last: (u64, u64),
    /// Entries that were read and checked. Those before `at` were returned.
    buffered: Vec<FooterEntry>,
    at: usize,
}

impl FooterCursor<'_> {
    /// True if every entry of a hash below `end` was read.
    fn has_all_below(&self, end: Option<u64>) -> bool {
        self.next == self.end || end.is_some_and(|end| self.last.0 >= end)
    }

    /// Checks and buffers the entries that follow.
    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        self.buffered.drain(..std::mem::take(&mut self.at));
        let records = self.segment.records();
        let format = self.segment.entry_format();
        self.buffered.reserve_exact(bytes.len() / format.bytes());
        for entry in bytes.chunks_exact(format.bytes()) {
            let entry = format.decode(entry);
            if entry.record >= records {
                let (at, expected) = (entry_offset(self.segment, self.next), format!("below {records}"));
                return Err(Error::corruption(self.segment.path(), at, "a record number", expected, entry.record));
            }
            if entry.key() < self.last {
                return Err(unordered_error(self.segment, self.next));
            }
            self.last = entry.key();
            self.buffered.push(entry);
            self.next += 1;
        }
        Ok(())
    }
}

/// A range of hashes: the first (inclusive) and the second (exclusive), which is `None` if the range is unbounded.
pub(crate) type FooterHashRange = (u64, Option<u64>);

/// Reads the entries of a range of hashes from several footers in parallel, by ascending hash.
pub(crate) struct FooterReader<'a> {
    engine: &'a dyn IoEngine,
    cursors: Vec<FooterCursor<'a>>,
    hashes: FooterHashRange,
    /// Entries per read of a footer.
    read_ahead: u32,
}

impl<'a> FooterReader<'a> {
    /// Creates a reader of the entries `begin[i]..end[i]` of the footer of each of `segments`, which are those of
    /// `hashes`.
    pub(crate) fn new(
        engine: &'a dyn IoEngine,
        segments: &'a [Arc<Segment>],
        (begin, end): (&[u32], &[u32]),
        hashes: FooterHashRange,
        read_ahead: u32,
    ) -> Result<Self> {
        let parts = segments.iter().zip(begin.iter().zip(end));
        let cursors = parts.map(|(segment, (&begin, &end))| {
            // The bounds were searched in footers that were not checked.
            if begin > end {
                return Err(unordered_error(segment, end));
            }
            let last = (hashes.0, 0);
            Ok(FooterCursor { segment, next: begin, end, crc: 0, last, buffered: Vec::new(), at: 0 })
        });
        Ok(Self { engine, cursors: cursors.collect::<Result<_>>()?, hashes, read_ahead: read_ahead.max(1) })
    }

    /// Calls `each` with the entries with hashes below `end` (or all, if it is `None`) that were not returned yet, with
    /// the position of their segment and their hash. Those of one segment are in order.
    pub(crate) fn for_each_below(
        &mut self,
        end: Option<u64>,
        mut each: impl FnMut(usize, u64, &FooterEntry),
    ) -> Result<()> {
        loop {
            let short = |(_, cursor): &(usize, &FooterCursor<'_>)| !cursor.has_all_below(end);
            let short: Vec<usize> = self.cursors.iter().enumerate().filter(short).map(|(at, _)| at).collect();
            if short.is_empty() {
                break;
            }
            let reads = short.iter().map(|&at| {
                let cursor = &self.cursors[at];
                entries_read(cursor.segment, cursor.next, self.read_ahead.min(cursor.end - cursor.next))
            });
            let reads: Vec<IoReadRequest> = reads.collect();
            let cursors = &mut self.cursors;
            read_each(self.engine, &reads, |number, bytes| cursors[short[number]].take(bytes))?;
        }
        for (at, cursor) in self.cursors.iter_mut().enumerate() {
            for entry in &cursor.buffered[cursor.at..] {
                let hash = hash_id(entry.id);
                if end.is_some_and(|end| hash >= end) {
                    break;
                }
                each(at, hash, entry);
                cursor.at += 1;
            }
        }
        Ok(())
    }

    /// Returns this part's contribution to the checksum of each footer, after all entries were returned. The exclusive
    /// or of the contributions of all parts is the footer's checksum, because the checksum of concatenated bytes is
    /// that of the first, shifted by the length of the second, xor that of the second.
    pub(crate) fn finish(self) -> Result<Vec<u32>> {
        let end_hash = self.hashes.1;
        let parts = self.cursors.iter().map(|cursor| {
            if end_hash.is_some_and(|end| cursor.last.0 >= end) {
                return Err(unordered_error(cursor.segment, cursor.end - 1));
            }
            let after = cursor.segment.records() - cursor.end;
            Ok(crc32c::crc32c_combine(cursor.crc, 0, after as usize * cursor.segment.entry_format().bytes()))
        });
        parts.collect()
    }
}

/// Returns `Corruption` unless `crc`, the checksum of a complete footer, equals the checksum in its trailer.
pub(crate) fn check_crc(segment: &Segment, crc: u32) -> Result<()> {
    let expected = segment.sealed().map_or(0, |sealed| sealed.trailer.entries_crc);
    if expected == crc {
        return Ok(());
    }
    let (expected, got) = (format!("{expected:08x}"), format!("{crc:08x}"));
    Err(Error::corruption(segment.path(), segment.footer_offset(), "the footer's checksum", expected, got))
}

/// Reads and checks all entries of a sealed segment, by hash.
pub(crate) fn read_entries(engine: &dyn IoEngine, segment: &Arc<Segment>) -> Result<Vec<FooterEntry>> {
    let records = segment.records();
    let segments = std::slice::from_ref(segment);
    let mut footers = FooterReader::new(engine, segments, (&[0], &[records]), (0, None), 1 << 16)?;
    let mut entries = Vec::with_capacity(records as usize);
    footers.for_each_below(None, |_, _, entry| entries.push(*entry))?;
    for crc in footers.finish()? {
        check_crc(segment, crc)?;
    }
    Ok(entries)
}

/// A search in a footer for the first entry whose hash is not below `bound`. Its position is in `low..=high`.
struct FooterSearch {
    segment: usize,
    bound: u64,
    /// The lower end of the bracket, and a hash near it.
    low: (u32, u64),
    /// The upper end of the bracket, and a hash near it.
    high: (u32, u64),
    steps: u32,
}

impl FooterSearch {
    /// Returns the entries to read next: those at the interpolated position of the bound, because hashes are evenly
    /// distributed. Every third step bisects, so that the search ends soon in any footer.
    fn guess(&self) -> (u32, u32) {
        let (low, high) = (self.low.0, self.high.0);
        let share = if self.steps % 3 == 2 {
            0.5
        } else {
            let width = self.high.1.saturating_sub(self.low.1).max(1);
            self.bound.saturating_sub(self.low.1) as f64 / width as f64
        };
        let middle = low + (f64::from(high - low) * share.clamp(0.0, 1.0)) as u32;
        let first = middle.saturating_sub(SEARCH_ENTRIES / 2).clamp(low, high - 1);
        (first, SEARCH_ENTRIES.min(high - first))
    }

    /// Narrows the bracket by the entries that were read from `first` on.
    fn narrow(&mut self, first: u32, bytes: &[u8], format: EntryFormat) {
        self.steps += 1;
        let hashes = bytes.chunks_exact(format.bytes()).map(|entry| hash_id(format.decode(entry).id));
        let hashes: Vec<u64> = hashes.collect();
        let (Some(&least), Some(&greatest)) = (hashes.first(), hashes.last()) else { return };
        let below = hashes.iter().take_while(|hash| **hash < self.bound).count() as u32;
        if below == 0 {
            self.high = (first, least);
        } else if below == hashes.len() as u32 {
            self.low = (first + below, greatest);
        } else {
            (self.low.0, self.high.0) = (first + below, first + below);
        }
    }
}

/// Returns, for each of `bounds` and each of `segments`, the position of the first entry of its footer whose hash is
/// not below the bound. In a footer that is not in order it is any position.
pub(crate) fn bound_positions(
    engine: &dyn IoEngine,
    segments: &[Arc<Segment>],
    bounds: &[u64],
) -> Result<Vec<Vec<u32>>> {
    let searches = bounds.iter().flat_map(|&bound| {
        segments.iter().enumerate().map(move |(at, segment)| {
            let high = (segment.records(), u64::MAX);
            FooterSearch { segment: at, bound, low: (0, 0), high, steps: 0 }
        })
    });
    let mut searches: Vec<FooterSearch> = searches.collect();
    loop {
        let open = searches.iter().enumerate().filter(|(_, search)| search.low.0 < search.high.0);
        let open: Vec<(usize, (u32, u32))> = open.map(|(at, search)| (at, search.guess())).collect();
        if open.is_empty() {
            break;
        }
        let reads =
            open.iter().map(|&(at, (first, count))| entries_read(&segments[searches[at].segment], first, count));
        let reads: Vec<IoReadRequest> = reads.collect();
        read_each(engine, &reads, |number, bytes| {
            let (at, (first, _)) = open[number];
            let format = segments[searches[at].segment].entry_format();
            searches[at].narrow(first, bytes, format);
            Ok(())
        })?;
    }
    let of_bound = |bound: usize| searches[bound * segments.len()..][..segments.len()].iter();
    Ok((0..bounds.len()).map(|bound| of_bound(bound).map(|search| search.low.0).collect()).collect())
}
