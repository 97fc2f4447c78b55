//! A snapshot has the rows of the instant at which it was taken, bitwise identical, for any change to the table before
//! they are read.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use embcache::Kind;
use embcache::cache::{BaseCheckpoint, Plan, PlanMode, PreImages, RowChunk, TableSnapshot};
use embcache::config::{OnFull, OptimizerKind, PolicyKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine};
use embcache::rows::RowHeader;
use embcache::types::{Id, hash_id};
use embcache_tests::{Contents, Rig, config, watched};

const DIM: usize = 4;
const IDS: u64 = 160;
const SPILL: &str = "/save/0-of-1.preimages";

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 += 1;
        hash_id(self.0 as Id) % sides
    }

    fn ids(&mut self, most: u64) -> Vec<Id> {
        let count = 1 + self.roll(most);
        let mut ids: Vec<Id> = (0..count).map(|_| self.roll(IDS) as Id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// A table and a sequence of random operations on it. The same dice run the same operations.
struct Run {
    rig: Rig,
    dice: Dice,
    waiting: VecDeque<(Plan, Vec<Id>)>,
    token: u64,
}

impl Run {
    fn new(config: TableConfig, engine: &Arc<dyn IoEngine>, seed: u64) -> Self {
        let rig = Rig::open(config, Arc::clone(engine)).unwrap();
        Self { rig, dice: Dice(seed << 32), waiting: VecDeque::new(), token: 0 }
    }

    fn act(&mut self) {
        let salt = self.dice.roll(100) as u32;
        match self.dice.roll(12) {
            0..4 => _ = self.rig.train(&self.dice.ids(20), 3, salt).unwrap(),
            4..6 => {
                let ids = self.dice.ids(12);
                self.waiting.push_back((self.rig.plan(&ids, PlanMode::TRAIN_PREFETCH).unwrap(), ids));
            }
            6..8 => {
                if let Some((plan, ids)) = self.waiting.pop_front() {
                    self.rig.finish(&plan, ids.len(), 3, salt).unwrap();
                }
            }
            8 => {
                let ids = self.dice.ids(10);
                self.waiting.clear();
                let floats = self.rig.table.config().layout().vector_floats();
                let rows: Contents = ids
                    .iter()
                    .map(|&id| (id, (RowHeader { id, count: salt, ..RowHeader::default() }, vec![salt; floats])))
                    .collect();
                self.rig.import(&rows).unwrap();
            }
            9 => {
                self.waiting.clear();
                let ids = self.dice.ids(8);
                self.rig.table.remove_rows(&ids).unwrap();
            }
            10 => {
                self.token += 1;
                self.rig.table.flush(self.token).unwrap();
            }
            _ => _ = self.rig.evaluate(&self.dice.ids(30), 4, salt > 50).unwrap(),
        }
    }
}

fn images(engine: &Arc<dyn IoEngine>, limit: usize) -> Arc<PreImages> {
    engine.create_dir_all(Path::new("/save")).unwrap();
    Arc::new(PreImages::new(Arc::clone(engine), SPILL.into(), limit, 1))
}

fn add(to: &mut Contents, chunk: &RowChunk) {
    let floats = chunk.vectors.len() / chunk.headers.len();
    for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(floats)) {
        let bits = vector.iter().map(|value| value.to_bits()).collect();
        assert!(to.insert(header.id, (*header, bits)).is_none(), "row {} is there twice", header.id);
    }
}

fn contents(moment: TableSnapshot) -> embcache::Result<Contents> {
    let mut rows = Contents::new();
    moment.for_each_chunk(7, &mut |chunk| {
        add(&mut rows, &chunk);
        Ok(())
    })?;
    Ok(rows)
}

#[derive(Clone, Copy, Debug)]
struct Tiers {
    device_rows: Option<u32>,
    host_rows: u64,
    ssd: Option<u64>,
    on_full: OnFull,
}

/// Rows are initialized, trained, evicted, moved between all tiers, and dropped.
const TIERS: [Tiers; 7] = [
    Tiers { device_rows: None, host_rows: 400, ssd: None, on_full: OnFull::Error },
    Tiers { device_rows: None, host_rows: 90, ssd: None, on_full: OnFull::Evict },
    Tiers { device_rows: Some(12), host_rows: 400, ssd: None, on_full: OnFull::Error },
    Tiers { device_rows: Some(60), host_rows: 90, ssd: None, on_full: OnFull::Evict },
    Tiers { device_rows: None, host_rows: 25, ssd: Some(4 << 20), on_full: OnFull::Error },
    Tiers { device_rows: Some(20), host_rows: 12, ssd: Some(4 << 20), on_full: OnFull::Error },
    Tiers { device_rows: None, host_rows: 1, ssd: Some(4 << 20), on_full: OnFull::Error },
];

fn table(tiers: Tiers, policy: PolicyKind, optimizer: OptimizerKind) -> TableConfig {
    let mut wanted = config(DIM, optimizer, tiers.host_rows);
    wanted.policy = policy;
    wanted.host_bytes = tiers.host_rows * embcache::cache::host_row_bytes(&wanted.layout(), policy);
    wanted.device_rows = tiers.device_rows;
    wanted.on_full = tiers.on_full;
    let dir = PathBuf::from("/base/m/t/0-of-1");
    wanted.ssd = tiers.ssd.map(|bytes| SsdConfig { dir, bytes, reopen: ReopenMode::Discard, resume_commit_id: None });
    wanted
}

/// The snapshot has the rows from before the exclusive change that places and updates them.
#[test]
fn snapshot_keeps_rows_placed_and_updated_exclusively() {
    let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
    for tiers in [TIERS[2], TIERS[5]] {
        let rig = Rig::open(table(tiers, PolicyKind::Lru, OptimizerKind::Sgd), Arc::clone(&engine)).unwrap();
        rig.train(&(0..30).collect::<Vec<Id>>(), 1, 0).unwrap();
        let before = rig.contents().unwrap();
        let moment = rig.table.snapshot(&images(&engine, 1 << 20), 1).unwrap();
        // Some of these rows are on the device, some are elsewhere, and one is new.
        let plan = rig.plan(&[1, 9, 20, 29, 50], PlanMode::TRAIN).unwrap();
        let change = || {
            rig.place(&plan).unwrap();
            plan.begin_update().unwrap();
            let slots = plan.slots(0).unwrap();
            rig.with_tensors(|tensors| {
                let weights = &mut tensors[0].as_mut().unwrap().weights;
                for slot in slots {
                    weights[slot as usize * DIM..][..DIM].fill(9.0);
                }
            });
            plan.commit().unwrap();
        };
        plan.exclusively(change).unwrap();
        assert!(contents(moment).unwrap() == before, "{tiers:?}");
        assert!(rig.contents().unwrap()[&29].1 == [9.0_f32.to_bits(); DIM]);
    }
}

/// A snapshot has its rows after any change of the table, and changes nothing in the table.
#[test]
fn snapshot_has_its_rows_after_any_change() {
    let policies = PolicyKind::ALL;
    // One optimizer of each layout of slots.
    let optimizers = [
        OptimizerKind::Sgd,
        OptimizerKind::RowWiseAdagrad,
        OptimizerKind::Adagrad,
        OptimizerKind::PartialRowWiseAdam,
        OptimizerKind::Adam,
    ];
    let (mut spilled, mut changed, mut of_all, mut of_changes) = (0, 0, 0, 0);
    // Each policy with each optimizer and each division into tiers.
    let a_policy = TIERS.len() * optimizers.len();
    for seed in 0..policies.len() * a_policy {
        let tiers = TIERS[seed % TIERS.len()];
        let wanted = || table(tiers, policies[seed / a_policy], optimizers[seed / TIERS.len() % optimizers.len()]);
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let mut run = Run::new(wanted(), &engine, seed as u64);
        let mut twin = Run::new(wanted(), &(Arc::new(MemoryEngine::default()) as Arc<dyn IoEngine>), seed as u64);
        let mut before = Contents::new();
        for round in 0..3 {
            for _ in 0..40 {
                run.act();
                twin.act();
            }
            let expected = run.rig.contents().unwrap();
            let step = run.rig.table.step().unwrap();
            let images = images(&engine, if seed % 2 == 0 { 1 << 20 } else { 1 });
            let checkpoint = |round| BaseCheckpoint { name: "c".into(), manifest_xxh3: 0, next_epoch: round + 1 };
            let is_delta = round > 0 && !(seed as u32 + round).is_multiple_of(3);
            let moment = if is_delta {
                run.rig.table.snapshot_of_changes(&images, round + 1, &checkpoint(round - 1)).unwrap()
            } else {
                run.rig.table.snapshot(&images, round + 1).unwrap()
            };
            twin.rig.table.set_epoch(round + 1).unwrap();
            twin.rig.table.saved_as(checkpoint(round)).unwrap();
            assert_eq!((moment.step(), moment.rows()), (step, expected.len() as u64));
            for _ in 0..10 {
                run.act();
                twin.act();
            }
            let left = moment.tombstones().map(<[Id]>::to_vec);
            assert_eq!(left.is_some(), is_delta);
            let mut rows = Contents::new();
            moment
                .for_each_chunk(9, &mut |chunk| {
                    add(&mut rows, &chunk);
                    run.act();
                    twin.act();
                    Ok(())
                })
                .unwrap();
            of_all += if is_delta { expected.len() } else { 0 };
            of_changes += if is_delta { rows.len() } else { 0 };
            if let Some(left) = left {
                assert!(rows.values().all(|(header, _)| header.modified_epoch >= round));
                before.retain(|id, _| left.binary_search(id).is_err());
                before.extend(rows);
                rows = before;
            }
            assert!(rows == expected, "{tiers:?}, seed {seed}, round {round}");
            before = expected.clone();
            run.rig.table.finish_background_save(round + 1, Some(checkpoint(round)));
            spilled += images.file_bytes();
            changed += u64::from(run.rig.contents().unwrap() != expected);
            drop(images);
            assert!(!engine.exists(Path::new(SPILL)).unwrap(), "the file of pre-images stays");
        }
        assert!(run.rig.contents().unwrap() == twin.rig.contents().unwrap(), "{tiers:?}, seed {seed}");
        run.waiting.clear();
        assert_eq!(run.rig.table.stats().unwrap().pinned_rows, 0);
    }
    assert!(spilled > 50_000 && changed > 200, "{spilled} bytes spilled, {changed} rounds changed rows");
    assert!(of_changes > 1000 && of_changes < of_all * 9 / 10, "{of_changes} changes of {of_all} rows");
}

#[test]
fn table_has_one_snapshot_at_a_time_and_drop_releases_it() {
    for tiers in TIERS {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let mut run = Run::new(table(tiers, PolicyKind::Lru, OptimizerKind::Adagrad), &engine, 1);
        (0..50).for_each(|_| run.act());
        let images = images(&engine, 1 << 20);
        let first = run.rig.table.snapshot(&images, 1).unwrap();
        assert_eq!(run.rig.table.snapshot(&images, 1).unwrap_err().kind(), Kind::State);
        (0..20).for_each(|_| run.act());
        drop(first);
        (0..20).for_each(|_| run.act());
        let expected = run.rig.contents().unwrap();
        let second = run.rig.table.snapshot(&images, 2).unwrap();
        (0..20).for_each(|_| run.act());
        assert_eq!(contents(second).unwrap(), expected);
    }
}

#[test]
fn rows_that_cannot_be_kept_fail_snapshot_and_not_training() {
    for (operation, tiers) in
        [(IoOperation::Create, TIERS[0]), (IoOperation::Write, TIERS[0]), (IoOperation::Write, TIERS[2])]
    {
        let memory: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let faults = FaultEngine::new(Arc::clone(&memory));
        let faulty: Arc<dyn IoEngine> = Arc::new(faults.clone());
        let mut run = Run::new(table(tiers, PolicyKind::Lru, OptimizerKind::Adagrad), &memory, 3);
        (0..60).for_each(|_| run.act());
        let images = images(&faulty, 1);
        let moment = run.rig.table.snapshot(&images, 1).unwrap();
        faults.hit_every(operation, IoFault::Fail(libc::ENOSPC));
        (0..400).for_each(|_| run.act());
        let error = contents(moment).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOSPC), "{error}");
        let images = self::images(&memory, 1 << 20);
        let expected = run.rig.contents().unwrap();
        assert_eq!(contents(run.rig.table.snapshot(&images, 2).unwrap()).unwrap(), expected);
    }
}

/// An append continues in another segment, whose file cannot be created. Its rows in the first segment then count as
/// missing.
#[test]
fn rows_left_on_ssd_by_failed_write_are_in_snapshot_once() {
    let mut half_written = 0;
    for passing in 0..8 {
        let memory: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let faults = FaultEngine::new(Arc::clone(&memory));
        let tiers = Tiers { device_rows: None, host_rows: 1500, ssd: Some(512 << 10), on_full: OnFull::Error };
        let wanted = table(tiers, PolicyKind::Lru, OptimizerKind::Adagrad);
        let rig = Rig::open(wanted, Arc::new(faults.clone()) as Arc<dyn IoEngine>).unwrap();
        let ids: Vec<Id> = (0..1400).collect();
        rig.train(&ids, 4, 1).unwrap();
        faults.hit_once(IoOperation::Create, passing, IoFault::Fail(libc::EMFILE));
        if rig.table.flush(1).is_ok() {
            break;
        }
        // All rows come from one append, so a file that was made has some of them.
        half_written += u64::from(passing > 0);
        assert_eq!(
            rig.table.stats().unwrap().ssd.unwrap().tier.rows,
            0,
            "rows are there that the table does not know of"
        );
        let expected = rig.contents().unwrap();
        let moment = rig.table.snapshot(&images(&memory, 1 << 20), 1).unwrap();
        assert!(contents(moment).unwrap() == expected, "after {passing} files");
    }
    assert!(half_written > 0, "no append failed half way");
}

#[test]
fn clear_and_close_wait_for_snapshot() {
    for close in [false, true] {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let mut run = Run::new(table(TIERS[4], PolicyKind::Lru, OptimizerKind::Adagrad), &engine, 5);
        (0..60).for_each(|_| run.act());
        run.waiting.clear();
        let expected = run.rig.contents().unwrap();
        let moment = run.rig.table.snapshot(&images(&engine, 1 << 20), 1).unwrap();
        let done = AtomicBool::new(false);
        let rig = &run.rig;
        watched(String::new, || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    if close {
                        rig.table.close().unwrap();
                    } else {
                        rig.table.clear().unwrap();
                    }
                    done.store(true, Ordering::SeqCst);
                });
                let mut rows = Contents::new();
                moment
                    .for_each_chunk(10, &mut |chunk| {
                        std::thread::sleep(Duration::from_millis(1));
                        assert!(!done.load(Ordering::SeqCst), "it did not wait");
                        add(&mut rows, &chunk);
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(rows, expected);
            });
        });
        assert!(done.load(Ordering::SeqCst));
        assert!(close || run.rig.table.is_empty().unwrap());
    }
}

/// Rows are written and compacted until all space was used several times. No thread reads the snapshot's rows during
/// that.
#[test]
fn full_ssd_tier_continues_under_unread_snapshot() {
    for on_full in [OnFull::Error, OnFull::Evict] {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        let tiers = Tiers { device_rows: None, host_rows: 40, ssd: Some(2 << 20), on_full };
        // The capacity assumes the maximum bytes of a record, which is close to the actual size if rows are wide.
        let mut wide = table(tiers, PolicyKind::Lru, OptimizerKind::Adagrad);
        (wide.dim, wide.host_bytes) = (64, 40 * embcache::cache::host_row_bytes(&wide.layout(), wide.policy));
        let rig = Rig::open(wide, Arc::clone(&engine)).unwrap();
        let capacity = {
            let mut ids: Vec<Id> = Vec::new();
            for first in (0..).step_by(16) {
                ids.clear();
                ids.extend(first..first + 16);
                match rig.train(&ids, 4, 1) {
                    Err(error) if error.kind() == Kind::Capacity => break,
                    _ if first > 4000 => break,
                    result => _ = result.unwrap(),
                }
            }
            rig.table.len().unwrap() as Id
        };
        let mut dice = Dice(9);
        watched(String::new, || {
            let expected = rig.contents().unwrap();
            let written = || rig.table.stats().unwrap().ssd.unwrap().tier.written_bytes;
            let before = written();
            let images = images(&engine, 8 << 10);
            let moment = rig.table.snapshot(&images, 1).unwrap();
            let mut token = 0;
            while written() < before + (8 << 20) {
                let mut ids: Vec<Id> = (0..16).map(|_| dice.roll(capacity as u64) as Id).collect();
                ids.sort_unstable();
                ids.dedup();
                rig.train(&ids, 4, 2).unwrap();
                if dice.roll(50) == 0 {
                    token += 1;
                    rig.table.flush(token).unwrap();
                }
            }
            // These are more rows than are in RAM, so segments were read early.
            assert!(images.file_bytes() > 8 << 10, "{}", images.file_bytes());
            assert_eq!(contents(moment).unwrap(), expected);
        });
    }
}
