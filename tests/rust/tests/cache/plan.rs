//! Tests of plans: pins, provisional rows, and one submission of reads for all tables.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use embcache::Kind;
use embcache::cache::{Lookup, PlanMode, RowBlock, Table};
use embcache::config::{OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{DirLock, DirLockPurpose, IoEngine, IoFile, IoOpenMode, IoReadRequest, MemoryEngine, ReadSink};
use embcache::rows::RowHeader;
use embcache::types::Id;
use embcache_tests::{Rig, config};

/// Counts the batches of reads.
#[derive(Debug)]
struct Counting {
    inner: MemoryEngine,
    batches: AtomicUsize,
    reads: AtomicUsize,
}

impl IoEngine for Counting {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn open(&self, path: &Path, how: IoOpenMode) -> embcache::Result<Arc<dyn IoFile>> {
        self.inner.open(path, how)
    }
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        self.batches.fetch_add(1, Ordering::SeqCst);
        self.reads.fetch_add(reads.len(), Ordering::SeqCst);
        self.inner.read_batch(reads, sink);
    }
    fn create_dir_all(&self, path: &Path) -> embcache::Result<()> {
        self.inner.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> embcache::Result<Vec<PathBuf>> {
        self.inner.list(path)
    }
    fn exists(&self, path: &Path) -> embcache::Result<bool> {
        self.inner.exists(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> embcache::Result<()> {
        self.inner.rename(from, to)
    }
    fn link(&self, file: &dyn IoFile, to: &Path) -> embcache::Result<()> {
        self.inner.link(file, to)
    }
    fn remove_file(&self, path: &Path) -> embcache::Result<()> {
        self.inner.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> embcache::Result<()> {
        self.inner.remove_dir_all(path)
    }
    fn sync_dir(&self, path: &Path) -> embcache::Result<()> {
        self.inner.sync_dir(path)
    }
    fn lock_dir(&self, path: &Path) -> embcache::Result<DirLock> {
        self.inner.lock_dir(path)
    }
    fn lock_dir_for(&self, path: &Path, how: DirLockPurpose) -> embcache::Result<DirLock> {
        self.inner.lock_dir_for(path, how)
    }
}

fn on_ssd(name: &str, host_rows: u64) -> TableConfig {
    let mut wanted = config(8, OptimizerKind::Sgd, host_rows);
    wanted.name = name.into();
    wanted.ssd = Some(SsdConfig {
        dir: PathBuf::from("/base").join(name),
        bytes: 1 << 20,
        reopen: ReopenMode::Never,
        resume_commit_id: None,
    });
    wanted
}

fn in_memory(wanted: TableConfig) -> Rig {
    Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("a table")
}

fn pinned(rig: &Rig) -> u64 {
    rig.table.stats().expect("counters").pinned_rows
}

#[test]
fn a_plan_over_several_tables_reads_in_one_submission() {
    let engine =
        Arc::new(Counting { inner: MemoryEngine::default(), batches: AtomicUsize::new(0), reads: AtomicUsize::new(0) });
    let tables: Vec<Table> = ["a", "b", "c"]
        .into_iter()
        .map(|name| Table::open(on_ssd(name, 40), None, Arc::<Counting>::clone(&engine)).expect("a table"))
        .collect();
    let lookup = Lookup::new(&tables, &[0, 1, 2]).expect("a lookup");
    let train = |first: Id| {
        let ids: Vec<Id> = (0..3).flat_map(|_| first..first + 30).collect();
        let plan = lookup.plan(&ids, &[0, 30, 60, 90], PlanMode::TRAIN, &[]).expect("a plan");
        plan.wait(&mut []).expect("its rows");
        plan.commit().expect("a step");
    };
    (0..10).for_each(|batch| train(batch * 30));
    for table in &tables {
        table.flush(1).expect("a flush, so that rows are in files");
    }
    engine.batches.store(0, Ordering::SeqCst);
    engine.reads.store(0, Ordering::SeqCst);
    train(0);
    assert_eq!(engine.batches.load(Ordering::SeqCst), 1);
    assert!(engine.reads.load(Ordering::SeqCst) >= 3, "each table had rows to read");
}

#[test]
fn rows_in_flight_are_never_evicted_however_small_the_budget() {
    let rig = in_memory(on_ssd("t", 4));
    let ahead: Vec<_> = (0..6)
        .map(|batch| rig.plan(&[batch * 2, batch * 2 + 1], PlanMode::TRAIN_PREFETCH).expect("a plan ahead"))
        .collect();
    assert!(
        ahead[0].is_prefetched().expect("no forked child") && !ahead[5].is_prefetched().expect("its own process"),
        "the budget ends the prefetch, not an error"
    );
    for (salt, plan) in ahead.iter().enumerate() {
        rig.finish(plan, 2, 2, salt as u32).expect("a step");
    }
    assert_eq!(rig.table.len().expect("rows"), 12);
    assert_eq!(pinned(&rig), 0);
}

#[test]
fn plan_cut_short_by_budget_completes_on_device() {
    let rig = in_memory(TableConfig { device_rows: Some(8), ..on_ssd("t", 4) });
    for ids in [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]] {
        rig.train(&ids, 2, 7).expect("a step");
    }
    let first = rig.plan(&[0, 1, 2, 3], PlanMode::TRAIN_PREFETCH).expect("a plan");
    let second = rig.plan(&[4, 5, 6, 7], PlanMode::TRAIN_PREFETCH).expect("a plan");
    assert!(!second.is_prefetched().expect("no forked child"), "RAM has four rows, which the first plan has");
    rig.place(&second).expect("rows in their slots");
    assert!(second.is_prefetched().expect("no forked child"));
    rig.finish(&second, 4, 2, 8).expect("a step");
    rig.finish(&first, 4, 2, 9).expect("a step");
    assert_eq!((rig.table.len().expect("rows"), pinned(&rig)), (16, 0));
}

#[test]
fn planned_rows_join_the_table_at_their_first_backward_only() {
    let rig = in_memory(on_ssd("t", 100));
    let plan = rig.plan(&[1, 2, 3], PlanMode::TRAIN).expect("a plan");
    rig.place(&plan).expect("its rows");
    let read = rig.table.read_rows(&[1]).expect("a read");
    assert_eq!((rig.table.len().expect("rows"), read.found[0]), (0, false));
    drop(plan);
    rig.evaluate(&[4, 5], 1, false).expect("an evaluation");
    assert_eq!(rig.table.len().expect("rows"), 0);
    rig.train(&[1, 2], 1, 0).expect("a step");
    assert_eq!(rig.table.len().expect("rows"), 2);
}

#[test]
fn a_second_backward_of_one_forward_is_refused() {
    let rig = in_memory(config(8, OptimizerKind::Sgd, 100));
    let plan = rig.plan(&[1, 2], PlanMode::TRAIN).expect("a plan");
    let out = rig.finish(&plan, 2, 1, 0).expect("a step");
    assert_eq!(rig.backward(&plan, out.len(), 1).expect_err("again").kind(), Kind::State);
    assert_eq!(rig.table.step().expect("a step"), 1);
}

#[test]
fn every_backward_is_a_step_ids_or_none() {
    let rig = in_memory(config(8, OptimizerKind::Adam, 100));
    rig.train(&[], 1, 0).expect("a step without ids");
    rig.train(&[1], 1, 0).expect("a step");
    rig.evaluate(&[1], 1, false).expect("an evaluation");
    drop(rig.plan(&[1], PlanMode::TRAIN).expect("an abandoned plan"));
    assert_eq!(rig.table.step().expect("a step"), 2);
}

#[test]
fn plan_dropped_during_reads_leaves_nothing() {
    let rig = in_memory(on_ssd("t", 20));
    for batch in 0..10 {
        rig.train(&(batch * 10..batch * 10 + 10).collect::<Vec<_>>(), 2, 0).expect("a step");
    }
    rig.table.flush(1).expect("a flush");
    for _ in 0..50 {
        drop(rig.plan(&(0..15).collect::<Vec<_>>(), PlanMode::TRAIN_PREFETCH).expect("a plan ahead"));
    }
    assert_eq!(pinned(&rig), 0);
    assert_eq!(rig.table.read_rows(&(0..100).collect::<Vec<_>>()).expect("rows").found, vec![true; 100]);
}

#[test]
fn a_working_set_past_the_budget_trains_and_the_overflow_goes_again() {
    for device_rows in [None, Some(3)] {
        let mut wanted = on_ssd("t", 5);
        wanted.device_rows = device_rows;
        let rig = in_memory(wanted);
        let oracle = in_memory(config(8, OptimizerKind::Sgd, 1000));
        for salt in 0..4 {
            let ids: Vec<Id> = (0..40).map(|id| id * 3 % 31 + i64::from(salt)).collect();
            let plan = rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
            let out = rig.finish(&plan, ids.len(), 4, salt).expect("a step past the budget");
            assert!(plan.overflow_rows().expect("no forked child")[0] > 0);
            assert_eq!(out, oracle.train(&ids, 4, salt).expect("the oracle's"));
        }
        rig.train(&[1], 1, 9).expect("a small step");
        let stats = rig.table.stats().expect("counters");
        assert!(stats.host.rows <= 5, "{stats:?}");
        assert!(stats.device.is_none_or(|device| device.rows <= 3));
        assert_eq!(stats.overflow_plans, 4);
    }
}

#[test]
fn metadata_counts_occurrences_and_steps_through_every_tier() {
    let rig = in_memory(on_ssd("t", 3));
    for salt in 0..5 {
        rig.train(&[7, 7, salt.into()], 3, salt).expect("a step");
        // Other rows demote them to SSD, and they are promoted again.
        rig.train(&(100..110).collect::<Vec<_>>(), 2, salt).expect("a step");
    }
    let rows = rig.table.read_rows(&[7, 3]).expect("rows");
    assert_eq!((rows.headers[0].count, rows.headers[0].last_step), (10, 9));
    assert_eq!((rows.headers[1].count, rows.headers[1].last_step), (1, 7));
    assert!(rows.headers[0].score > 0.0);
}

#[test]
fn a_clean_eviction_writes_nothing() {
    let rig = in_memory(on_ssd("t", 10));
    rig.train(&(0..40).collect::<Vec<_>>(), 4, 0).expect("a step");
    rig.table.flush(1).expect("a flush: every row is clean now");
    let given = || rig.table.stats().expect("counters").ssd.expect("an SSD tier").logical_written_bytes;
    let (before, evictions) = (given(), rig.table.stats().expect("counters").host.evictions);
    for first in [0, 10, 20, 30] {
        rig.evaluate(&(first..first + 10).collect::<Vec<_>>(), 2, false).expect("an evaluation");
    }
    assert!(rig.table.stats().expect("counters").host.evictions > evictions, "rows were evicted");
    assert_eq!(given(), before);
}

#[test]
fn a_row_of_zeros_is_a_row() {
    for device_rows in [None, Some(2)] {
        let mut wanted = on_ssd("t", 2);
        wanted.device_rows = device_rows;
        let rig = in_memory(wanted);
        let headers: Vec<RowHeader> = (0..20).map(|id| RowHeader { id, ..RowHeader::default() }).collect();
        rig.table.import_rows(RowBlock { headers: &headers, vectors: &[0.0; 160] }).expect("rows of zeros");
        for id in 0..20 {
            assert_eq!(rig.evaluate(&[id], 1, false).expect("an evaluation"), [0.0; 8], "not its initial value");
        }
        assert_eq!(rig.table.read_rows(&[3]).expect("a row").found, [true]);
    }
}

#[test]
fn a_row_moves_with_its_slots_and_metadata_in_one_read() {
    let engine =
        Arc::new(Counting { inner: MemoryEngine::default(), batches: AtomicUsize::new(0), reads: AtomicUsize::new(0) });
    let mut wanted = on_ssd("t", 8);
    wanted.optimizer = OptimizerKind::Adam;
    wanted.host_bytes = 8 * embcache::cache::host_row_bytes(&wanted.layout(), wanted.policy);
    let rig = Rig::open(wanted, Arc::<Counting>::clone(&engine)).expect("a table");
    rig.train(&(0..400).collect::<Vec<_>>(), 4, 0).expect("a step");
    rig.table.flush(1).expect("a flush");
    let expected = rig.table.read_rows(&[5, 150, 300]).expect("rows");
    engine.reads.store(0, Ordering::SeqCst);
    let plan = rig.plan(&[5, 150, 300], PlanMode::EVALUATE).expect("a plan of rows that lie apart");
    rig.place(&plan).expect("its rows");
    assert!(engine.reads.load(Ordering::SeqCst) <= 3);
    let found = rig.table.read_rows(&[5, 150, 300]).expect("rows, from RAM now");
    assert_eq!((found.headers, found.vectors), (expected.headers, expected.vectors));
    assert!(found.found.iter().all(|&found| found));
}

#[test]
fn rows_dropped_by_a_full_table_stay_away_after_a_resume() {
    let engine = Arc::new(MemoryEngine::default());
    let mut wanted = on_ssd("t", 30);
    wanted.on_full = OnFull::Evict;
    if let Some(ssd) = &mut wanted.ssd {
        ssd.bytes = 256 << 10;
    }
    let rig = Rig::open(wanted.clone(), Arc::<MemoryEngine>::clone(&engine)).expect("a table");
    let ids = |batch: Id| (batch * 40..batch * 40 + 40).collect::<Vec<_>>();
    for batch in 0..80 {
        rig.train(&ids(batch), 4, 0).expect("a step");
        if batch % 30 == 20 {
            rig.table.flush(batch as u64).expect("a flush");
        }
    }
    rig.table.flush(100).expect("a flush");
    let all: Vec<Id> = (0..80).flat_map(ids).collect();
    let before = rig.table.read_rows(&all).expect("rows").found;
    assert!(before.contains(&false), "some were dropped");
    rig.table.close().expect("a close");
    drop(rig);
    if let Some(ssd) = &mut wanted.ssd {
        ssd.reopen = ReopenMode::Resume;
    }
    let rig = Rig::open(wanted, engine).expect("the table again");
    assert_eq!(rig.table.read_rows(&all).expect("rows").found, before);
}

#[test]
fn the_index_of_rows_on_ssd_takes_its_share_of_the_host_budget() {
    let mut wanted = on_ssd("t", 5000);
    let budget = wanted.host_bytes;
    if let Some(ssd) = &mut wanted.ssd {
        ssd.bytes = 32 << 20;
    }
    let rig = in_memory(wanted);
    let host = || rig.table.stats().expect("counters").host;
    let ids = |batch: Id| (batch * 1000..batch * 1000 + 1000).collect::<Vec<_>>();
    (0..5).for_each(|batch| drop(rig.train(&ids(batch), 4, 0).expect("a step")));
    let rows_at_first = host().rows;
    (5..40).for_each(|batch| drop(rig.train(&ids(batch), 4, 0).expect("a step")));
    let row_bytes = budget / 5000;
    let indexed = rig.table.stats().expect("counters").ssd.expect("an SSD tier").tier.rows;
    let charged = indexed * 12 - (64 << 10);
    assert!(host().rows < rows_at_first, "fewer rows fit beside the index");
    // Rows are moved in steps of 64 KiB.
    assert!(host().rows * row_bytes + charged <= budget + (64 << 10), "{:?}, {indexed} rows on SSD", host());
    rig.table.clear().expect("a clear");
    (0..5).for_each(|batch| drop(rig.train(&ids(batch), 4, 0).expect("a step")));
    assert_eq!(host().rows, rows_at_first, "the room comes back with the index's");
}

/// The capacity error names the budget.
#[test]
fn index_larger_than_host_budget_is_capacity_error() {
    let mut wanted = on_ssd("t", 300);
    if let Some(ssd) = &mut wanted.ssd {
        ssd.bytes = 32 << 20;
    }
    let rig = in_memory(wanted);
    let error = (0..400)
        .find_map(|batch| rig.train(&(batch * 100..batch * 100 + 100).collect::<Vec<_>>(), 4, 0).err())
        .expect("the index outgrows the budget");
    assert_eq!(error.kind(), Kind::Capacity);
    assert!(error.to_string().contains("host_bytes"), "{error}");
    rig.train(&(0..100).collect::<Vec<_>>(), 4, 0).expect("rows that are there still train");
}
