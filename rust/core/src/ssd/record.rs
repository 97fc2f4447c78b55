//! Records: how a row lies on disk. Format version 1, little-endian, packed.
//!
//! | byte | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | crc32c of all that follows, payload included |
//! | 4 | 1 | version, 1 |
//! | 5 | 1 | kind: 1 row, 2 tombstone |
//! | 6 | 2 | 0 |
//! | 8 | 8 | id |
//! | 16 | 8 | `write_seq`: order of writing; kept by compaction |
//! | 24 | 8 | last step |
//! | 32 | 4 | `modified_epoch`; kept by compaction |
//! | 36 | 4 | count |
//! | 40 | 4 | score, f32 |
//! | 44 | 4 × floats | rows only: the vector part, then the scalar slot where the layout has one, f32 |

use std::path::Path;

use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowLayout};
use crate::types::Id;

/// Bytes before the payload; all of a tombstone.
pub(super) const RECORD_HEADER_BYTES: usize = 44;
const VERSION: u8 = 1;

// The payload is copied as it lies in memory.
const _: () = assert!(cfg!(target_endian = "little"), "records are little-endian");

/// What a record says about its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// Its row.
    Row = 1,
    /// That it is no more.
    Tombstone = 2,
}

/// Bytes of a row's record.
pub(super) fn row_record_bytes(layout: &RowLayout) -> usize {
    RECORD_HEADER_BYTES + layout.floats() * 4
}

/// A record read back and checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record<'a> {
    pub(super) kind: RecordKind,
    pub(super) id: Id,
    pub(super) write_seq: u64,
    pub(super) last_step: u64,
    pub(super) modified_epoch: u32,
    pub(super) count: u32,
    pub(super) score: f32,
    /// Little-endian floats; empty for a tombstone.
    pub(super) payload: &'a [u8],
}

/// Write a row's record into `into`, which has exactly [`row_record_bytes`].
pub(super) fn encode_row(into: &mut [u8], header: &RowHeader, vector: &[f32], scalar_slot: bool, write_seq: u64) {
    encode_header(into, RecordKind::Row, header, write_seq);
    let vector = bytemuck::cast_slice::<f32, u8>(vector);
    let end = RECORD_HEADER_BYTES + vector.len();
    into[RECORD_HEADER_BYTES..end].copy_from_slice(vector);
    if scalar_slot {
        into[end..end + 4].copy_from_slice(&header.scalar.to_le_bytes());
    }
    finish(into);
}

/// Write a tombstone into `into`, which has exactly [`RECORD_HEADER_BYTES`].
pub(super) fn encode_tombstone(into: &mut [u8], id: Id, modified_epoch: u32, write_seq: u64) {
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

/// Check and take apart the record in `bytes`, which lie at `offset` of `path` and are as long as the segment's records.
pub(super) fn decode<'a>(bytes: &'a [u8], path: &Path, offset: u64) -> Result<Record<'a>> {
    let Some((head, payload)) = bytes.split_at_checked(RECORD_HEADER_BYTES) else {
        return Err(Error::corruption(path, offset, "the record's length", RECORD_HEADER_BYTES, bytes.len()));
    };
    let stored = le_u32(head, 0);
    let crc = crc32c::crc32c(&bytes[4..]);
    if stored != crc {
        let (expected, got) = (format!("{stored:08x}"), format!("{crc:08x}"));
        return Err(Error::corruption(path, offset, "the record's checksum", expected, got));
    }
    if head[4] != VERSION {
        return Err(Error::corruption(path, offset + 4, "the record's version", VERSION, head[4]));
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
    /// The row's header, and its vector part copied into `vector`. The payload must have the layout's length (the segment's
    /// header was checked against it).
    pub(super) fn unpack(&self, layout: &RowLayout, vector: &mut [f32]) -> RowHeader {
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

/// The little-endian u32 at `at`, which the caller has checked to be inside.
pub(super) fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// The little-endian u64 at `at`, which the caller has checked to be inside.
pub(super) fn le_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    const LAYOUT: RowLayout = RowLayout { dim: 3, vector_slots: 1, scalar_slot: true };

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
        encode_row(&mut bytes, &header, &vector, LAYOUT.scalar_slot, 77);
        (header, vector, bytes)
    }

    #[test]
    fn a_row_comes_back_bit_for_bit() {
        let (header, vector, bytes) = sample();
        assert_eq!(bytes.len(), 44 + 7 * 4);
        let record = decode(&bytes, Path::new("x"), 0).unwrap();
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
            let error = decode(&flipped, Path::new("dir/x.seg"), 4096).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "bit {bit}");
            assert!(error.to_string().contains("dir/x.seg is damaged at byte 4096"), "{error}");
        }
    }

    #[test]
    fn zeros_and_short_bytes_are_no_record() {
        for len in [0, 1, 43, 44, 72] {
            assert_eq!(decode(&vec![0; len], Path::new("x"), 0).unwrap_err().kind(), Kind::Corruption, "{len}");
        }
    }

    #[test]
    fn a_tombstone_has_no_payload() {
        let mut bytes = vec![0; RECORD_HEADER_BYTES];
        encode_tombstone(&mut bytes, i64::MIN, 5, 6);
        let record = decode(&bytes, Path::new("x"), 0).unwrap();
        assert_eq!((record.kind, record.id, record.modified_epoch), (RecordKind::Tombstone, i64::MIN, 5));
        // A checksummed tombstone where a row's length is expected is refused all the same.
        let mut long = vec![0; 48];
        encode_tombstone(&mut long, 1, 5, 6);
        assert_eq!(decode(&long, Path::new("x"), 0).unwrap_err().kind(), Kind::Corruption);
    }
}
