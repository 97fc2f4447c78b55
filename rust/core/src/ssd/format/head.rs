//! The head of a record: the bytes before its payload.
//!
//! A head is packed: each number has only as many bytes as the segment needs ([`HeadWidths`]). The segment's header
//! contains the widths.
//!
//! ```text
//! crc32c of all that follows, payload included, xor the mask of the record's position u32 | id i64 | write_seq | last step
//! | modified_epoch | count | score f32
//! ```
//!
//! The last five have at most 8, 8, 4, 4 and 4 bytes. A field without bytes is 0.

use crate::rows::RowHeader;
use crate::ssd::format::words::le_u64;
use crate::types::Id;

/// Offset of the first byte that a record's checksum covers.
pub(crate) const CHECKED_FROM: usize = 4;
/// Offset of the id.
pub(crate) const ID_AT: usize = CHECKED_FROM;
/// Bytes of a head before the packed numbers: the checksum and the id.
const UNPACKED_BYTES: usize = ID_AT + 8;
/// Maximum bytes of a head.
pub(crate) const MAX_HEAD_BYTES: usize = UNPACKED_BYTES + 8 + 8 + 4 + 4 + 4;
/// A number of a head is written and read as 8 bytes, and the next number overwrites the excess. So the last number
/// needs this many bytes after it.
const OVERRUN_BYTES: usize = 8;

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
    /// Upper bounds of any record.
    #[cfg(test)]
    pub(crate) const ANY: Self =
        Self { write_seq: u64::MAX, last_step: u64::MAX, modified_epoch: u32::MAX, count: u32::MAX, has_scores: true };

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

/// Returns the smallest of `widths` that fits `value`.
fn least_width(widths: &[u8], value: u64) -> u8 {
    widths.iter().copied().find(|width| value <= max_of_width(*width)).unwrap_or(8)
}

/// Returns the largest number of `width` bytes.
#[inline]
fn max_of_width(width: u8) -> u64 {
    u64::MAX.checked_shr(64 - 8 * u32::from(width)).unwrap_or(0)
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

/// Returns the id of a record.
#[inline]
pub(crate) fn id_of(record: &[u8]) -> Id {
    le_u64(record, ID_AT) as Id
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_fields() -> impl Strategy<Value = HeadFields> {
        let number = || (any::<u64>(), 0..65_u32).prop_map(|(value, bits)| value.checked_shr(bits).unwrap_or(0));
        (any::<Id>(), number(), number(), any::<[u32; 3]>(), [0..33_u32, 0..33, 0..33]).prop_map(
            |(id, write_seq, last_step, small, bits)| {
                let small = |at: usize| small[at].checked_shr(bits[at]).unwrap_or(0);
                let score = f32::from_bits(small(2));
                HeadFields { id, write_seq, last_step, modified_epoch: small(0), count: small(1), score }
            },
        )
    }

    fn highest_of(fields: &HeadFields) -> RecordMaxima {
        RecordMaxima {
            write_seq: fields.write_seq,
            last_step: fields.last_step,
            modified_epoch: fields.modified_epoch,
            count: fields.count,
            has_scores: fields.score.to_bits() != 0,
        }
    }

    fn bits_of(fields: &HeadFields) -> (Id, u64, u64, u32, u32, u32) {
        let HeadFields { id, write_seq, last_step, modified_epoch, count, score } = *fields;
        (id, write_seq, last_step, modified_epoch, count, score.to_bits())
    }

    proptest! {
        /// A head is unchanged by encoding and decoding with any sufficient widths, and so are the widths in a
        /// segment's header.
        #[test]
        fn a_head_comes_back(fields in any_fields(), other in any_fields()) {
            let highest = highest_of(&fields).max(highest_of(&other));
            let widths = HeadWidths::of_rows(&highest);
            prop_assert_eq!(HeadWidths::from_bits(widths.to_bits()), Some(widths));
            prop_assert!(widths.bytes() <= MAX_HEAD_BYTES);
            prop_assert_eq!(widths.highest().max(highest), widths.highest());
            let mut bytes = vec![1; widths.bytes()];
            widths.encode(&fields, &mut bytes);
            prop_assert_eq!(bits_of(&widths.decode(&bytes)), bits_of(&fields));
            prop_assert_eq!(id_of(&bytes), fields.id);
        }

        /// Any bits of a header are either invalid or encode their widths uniquely.
        #[test]
        fn bits_are_widths_or_none(bits in any::<u16>()) {
            if let Some(widths) = HeadWidths::from_bits(bits) {
                prop_assert_eq!(widths.to_bits(), bits);
                prop_assert!(widths.bytes() <= MAX_HEAD_BYTES);
            }
        }
    }

    #[test]
    fn widths_grow_in_few_steps() {
        let row = |last_step, modified_epoch, count, score| RowHeader {
            id: 1,
            last_step,
            count,
            score,
            scalar: 0.0,
            modified_epoch,
        };
        let bytes = |write_seq, rows: &[RowHeader]| {
            let highest = RecordMaxima { write_seq, ..RecordMaxima::of_rows(rows.iter()) };
            [HeadWidths::of_rows(&highest), HeadWidths::of_tombstones(&highest)].map(HeadWidths::bytes)
        };
        assert_eq!(bytes(1, &[row(0, 0, 0, 0.0)]), [16, 16]);
        assert_eq!(bytes(1, &[row(1, 1, 1, 0.0)]), [21, 17]);
        assert_eq!(bytes(1 << 32, &[row(0, 0, 1, 0.0), row(1 << 24, 256, 256, -0.0)]), [29, 19]);
        assert_eq!(bytes(u64::MAX, &[row(u64::MAX, u32::MAX, u32::MAX, 1.0)]), [MAX_HEAD_BYTES, 24]);
    }
}
