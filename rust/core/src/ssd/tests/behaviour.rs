//! Behaviours of the tier, one per test.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;
use crate::error::Kind;
use crate::io::MemoryEngine;
use crate::ssd::format::record::RecordMaxima;
use crate::ssd::segment::write_buffer::{BLOCK_BYTES, WriteBufferPool};
use crate::ssd::store::state::SegmentStream;

#[test]
fn rows_are_found_before_and_after_they_are_written() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    let rows: Vec<SsdTestRow> = (0..1000).map(|id| SsdTestRow::new(id - 500, 1)).collect();
    append(&tier, &rows, |_| false).unwrap();
    let ids: Vec<Id> = (-600..600).collect();
    for _ in 0..2 {
        for (id, found) in ids.iter().zip(fetch(&tier, &ids).unwrap()) {
            assert_eq!(found, (-500..500).contains(id).then(|| SsdTestRow::new(*id, 1)), "{id}");
        }
        settle(&tier);
    }
    assert_eq!(tier.stats().tier.rows, 1000);
}

#[test]
fn concurrent_reads_see_whole_rows_of_the_start_or_newer() {
    const ROWS: Id = 500;
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open_tuned(&engine, &config(128 << 10, ReopenMode::Never), TINY).unwrap();
    let ids: Vec<Id> = (0..ROWS).collect();
    let version = |version: u32| -> Vec<SsdTestRow> { ids.iter().map(|id| SsdTestRow::new(*id, version)).collect() };
    append(&tier, &version(1), |_| false).unwrap();
    let (written, done) = (AtomicU32::new(1), AtomicBool::new(false));
    let check = |row: &SsdTestRow, least: u32| {
        assert_eq!(row, &SsdTestRow::new(row.header.id, row.header.count));
        assert!(row.header.count >= least, "version {} of {}, not {least}", row.header.count, row.header.id);
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    let least = written.load(Ordering::Acquire);
                    for row in fetch(&tier, &ids).unwrap() {
                        check(&row.unwrap(), least);
                    }
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let rows = scan(&tier).unwrap();
                assert!(rows.windows(2).all(|pair| pair[0].header.id < pair[1].header.id), "an id twice");
                for row in &rows {
                    check(row, 1);
                }
            }
        });
        // On a busy machine the compactor may find nothing to move. So this continues until it has moved something.
        for number in (2..10_000).take_while(|number| *number < 80 || tier.stats().compaction_bytes == 0) {
            let some: Vec<SsdTestRow> = version(number).into_iter().filter(|row| row.header.id % 5 != 0).collect();
            append(&tier, &some, |_| true).unwrap();
            let rest: Vec<SsdTestRow> = version(number).into_iter().filter(|row| row.header.id % 5 == 0).collect();
            append(&tier, &rest, |_| true).unwrap();
            written.store(number, Ordering::Release);
        }
        done.store(true, Ordering::Release);
    });
    assert!(tier.stats().compaction_bytes > 0);
}

#[test]
fn scan_during_compaction_misses_no_row() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open_tuned(&engine, &config(128 << 10, ReopenMode::Never), TINY).unwrap();
    let still: Vec<SsdTestRow> = (0..300).map(|id| SsdTestRow::new(id, 1)).collect();
    append(&tier, &still, |_| false).unwrap();
    let busy = |version| (300..500).map(|id| SsdTestRow::new(id, version)).collect::<Vec<_>>();
    append(&tier, &busy(1), |_| false).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let rows: Vec<SsdTestRow> =
                    scan(&tier).unwrap().into_iter().filter(|row| row.header.id < 300).collect();
                assert_eq!(rows, still);
            }
        });
        for version in 2..100 {
            append(&tier, &busy(version), |_| true).unwrap();
        }
        done.store(true, Ordering::Release);
    });
}

#[test]
fn tombstones_are_pruned_without_dead_records() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open_tuned(&engine, &config(256 << 10, ReopenMode::Never), TINY).unwrap();
    let rows = |ids: std::ops::Range<Id>| ids.map(|id| SsdTestRow::new(id, 1)).collect::<Vec<_>>();
    append(&tier, &rows(0..200), |_| false).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    tier.remove(&(0..200).collect::<Vec<Id>>()).unwrap();
    for token in 2..5 {
        append(&tier, &rows(token as Id * 1000..token as Id * 1000 + 10), |_| false).unwrap();
        tier.publish(Some(token), StateCounters::default(), Vec::new()).unwrap();
    }
    assert!(tier.inner.view().segments().tombstones().segments == 0);
    assert_eq!(scan(&tier).unwrap().len(), 30);
}

#[test]
fn hundreds_of_tables_with_a_few_rows_each_share_the_process_buffers() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let usual = SsdTuning { segment_bytes: Some(4 << 20), ..SsdTuning::default() };
    let tiers: Vec<SsdTier> = (0..200)
        .map(|table| {
            let mut config = config(64 << 20, ReopenMode::Never);
            config.dir = format!("/embcache-test/{table}").into();
            let (inner, _) = opening::open(&config, &identity(), layout(), engine.clone(), usual, None).unwrap();
            assert_eq!(inner.context.block_bytes, BLOCK_BYTES);
            SsdTier { inner }
        })
        .collect();
    let ids: Vec<Id> = (0..300).collect();
    for version in 1..4 {
        for tier in &tiers {
            let rows: Vec<SsdTestRow> = ids.iter().map(|id| SsdTestRow::new(*id, version)).collect();
            append(tier, &rows, |_| version > 1).unwrap();
        }
    }
    assert!(WriteBufferPool::of_process().in_use() < 100, "{} buffers out", WriteBufferPool::of_process().in_use());
    for tier in &tiers {
        let expected: Vec<Option<SsdTestRow>> = ids.iter().map(|id| Some(SsdTestRow::new(*id, 3))).collect();
        assert_eq!(fetch(tier, &ids).unwrap(), expected);
    }
}

#[test]
fn records_larger_than_a_block_go_through() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let dim = 65_536;
    let layout = OptimizerKind::Adam.layout(dim);
    let identity = ShardIdentity { dim: dim as u64, optimizer: "adam".into(), ..identity() };
    let config = config(64 << 20, ReopenMode::Never);
    let (inner, _) = opening::open(&config, &identity, layout, engine, SsdTuning::default(), None).unwrap();
    let tier = SsdTier { inner };
    let rows = tier.capacity_rows() as Id;
    assert!(rows > 20, "{rows}");
    let row = |id: Id| (RowHeader { id, ..RowHeader::default() }, vec![id as f32; layout.vector_floats()]);
    for version in 0..3 {
        for id in 0..rows {
            let (header, vector) = row(id);
            tier.append(&[RowRef { header: &header, vector: &vector }], &[version > 0]).unwrap();
        }
    }
    for id in 0..rows {
        let mut found = SsdTestRow { header: RowHeader::default(), vector: vec![f32::NAN; layout.vector_floats()] };
        assert!(tier.fetch(vec![(id, found.as_mut())]).wait().unwrap().is_empty());
        assert_eq!((found.header, found.vector), row(id));
    }
}

/// A published tier of several segments, with newer versions of some rows, and removals; and its rows.
fn published_rows() -> (MemoryEngine, Vec<SsdTestRow>) {
    let memory = MemoryEngine::default();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let tuning = SsdTuning { segment_bytes: Some(64 << 10), ..SsdTuning::default() };
    let (tier, _) = open_tuned(&engine, &config(4 << 20, ReopenMode::Never), tuning).unwrap();
    let version = |id: Id| if id % 3 == 0 { 2 } else { 1 };
    let rows = |ids: &[Id], version: u32| ids.iter().map(|id| SsdTestRow::new(*id, version)).collect::<Vec<_>>();
    let ids: Vec<Id> = (0..9000).map(|id| id * 7919 - 4_000_000).collect();
    append(&tier, &rows(&ids, 1), |_| false).unwrap();
    let newer: Vec<Id> = ids.iter().copied().filter(|id| version(*id) == 2).collect();
    append(&tier, &rows(&newer, 2), |_| true).unwrap();
    let (gone, mut left): (Vec<Id>, Vec<Id>) = ids.into_iter().partition(|id| id % 10 == 0);
    tier.remove(&gone).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    tier.close().unwrap();
    left.sort_unstable();
    (memory, left.into_iter().map(|id| SsdTestRow::new(id, version(id))).collect())
}

#[test]
fn any_number_of_threads_reopens_the_same_rows() {
    let (memory, rows) = published_rows();
    for threads in [1, 2, 3, 8, 64] {
        let engine: Arc<dyn IoEngine> = Arc::new(memory.kill());
        let tuning = SsdTuning { segment_bytes: Some(64 << 10), threads: Some(threads), ..SsdTuning::default() };
        let (tier, _) = open_tuned(&engine, &config(4 << 20, ReopenMode::Resume), tuning).unwrap();
        assert_eq!(scan(&tier).unwrap(), rows, "{threads} threads");
        let ids: Vec<Id> = rows.iter().map(|row| row.header.id).collect();
        assert!(fetch(&tier, &ids).unwrap().into_iter().eq(rows.iter().cloned().map(Some)));
    }
}

#[test]
fn a_damaged_footer_is_found_by_any_number_of_threads() {
    let (memory, rows) = published_rows();
    let files = memory.list(&config(4 << 20, ReopenMode::Resume).dir).unwrap();
    let segments = files.iter().filter(|path| path.extension().is_some_and(|suffix| suffix == "seg"));
    for (number, path) in segments.step_by(9).enumerate() {
        let bytes = crate::io::read_file(&memory, path, 1 << 20).unwrap();
        for (at, threads) in (number..2400).step_by(157).zip([1, 3, 8].into_iter().cycle()) {
            let engine: Arc<dyn IoEngine> = Arc::new(memory.kill());
            let mut flipped = bytes.clone();
            // The byte is in the footer's entries or the trailer, which are the file's last bytes.
            let place = bytes.len() - 1 - at;
            flipped[place] ^= 1 << (at % 8);
            crate::io::write_atomically(&*engine, path, &flipped).unwrap();
            let tuning = SsdTuning { segment_bytes: Some(64 << 10), threads: Some(threads), ..SsdTuning::default() };
            let error = open_tuned(&engine, &config(4 << 20, ReopenMode::Resume), tuning).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "byte {place} of {}: {error}", path.display());
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
    }
    assert!(!rows.is_empty());
}

#[test]
fn open_segment_with_narrow_heads_holds_space_until_sealed() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open(&engine, &config(1 << 20, ReopenMode::Never)).unwrap();
    let row = |id| SsdTestRow { header: RowHeader { id, ..RowHeader::default() }, ..SsdTestRow::empty() };
    append(&tier, &[row(1), row(2)], |_| false).unwrap();
    tier.remove(&[1]).unwrap();
    append(&tier, &[row(3)], |_| false).unwrap();
    let mut state = tier.inner.state();
    // The segment of the rows has a dead record. It is sealed, and rows go to another one.
    let of_rows = state.open_stream_holding_space().unwrap();
    state.seal(of_rows);
    drop(state);
    append(&tier, &[row(4)], |_| false).unwrap();
    let mut state = tier.inner.state();
    assert_eq!(state.open_stream_holding_space(), None);
    state.raise_highest(RecordMaxima { last_step: 1, modified_epoch: 1, ..RecordMaxima::default() });
    let mut closed = Vec::new();
    while let Some(stream) = state.open_stream_holding_space() {
        state.seal(stream);
        closed.push(stream);
    }
    assert_eq!(closed, [of_rows, SegmentStream::Tombstones]);
    drop(state);
    settle(&tier);
    let held: u64 = tier.inner.view().segments().iter().map(|segment| segment.held_bytes()).sum();
    assert_eq!(held, 3 * 4096, "the room that they could not use is free");
}
