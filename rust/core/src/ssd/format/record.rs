//! Records: the layout of a row on disk, little-endian and packed: a head (see `head`), then the payload.
//!
//! Only rows have a payload: 4 bytes for each float of the vector part, then the scalar slot if the layout has one,
//! f32. `write_seq` is the order of writing. Compaction preserves it, and `modified_epoch`.
//!
//! The mask (see [`RecordBinding`]) binds a record to its table, its segment and its number there. So an intact record
//! at another record's position, because a disk lost or misdirected a write, is detected as corruption.

use std::path::Path;

use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowLayout, RowRef};
use crate::ssd::format::checksums::checksum_each;
use crate::ssd::format::head::{CHECKED_FROM, HeadFields, HeadWidths, MAX_HEAD_BYTES};
use crate::ssd::format::words::le_u32;
use crate::types::{Id, hash_id};

/// Rows that are encoded together, so that their checksums are computed interleaved while their bytes are in the CPU
/// cache.
const ENCODE_GROUP_ROWS: usize = 4;
/// The difference between the masks of consecutive records. It is odd, so that all masks of a segment are different.
const MASK_STEP: u32 = 0x9e37_79b1;

// The payload is copied from memory without conversion.
const _: () = assert!(cfg!(target_endian = "little"), "records are little-endian");

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

/// Bytes of the payload of a row of `layout`.
pub(crate) fn payload_bytes(layout: &RowLayout) -> usize {
    layout.floats() * 4
}

/// Maximum bytes of the record of a row of `layout`.
pub(crate) fn max_record_bytes(layout: &RowLayout) -> usize {
    MAX_HEAD_BYTES + payload_bytes(layout)
}

/// A verified record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) head: HeadFields,
    /// Little-endian floats. A tombstone has none.
    pub(crate) payload: &'a [u8],
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
    for group in into.chunks_mut(ENCODE_GROUP_ROWS * record_bytes) {
        group.chunks_exact_mut(record_bytes).zip(&mut items).for_each(|(record, item)| encode(record, item));
        let mut crcs = [0; ENCODE_GROUP_ROWS];
        checksum_each(group.chunks_exact(record_bytes), CHECKED_FROM, |at, crc| crcs[at] = crc);
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

/// Calls `sink` with the position of each record and its checksum for [`decode_with`]. All records have one length.
pub(crate) fn checksums_of<'a>(records: impl Iterator<Item = &'a [u8]>, sink: impl FnMut(usize, u32)) {
    checksum_each(records, CHECKED_FROM, sink);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::ssd::format::head::RecordMaxima;

    const LAYOUT: RowLayout = RowLayout { dim: 3, vector_slots: 1, scalar_slot: true };
    const BINDING: RecordBinding = RecordBinding { first: 0x1234_5678, step: MASK_STEP };
    const NUMBER: u32 = 5;

    fn header() -> RowHeader {
        let scalar = f32::from_bits(0x7fc0_0001);
        RowHeader { id: -7, last_step: 9, count: 3, score: 2.5, scalar, modified_epoch: 4 }
    }

    fn widths() -> HeadWidths {
        HeadWidths::of_rows(&RecordMaxima { write_seq: 77, ..RecordMaxima::of_rows(std::iter::once(&header())) })
    }

    fn position() -> (RecordFormat, u32) {
        (RecordFormat { widths: widths(), binding: BINDING }, NUMBER)
    }

    fn sample() -> (RowHeader, Vec<f32>, Vec<u8>) {
        let header = header();
        let vector: Vec<f32> = (0..6).map(|x| x as f32 - 2.5).collect();
        let mut bytes = vec![0; widths().bytes() + payload_bytes(&LAYOUT)];
        encode_rows(&mut bytes, &[RowRef { header: &header, vector: &vector }], &LAYOUT, (widths(), 77));
        BINDING.bind(NUMBER, &mut bytes);
        (header, vector, bytes)
    }

    #[test]
    fn a_row_comes_back_bit_for_bit() {
        let (header, vector, bytes) = sample();
        assert_eq!(bytes.len(), 12 + 4 + 3 + 1 + 1 + 4 + 7 * 4);
        let record = decode(&bytes, position(), Path::new("x"), 0).unwrap();
        assert_eq!((record.head.id, record.head.write_seq), (-7, 77));
        let mut read = vec![0.0; 6];
        let got = record.unpack(&LAYOUT, &mut read);
        assert_eq!(bytemuck::bytes_of(&got), bytemuck::bytes_of(&header));
        assert_eq!(read, vector);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let (_, _, bytes) = sample();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = decode(&flipped, position(), Path::new("dir/x.seg"), 4096).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "bit {bit}");
            assert!(error.to_string().contains("dir/x.seg is damaged at byte 4096"), "{error}");
        }
    }

    #[test]
    fn zeros_and_short_bytes_are_no_record() {
        for len in [0, 1, 24, 25, 43, 44, 72] {
            let decoded = decode(&vec![0; len], position(), Path::new("x"), 0).map(|record| record.head.id);
            assert_eq!(decoded.unwrap_err().kind(), Kind::Corruption, "{len}");
        }
    }

    #[test]
    fn a_tombstone_has_no_payload() {
        let widths =
            HeadWidths::of_tombstones(&RecordMaxima { write_seq: 6, modified_epoch: 5, ..RecordMaxima::default() });
        let format = RecordFormat { widths, binding: BINDING };
        let mut bytes = vec![0; format.widths.bytes()];
        encode_tombstone(&mut bytes, i64::MIN, 5, (widths, 6));
        BINDING.bind(NUMBER, &mut bytes);
        let record = decode(&bytes, (format, NUMBER), Path::new("x"), 0).unwrap();
        let HeadFields { id, modified_epoch, write_seq, .. } = record.head;
        assert_eq!((record.payload.len(), id, modified_epoch, write_seq), (0, i64::MIN, 5, 6));
    }

    #[test]
    fn a_whole_record_at_another_position_is_found() {
        let (_, _, bytes) = sample();
        let refused = |(binding, number): (RecordBinding, u32)| {
            let position = (RecordFormat { binding, ..position().0 }, number);
            decode(&bytes, position, Path::new("x"), 0).is_err_and(|error| error.kind() == Kind::Corruption)
        };
        assert!((0..1 << 20).filter(|number| *number != NUMBER).all(|number| refused((BINDING, number))));
        assert!((0..1000).all(|serial| refused((RecordBinding::new(7, serial), NUMBER))), "another segment");
        let (here, there) = (RecordBinding::new(7, 3), RecordBinding::new(8, 3));
        assert!((0..1000).all(|number| here.mask(number) != there.mask(number)), "another table");
    }

    #[test]
    fn a_record_that_moves_is_bound_to_its_new_position() {
        let (header, vector, bytes) = sample();
        let to = (RecordBinding::new(7, 9), 11);
        let mut moved = bytes;
        BINDING.rebind(NUMBER, to, &mut moved);
        let mut read = vec![0.0; 6];
        let position = (RecordFormat { binding: to.0, ..position().0 }, to.1);
        let got = decode(&moved, position, Path::new("x"), 0).unwrap().unpack(&LAYOUT, &mut read);
        assert_eq!((bytemuck::bytes_of(&got), read), (bytemuck::bytes_of(&header), vector));
    }

    #[test]
    fn a_record_is_written_again_with_other_widths() {
        let (header, vector, bytes) = sample();
        let wide = HeadWidths::of_rows(&RecordMaxima::ANY);
        let record = decode(&bytes, position(), Path::new("x"), 0).unwrap();
        let mut again = vec![0; 2 * (wide.bytes() + payload_bytes(&LAYOUT))];
        repack(&mut again, [&record, &record].into_iter(), wide);
        for copy in again.chunks_exact_mut(wide.bytes() + payload_bytes(&LAYOUT)) {
            BINDING.bind(NUMBER, copy);
            let format = RecordFormat { widths: wide, binding: BINDING };
            let mut read = vec![0.0; 6];
            let got = decode(copy, (format, NUMBER), Path::new("x"), 0).unwrap().unpack(&LAYOUT, &mut read);
            assert_eq!((bytemuck::bytes_of(&got), &read), (bytemuck::bytes_of(&header), &vector));
        }
    }
}
