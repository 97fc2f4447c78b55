//! The frame of a segment's file: a header, packed records, and the tail, which is written at once: the last records,
//! the footer (see `footer`), padding and the trailer.
//!
//! ```text
//! header   "EMBCSEG1" | header bytes u32 | content u8 (1 rows, 2 tombstones) | field count u8 | widths of the records' heads u16
//!          | record bytes u32 | serial u64 | table key u64 | fields: name bytes u8, name, dtype u8 (1 = f32), width u32 | crc32c u32
//! records  n × record bytes
//! entries, padding, trailer: the footer, which ends with the file, whose length is a multiple of 4096
//! ```
//!
//! Names of a tier's files: `<serial>.seg` of a segment, `<commit id>.state` of a published state, each number in 16
//! hexadecimal digits.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::OptimizerKind;
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, BufPool, PooledBuf};
use crate::rows::RowLayout;
use crate::runtime::memory;
use crate::runtime::process::PerProcess;
use crate::ssd::format::footer::{FooterEntry, FooterTrailer, MAX_ENTRY_BYTES, SegmentFooter, TRAILER_BYTES};
use crate::ssd::format::record::{HeadWidths, MAX_HEAD_BYTES, RecordBinding, RecordFormat, payload_bytes};

const HEADER_MAGIC: [u8; 8] = *b"EMBCSEG1";
const FIXED_HEADER_BYTES: usize = 36;
/// Offset of the head widths in a header.
const WIDTHS_AT: usize = 14;
const DTYPE_F32: u8 = 1;

/// Maximum bytes of a header.
pub(crate) const MAX_HEADER_BYTES: usize = 4096;
/// A segment is padded with zeros to its full length if less than 1/64 of its space remains. Then its file can be
/// reused for another segment.
const FILL_UP_SHARE: u64 = 64;
/// Bytes of a large buffer. A few are kept for reuse: allocating the memory takes longer than filling it.
const LARGE_BUFFER_BYTES: usize = 4 << 20;
/// Number of large buffers that are kept.
const LARGE_BUFFERS_KEPT: usize = 2;
/// Minimum bytes of a tail that uses a large buffer.
const LARGE_FROM_BYTES: usize = 1 << 20;
const SEGMENT_SUFFIX: &str = "seg";
const STATE_SUFFIX: &str = "state";

/// The kind of a segment's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SegmentContent {
    Rows = 1,
    Tombstones = 2,
}

/// One value of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SchemaField {
    name: String,
    width: u32,
}

/// The fields that the headers of all segments of a table share, without serial and content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SegmentSchema {
    table_key: u64,
    /// Bytes of a row's record after its head.
    payload_bytes: usize,
    fields: Vec<SchemaField>,
}

impl SegmentSchema {
    /// Creates the schema of rows of `layout`. Slots have the names of the optimizer's slots if the optimizer is known.
    pub(crate) fn new(table_key: u64, optimizer: &str, layout: &RowLayout) -> Self {
        let names = OptimizerKind::from_name(optimizer).map(OptimizerKind::slot_names).unwrap_or_default();
        let slots = layout.vector_slots + usize::from(layout.scalar_slot);
        let mut fields = vec![SchemaField { name: "weight".into(), width: layout.dim as u32 }];
        for slot in 0..slots {
            let name = names.get(slot).map_or_else(|| format!("slot{slot}"), |name| (*name).to_owned());
            let width = if slot < layout.vector_slots { layout.dim as u32 } else { 1 };
            fields.push(SchemaField { name, width });
        }
        Self { table_key, payload_bytes: payload_bytes(layout), fields }
    }

    /// Bytes of a record in a segment of `content` with heads of these widths.
    pub(crate) fn record_bytes(&self, content: SegmentContent, widths: HeadWidths) -> usize {
        widths.bytes() + self.payload_bytes(content)
    }

    /// Maximum bytes of a record in a segment of `content`.
    pub(crate) fn max_record_bytes(&self, content: SegmentContent) -> usize {
        MAX_HEAD_BYTES + self.payload_bytes(content)
    }

    fn payload_bytes(&self, content: SegmentContent) -> usize {
        match content {
            SegmentContent::Rows => self.payload_bytes,
            SegmentContent::Tombstones => 0,
        }
    }

    /// Bytes of the header.
    pub(crate) fn header_bytes(&self) -> usize {
        FIXED_HEADER_BYTES + self.fields.iter().map(|field| field.name.len() + 6).sum::<usize>() + 4
    }

    /// Returns the format of the records of segment `serial`, with heads of these widths.
    pub(crate) fn record_format(&self, serial: u64, widths: HeadWidths) -> RecordFormat {
        RecordFormat { widths, binding: RecordBinding::new(self.table_key, serial) }
    }

    /// Encodes the header of segment `serial`.
    pub(crate) fn header(&self, serial: u64, content: SegmentContent, widths: HeadWidths) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.header_bytes());
        bytes.extend_from_slice(&HEADER_MAGIC);
        bytes.extend_from_slice(&(self.header_bytes() as u32).to_le_bytes());
        bytes.extend_from_slice(&[content as u8, self.fields.len() as u8]);
        bytes.extend_from_slice(&widths.to_bits().to_le_bytes());
        bytes.extend_from_slice(&(self.record_bytes(content, widths) as u32).to_le_bytes());
        bytes.extend_from_slice(&serial.to_le_bytes());
        bytes.extend_from_slice(&self.table_key.to_le_bytes());
        for field in &self.fields {
            bytes.push(field.name.len() as u8);
            bytes.extend_from_slice(field.name.as_bytes());
            bytes.push(DTYPE_F32);
            bytes.extend_from_slice(&field.width.to_le_bytes());
        }
        let crc = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Checks that `bytes`, the start of the file at `path`, are the header of segment `serial`. Returns its content
    /// and the format of its records.
    pub(crate) fn check_header(
        &self,
        bytes: &[u8],
        path: &Path,
        serial: u64,
    ) -> Result<(SegmentContent, RecordFormat)> {
        let bits = bytes.get(WIDTHS_AT..WIDTHS_AT + 2).map_or(0, |bits| u16::from_le_bytes([bits[0], bits[1]]));
        // With invalid widths the comparison below fails.
        let widths = HeadWidths::from_bits(bits).unwrap_or(HeadWidths::NONE);
        for content in [SegmentContent::Rows, SegmentContent::Tombstones] {
            if bytes == self.header(serial, content, widths) {
                return Ok((content, self.record_format(serial, widths)));
            }
        }
        let expected = self.header(serial, SegmentContent::Rows, widths);
        let at = expected.iter().zip(bytes).position(|(a, b)| a != b).unwrap_or(bytes.len());
        let got = bytes.get(at).map_or_else(|| "missing".to_owned(), |byte| format!("{byte:#04x}"));
        Err(Error::corruption(path, at as u64, "the segment's header", "that of this table's rows", got))
    }
}

/// The bytes of a file from its last records on.
pub(crate) struct SegmentTail {
    pub(crate) bytes: SegmentTailBytes,
    pub(crate) trailer: FooterTrailer,
    /// Length of the file.
    pub(crate) file_bytes: u64,
}

/// The bytes of a tail.
pub(crate) struct SegmentTailBytes {
    buffer: PooledBuf,
    bytes: usize,
}

impl SegmentTailBytes {
    /// Allocates `bytes`, with unspecified contents. Returns `Kind::Memory` if the allocation fails, even after
    /// releasing the reserve.
    fn new(bytes: usize) -> Result<Self> {
        static LARGE: PerProcess<Arc<BufPool>> = PerProcess::new();
        let pool = if bytes < LARGE_FROM_BYTES {
            Arc::new(BufPool::new(0, 0)) // keeps no buffers
        } else {
            Arc::clone(LARGE.get(|| Ok(Arc::new(BufPool::new(LARGE_BUFFER_BYTES, LARGE_BUFFERS_KEPT))))?)
        };
        Ok(Self { buffer: memory::or_from_reserve(|| pool.take_at_least(bytes))?, bytes })
    }
}

impl Deref for SegmentTailBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer[..self.bytes]
    }
}

impl DerefMut for SegmentTailBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }
}

/// Maximum bytes of padding in a file of `file_bytes`.
pub(crate) fn max_padding_bytes(file_bytes: u64) -> u64 {
    file_bytes / FILL_UP_SHARE + ALIGNMENT as u64
}

/// Returns the length of a segment's file that needs at least `least` bytes, of `capacity_bytes`.
pub(crate) fn file_bytes(least: u64, capacity_bytes: u64) -> u64 {
    if capacity_bytes.saturating_sub(least) <= capacity_bytes / FILL_UP_SHARE {
        least.max(capacity_bytes)
    } else {
        least
    }
}

/// Encodes the tail of segment `serial`, whose last `records` start at offset `start`, in a file of at most
/// `capacity_bytes`. Returns `Kind::Memory` if the allocation fails, even after releasing the reserve ([`memory`]).
pub(crate) fn encode_tail(
    start: u64,
    records: &[u8],
    entries: &mut [FooterEntry],
    serial: u64,
    capacity_bytes: u64,
) -> Result<SegmentTail> {
    let most_bytes = capacity_bytes.saturating_sub(start + records.len() as u64) as usize;
    let footer = SegmentFooter::of(entries, most_bytes);
    let least = start + (records.len() + footer.bytes()).next_multiple_of(ALIGNMENT) as u64;
    let file_bytes = file_bytes(least, capacity_bytes);
    let mut bytes = SegmentTailBytes::new((file_bytes - start) as usize)?;
    bytes[..records.len()].copy_from_slice(records);
    let trailer = footer.encode(serial, &mut bytes[records.len()..]);
    Ok(SegmentTail { bytes, trailer, file_bytes })
}

fn max_footer_bytes(entries: usize) -> usize {
    entries * MAX_ENTRY_BYTES + TRAILER_BYTES
}

/// Maximum memory that [`encode_tail`] uses for a segment of `records` records, the last of which are in a buffer of
/// `buffer_bytes`.
pub(crate) fn max_tail_bytes(records: usize, buffer_bytes: usize) -> usize {
    // The order of the entries needs less memory than the entries.
    let end = max_footer_bytes(records) + buffer_bytes;
    max_footer_bytes(records) + if end < LARGE_FROM_BYTES { end } else { end.max(LARGE_BUFFER_BYTES) }
}

/// Returns the path of segment `serial` in `dir`.
pub(crate) fn segment_path(dir: &Path, serial: u64) -> PathBuf {
    dir.join(format!("{serial:016x}.{SEGMENT_SUFFIX}"))
}

/// Returns the serial of a segment's file; `None` for any other file.
pub(crate) fn segment_serial(path: &Path) -> Option<u64> {
    parse_number(path, SEGMENT_SUFFIX)
}

/// Returns the path of the state `commit_id` in `dir`.
pub(crate) fn state_path(dir: &Path, commit_id: u64) -> PathBuf {
    dir.join(format!("{commit_id:016x}.{STATE_SUFFIX}"))
}

/// Returns the commit id of a state's file; `None` for any other file.
pub(crate) fn state_commit_id(path: &Path) -> Option<u64> {
    parse_number(path, STATE_SUFFIX)
}

/// Returns the commit ids of the states in a directory's listing, ascending.
pub(crate) fn commit_ids(listing: &[PathBuf]) -> Vec<u64> {
    let mut commit_ids: Vec<u64> = listing.iter().filter_map(|path| state_commit_id(path)).collect();
    commit_ids.sort_unstable();
    commit_ids
}

/// True if a path is the temporary file of a state that was being published.
pub(crate) fn is_temporary(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_suffix(".tmp").is_some_and(|stem| state_commit_id(Path::new(stem)).is_some())
}

/// Parses the number in a file name of 16 lower-case hexadecimal digits and `suffix`; `None` for any other name.
fn parse_number(path: &Path, suffix: &str) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let number = u64::from_str_radix(name.split_once('.')?.0, 16).ok()?;
    (name == format!("{number:016x}.{suffix}")).then_some(number)
}

#[cfg(test)]
mod tests;
