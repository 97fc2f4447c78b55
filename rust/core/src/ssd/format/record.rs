//! Records: how a row lies on disk. The format is version 2, little-endian and packed.
//!
//! | byte | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | crc32c of all that follows, payload included, xor the mask of the record's position |
//! | 4 | 1 | version, 2 |
//! | 5 | 1 | kind: 1 row, 2 tombstone |
//! | 6 | 2 | 0 |
//! | 8 | 8 | id |
//! | 16 | 8 | `write_seq`: the order of writing; compaction keeps it |
//! | 24 | 8 | last step |
//! | 32 | 4 | `modified_epoch`; compaction keeps it |
//! | 36 | 4 | count |
//! | 40 | 4 | score, f32 |
//! | 44 | 4 × floats | rows only: the vector part, then the scalar slot where the layout has one, f32 |
//!
//! The mask (see [`Binding`]) binds a record to its table, its segment and its number there. So a whole record that lies where another
//! belongs, because a disk lost a write or put it elsewhere, is damage like any other. In version 1 the mask is 0.

use std::path::Path;

use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowLayout, RowRef};
use crate::ssd::format::checksums::checksums;
use crate::types::{Id, hash_id};

/// Bytes of a record before its payload. A tombstone has no others.
pub(crate) const RECORD_HEADER_BYTES: usize = 44;
const VERSION: u8 = 2;
/// The checksum is of the bytes from this one on.
const CHECKED_FROM: usize = 4;
/// Rows that are encoded together, so that their checksums are computed in turn while their bytes are in the processor's cache.
const AT_ONCE: usize = 4;
/// The difference between the masks of two records that follow each other. It is odd, so that no two records of a segment have the same
/// mask.
const MASK_STEP: u32 = 0x9e37_79b1;

// The payload is copied as it lies in memory.
const _: () = assert!(cfg!(target_endian = "little"), "records are little-endian");

/// What a record says of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RecordKind {
    /// This is its row.
    Row = 1,
    /// It was removed.
    Tombstone = 2,
}

/// Ties the records of a segment to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    version: u8,
    first: u32,
    step: u32,
}

impl Binding {
    /// The binding of records that are written now, to segment `serial` of the table `key`.
    pub(crate) fn new(key: u64, serial: u64) -> Self {
        let first = hash_id((key ^ serial.rotate_left(32)) as i64) as u32;
        Self { version: VERSION, first, step: MASK_STEP }
    }

    /// The binding of records of version 1, which is none.
    pub(crate) fn version_1() -> Self {
        Self { version: 1, first: 0, step: 0 }
    }

    #[inline]
    fn mask(self, number: u32) -> u32 {
        self.first.wrapping_add(number.wrapping_mul(self.step))
    }

    /// Bind a record that was just encoded to number `number`.
    #[inline]
    pub(crate) fn bind(self, number: u32, record: &mut [u8]) {
        debug_assert_eq!((self.version, record[4]), (VERSION, VERSION), "no segment of an older version is written");
        let crc = le_u32(record, 0) ^ self.mask(number);
        record[..4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Bind a copy of this segment's record `from`, which was checked, to number `to.1` of the segment whose binding is `to.0`.
    #[inline]
    pub(crate) fn rebind(self, from: u32, to: (Self, u32), record: &mut [u8]) {
        if self.version == VERSION {
            let crc = le_u32(record, 0) ^ self.mask(from);
            record[..4].copy_from_slice(&crc.to_le_bytes());
        } else {
            record[4] = VERSION;
            finish(record);
        }
        to.0.bind(to.1, record);
    }
}

/// Bytes of the record of a row of `layout`.
pub(crate) fn row_record_bytes(layout: &RowLayout) -> usize {
    RECORD_HEADER_BYTES + layout.floats() * 4
}

/// A record that was read and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) kind: RecordKind,
    pub(crate) id: Id,
    pub(crate) write_seq: u64,
    pub(crate) last_step: u64,
    pub(crate) modified_epoch: u32,
    pub(crate) count: u32,
    pub(crate) score: f32,
    /// Little-endian floats. A tombstone has none.
    pub(crate) payload: &'a [u8],
}

/// Write the records of rows into `into`, which has exactly [`row_record_bytes`] for each, the first with this `write_seq`. They are still to
/// be bound to their segments.
pub(crate) fn encode_rows(into: &mut [u8], rows: &[RowRef<'_>], layout: &RowLayout, first_seq: u64) {
    let record_bytes = row_record_bytes(layout);
    let groups = into.chunks_mut(AT_ONCE * record_bytes).zip(rows.chunks(AT_ONCE));
    for ((group, rows), first_seq) in groups.zip((first_seq..).step_by(AT_ONCE)) {
        for ((record, row), seq) in group.chunks_exact_mut(record_bytes).zip(rows).zip(first_seq..) {
            encode_row(record, row.header, row.vector, layout.scalar_slot, seq);
        }
        let mut crcs = [0; AT_ONCE];
        checksums(group.chunks_exact(record_bytes), CHECKED_FROM, |at, crc| crcs[at] = crc);
        for (record, crc) in group.chunks_exact_mut(record_bytes).zip(crcs) {
            record[..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
        }
    }
}

/// Write a row's record but for its checksum.
fn encode_row(into: &mut [u8], header: &RowHeader, vector: &[f32], scalar_slot: bool, write_seq: u64) {
    encode_header(into, RecordKind::Row, header, write_seq);
    let vector = bytemuck::cast_slice::<f32, u8>(vector);
    let end = RECORD_HEADER_BYTES + vector.len();
    into[RECORD_HEADER_BYTES..end].copy_from_slice(vector);
    if scalar_slot {
        into[end..end + 4].copy_from_slice(&header.scalar.to_le_bytes());
    }
}

/// Write a tombstone into `into`, which has exactly [`RECORD_HEADER_BYTES`]. It is still to be bound to its segment.
pub(crate) fn encode_tombstone(into: &mut [u8], id: Id, modified_epoch: u32, write_seq: u64) {
    let header = RowHeader { id, modified_epoch, ..RowHeader::default() };
    encode_header(into, RecordKind::Tombstone, &header, write_seq);
    finish(into);
}

fn encode_header(into: &mut [u8], kind: RecordKind, header: &RowHeader, write_seq: u64) {
    into[4] = VERSION;
    into[5] = kind as u8;
    into[6..8].fill(0);
    into[8..16].copy_from_slice(&header.id.to_le_bytes());
    into[16..24].copy_from_slice(&write_seq.to_le_bytes());
    into[24..32].copy_from_slice(&header.last_step.to_le_bytes());
    into[32..36].copy_from_slice(&header.modified_epoch.to_le_bytes());
    into[36..40].copy_from_slice(&header.count.to_le_bytes());
    into[40..44].copy_from_slice(&header.score.to_le_bytes());
}

fn finish(into: &mut [u8]) {
    let crc = crc32c::crc32c(&into[4..]);
    into[..4].copy_from_slice(&crc.to_le_bytes());
}

/// Check and take apart record `number` of a segment. It is in `bytes`, which lie at `offset` of `path` and are as long as the segment's
/// records.
pub(crate) fn decode<'a>(
    bytes: &'a [u8],
    (binding, number): (Binding, u32),
    path: &Path,
    offset: u64,
) -> Result<Record<'a>> {
    let crc = bytes.get(CHECKED_FROM..).map_or(0, crc32c::crc32c);
    decode_with(bytes, crc, (binding, number), path, offset)
}

/// Hand the position of each record to `sink`, and the checksum of its bytes for [`decode_with`]. All records have one length.
pub(crate) fn checksums_of<'a>(records: impl Iterator<Item = &'a [u8]>, sink: impl FnMut(usize, u32)) {
    checksums(records, CHECKED_FROM, sink);
}

/// As [`decode`], with the checksum of the bytes that was computed.
pub(crate) fn decode_with<'a>(
    bytes: &'a [u8],
    crc: u32,
    (binding, number): (Binding, u32),
    path: &Path,
    offset: u64,
) -> Result<Record<'a>> {
    let Some((head, payload)) = bytes.split_at_checked(RECORD_HEADER_BYTES) else {
        return Err(Error::corruption(path, offset, "the record's length", RECORD_HEADER_BYTES, bytes.len()));
    };
    let stored = le_u32(head, 0);
    let crc = crc ^ binding.mask(number);
    if stored != crc {
        let (expected, got) = (format!("{stored:08x}"), format!("{crc:08x}"));
        return Err(Error::corruption(path, offset, "the record's checksum", expected, got));
    }
    if head[4] != binding.version {
        return Err(Error::corruption(path, offset + 4, "the record's version", binding.version, head[4]));
    }
    let kind = match head[5] {
        1 => RecordKind::Row,
        2 => RecordKind::Tombstone,
        other => return Err(Error::corruption(path, offset + 5, "the record's kind", "1 or 2", other)),
    };
    if (kind == RecordKind::Tombstone) != payload.is_empty() {
        let got = format!("{} for a {kind:?}", payload.len());
        return Err(Error::corruption(path, offset, "the record's payload", "empty for tombstones only", got));
    }
    Ok(Record {
        kind,
        id: le_u64(head, 8) as Id,
        write_seq: le_u64(head, 16),
        last_step: le_u64(head, 24),
        modified_epoch: le_u32(head, 32),
        count: le_u32(head, 36),
        score: f32::from_bits(le_u32(head, 40)),
        payload,
    })
}

impl Record<'_> {
    /// Copy the row's vector part into `vector`, and return its header. The payload must have the layout's length, with which the segment's
    /// header was compared.
    pub(crate) fn unpack(&self, layout: &RowLayout, vector: &mut [f32]) -> RowHeader {
        let bytes = layout.vector_floats() * 4;
        bytemuck::cast_slice_mut::<f32, u8>(vector).copy_from_slice(&self.payload[..bytes]);
        let scalar = if layout.scalar_slot { f32::from_bits(le_u32(self.payload, bytes)) } else { 0.0 };
        RowHeader {
            id: self.id,
            last_step: self.last_step,
            count: self.count,
            score: self.score,
            scalar,
            modified_epoch: self.modified_epoch,
        }
    }
}

/// The little-endian u32 at `at`. The caller has checked that it is inside.
pub(crate) fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// The little-endian u64 at `at`. The caller has checked that it is inside.
pub(crate) fn le_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    const LAYOUT: RowLayout = RowLayout { dim: 3, vector_slots: 1, scalar_slot: true };
    const POSITION: (Binding, u32) = (Binding { version: VERSION, first: 0x1234_5678, step: MASK_STEP }, 5);

    fn sample() -> (RowHeader, Vec<f32>, Vec<u8>) {
        let header = RowHeader {
            id: -7,
            last_step: 9,
            count: 3,
            score: 2.5,
            scalar: f32::from_bits(0x7fc0_0001),
            modified_epoch: 4,
        };
        let vector: Vec<f32> = (0..6).map(|x| x as f32 - 2.5).collect();
        let mut bytes = vec![0; row_record_bytes(&LAYOUT)];
        encode_rows(&mut bytes, &[RowRef { header: &header, vector: &vector }], &LAYOUT, 77);
        POSITION.0.bind(POSITION.1, &mut bytes);
        (header, vector, bytes)
    }

    #[test]
    fn a_row_comes_back_bit_for_bit() {
        let (header, vector, bytes) = sample();
        assert_eq!(bytes.len(), 44 + 7 * 4);
        let record = decode(&bytes, POSITION, Path::new("x"), 0).unwrap();
        assert_eq!((record.kind, record.id, record.write_seq), (RecordKind::Row, -7, 77));
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
            let error = decode(&flipped, POSITION, Path::new("dir/x.seg"), 4096).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "bit {bit}");
            assert!(error.to_string().contains("dir/x.seg is damaged at byte 4096"), "{error}");
        }
    }

    #[test]
    fn zeros_and_short_bytes_are_no_record() {
        for len in [0, 1, 43, 44, 72] {
            let decoded = decode(&vec![0; len], POSITION, Path::new("x"), 0).map(|record| record.id);
            assert_eq!(decoded.unwrap_err().kind(), Kind::Corruption, "{len}");
        }
    }

    #[test]
    fn a_tombstone_has_no_payload() {
        let mut bytes = vec![0; RECORD_HEADER_BYTES];
        encode_tombstone(&mut bytes, i64::MIN, 5, 6);
        POSITION.0.bind(POSITION.1, &mut bytes);
        let record = decode(&bytes, POSITION, Path::new("x"), 0).unwrap();
        assert_eq!((record.kind, record.id, record.modified_epoch), (RecordKind::Tombstone, i64::MIN, 5));
        // A checksummed tombstone where a row's length is expected is refused all the same.
        let mut long = vec![0; 48];
        encode_tombstone(&mut long, 1, 5, 6);
        POSITION.0.bind(POSITION.1, &mut long);
        assert_eq!(decode(&long, POSITION, Path::new("x"), 0).unwrap_err().kind(), Kind::Corruption);
    }

    #[test]
    fn a_whole_record_at_another_position_is_found() {
        let (_, _, bytes) = sample();
        let refused = |position: (Binding, u32)| {
            decode(&bytes, position, Path::new("x"), 0).is_err_and(|error| error.kind() == Kind::Corruption)
        };
        assert!((0..1 << 20).filter(|number| *number != POSITION.1).all(|number| refused((POSITION.0, number))));
        assert!((0..1000).all(|serial| refused((Binding::new(7, serial), POSITION.1))), "another segment");
        let (here, there) = (Binding::new(7, 3), Binding::new(8, 3));
        assert!((0..1000).all(|number| here.mask(number) != there.mask(number)), "another table");
    }

    #[test]
    fn a_record_that_moves_is_bound_to_its_new_position_and_becomes_one_of_this_version() {
        let (header, vector, bytes) = sample();
        let to = (Binding::new(7, 9), 11);
        let mut moved = bytes.clone();
        POSITION.0.rebind(POSITION.1, to, &mut moved);
        let mut old = bytes;
        old[4] = 1;
        finish(&mut old);
        assert!(decode(&old, (Binding::version_1(), 3), Path::new("x"), 0).is_ok());
        Binding::version_1().rebind(3, to, &mut old);
        assert_eq!(moved, old);
        let mut read = vec![0.0; 6];
        let got = decode(&moved, to, Path::new("x"), 0).unwrap().unpack(&LAYOUT, &mut read);
        assert_eq!((bytemuck::bytes_of(&got), read), (bytemuck::bytes_of(&header), vector));
    }
}
