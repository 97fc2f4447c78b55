//! Versions are swapped under load: each request uses one version, whose number is in all its rows, and reads the rows
//! of this version.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use embcache::checkpoint::{CheckpointId, CheckpointSave, DeltaChanges, RankWriter, SaveOptions};
use embcache::config::OptimizerKind;
use embcache::io::{IoEngine, PsyncEngine};
use embcache::lifecycle::{ExpiryRule, ExpirySweep};
use embcache::serve::{PollOutcome, ServeOptions, ServedVersion, TableServer};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, memory, on, save_with};
use embcache_tests::directory_in;

use crate::faults::wait_for;

const READERS: usize = 2;
/// A full checkpoint is saved after this number of versions. It starts a new chain.
const FULL_EVERY: u64 = 18;
/// After this number of versions, the publishing thread waits until each reader has seen one of them.
const WAITED_EVERY: u64 = 5;
/// This number of deltas, each with a sweep that covers no other, is one more than fits next to an index. They are
/// merged.
const DELTAS_TO_MERGE: u64 = 9;

fn all_ids() -> Vec<Id> {
    (0..90).map(|n| n * 77 - 2000).collect()
}

/// True if a version has a row of an id. Each id is removed now and then, and inserted again.
fn has(number: u64, id: Id) -> bool {
    !(id.unsigned_abs() + number).is_multiple_of(5)
}

/// The tables of a version. Every weight is its number.
fn numbered(number: u64) -> Vec<Table> {
    let ids: Vec<Id> = all_ids().into_iter().filter(|id| has(number, *id)).collect();
    let mut tables = vec![
        Table::new("m", "a", OptimizerKind::RowWiseAdagrad, 8, &ids, number),
        Table::new("m", "b", OptimizerKind::Sgd, 3, &ids[..40], number),
    ];
    for (header, vector) in tables.iter_mut().flat_map(|table| table.rows.values_mut()) {
        header.last_step = number;
        vector.fill(number as f32);
    }
    tables
}

/// Saves a version as a delta. Every other removed id has a tombstone, and a sweep expires the rest.
fn save_changes(engine: &Arc<dyn IoEngine>, root: &Path, number: u64, parent: &CheckpointId) -> CheckpointId {
    let directory = directory_in(engine, root);
    let save = CheckpointSave::begin_with(&directory, number, on(parent)).expect("begun");
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("a writer");
    let norm = ExpiryRule::NormBelow(1e9 - number as f64);
    let sweeps =
        [ExpirySweep { step: number - 1, rule: ExpiryRule::All(vec![ExpiryRule::LastStep(number - 1), norm]) }];
    for (before, now) in numbered(number - 1).iter().zip(&numbered(number)) {
        let buckets = now.buckets_of(0, 1);
        let left = before.rows.keys().filter(|id| !now.rows.contains_key(id)).step_by(2).copied();
        let left: Vec<Id> = left.collect();
        let changes = DeltaChanges { tombstones: &left, sweeps: &sweeps, total_rows: now.rows.len() as u64 };
        let mut source = now.source(&buckets, 50);
        writer.write_changes(now.spec.clone(), buckets, &mut source, changes).expect("written");
    }
    save.publish(&[writer.finish().expect("durable")], 1).expect("published").identity
}

/// Looks all ids up in all tables of a version. Returns the number in the rows.
fn look_up(version: &ServedVersion, ids: &[Id]) -> u64 {
    let number = version.name().seq;
    for table in version.tables() {
        let dim = table.dim();
        let (mut out, mut found) = (vec![f32::NAN; ids.len() * dim], vec![false; ids.len()]);
        table.lookup(ids, &mut out, &mut found).expect("served");
        let there = ids.iter().filter(|id| has(number, **id)).take(table.rows() as usize).count();
        assert_eq!(found.iter().filter(|found| **found).count(), there, "rows of version {number}");
        for ((id, found), row) in ids.iter().zip(found).zip(out.chunks(dim)) {
            assert!(!found || has(number, *id), "id {id} is not in version {number}");
            let is_of_it = row.iter().all(|weight| weight.to_bits() == (number as f32).to_bits());
            assert_eq!(is_of_it, found, "id {id} in version {number}: {row:?}");
        }
    }
    number
}

/// The observations of a reader thread.
#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    versions: AtomicU64,
    /// The version of its last request.
    last: AtomicU64,
}

fn read_until(done: &AtomicBool, serving: &TableServer, seen: &Seen) {
    // The trainer needs the CPU too. On Linux this is the priority of the thread; if it fails the test takes longer.
    let _ = rustix::process::setpriority_process(None, 19);
    let ids = all_ids();
    while !done.load(Ordering::Relaxed) {
        let number = look_up(&serving.pin().expect("a version"), &ids);
        let last = seen.last.load(Ordering::Relaxed);
        assert!(number >= last, "versions do not go back");
        seen.versions.fetch_add(u64::from(number > last), Ordering::Relaxed);
        seen.requests.fetch_add(1, Ordering::Relaxed);
        seen.last.store(number, Ordering::Release);
    }
}

/// Stops the readers, also if the publishing thread panics.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Publishes `versions` versions, while threads look up all rows of all tables of their pinned version.
fn swap_under_load(engine: &Arc<dyn IoEngine>, root: &Path, versions: u64) {
    let full = |number| {
        let options = SaveOptions { keep: 1, ..SaveOptions::default() };
        save_with(engine, root, &numbered(number), (1, 2000), number, options).expect("saved").identity
    };
    let mut parent = full(1);
    let serving = TableServer::open(directory_in(engine, root), ServeOptions::default()).expect("opened");
    let (done, seen): (_, [Seen; READERS]) = (AtomicBool::new(false), std::array::from_fn(|_| Seen::default()));
    let (mut merges, mut waited) = (0, 0);
    std::thread::scope(|scope| {
        let ends = Done(&done);
        let readers = seen.each_ref().map(|seen| scope.spawn(|| read_until(&done, &serving, seen)));
        for number in 2..=versions {
            let deltas = (number - 1) % FULL_EVERY;
            parent = if deltas == 0 { full(number) } else { save_changes(engine, root, number, &parent) };
            assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == number));
            // In every other chain newer versions are served while deltas are merged.
            if deltas == DELTAS_TO_MERGE && ((number - 1) / FULL_EVERY).is_multiple_of(2) {
                wait_for(|| serving.stats().overlay_ids == 0, "the deltas are merged into an index");
                merges += 1;
            }
            if deltas == FULL_EVERY - 2 {
                // The merging thread pins the version that it merges. The next chain has its own merge.
                wait_for(|| serving.stats().versions == 2, "the merge has ended");
            }
            // Other swaps follow without waiting.
            if number.is_multiple_of(WAITED_EVERY) || number == versions {
                let is_seen = |seen: &Seen| seen.last.load(Ordering::Acquire) == number;
                while !seen.iter().all(is_seen) {
                    assert!(!readers.iter().any(ScopedJoinHandle::is_finished), "a reader has ended, see above");
                    std::thread::sleep(Duration::from_micros(100));
                }
                waited += 1;
            }
        }
        drop(ends);
        for reader in readers {
            reader.join().expect("no torn row");
        }
    });
    for seen in &seen {
        let (requests, versions) = (seen.requests.load(Ordering::Relaxed), seen.versions.load(Ordering::Relaxed));
        assert!(requests >= versions && versions >= waited, "{requests} requests of {versions} versions");
    }
    assert!(merges >= versions / (2 * FULL_EVERY) && merges > 0, "{merges} merges");
    assert!(waited >= versions / WAITED_EVERY, "{waited} versions were waited for");
    // A merge may still be under way.
    wait_for(|| serving.stats().versions == 2, "nobody holds older ones");
    let stats = serving.stats();
    assert_eq!((stats.swaps, stats.failed_polls), (versions - 1, 0));
}

#[test]
fn no_request_sees_two_versions_of_files_in_memory() {
    swap_under_load(&(Arc::new(memory()) as Arc<dyn IoEngine>), Path::new(ROOT), 100);
}

#[test]
fn no_request_sees_two_versions_in_a_thousand_swaps_of_mapped_files() {
    // A disk in memory, if there is one: a thousand saves wait many times for a real one.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
    swap_under_load(&(Arc::new(PsyncEngine::new(false)) as Arc<dyn IoEngine>), dir.path(), 1001);
}

#[test]
fn no_request_sees_two_versions_of_mapped_files_on_a_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    swap_under_load(&(Arc::new(PsyncEngine::new(false)) as Arc<dyn IoEngine>), dir.path(), 60);
}
