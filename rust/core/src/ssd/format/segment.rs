//! The frame of a segment's file: a header, packed records, and the footer (see `footer`).
//!
//! ```text
//! header   "EMBCSEG1" | header bytes u32 | content u8 (1 rows, 2 tombstones) | field count u8 | widths of the records' heads u16
//!          | record bytes u32 | serial u64 | table key u64 | fields: name bytes u8, name, dtype u8 (1 = f32), width u32 | crc32c u32
//! records  n × record bytes
//! entries, padding, trailer: the footer, which ends with the file, whose length is a multiple of 4096
//! ```

use std::path::Path;

use crate::config::OptimizerKind;
use crate::error::{Error, Result};
use crate::rows::RowLayout;
use crate::ssd::format::head::{HeadWidths, MAX_HEAD_BYTES};
use crate::ssd::format::record::{RecordBinding, RecordFormat, payload_bytes};

const HEADER_MAGIC: [u8; 8] = *b"EMBCSEG1";
const FIXED_HEADER_BYTES: usize = 36;
/// Offset of the head widths in a header.
const WIDTHS_AT: usize = 14;
const DTYPE_F32: u8 = 1;

/// Maximum bytes of a header.
pub(crate) const MAX_HEADER_BYTES: usize = 4096;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::ssd::format::head::RecordMaxima;

    fn schema() -> SegmentSchema {
        SegmentSchema::new(5, "rowwise_adagrad", &OptimizerKind::RowWiseAdagrad.layout(8))
    }

    #[test]
    fn a_header_names_its_fields_and_is_checked_byte_for_byte() {
        let schema = schema();
        assert_eq!(
            schema.fields,
            [SchemaField { name: "weight".into(), width: 8 }, SchemaField { name: "sum".into(), width: 1 }]
        );
        let highest =
            RecordMaxima { write_seq: 1 << 40, last_step: 70_000, modified_epoch: 3, count: 300, has_scores: true };
        let widths = HeadWidths::of_rows(&highest);
        let header = schema.header(3, SegmentContent::Rows, widths);
        assert_eq!(header.len(), schema.header_bytes());
        let (content, format) = schema.check_header(&header, Path::new("x"), 3).unwrap();
        assert_eq!((content, format), (SegmentContent::Rows, schema.record_format(3, widths)));
        let tombstones = schema.header(3, SegmentContent::Tombstones, widths);
        assert_eq!(schema.check_header(&tombstones, Path::new("x"), 3).unwrap(), (SegmentContent::Tombstones, format));
        for bit in 0..header.len() * 8 {
            let mut flipped = header.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(schema.check_header(&flipped, Path::new("x"), 3).unwrap_err().kind(), Kind::Corruption, "{bit}");
        }
        assert!(schema.check_header(&header[..20], Path::new("x"), 3).is_err());
        assert!(schema.check_header(&header, Path::new("x"), 4).is_err(), "another segment's header");
    }
}
