use super::*;
use crate::config::OptimizerKind;

fn sizing(cap: u64, dim: usize) -> Result<SegmentSizing> {
    SegmentSizing::new(cap, &SegmentSchema::new(1, "adam", &OptimizerKind::Adam.layout(dim)), None)
}

#[test]
fn capacity_and_headroom_fit_the_cap() {
    for dim in [1, 16, 64, 1000, 65_536] {
        for cap in [256 << 10, 1 << 20, 100 << 20, 16 << 30, 1 << 44] {
            let Ok(g) = sizing(cap, dim) else {
                assert!(cap < 10 * (dim as u64 * 12 + 4096).max(8192) + (128 << 10), "{cap} refused for {dim}");
                continue;
            };
            assert!(g.segment_bytes % ALIGNMENT as u64 == 0 && g.rows_per_segment >= 1);
            // Bytes of live rows when compaction can free nothing more.
            let full = u128::from(g.cap_bytes - g.overhead_bytes() - g.segment_bytes);
            let (rows, bytes) = (u128::from(g.rows_per_segment), u128::from(g.segment_bytes));
            assert!(u128::from(g.capacity_rows) * bytes <= full * rows, "{g:?}");
            assert!(g.rows_per_segment <= RecordLocation::MAX_RECORDS);
        }
    }
}

#[test]
fn capacity_is_bounded_by_the_index() {
    let small = SegmentSchema::new(1, "sgd", &OptimizerKind::Sgd.layout(1));
    let g = SegmentSizing::new(60 << 40, &small, None).unwrap();
    assert_eq!(g.capacity_rows, TagIndex::MAX_IDS);
    let error = SegmentSizing::new(65 << 40, &small, None).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    let most = error.to_string().split("set it to ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(SegmentSizing::new(most, &small, None).is_ok());
}

#[test]
fn full_segment_is_smaller_at_the_record_limit() {
    let full = |dim: usize, highest: &RecordMaxima| {
        let g =
            SegmentSizing::new(1 << 40, &SegmentSchema::new(1, "sgd", &OptimizerKind::Sgd.layout(dim)), None).unwrap();
        (g.min_rows_per_segment(highest), g.full_bytes(highest), g.segment_bytes)
    };
    for highest in [RecordMaxima::default(), RecordMaxima::ANY] {
        let (_, full, room) = full(64, &highest);
        assert_eq!(full, room);
    }
    let narrow = RecordMaxima { write_seq: 1 << 31, ..RecordMaxima::default() };
    let (rows, full, room) = full(4, &narrow);
    assert_eq!(rows, u64::from(RecordLocation::MAX_RECORDS));
    // A record has 16 bytes and 4 floats, and its entry has 8 bytes of an id, 4 and 3 of its numbers.
    assert!((rows * (16 + 16 + 8 + 4 + 2)..room / 10 * 9).contains(&full), "{full} of {room}");
}

#[test]
fn four_fifths_of_a_large_cap_can_be_live() {
    let schema = SegmentSchema::new(1, "rowwise_adagrad", &OptimizerKind::RowWiseAdagrad.layout(64));
    let g = SegmentSizing::new(8 << 30, &schema, None).unwrap();
    assert!(g.capacity_rows * g.row_bytes as u64 > (8 << 30) / 5 * 4, "{g:?}");
}

#[test]
fn cap_below_one_row_names_the_minimum() {
    let error = sizing(100, 16).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    let least: u64 = error.to_string().split("set it to ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(sizing(least, 16).is_ok(), "{least}");
}
