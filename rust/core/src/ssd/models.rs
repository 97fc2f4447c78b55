//! Explores every interleaving of a few threads in the tier's own code, up to two preemptions (`make test-loom`).
//!
//! Waits have no time limits here, so that a lost wake-up is a deadlock, which loom reports.

use std::sync::Arc;

use loom::thread::{Builder, JoinHandle};

use super::ops::compaction::{next_choice, schedule};
use super::ops::scan::read_segment_early;
use super::recover::open::SsdTuning;
use super::space::compaction_choice::CompactionChoice;
use super::tests::{SMALL, SsdTestRow, TINY, append, config, open_tuned};
use super::workers::SsdWorkers;
use super::{RowFetch, SsdTier};
use crate::config::ReopenMode;
use crate::io::{IoEngine, MemoryEngine};
use crate::rows::RowRef;
use crate::runtime::sync::{Mutex, lock};
use crate::types::Id;

/// Words of a thread's stack. Unoptimized code has large frames.
const STACK_WORDS: usize = 64 << 10;

/// Explores `body` and the threads that it starts.
pub(crate) fn model(body: impl Fn() + Send + Sync + Copy + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 100_000;
    builder.check(move || spawn(body).join().unwrap());
}

pub(crate) fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    Builder::new().stack_size(STACK_WORDS).spawn(body).unwrap()
}

/// Runs the queued reads. The file of each must exist.
pub(crate) fn read_waiting(engine: &dyn IoEngine) {
    SsdWorkers::of_process().unwrap().read_waiting(|path| {
        assert!(engine.exists(path).unwrap(), "{} is gone before it is read", path.display());
    });
}

impl SsdTier {
    /// Writes all buffered rows into files.
    pub(crate) fn settle(&self) {
        self.inner.state().seal_all();
        SsdWorkers::of_process().unwrap().write_waiting();
    }
}

fn tier(bytes: u64, tuning: SsdTuning) -> (Arc<SsdTier>, Arc<dyn IoEngine>) {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    let (tier, _) = open_tuned(&engine, &config(bytes, ReopenMode::Never), tuning).unwrap();
    (Arc::new(tier), engine)
}

fn rows(ids: std::ops::Range<Id>, version: u32) -> Vec<SsdTestRow> {
    ids.map(|id| SsdTestRow::new(id, version)).collect()
}

/// Returns the current versions of `ids`. Each row must be intact.
fn versions(tier: &SsdTier, engine: &dyn IoEngine, ids: &[Id]) -> Vec<Option<u32>> {
    let mut found: Vec<SsdTestRow> = ids.iter().map(|_| SsdTestRow::empty()).collect();
    let fetch: Arc<RowFetch> = tier.fetch(ids.iter().copied().zip(found.iter_mut().map(SsdTestRow::as_mut)).collect());
    read_waiting(engine);
    let missing = fetch.wait().unwrap();
    let versions = found.into_iter().enumerate().map(|(at, row)| {
        let version = row.header.count;
        let there = !missing.contains(&(at as u32));
        there.then(|| {
            assert_eq!(row, SsdTestRow::new(ids[at], version));
            version
        })
    });
    versions.collect()
}

/// Compares counters with contents. Open segments are sealed first, so that no thread waits for the writers.
fn check_counts(tier: &SsdTier) {
    tier.settle();
    let space = &tier.inner.context.space;
    let state = tier.inner.view();
    let live: u32 = state.segments().iter().map(|segment| segment.live()).sum();
    assert_eq!(u64::from(live), state.rows());
    let held: u64 = state.segments().iter().map(|segment| segment.held_bytes()).sum();
    assert_eq!(space.used_bytes(), held, "of files that are gone the bytes are free");
}

/// A full buffer goes to the writers, is written and released, while its rows are read from the buffer, the block or
/// the file.
#[test]
fn loom_row_is_found_from_buffer_to_file() {
    model(|| {
        let (tier, engine) = tier(256 << 10, SMALL);
        // One more row fills the buffer.
        append(&tier, &rows(0..191, 1), |_| false).unwrap();
        let background = SsdWorkers::of_process().unwrap();
        let writer = spawn(move || background.work_as_writer());
        let appending = {
            let tier = Arc::clone(&tier);
            spawn(move || append(&tier, &rows(191..192, 1), |_| false).unwrap())
        };
        assert_eq!(versions(&tier, &*engine, &[0, 190]), [Some(1); 2]);
        appending.join().unwrap();
        assert_eq!(versions(&tier, &*engine, &[1, 191]), [Some(1); 2]);
        background.end_writer();
        writer.join().unwrap();
        check_counts(&tier);
    });
}

/// Newer versions empty a segment, so that its file is removed, while a fetch that has found it is about to read.
#[test]
fn loom_released_segment_keeps_its_file_during_reads() {
    model(|| {
        let (tier, engine) = tier(256 << 10, SMALL);
        append(&tier, &rows(0..2, 1), |_| false).unwrap();
        tier.settle();
        let files = engine.list(&config(0, ReopenMode::Never).dir).unwrap().len();
        let overwriting = {
            let tier = Arc::clone(&tier);
            spawn(move || append(&tier, &rows(0..2, 2), |_| true).unwrap())
        };
        for version in versions(&tier, &*engine, &[0, 1]) {
            assert!(version == Some(1) || version == Some(2), "{version:?}");
        }
        overwriting.join().unwrap();
        check_counts(&tier);
        assert_eq!(engine.list(&config(0, ReopenMode::Never).dir).unwrap().len(), files, "one came, one went");
    });
}

/// Returns a tier in which half of a segment is dead, and space is so short that compaction chooses it.
fn with_compaction_candidate() -> (Arc<SsdTier>, Arc<dyn IoEngine>) {
    let (tier, engine) = tier(88 << 10, TINY);
    for first in 0..6 {
        append(&tier, &rows(first * 4..first * 4 + 4, 1), |_| false).unwrap();
        tier.settle();
    }
    append(&tier, &rows(2..4, 2), |_| true).unwrap();
    let state = tier.inner.view();
    assert!(next_choice(&tier.inner, &state) != CompactionChoice::Nothing, "compaction would have nothing to do");
    drop(state);
    (tier, engine)
}

/// Starts a compactor, which finds the tier in its inbox.
fn compact(tier: &Arc<SsdTier>) -> JoinHandle<()> {
    schedule(&tier.inner);
    spawn(|| SsdWorkers::of_process().unwrap().compact_waiting())
}

/// Compaction moves a row while the same id is appended or removed. The newer record wins.
#[test]
fn loom_compaction_never_overwrites_newer_rows() {
    model(|| {
        let (tier, engine) = with_compaction_candidate();
        let compacting = compact(&tier);
        append(&tier, &rows(0..1, 3), |_| true).unwrap();
        compacting.join().unwrap();
        assert_eq!(versions(&tier, &*engine, &[0, 1, 2]), [Some(3), Some(1), Some(2)]);
        check_counts(&tier);
    });
}

#[test]
fn loom_row_removed_during_compaction_stays_removed() {
    model(|| {
        let (tier, engine) = with_compaction_candidate();
        let compacting = compact(&tier);
        tier.remove(&[0]).unwrap();
        compacting.join().unwrap();
        assert_eq!(versions(&tier, &*engine, &[0, 1]), [None, Some(1)]);
        check_counts(&tier);
    });
}

/// A scan reads a list of segments. It misses no row that compaction moves, and returns none twice.
#[test]
fn loom_scan_during_compaction_yields_every_row_once() {
    model(|| {
        let (tier, _engine) = with_compaction_candidate();
        let compacting = compact(&tier);
        let mut ids = Vec::new();
        tier.scan(&mut |row| {
            ids.push(row.header.id);
            Ok(())
        })
        .unwrap();
        compacting.join().unwrap();
        ids.sort_unstable();
        assert_eq!(ids, (0..24).collect::<Vec<Id>>());
        check_counts(&tier);
    });
}

/// A snapshot returns each of its rows once, in its version, while compaction moves them, they are overwritten, and
/// segments are read out of order.
#[test]
fn loom_snapshot_sees_old_rows_during_move_and_overwrite() {
    model(|| {
        let (tier, _engine) = with_compaction_candidate();
        let compacting = compact(&tier);
        let early = Arc::new(Mutex::new(Vec::new()));
        let keep = {
            let early = Arc::clone(&early);
            Box::new(move |row: RowRef<'_>| lock(&early).push((row.header.id, row.header.count)))
        };
        let snapshot = tier.snapshot(&mut [1].into_iter(), 0, keep).unwrap();
        let reading_early = {
            let tier = Arc::clone(&tier);
            spawn(move || read_segment_early(&tier.inner))
        };
        append(&tier, &rows(0..1, 3), |_| true).unwrap();
        let mut given = Vec::new();
        snapshot
            .for_each_row(&mut |row| {
                given.push((row.header.id, row.header.count));
                Ok(())
            })
            .unwrap();
        reading_early.join().unwrap();
        drop(snapshot);
        compacting.join().unwrap();
        given.append(&mut lock(&early));
        given.sort_unstable();
        let version = |id: Id| (id, if id == 2 || id == 3 { 2 } else { 1 });
        assert_eq!(given, (0..24).filter(|id| *id != 1).map(version).collect::<Vec<_>>());
        check_counts(&tier);
    });
}
