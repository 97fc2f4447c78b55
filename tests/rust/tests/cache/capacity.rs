//! Tables near their cap: no call waits for space that only it could free, and there are never more rows than fit the
//! cap.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{ExportStream, MissingMode, PlanMode, RowChunk};
use embcache::config::{OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, MemoryEngine};
use embcache::types::Id;
use embcache_tests::{Rig, config, watched};

const DIM: usize = 4;

fn on_ssd(host_rows: u64, ssd_bytes: u64) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::Sgd, host_rows);
    wanted.ssd = Some(SsdConfig {
        dir: PathBuf::from("/base/m/t/0-of-1"),
        bytes: ssd_bytes,
        reopen: ReopenMode::Never,
        resume_commit_id: None,
    });
    wanted
}

fn rig(wanted: TableConfig) -> Rig {
    Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table")
}

/// Trains new ids, starting at the table's length, `at_once` per step, until the table is full. Returns the number of
/// rows.
fn fill(rig: &Rig, at_once: Id) -> Id {
    let mut rows = rig.table.len().expect("a length") as Id;
    loop {
        let ids: Vec<Id> = (rows..rows + at_once).collect();
        match rig.train(&ids, 1, 1) {
            Ok(_) => rows += at_once,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Capacity, "{error}");
                return rows;
            }
        }
    }
}

/// Pseudorandom numbers, the same in each run.
fn numbers() -> impl FnMut(Id) -> Id {
    let mut state = 1_u64;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below as u64) as Id
    }
}

/// A plan with more reads than are submitted at once never waits for files that its own reads keep.
#[test]
fn plan_with_many_reads_never_waits_for_its_own_files() {
    watched(String::new, || {
        let table = rig(on_ssd(14_000, 4 << 20));
        let rows = fill(&table, 1000);
        let straight = rig(config(DIM, OptimizerKind::Sgd, 60_000));
        for first in (0..rows).step_by(1000) {
            straight.train(&(first..first + 1000).collect::<Vec<Id>>(), 1, 1).expect("a step");
        }
        let mut next = numbers();
        for salt in 0..40 {
            let ids: Vec<Id> = (0..13_000).map(|_| next(rows)).collect::<BTreeSet<Id>>().into_iter().collect();
            table.train(&ids, 1, salt).expect("a step");
            straight.train(&ids, 1, salt).expect("a step");
        }
        assert!(table.contents().expect("every row") == straight.contents().expect("every row"));
    });
}

/// Missing ids for which the index of the rows on SSD finds a row. It stores fingerprints, and no ids.
fn false_traces(rig: &Rig, wanted: usize) -> Vec<Id> {
    let mut found = Vec::new();
    for first in (1 << 40..).step_by(100_000) {
        let ids: Vec<Id> = (first..first + 100_000).collect();
        let plan = rig
            .plan(&ids, PlanMode { is_prefetch: true, missing: MissingMode::Zeros, ..PlanMode::EVALUATE })
            .expect("a plan");
        found.extend(plan.reading().expect("no forked child").remove(0));
        if found.len() >= wanted {
            break;
        }
    }
    found.truncate(wanted);
    found
}

#[test]
fn new_ids_found_by_late_reads_stay_within_capacity() {
    let table = rig(on_ssd(1000, 1 << 20));
    fill(&table, 100);
    fill(&table, 3);
    let missing = false_traces(&table, 3);
    let rows = table.table.len().expect("a length");
    // All of RAM is in use, so a prefetched plan defers its reads to its forward.
    let held: Vec<Id> = (0..1000).collect();
    let holds = table.plan(&held, PlanMode::TRAIN).expect("a plan");
    table.place(&holds).expect("rows in place");
    let plan = table.plan(&missing, PlanMode::TRAIN_PREFETCH).expect("a plan");
    assert!(!plan.is_prefetched().expect("no forked child"), "there was no room");
    let error = table.place(&plan).expect_err("fewer than three rows fit");
    assert_eq!(error.kind(), Kind::Capacity, "{error}");
    drop((plan, holds));
    assert_eq!(table.table.len().expect("a length"), rows);
    assert_eq!(table.table.stats().expect("counters").pinned_rows, 0);
    table.table.flush(1).expect("what is there fits");
    assert_eq!(table.contents().expect("every row").len() as u64, rows);
}

/// The hits and misses of the host tier and of the SSD tier. Reads of dropped plans are counted first.
fn found_and_not(rig: &Rig) -> [(u64, u64); 2] {
    rig.table.read_rows(&[0]).expect("a row");
    let stats = rig.table.stats().expect("counters");
    let ssd = stats.ssd.expect("an SSD tier").tier;
    [(stats.host.hits, stats.host.misses), (ssd.hits, ssd.misses)]
}

#[test]
fn new_ids_found_by_prefetch_count_as_ssd_misses() {
    for device_rows in [None, Some(300)] {
        let mut wanted = on_ssd(1000, 1 << 20);
        wanted.device_rows = device_rows;
        let table = rig(wanted);
        fill(&table, 100);
        let missing = false_traces(&table, 2);
        let before = found_and_not(&table)[1];
        let plan = table
            .plan(&missing, PlanMode { is_prefetch: true, missing: MissingMode::Zeros, ..PlanMode::EVALUATE })
            .expect("a plan");
        assert_eq!(plan.reading().expect("no forked child")[0], missing, "the index finds a row for each");
        table.place(&plan).expect("rows of zeros");
        assert_eq!(found_and_not(&table)[1], (before.0, before.1 + 2), "{device_rows:?}");
    }
}

#[test]
fn ids_that_a_plan_ahead_leaves_to_its_forward_are_counted_once() {
    let table = rig(on_ssd(1000, 1 << 20));
    let rows = fill(&table, 100);
    let holds = table.plan(&(0..1000).collect::<Vec<Id>>(), PlanMode::TRAIN).expect("a plan");
    table.place(&holds).expect("rows in place");
    let [host, ssd] = found_and_not(&table);
    let (on_ssd, missing) = ((2000..2050).collect::<Vec<Id>>(), (rows..rows + 2).collect::<Vec<Id>>());
    let plan =
        table.plan(&[on_ssd, missing].concat(), PlanMode { is_prefetch: true, ..PlanMode::EVALUATE }).expect("a plan");
    assert!(!plan.is_prefetched().expect("no forked child"), "there is no room");
    table.place(&plan).expect("rows past the budget");
    assert_eq!(found_and_not(&table), [(host.0, host.1 + 52), (ssd.0 + 50, ssd.1 + 2)]);
}

/// The rest of a stream: its chunks, and its final result.
fn rest(stream: ExportStream) -> (Vec<RowChunk>, embcache::Result<()>) {
    let mut chunks = Vec::new();
    for chunk in stream {
        match chunk {
            Ok(chunk) => chunks.push(chunk),
            Err(error) => return (chunks, Err(error)),
        }
    }
    (chunks, Ok(()))
}

/// A full table, and an export of it that has returned only the first rows on SSD.
fn full_with_a_waiting_export(device_rows: Option<u32>) -> (Rig, Id, ExportStream) {
    let mut wanted = on_ssd(4000, 2 << 20);
    wanted.device_rows = device_rows;
    let table = rig(wanted);
    let rows = fill(&table, 500);
    let mut stream = table.table.export(100).expect("a stream");
    for _ in 0..60 {
        stream.next().expect("more rows than are in RAM").expect("a chunk");
    }
    (table, rows, stream)
}

fn training_ends_an_export_that_waits(device_rows: Option<u32>) {
    watched(String::new, || {
        let (table, rows, stream) = full_with_a_waiting_export(device_rows);
        for step in 0..300 {
            let ids: BTreeSet<Id> = (0..500).map(|at| (at * 37 + step * 501) % rows).collect();
            table.train(&ids.into_iter().collect::<Vec<Id>>(), 1, step as u32).expect("a step");
        }
        let (_, ended) = rest(stream);
        assert_eq!(ended.expect_err("rows changed").kind(), Kind::State);
        assert_eq!(table.contents().expect("every row").len() as Id, rows);
    });
}

#[test]
fn training_near_cap_ends_stalled_export() {
    training_ends_an_export_that_waits(None);
}

/// With a device tier, training near the cap ends an export whose chunks no caller takes.
#[test]
fn training_near_cap_ends_stalled_export_with_device_tier() {
    training_ends_an_export_that_waits(Some(300));
}

#[test]
fn load_into_full_table_ends_stalled_export() {
    watched(String::new, || {
        let (table, rows, stream) = full_with_a_waiting_export(None);
        let contents = table.contents().expect("every row");
        table.table.clear().expect("no batch is in flight");
        table.import(&contents).expect("the rows of before");
        assert_eq!(rest(stream).1.expect_err("rows changed").kind(), Kind::State);
        assert_eq!(table.table.len().expect("a length") as Id, rows);
    });
}

/// An export whose chunks no caller takes has every row, or returns the error that its space was needed.
#[test]
fn stalled_export_has_every_row_or_an_error() {
    watched(String::new, || {
        for bytes in [2 << 20, 8 << 20] {
            let table = rig(on_ssd(4000, bytes));
            let mut rows = 0;
            while rows < 20_500 {
                table.train(&(rows..rows + 500).collect::<Vec<Id>>(), 1, 1).expect("a step");
                rows += 500;
            }
            // Each of these rows is newer in RAM than on SSD, and writing it needs space.
            table.train(&(0..3000).collect::<Vec<Id>>(), 1, 2).expect("a step");
            let mut stream = table.table.export(100).expect("a stream");
            let mut taken: Vec<RowChunk> = (&mut stream).take(60).map(|chunk| chunk.expect("a chunk")).collect();
            for token in 1..4 {
                table.table.flush(token).expect("a flush");
                table.evaluate(&(3000..6000).collect::<Vec<Id>>(), 1, false).expect("an evaluation");
            }
            let (more, ended) = rest(stream);
            taken.extend(more);
            let ids: Vec<Id> = taken.iter().flat_map(|chunk| chunk.headers.iter().map(|header| header.id)).collect();
            assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "a row twice");
            match ended {
                Ok(()) => assert_eq!(ids.len() as Id, rows),
                Err(error) => {
                    assert_eq!(error.kind(), Kind::State);
                    assert!(error.to_string().contains("raise ssd_bytes"), "{error}");
                    assert_eq!(bytes, 2 << 20, "there was room: {error}");
                }
            }
        }
    });
}

#[test]
fn full_table_evicts_from_ram_when_ram_exceeds_ssd_capacity() {
    for (host_rows, device_rows) in [(20_000, None), (20_000, Some(600)), (6000, None), (2000, Some(12_000))] {
        let what = format!("{host_rows} in RAM, {device_rows:?} on the device");
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let mut wanted = on_ssd(host_rows, 1 << 20);
        wanted.on_full = OnFull::Evict;
        wanted.device_rows = device_rows;
        let table = Rig::open(wanted.clone(), Arc::clone(&engine)).expect("a table");
        for step in 0..60 {
            let ids: Vec<Id> = (step * 500..step * 500 + 500).collect();
            table.train(&ids, 1, step as u32).unwrap_or_else(|error| panic!("{what}: {error}"));
            if step % 7 == 3 {
                // Some rows are in RAM and on SSD when they are dropped.
                table.table.flush(step as u64).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
        }
        let stats = table.table.stats().expect("counters");
        assert!(stats.rows < 11_000 && stats.rows > 9000, "{what}: {stats:?}");
        assert_eq!(stats.rows + stats.dropped_rows, 30_000, "{what}");
        let contents = table.contents().expect("every row");
        assert_eq!(contents.len() as u64, stats.rows, "{what}");
        assert!((29_500..30_000).all(|id| contents.contains_key(&id)), "{what}: the newest rows are there");
        table.table.flush(100).unwrap_or_else(|error| panic!("{what}: {error}"));
        table.table.close().unwrap_or_else(|error| panic!("{what}: {error}"));
        drop(table);
        wanted.ssd.as_mut().expect("an SSD tier").reopen = ReopenMode::Resume;
        let resumed = Rig::open(wanted, engine).expect("a table");
        assert!(resumed.contents().expect("every row") == contents, "{what}");
    }
}

/// A batch is rejected and changes nothing if no rows can be evicted for it.
#[test]
fn batch_without_evictable_rows_is_rejected_unchanged() {
    let mut wanted = on_ssd(20_000, 1 << 20);
    wanted.on_full = OnFull::Evict;
    let table = rig(wanted);
    table.train(&(0..9000).collect::<Vec<Id>>(), 1, 1).expect("a step");
    let before = table.contents().expect("every row");
    let in_flight = table.plan(&(0..6000).collect::<Vec<Id>>(), PlanMode::TRAIN).expect("a plan");
    table.place(&in_flight).expect("rows in place");
    let error =
        table.train(&(20_000..26_000).collect::<Vec<Id>>(), 1, 2).expect_err("6000 more do not fit beside them");
    assert_eq!(error.kind(), Kind::Capacity, "{error}");
    assert!(error.to_string().contains("ssd_bytes"), "{error}");
    drop(in_flight);
    let after = table.contents().expect("every row");
    assert!(after == before, "no row was dropped for it");
    table.train(&(20_000..26_000).collect::<Vec<Id>>(), 1, 2).expect("a step, once that batch is over");
    table.table.flush(1).expect("a flush");
}
