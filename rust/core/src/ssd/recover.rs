//! Reopening: a published state back into memory, from footers alone.
//!
//! Footers are sorted by the hash of their ids, so all of them are read side by side, one range of hashes after the other: the
//! entries of one id meet in one range, the newest wins, and memory does not grow with the rows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::format::{Content, ENTRY_BYTES, Entry, MAX_HEADER_BYTES, TRAILER_BYTES, decode_trailer};
use super::index::Location;
use super::manifest::{Named, StateFile};
use super::segment::{Home, Sealed, Segment, segment_path};
use super::shared::{State, Tombstones};
use crate::error::{Error, Result};
use crate::io::Open;
use crate::sync::Ordering;
use crate::types::hash_id;

/// Entries of all segments in one range of hashes, about.
const RANGE_ENTRIES: u64 = 1 << 18;
/// Bytes of read-ahead for all footers together.
const READ_AHEAD_BYTES: usize = 64 << 20;

/// Open the segment that a state names, and check all of it but entries and records.
fn open_segment(home: &Home, named: &Named) -> Result<Segment> {
    let path = segment_path(&home.dir, named.serial);
    if !home.engine.exists(&path) {
        return Err(Error::corruption(&path, 0, "a segment that the state names", "there", "missing"));
    }
    let file = home.engine.open(&path, Open::Read)?;
    let file_bytes = file.len()?;
    if file_bytes != named.file_bytes {
        return Err(Error::corruption(&path, 0, "the file's length", named.file_bytes, file_bytes));
    }
    let header_bytes = home.schema.header_bytes();
    let least = (header_bytes + TRAILER_BYTES) as u64;
    if file_bytes < least {
        return Err(Error::corruption(&path, 0, "the file's length", format!("at least {least}"), file_bytes));
    }
    debug_assert!(header_bytes <= MAX_HEADER_BYTES);
    let mut header = vec![0; header_bytes];
    file.read_at(0, &mut header)?;
    let content = home.schema.check_header(&header, &path, named.serial)?;
    if (content == Content::Tombstones) != named.tombstones {
        let expected = if named.tombstones { "tombstones" } else { "rows" };
        return Err(Error::corruption(&path, 12, "the segment's content", expected, format!("{content:?}")));
    }
    let mut trailer = [0; TRAILER_BYTES];
    let at = file_bytes - TRAILER_BYTES as u64;
    file.read_at(at, &mut trailer)?;
    let trailer = decode_trailer(&trailer, &path, at, named.serial)?;
    if trailer.crc != named.crc {
        let (expected, got) = (format!("{:08x}", named.crc), format!("{:08x}", trailer.crc));
        return Err(Error::corruption(&path, at, "the footer's checksum named by the state", expected, got));
    }
    let records = u64::from(trailer.records) * (home.schema.record_bytes(content) + ENTRY_BYTES) as u64;
    if trailer.records > Location::MAX_RECORDS || least + records != file_bytes {
        let expected = format!("that of {file_bytes} bytes");
        return Err(Error::corruption(&path, at + 8, "the number of records", expected, trailer.records));
    }
    Segment::reopened(home, named.serial, content, file, Sealed { trailer, file_bytes })
}

/// The segments that states name, each opened once.
#[derive(Default)]
pub(super) struct Opened {
    by_serial: HashMap<u64, Arc<Segment>>,
}

impl Opened {
    /// Those of `state`, all or none.
    pub(super) fn segments_of(&mut self, home: &Home, state: &StateFile) -> Result<Vec<Arc<Segment>>> {
        let mut segments = Vec::with_capacity(state.segments.len());
        for named in &state.segments {
            let segment = match self.by_serial.get(&named.serial) {
                Some(segment) => segment.clone(),
                None => Arc::new(open_segment(home, named)?),
            };
            segments.push(segment);
        }
        for segment in &segments {
            self.by_serial.insert(segment.serial, segment.clone());
        }
        Ok(segments)
    }

    /// Whether a file is that of one of them.
    pub(super) fn contains(&self, serial: u64) -> bool {
        self.by_serial.contains_key(&serial)
    }
}

/// A footer being read from its start to its end.
struct Cursor {
    segment: Arc<Segment>,
    path: PathBuf,
    next: u32,
    crc: u32,
    last: (u64, u64),
    ahead: Vec<Entry>,
    at: usize,
}

impl Cursor {
    fn new(segment: &Arc<Segment>) -> Self {
        let path = segment.path().to_owned();
        Self { segment: segment.clone(), path, next: 0, crc: 0, last: (0, 0), ahead: Vec::new(), at: 0 }
    }

    fn offset(&self, entry: u32) -> u64 {
        self.segment.footer_offset() + u64::from(entry) * ENTRY_BYTES as u64
    }

    /// The next entry, `None` at the end of a footer whose checksum is right.
    fn peek(&mut self, read_ahead: usize) -> Result<Option<Entry>> {
        if self.at == self.ahead.len() {
            self.refill(read_ahead)?;
        }
        Ok(self.ahead.get(self.at).copied())
    }

    fn refill(&mut self, read_ahead: usize) -> Result<()> {
        let records = self.segment.records.load(Ordering::Relaxed);
        let count = (records - self.next).min(read_ahead as u32);
        self.at = 0;
        self.ahead.clear();
        if count == 0 {
            let expected = self.segment.sealed().map_or(0, |sealed| sealed.trailer.entries_crc);
            if expected != self.crc {
                let (expected, got) = (format!("{expected:08x}"), format!("{:08x}", self.crc));
                return Err(Error::corruption(&self.path, self.offset(0), "the footer's checksum", expected, got));
            }
            return Ok(());
        }
        self.ahead.resize(count as usize, Entry { id: 0, write_seq: 0, modified_epoch: 0, record: 0 });
        let bytes = bytemuck::cast_slice_mut::<Entry, u8>(&mut self.ahead);
        self.segment.file.read_at(self.segment.footer_offset() + u64::from(self.next) * ENTRY_BYTES as u64, bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, bytes);
        for (at, entry) in self.ahead.iter().enumerate() {
            let offset = self.offset(self.next + at as u32);
            if entry.record >= records {
                let expected = format!("below {records}");
                return Err(Error::corruption(&self.path, offset, "a record number", expected, entry.record));
            }
            if entry.key() < self.last {
                return Err(Error::corruption(&self.path, offset, "the order of the footer", "ascending", "not"));
            }
            self.last = entry.key();
        }
        self.next += count;
        Ok(())
    }
}

/// All entries of a sealed segment, checked, by hash.
pub(super) fn read_entries(segment: &Arc<Segment>) -> Result<Vec<Entry>> {
    let records = segment.records.load(Ordering::Relaxed) as usize;
    let mut cursor = Cursor::new(segment);
    let mut entries = Vec::with_capacity(records);
    while let Some(entry) = cursor.peek(1 << 16)? {
        entries.push(entry);
        cursor.at += 1;
    }
    Ok(entries)
}

struct Candidate {
    hash: u64,
    write_seq: u64,
    id: i64,
    location: Location,
    /// Position among the segments.
    segment: u32,
    row: bool,
}

/// Fill `state` (its index empty) with what `file` says of `segments`.
pub(super) fn restore(state: &mut State, file: &StateFile, segments: &[Arc<Segment>], dir: &Path) -> Result<()> {
    let entries: u64 = segments.iter().map(|s| u64::from(s.records.load(Ordering::Relaxed))).sum();
    let range_bits = (entries / RANGE_ENTRIES).max(1).next_power_of_two().trailing_zeros().min(20);
    let read_ahead = (READ_AHEAD_BYTES / ENTRY_BYTES / segments.len().max(1)).clamp(170, 1 << 16);
    let mut cursors: Vec<Cursor> = segments.iter().map(Cursor::new).collect();
    let mut range: Vec<Candidate> = Vec::new();
    for number in 0..1_u64 << range_bits {
        for (segment, cursor) in cursors.iter_mut().enumerate() {
            while let Some(entry) = cursor.peek(read_ahead)? {
                let hash = hash_id(entry.id);
                if range_bits > 0 && hash >> (64 - range_bits) > number {
                    break;
                }
                cursor.at += 1;
                if entry.write_seq > file.write_seq {
                    continue;
                }
                state.highest_epoch = state.highest_epoch.max(entry.modified_epoch);
                range.push(Candidate {
                    hash,
                    write_seq: entry.write_seq,
                    id: entry.id,
                    location: cursor.segment.location(entry.record),
                    segment: segment as u32,
                    row: cursor.segment.content == Content::Rows,
                });
            }
        }
        range.sort_unstable_by_key(|candidate| (candidate.hash, std::cmp::Reverse(candidate.write_seq)));
        let mut last = None;
        for candidate in range.drain(..) {
            if last == Some(candidate.hash) {
                continue;
            }
            last = Some(candidate.hash);
            if candidate.row {
                state.index.insert(candidate.id, candidate.location);
                segments[candidate.segment as usize].live.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    let rows = state.index.len() as u64;
    if rows != file.rows {
        let path = super::manifest::state_path(dir, file.token);
        return Err(Error::corruption(&path, 0, "the rows that the footers hold", file.rows, rows));
    }
    state.next_seq = file.write_seq + 1;
    state.next_serial = segments.iter().map(|segment| segment.serial).max().unwrap_or(0) + 1;
    for segment in segments {
        segment.hold();
        state.adopt(segment.clone());
        match segment.content {
            Content::Rows if segment.live.load(Ordering::Relaxed) == 0 => state.emptied.push(segment.slot),
            Content::Rows => {}
            Content::Tombstones => {
                state.tombstones.push(Tombstones { segment: segment.clone(), before: state.next_serial });
            }
        }
    }
    Ok(())
}
