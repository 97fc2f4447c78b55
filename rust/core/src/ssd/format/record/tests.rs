use proptest::prelude::*;

use super::*;
use crate::error::Kind;

const LAYOUT: RowLayout = RowLayout { dim: 3, vector_slots: 1, scalar_slot: true };
const BINDING: RecordBinding = RecordBinding { first: 0x1234_5678, step: MASK_STEP };
const NUMBER: u32 = 5;

impl RecordMaxima {
    /// Upper bounds of any record.
    pub(crate) const ANY: Self =
        Self { write_seq: u64::MAX, last_step: u64::MAX, modified_epoch: u32::MAX, count: u32::MAX, has_scores: true };
}

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

#[test]
fn many_checksums_are_those_of_one_record_each() {
    let bytes: Vec<u8> = (0..9000_u32).map(|at| ((at * at) >> 3) as u8).collect();
    for len in [4, 5, 8, 11, 44, 63, 64, 300, 304, 1000] {
        for count in 0..=9 {
            let records = || bytes.chunks_exact(len).take(count);
            let mut found = Vec::new();
            checksums_of(records(), |at, crc| found.push((at, crc)));
            let expected: Vec<(usize, u32)> =
                records().map(|record| crc32c::crc32c(&record[4..])).enumerate().collect();
            assert_eq!(found, expected, "{count} records of {len} bytes");
        }
    }
    let uneven = [&bytes[..20], &bytes[..30], &bytes[..40], &bytes[..50]];
    assert_eq!(checksum_group(uneven), uneven.map(crc32c::crc32c));
}
