//! The frame of a segment's file, in format version 2: a header, packed records, the footer's entries, and the trailer.
//!
//! ```text
//! header   "EMBCSEG2" | header bytes u32 | content u8 (1 rows, 2 tombstones) | field count u8 | 0 u16 | record bytes u32
//!          | serial u64 | table key u64 | fields: name bytes u8, name, dtype u8 (1 = f32), width u32 | crc32c u32
//! records  n × record bytes
//! entries  n × (id i64 | write_seq - lowest write_seq | highest epoch - modified_epoch | record number), sorted by `hash_id(id)`, then
//!          write_seq; the last three in as many bytes as the widest of the segment takes, 0 to 8, 0 to 4 and 0 to 3
//! padding  zeros, so that the trailer ends with the file, whose length is a multiple of 4096
//! trailer  "EMBCFOOT" | n u24 | bytes of an entry's epoch u8 | highest epoch u32 | lowest write_seq u64 | highest write_seq u64 | serial u64
//!          | crc32c of the entries u32 | crc32c of the trailer so far u32
//! ```
//!
//! In version 1 the header begins with "EMBCSEG1" and the records are of version 1. All else is the same. Such segments are read, and
//! compaction moves their records to segments of version 2.
//!
//! The hash is not stored, because it is a function of the id. Whether entries are rows or tombstones is the segment's content.

use std::path::Path;

use crate::config::OptimizerKind;
use crate::error::{Error, Result};
use crate::rows::RowLayout;
use crate::ssd::format::record::{Binding, RECORD_HEADER_BYTES, le_u32, le_u64, row_record_bytes};
use crate::types::{Id, hash_id};

const HEADER_MAGIC: [u8; 8] = *b"EMBCSEG2";
const HEADER_MAGIC_1: [u8; 8] = *b"EMBCSEG1";
const TRAILER_MAGIC: &[u8; 8] = b"EMBCFOOT";
const FIXED_HEADER_BYTES: usize = 36;
const DTYPE_F32: u8 = 1;

/// The most bytes of an entry of a footer.
pub(crate) const MOST_ENTRY_BYTES: usize = 8 + 8 + 4 + 3;
/// Bytes of the trailer.
pub(crate) const TRAILER_BYTES: usize = 48;
/// The most bytes of a header.
pub(crate) const MAX_HEADER_BYTES: usize = 4096;

/// What the records of a segment are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Content {
    Rows = 1,
    Tombstones = 2,
}

/// One value of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    name: String,
    width: u32,
}

/// What the headers of all segments of a table say, except serial and content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Schema {
    table_key: u64,
    row_bytes: usize,
    fields: Vec<Field>,
}

impl Schema {
    /// The schema of rows of `layout`. Slots have the names that the optimizer gives them, where it is known.
    pub(crate) fn new(table_key: u64, optimizer: &str, layout: &RowLayout) -> Self {
        let names = OptimizerKind::from_name(optimizer).map(OptimizerKind::slot_names).unwrap_or_default();
        let slots = layout.vector_slots + usize::from(layout.scalar_slot);
        let mut fields = vec![Field { name: "weight".into(), width: layout.dim as u32 }];
        for slot in 0..slots {
            let name = names.get(slot).map_or_else(|| format!("slot{slot}"), |name| (*name).to_owned());
            let width = if slot < layout.vector_slots { layout.dim as u32 } else { 1 };
            fields.push(Field { name, width });
        }
        Self { table_key, row_bytes: row_record_bytes(layout), fields }
    }

    /// Bytes of a record in a segment of `content`.
    pub(crate) fn record_bytes(&self, content: Content) -> usize {
        match content {
            Content::Rows => self.row_bytes,
            Content::Tombstones => RECORD_HEADER_BYTES,
        }
    }

    /// Bytes of the header.
    pub(crate) fn header_bytes(&self) -> usize {
        FIXED_HEADER_BYTES + self.fields.iter().map(|field| field.name.len() + 6).sum::<usize>() + 4
    }

    /// The binding of records that are written now to segment `serial`.
    pub(crate) fn binding(&self, serial: u64) -> Binding {
        Binding::new(self.table_key, serial)
    }

    /// The header of segment `serial`, in the version that is written now.
    pub(crate) fn header(&self, serial: u64, content: Content) -> Vec<u8> {
        self.header_with(HEADER_MAGIC, serial, content)
    }

    fn header_with(&self, magic: [u8; 8], serial: u64, content: Content) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.header_bytes());
        bytes.extend_from_slice(&magic);
        bytes.extend_from_slice(&(self.header_bytes() as u32).to_le_bytes());
        bytes.extend_from_slice(&[content as u8, self.fields.len() as u8, 0, 0]);
        bytes.extend_from_slice(&(self.record_bytes(content) as u32).to_le_bytes());
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

    /// Check that `bytes`, the start of the file at `path`, are the header of segment `serial`. Returns its content and the binding of its
    /// records.
    pub(crate) fn check_header(&self, bytes: &[u8], path: &Path, serial: u64) -> Result<(Content, Binding)> {
        let (magic, binding) = if bytes.starts_with(&HEADER_MAGIC_1) {
            (HEADER_MAGIC_1, Binding::version_1())
        } else {
            (HEADER_MAGIC, self.binding(serial))
        };
        for content in [Content::Rows, Content::Tombstones] {
            if bytes == self.header_with(magic, serial, content) {
                return Ok((content, binding));
            }
        }
        let expected = self.header_with(magic, serial, Content::Rows);
        let at = expected.iter().zip(bytes).position(|(a, b)| a != b).unwrap_or(bytes.len());
        let got = bytes.get(at).map_or_else(|| "missing".to_owned(), |byte| format!("{byte:#04x}"));
        Err(Error::corruption(path, at as u64, "the segment's header", "that of this table's rows", got))
    }
}

/// An entry of the footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: Id,
    pub(crate) write_seq: u64,
    pub(crate) modified_epoch: u32,
    pub(crate) record: u32,
}

impl Entry {
    /// Footers are sorted by this.
    pub(crate) fn key(&self) -> (u64, u64) {
        (hash_id(self.id), self.write_seq)
    }
}

/// What the trailer says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) records: u32,
    pub(crate) highest_epoch: u32,
    pub(crate) lowest_seq: u64,
    pub(crate) highest_seq: u64,
    pub(crate) entries_crc: u32,
    /// Bytes that an entry's epoch takes.
    epoch_bytes: u8,
    /// Checksum of the trailer. A state names the segment by it.
    pub(crate) crc: u32,
}

/// How the entries of one footer lie in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryFormat {
    lowest_seq: u64,
    highest_epoch: u32,
    seq_bytes: usize,
    epoch_bytes: usize,
    record_bytes: usize,
}

/// The most bytes of an entry in a footer of `records` records, where none has a larger `write_seq` or epoch than these.
#[inline]
pub(crate) fn most_entry_bytes(records: u32, highest_seq: u64, highest_epoch: u32) -> usize {
    8 + width(highest_seq) + width(u64::from(highest_epoch)) + width(u64::from(records))
}

/// The fewest bytes that hold `value`.
#[inline]
fn width(value: u64) -> usize {
    (u64::BITS - value.leading_zeros()).div_ceil(8) as usize
}

fn le_uint(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

impl EntryFormat {
    /// Bytes of an entry.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        8 + self.seq_bytes + self.epoch_bytes + self.record_bytes
    }

    fn encode(&self, entry: &Entry, into: &mut [u8]) {
        let (id, rest) = into.split_at_mut(8);
        let (seq, rest) = rest.split_at_mut(self.seq_bytes);
        let (epoch, record) = rest.split_at_mut(self.epoch_bytes);
        id.copy_from_slice(&entry.id.to_le_bytes());
        seq.copy_from_slice(&(entry.write_seq - self.lowest_seq).to_le_bytes()[..seq.len()]);
        epoch.copy_from_slice(&(self.highest_epoch - entry.modified_epoch).to_le_bytes()[..epoch.len()]);
        record.copy_from_slice(&entry.record.to_le_bytes()[..record.len()]);
    }

    /// The entry in `bytes`, which are as long as one. What they say is not checked.
    #[inline]
    pub(crate) fn decode(&self, bytes: &[u8]) -> Entry {
        let (id, rest) = bytes.split_at(8);
        let (seq, rest) = rest.split_at(self.seq_bytes);
        let (epoch, record) = rest.split_at(self.epoch_bytes);
        Entry {
            id: le_uint(id) as Id,
            write_seq: self.lowest_seq.saturating_add(le_uint(seq)),
            modified_epoch: self.highest_epoch.saturating_sub(le_uint(epoch) as u32),
            record: le_uint(record) as u32,
        }
    }
}

impl Trailer {
    /// How the entries before the trailer lie.
    pub(crate) fn entries(&self) -> EntryFormat {
        EntryFormat {
            lowest_seq: self.lowest_seq,
            highest_epoch: self.highest_epoch,
            seq_bytes: width(self.highest_seq.saturating_sub(self.lowest_seq)),
            epoch_bytes: self.epoch_bytes as usize,
            record_bytes: width(u64::from(self.records.saturating_sub(1))),
        }
    }
}

/// Sort `entries` and append them and the trailer to `into`.
pub(crate) fn encode_footer(entries: &mut [Entry], serial: u64, into: &mut Vec<u8>) -> Trailer {
    entries.sort_unstable_by_key(Entry::key);
    let (lowest_epoch, highest_epoch) = bounds(entries.iter().map(|entry| entry.modified_epoch));
    let (lowest_seq, highest_seq) = bounds(entries.iter().map(|entry| entry.write_seq));
    let mut trailer = Trailer {
        records: entries.len() as u32,
        highest_epoch,
        lowest_seq,
        highest_seq,
        entries_crc: 0,
        epoch_bytes: width(u64::from(highest_epoch - lowest_epoch)) as u8,
        crc: 0,
    };
    let format = trailer.entries();
    let start = into.len();
    into.resize(start + entries.len() * format.bytes() + TRAILER_BYTES, 0);
    let (body, tail) = into[start..].split_at_mut(entries.len() * format.bytes());
    for (entry, bytes) in entries.iter().zip(body.chunks_exact_mut(format.bytes())) {
        format.encode(entry, bytes);
    }
    trailer.entries_crc = crc32c::crc32c(body);
    tail[..8].copy_from_slice(TRAILER_MAGIC);
    tail[8..12].copy_from_slice(&trailer.records.to_le_bytes());
    tail[11] = trailer.epoch_bytes;
    tail[12..16].copy_from_slice(&trailer.highest_epoch.to_le_bytes());
    tail[16..24].copy_from_slice(&trailer.lowest_seq.to_le_bytes());
    tail[24..32].copy_from_slice(&trailer.highest_seq.to_le_bytes());
    tail[32..40].copy_from_slice(&serial.to_le_bytes());
    tail[40..44].copy_from_slice(&trailer.entries_crc.to_le_bytes());
    trailer.crc = crc32c::crc32c(&tail[..44]);
    tail[44..48].copy_from_slice(&trailer.crc.to_le_bytes());
    trailer
}

fn bounds<T: Ord + Copy + Default>(values: impl Iterator<Item = T> + Clone) -> (T, T) {
    (values.clone().min().unwrap_or_default(), values.max().unwrap_or_default())
}

/// Check and take apart the trailer in `bytes`, of which there are [`TRAILER_BYTES`], and which lie at `offset` of `path`.
pub(crate) fn decode_trailer(bytes: &[u8], path: &Path, offset: u64, serial: u64) -> Result<Trailer> {
    let (stored, crc) = (le_u32(bytes, 44), crc32c::crc32c(&bytes[..44]));
    if stored != crc {
        let (expected, got) = (format!("{stored:08x}"), format!("{crc:08x}"));
        return Err(Error::corruption(path, offset, "the footer's checksum", expected, got));
    }
    if &bytes[..8] != TRAILER_MAGIC {
        return Err(Error::corruption(path, offset, "the footer's magic", "EMBCFOOT", format!("{:?}", &bytes[..8])));
    }
    if le_u64(bytes, 32) != serial {
        return Err(Error::corruption(path, offset + 32, "the segment's serial", serial, le_u64(bytes, 32)));
    }
    if bytes[11] > 4 {
        return Err(Error::corruption(path, offset + 11, "the bytes of an entry's epoch", "at most 4", bytes[11]));
    }
    Ok(Trailer {
        records: le_u32(bytes, 8) & 0xff_ffff,
        epoch_bytes: bytes[11],
        highest_epoch: le_u32(bytes, 12),
        lowest_seq: le_u64(bytes, 16),
        highest_seq: le_u64(bytes, 24),
        entries_crc: le_u32(bytes, 40),
        crc,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn schema() -> Schema {
        Schema::new(5, "rowwise_adagrad", &OptimizerKind::RowWiseAdagrad.layout(8))
    }

    #[test]
    fn a_header_names_its_fields_and_is_checked_byte_for_byte() {
        let schema = schema();
        assert_eq!(schema.fields, [Field { name: "weight".into(), width: 8 }, Field { name: "sum".into(), width: 1 }]);
        let header = schema.header(3, Content::Tombstones);
        assert_eq!(header.len(), schema.header_bytes());
        let (content, binding) = schema.check_header(&header, Path::new("x"), 3).unwrap();
        assert_eq!((content, binding), (Content::Tombstones, schema.binding(3)));
        let old = schema.header_with(HEADER_MAGIC_1, 3, Content::Rows);
        let found = schema.check_header(&old, Path::new("x"), 3).unwrap();
        assert_eq!(found, (Content::Rows, Binding::version_1()));
        for bit in 0..header.len() * 8 {
            let mut flipped = header.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(schema.check_header(&flipped, Path::new("x"), 3).unwrap_err().kind(), Kind::Corruption, "{bit}");
        }
        assert!(schema.check_header(&header[..20], Path::new("x"), 3).is_err());
        assert!(schema.check_header(&header, Path::new("x"), 4).is_err(), "another segment's header");
    }

    #[test]
    fn entries_take_the_bytes_that_their_segment_needs_and_come_back() {
        let far = |step: u64| (0..300_u32).map(move |i| (u64::from(i) * step, i * (step >> 40) as u32));
        for (step, bytes) in [(0, 10), (1, 12), (1 << 12, 13), (1 << 24, 15), (1 << 55, 8 + 8 + 3 + 2)] {
            let entry = |(record, (seq, epoch))| Entry { id: -7, write_seq: 5 + seq, modified_epoch: epoch, record };
            let mut entries: Vec<Entry> = (0..).zip(far(step)).map(entry).collect();
            let mut footer = Vec::new();
            let format = encode_footer(&mut entries, 1, &mut footer).entries();
            assert_eq!(format.bytes(), bytes, "{step}");
            assert!(footer.chunks(bytes).zip(&entries).all(|(bytes, entry)| format.decode(bytes) == *entry));
        }
        assert_eq!(encode_footer(&mut [], 1, &mut Vec::new()).entries().bytes(), 8);
    }

    #[test]
    fn a_footer_is_sorted_by_hash_and_every_flipped_bit_of_its_trailer_is_found() {
        let mut entries: Vec<Entry> = (0..50)
            .map(|i| Entry { id: 25 - i, write_seq: 100 + i as u64, modified_epoch: i as u32 % 7, record: i as u32 })
            .collect();
        let mut bytes = Vec::new();
        let trailer = encode_footer(&mut entries, 9, &mut bytes);
        assert!(entries.is_sorted_by_key(|entry| hash_id(entry.id)));
        let format = trailer.entries();
        assert_eq!(format.bytes(), 8 + 1 + 1 + 1);
        let (body, tail) = bytes.split_at(50 * format.bytes());
        assert!(body.chunks(format.bytes()).map(|bytes| format.decode(bytes)).eq(entries.iter().copied()));
        assert_eq!(decode_trailer(tail, Path::new("x"), 0, 9).unwrap(), trailer);
        assert_eq!(
            (trailer.records, trailer.highest_epoch, trailer.lowest_seq, trailer.highest_seq),
            (50, 6, 100, 149)
        );
        for bit in 0..TRAILER_BYTES * 8 {
            let mut flipped = tail.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_trailer(&flipped, Path::new("x"), 0, 9).unwrap_err().kind(), Kind::Corruption, "{bit}");
        }
        assert!(decode_trailer(tail, Path::new("x"), 0, 8).is_err());
    }
}
