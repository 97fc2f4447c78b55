use super::*;
use crate::error::Kind;
use crate::ssd::format::record::RecordMaxima;

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
