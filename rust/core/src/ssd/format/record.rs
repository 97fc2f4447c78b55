//! Records: the layout of a row on disk, little-endian and packed: a head, then the payload.
//!
//! ```text
//! head     crc32c of all that follows, payload included, xor the mask of the record's position u32 | id i64 | write_seq | last step
//!          | modified_epoch | count | score f32
//! payload  4 bytes for each float of the vector part, then the scalar slot if the layout has one f32; only rows have it
//! ```
//!
//! The last five numbers of a head have at most 8, 8, 4, 4 and 4 bytes: only as many as the segment needs
//! ([`HeadWidths`], which the segment's header contains). A field without bytes is 0. `write_seq` is the order of
//! writing. Compaction preserves it, and `modified_epoch`.
//!
//! The mask (see [`RecordBinding`]) binds a record to its table, its segment and its number there. So an intact record
//! at another record's position, because a disk lost or misdirected a write, is detected as corruption.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
use std::path::Path;

use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowLayout, RowRef};
use crate::types::{Id, hash_id};

/// Offset of the first byte that a record's checksum covers.
const CHECKED_FROM: usize = 4;
/// Offset of the id.
pub(crate) const ID_AT: usize = CHECKED_FROM;
/// Bytes of a head before the packed numbers: the checksum and the id.
const UNPACKED_BYTES: usize = ID_AT + 8;
/// Maximum bytes of a head.
pub(crate) const MAX_HEAD_BYTES: usize = UNPACKED_BYTES + 8 + 8 + 4 + 4 + 4;
/// A number of a head is written and read as 8 bytes, and the next number overwrites the excess. So the last number
/// needs this many bytes after it.
const OVERRUN_BYTES: usize = 8;
/// Records whose checksums are computed interleaved. Rows are encoded in groups of as many, so that their bytes are still
/// in the CPU cache.
const CHECKSUM_LANES: usize = 4;
/// The difference between the masks of consecutive records. It is odd, so that all masks of a segment are different.
const MASK_STEP: u32 = 0x9e37_79b1;

// The payload is copied from memory without conversion.
const _: () = assert!(cfg!(target_endian = "little"), "records are little-endian");

/// The highest number of each kind in a tier's records. Widths follow from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecordMaxima {
    pub(crate) write_seq: u64,
    pub(crate) last_step: u64,
    pub(crate) modified_epoch: u32,
    pub(crate) count: u32,
    /// True if any row may have a score other than 0.
    pub(crate) has_scores: bool,
}

impl RecordMaxima {
    /// Maxima of these rows, except `write_seq`, which a row does not have.
    pub(crate) fn of_rows<'a>(rows: impl Iterator<Item = &'a RowHeader>) -> Self {
        rows.fold(Self::default(), |highest, row| Self {
            write_seq: 0,
            last_step: highest.last_step.max(row.last_step),
            modified_epoch: highest.modified_epoch.max(row.modified_epoch),
            count: highest.count.max(row.count),
            has_scores: highest.has_scores || row.score.to_bits() != 0,
        })
    }

    /// Returns the maximum of each field.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            write_seq: self.write_seq.max(other.write_seq),
            last_step: self.last_step.max(other.last_step),
            modified_epoch: self.modified_epoch.max(other.modified_epoch),
            count: self.count.max(other.count),
            has_scores: self.has_scores || other.has_scores,
        }
    }
}

/// Widths in bytes of the numbers in a head, which determine the layout of the heads of a segment's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadWidths {
    write_seq: u8,
    last_step: u8,
    modified_epoch: u8,
    count: u8,
    score: u8,
}

impl HeadWidths {
    /// All widths are 0.
    pub(crate) const NONE: Self = Self { write_seq: 0, last_step: 0, modified_epoch: 0, count: 0, score: 0 };

    /// Returns widths for rows up to the maxima `highest`. Whenever a width grows, a tier seals its open segments. So
    /// widths that would suffice only for a short time are not used.
    pub(crate) fn of_rows(highest: &RecordMaxima) -> Self {
        Self {
            write_seq: least_width(&[4, 5, 6], highest.write_seq),
            last_step: least_width(&[0, 3, 4], highest.last_step),
            modified_epoch: least_width(&[0, 1, 2, 4], highest.modified_epoch.into()),
            count: least_width(&[0, 1, 2, 4], highest.count.into()),
            score: if highest.has_scores { 4 } else { 0 },
        }
    }

    /// Returns widths for tombstones, which only have a `write_seq` and an epoch.
    pub(crate) fn of_tombstones(highest: &RecordMaxima) -> Self {
        Self { last_step: 0, count: 0, score: 0, ..Self::of_rows(highest) }
    }

    /// Encodes the widths for a segment's header: 4 bits for each of the first two, 3 bits for each of the others, from
    /// the lowest bit on.
    pub(crate) fn to_bits(self) -> u16 {
        let Self { write_seq, last_step, modified_epoch, count, score } = self;
        u16::from(write_seq | last_step << 4)
            | u16::from(modified_epoch) << 8
            | u16::from(count) << 11
            | u16::from(score / 4) << 14
    }

    /// Decodes the widths in a segment's header; `None` if they are invalid.
    pub(crate) fn from_bits(bits: u16) -> Option<Self> {
        let field = |from: u32, count: u32| (bits >> from & ((1 << count) - 1)) as u8;
        let widths = Self {
            write_seq: field(0, 4),
            last_step: field(4, 4),
            modified_epoch: field(8, 3),
            count: field(11, 3),
            score: 4 * field(14, 1),
        };
        let fit = widths.write_seq <= 8 && widths.last_step <= 8 && widths.modified_epoch <= 4 && widths.count <= 4;
        (fit && bits >> 15 == 0).then_some(widths)
    }

    /// Writes the head of a record without its checksum. `into` has the length of the head.
    #[inline]
    pub(crate) fn encode(self, fields: &HeadFields, into: &mut [u8]) {
        let mut bytes = [0; MAX_HEAD_BYTES + OVERRUN_BYTES];
        bytes[ID_AT..UNPACKED_BYTES].copy_from_slice(&fields.id.to_le_bytes());
        let values = [
            fields.write_seq,
            fields.last_step,
            fields.modified_epoch.into(),
            fields.count.into(),
            fields.score.to_bits().into(),
        ];
        let mut at = UNPACKED_BYTES;
        for (value, width) in values.into_iter().zip(self.to_array()) {
            debug_assert!(value <= max_of_width(width), "{value} in {width} bytes");
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            at += usize::from(width);
        }
        into.copy_from_slice(&bytes[..at]);
    }

    /// Bytes of the head.
    #[inline]
    pub(crate) fn bytes(self) -> usize {
        UNPACKED_BYTES + self.to_array().iter().map(|width| usize::from(*width)).sum::<usize>()
    }

    /// Returns the maxima of records with such a head.
    pub(crate) fn highest(self) -> RecordMaxima {
        RecordMaxima {
            write_seq: max_of_width(self.write_seq),
            last_step: max_of_width(self.last_step),
            modified_epoch: max_of_width(self.modified_epoch) as u32,
            count: max_of_width(self.count) as u32,
            has_scores: self.score > 0,
        }
    }

    /// Decodes the fields in a record's `head`. Ignores the checksum.
    #[inline]
    pub(crate) fn decode(self, head: &[u8]) -> HeadFields {
        let mut bytes = [0; MAX_HEAD_BYTES + OVERRUN_BYTES];
        bytes[..head.len()].copy_from_slice(head);
        let mut at = UNPACKED_BYTES;
        let [write_seq, last_step, modified_epoch, count, score] = self.to_array().map(|width| {
            let value = le_u64(&bytes, at) & max_of_width(width);
            at += usize::from(width);
            value
        });
        HeadFields {
            id: id_of(&bytes),
            write_seq,
            last_step,
            modified_epoch: modified_epoch as u32,
            count: count as u32,
            score: f32::from_bits(score as u32),
        }
    }

    /// Returns the widths in the order of the head.
    fn to_array(self) -> [u8; 5] {
        [self.write_seq, self.last_step, self.modified_epoch, self.count, self.score]
    }
}

/// The fields of a head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadFields {
    pub(crate) id: Id,
    pub(crate) write_seq: u64,
    pub(crate) last_step: u64,
    pub(crate) modified_epoch: u32,
    pub(crate) count: u32,
    pub(crate) score: f32,
}

/// Binds records to their segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordBinding {
    first: u32,
    step: u32,
}

impl RecordBinding {
    /// Returns the binding of the records of segment `serial` of the table `key`.
    pub(crate) fn new(key: u64, serial: u64) -> Self {
        let first = hash_id((key ^ serial.rotate_left(32)) as i64) as u32;
        Self { first, step: MASK_STEP }
    }

    #[inline]
    fn mask(self, number: u32) -> u32 {
        self.first.wrapping_add(number.wrapping_mul(self.step))
    }

    /// Binds a newly encoded record to number `number`.
    #[inline]
    pub(crate) fn bind(self, number: u32, record: &mut [u8]) {
        mask_checksum(record, self.mask(number));
    }

    /// Binds a copy of this segment's verified record `from` to number `to.1` of the segment with the binding `to.0`.
    /// The heads of both segments must have the same layout.
    #[inline]
    pub(crate) fn rebind(self, from: u32, to: (Self, u32), record: &mut [u8]) {
        mask_checksum(record, self.mask(from) ^ to.0.mask(to.1));
    }
}

#[inline]
fn mask_checksum(record: &mut [u8], mask: u32) {
    let crc = le_u32(record, 0) ^ mask;
    record[..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
}

/// Layout and binding of a segment's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordFormat {
    pub(crate) widths: HeadWidths,
    pub(crate) binding: RecordBinding,
}

/// A verified record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) head: HeadFields,
    /// Little-endian floats. A tombstone has none.
    pub(crate) payload: &'a [u8],
}

impl Record<'_> {
    /// Copies the row's vector part into `vector`, and returns its header. The payload must have the layout's length,
    /// which the check of the segment's header ensures.
    pub(crate) fn unpack(&self, layout: &RowLayout, vector: &mut [f32]) -> RowHeader {
        let bytes = layout.vector_floats() * 4;
        bytemuck::cast_slice_mut::<f32, u8>(vector).copy_from_slice(&self.payload[..bytes]);
        let scalar = if layout.scalar_slot { f32::from_bits(le_u32(self.payload, bytes)) } else { 0.0 };
        let HeadFields { id, last_step, modified_epoch, count, score, .. } = self.head;
        RowHeader { id, last_step, count, score, scalar, modified_epoch }
    }
}

/// Bytes of the payload of a row of `layout`.
pub(crate) fn payload_bytes(layout: &RowLayout) -> usize {
    layout.floats() * 4
}

/// Maximum bytes of the record of a row of `layout`.
pub(crate) fn max_record_bytes(layout: &RowLayout) -> usize {
    MAX_HEAD_BYTES + payload_bytes(layout)
}

/// Writes the records of rows, with heads of these widths, into `into`, which has exactly the bytes for them. The first
/// has this `write_seq`. They are not yet bound to their segments.
pub(crate) fn encode_rows(
    into: &mut [u8],
    rows: &[RowRef<'_>],
    layout: &RowLayout,
    (widths, first_seq): (HeadWidths, u64),
) {
    let record_bytes = widths.bytes() + payload_bytes(layout);
    let rows = rows.iter().zip(first_seq..);
    encode_each(into, record_bytes, rows, |record, (row, write_seq)| {
        encode_row(record, row, layout.scalar_slot, (widths, write_seq));
    });
}

/// Encodes decoded records again, with heads of these widths. They are not yet bound to their segments.
pub(crate) fn repack<'a>(into: &mut [u8], records: impl Iterator<Item = &'a Record<'a>>, widths: HeadWidths) {
    let head_bytes = widths.bytes();
    let mut records = records.peekable();
    let record_bytes = head_bytes + records.peek().map_or(0, |record| record.payload.len());
    encode_each(into, record_bytes, records, |bytes, record| {
        let (head, payload) = bytes.split_at_mut(head_bytes);
        widths.encode(&record.head, head);
        payload.copy_from_slice(record.payload);
    });
}

/// Writes a record of `record_bytes` for each of `items`, and its checksum.
#[inline]
fn encode_each<T>(
    into: &mut [u8],
    record_bytes: usize,
    mut items: impl Iterator<Item = T>,
    encode: impl Fn(&mut [u8], T),
) {
    for group in into.chunks_mut(CHECKSUM_LANES * record_bytes) {
        group.chunks_exact_mut(record_bytes).zip(&mut items).for_each(|(record, item)| encode(record, item));
        let mut crcs = [0; CHECKSUM_LANES];
        checksums_of(group.chunks_exact(record_bytes), |at, crc| crcs[at] = crc);
        for (record, crc) in group.chunks_exact_mut(record_bytes).zip(crcs) {
            record[..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
        }
    }
}

/// Writes a row's record without its checksum.
#[inline]
fn encode_row(into: &mut [u8], row: &RowRef<'_>, scalar_slot: bool, (widths, write_seq): (HeadWidths, u64)) {
    let (head, payload) = into.split_at_mut(widths.bytes());
    widths.encode(&head_of(row.header, write_seq), head);
    let (vector, scalar) = payload.split_at_mut(row.vector.len() * 4);
    vector.copy_from_slice(bytemuck::cast_slice(row.vector));
    if scalar_slot {
        scalar.copy_from_slice(&row.header.scalar.to_le_bytes());
    }
}

/// Writes a tombstone into `into`, which has the length of a head of these widths. It is not yet bound to its segment.
pub(crate) fn encode_tombstone(into: &mut [u8], id: Id, modified_epoch: u32, (widths, write_seq): (HeadWidths, u64)) {
    let header = RowHeader { id, modified_epoch, ..RowHeader::default() };
    widths.encode(&head_of(&header, write_seq), into);
    let crc = crc32c::crc32c(&into[CHECKED_FROM..]);
    into[..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
}

#[inline]
fn head_of(row: &RowHeader, write_seq: u64) -> HeadFields {
    HeadFields {
        id: row.id,
        write_seq,
        last_step: row.last_step,
        modified_epoch: row.modified_epoch,
        count: row.count,
        score: row.score,
    }
}

/// Checks and decodes record `number` of a segment. Its `bytes` are at `offset` of `path` and have the length of the
/// segment's records.
pub(crate) fn decode<'a>(
    bytes: &'a [u8],
    (format, number): (RecordFormat, u32),
    path: &Path,
    offset: u64,
) -> Result<Record<'a>> {
    let crc = bytes.get(CHECKED_FROM..).map_or(0, crc32c::crc32c);
    decode_with(bytes, crc, (format, number), path, offset)
}

/// Like [`decode`], with the precomputed checksum of the bytes.
pub(crate) fn decode_with<'a>(
    bytes: &'a [u8],
    crc: u32,
    (format, number): (RecordFormat, u32),
    path: &Path,
    offset: u64,
) -> Result<Record<'a>> {
    let Some((head, payload)) = bytes.split_at_checked(format.widths.bytes()) else {
        return Err(Error::corruption(path, offset, "the record's length", format.widths.bytes(), bytes.len()));
    };
    let stored = le_u32(head, 0);
    let crc = crc ^ format.binding.mask(number);
    if stored != crc {
        let (expected, got) = (format!("{stored:08x}"), format!("{crc:08x}"));
        return Err(Error::corruption(path, offset, "the record's checksum", expected, got));
    }
    Ok(Record { head: format.widths.decode(head), payload })
}

/// Returns the id of a record.
#[inline]
pub(crate) fn id_of(record: &[u8]) -> Id {
    le_u64(record, ID_AT) as Id
}

/// Calls `sink` with the position of each record and its checksum for [`decode_with`]. All records have one length.
///
/// A CPU with a crc32c instruction can start one per cycle, and has its result three cycles later. So the checksums of
/// four independent records are computed interleaved.
pub(crate) fn checksums_of<'a>(records: impl Iterator<Item = &'a [u8]>, mut sink: impl FnMut(usize, u32)) {
    let mut together: [&[u8]; CHECKSUM_LANES] = [&[]; CHECKSUM_LANES];
    let mut count = 0;
    for record in records {
        together[count % CHECKSUM_LANES] = &record[CHECKED_FROM..];
        count += 1;
        if count % CHECKSUM_LANES == 0 {
            let crcs = checksum_group(together);
            (count - CHECKSUM_LANES..).zip(crcs).for_each(|(at, crc)| sink(at, crc));
        }
    }
    let done = count / CHECKSUM_LANES * CHECKSUM_LANES;
    (done..count).zip(together).for_each(|(at, record)| sink(at, crc32c::crc32c(record)));
}

#[allow(unsafe_code)]
fn checksum_group(records: [&[u8]; CHECKSUM_LANES]) -> [u32; CHECKSUM_LANES] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") && records.iter().all(|record| record.len() == records[0].len()) {
        // SAFETY: the CPU has SSE 4.2.
        return unsafe { checksum_group_sse42(records) };
    }
    records.map(crc32c::crc32c)
}

/// Computes the checksums of records of one length.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn checksum_group_sse42(records: [&[u8]; CHECKSUM_LANES]) -> [u32; CHECKSUM_LANES] {
    let words = records.map(|record| record.as_chunks::<8>());
    let [a, b, c, d] = words.map(|(words, _)| words);
    let mut crcs = [u64::from(u32::MAX); CHECKSUM_LANES];
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        crcs[0] = _mm_crc32_u64(crcs[0], u64::from_le_bytes(*a));
        crcs[1] = _mm_crc32_u64(crcs[1], u64::from_le_bytes(*b));
        crcs[2] = _mm_crc32_u64(crcs[2], u64::from_le_bytes(*c));
        crcs[3] = _mm_crc32_u64(crcs[3], u64::from_le_bytes(*d));
    }
    let mut results = [0; CHECKSUM_LANES];
    for ((result, crc), (_, rest)) in results.iter_mut().zip(crcs).zip(words) {
        *result = !rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte));
    }
    results
}

/// Returns the little-endian u32 at `at`. The caller has checked the bounds.
pub(crate) fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Returns the little-endian u64 at `at`. The caller has checked the bounds.
pub(crate) fn le_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Returns the smallest of `widths` that fits `value`.
fn least_width(widths: &[u8], value: u64) -> u8 {
    widths.iter().copied().find(|width| value <= max_of_width(*width)).unwrap_or(8)
}

/// Returns the largest number of `width` bytes.
#[inline]
fn max_of_width(width: u8) -> u64 {
    u64::MAX.checked_shr(64 - 8 * u32::from(width)).unwrap_or(0)
}

#[cfg(test)]
mod tests;
