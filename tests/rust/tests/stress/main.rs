//! Plans, training, evaluations, imports, removals, exports, snapshots and flushes all run concurrently, over tiers so
//! small that rows move all the time.
//!
//! Each row shows if it is intact. Every training step of an id has the gradient 1, so after `n` steps weights, slot
//! and count are a function of `n`. This `n` is between the number of steps that were complete before the row was read
//! and the number of steps that had started after. `EMBCACHE_STRESS=20` runs twenty times as long.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use embcache::cache::{Plan, PlanMode, PreImages, RowBlock};
use embcache::config::{OnFull, OptimizerKind, PolicyKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, MemoryEngine, PsyncEngine, UringEngine};
use embcache::rows::{InitializerSpec, RowHeader};
use embcache::types::{Id, hash_id};
use embcache::{Error, Kind};
use embcache_tests::{Rig, config, times, watched};

const DIM: usize = 8;
const HOST_ROWS: u64 = 250;
/// The ids that are trained.
const IDS: Id = 3000;
/// The number of ids that only the importing thread uses. They are `IDS..IDS + OWN`.
const OWN: Id = 400;
const BATCH: usize = 48;
/// The steps of each trainer.
const STEPS: u64 = 60;
const TRAINERS: u64 = 3;
const SSD_BYTES: u64 = 640 << 10;

/// The random numbers of one thread.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 += 1;
        hash_id(self.0 as Id) % sides
    }

    /// Distinct ids, most of them from a small set that moves with `step`.
    fn batch(&mut self, step: u64) -> Vec<Id> {
        let mut ids: Vec<Id> = (0..BATCH)
            .map(|_| {
                let any = self.roll(IDS as u64);
                let near = (step / 8 * 20 + self.roll(150)) % IDS as u64;
                (if self.roll(3) == 0 { any } else { near }) as Id
            })
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// The row after each number of steps: weights and slots as bits.
struct Life(Vec<Vec<u32>>);

impl Life {
    fn new(steps: usize) -> Self {
        let rig = Rig::open(
            wanted(PolicyKind::Lru, OnFull::Error, None, ReopenMode::Never),
            Arc::new(MemoryEngine::default()),
        );
        let rig = rig.unwrap();
        let mut states = Vec::with_capacity(steps + 1);
        for step in 0..=steps {
            states.push(rig.table.read_rows(&[0]).unwrap().vectors.iter().map(|value| value.to_bits()).collect());
            if step < steps {
                let plan = rig.plan(&[0], PlanMode::TRAIN).unwrap();
                rig.place(&plan).unwrap();
                rig.forward(&plan, 1, 1).unwrap();
                rig.backward_with(&plan, &[1.0; DIM]).unwrap();
            }
        }
        assert!(states.windows(2).all(|pair| pair[0] != pair[1]), "each step changes the row");
        Self(states)
    }

    /// The number of steps that produced these floats, which are the first ones of a row.
    fn steps(&self, floats: &[f32]) -> Option<u32> {
        let is = |state: &Vec<u32>| floats.iter().zip(state).all(|(float, bits)| float.to_bits() == *bits);
        self.0.iter().position(is).map(|steps| steps as u32)
    }
}

fn wanted(policy: PolicyKind, on_full: OnFull, dir: Option<&Path>, reopen: ReopenMode) -> TableConfig {
    let mut wanted = config(DIM, OptimizerKind::Adagrad, HOST_ROWS);
    wanted.policy = policy;
    wanted.on_full = on_full;
    wanted.initializer = InitializerSpec::Constant { value: 1.0 };
    wanted.host_bytes = HOST_ROWS * embcache::cache::host_row_bytes(&wanted.layout(), policy);
    // With a cap of fewer rows than there are ids, rows are evicted by policy.
    let bytes = if on_full == OnFull::Evict { SSD_BYTES * 2 / 5 } else { SSD_BYTES };
    wanted.ssd = dir.map(|dir| SsdConfig { dir: dir.to_owned(), bytes, reopen, resume_commit_id: None });
    wanted
}

/// One run: the table, the operations on each id, and a flag that the trainers have finished.
struct World {
    rig: Rig,
    life: Life,
    on_full: OnFull,
    begun: Vec<AtomicU32>,
    done: Vec<AtomicU32>,
    trainers: AtomicU64,
    /// Counts of the events that the run must cover.
    exports: AtomicU64,
    moments: AtomicU64,
    token: AtomicU64,
    failed: AtomicBool,
}

impl World {
    fn count(counters: &[AtomicU32], ids: &[Id]) -> Vec<u32> {
        ids.iter().map(|&id| counters[id as usize].load(Ordering::SeqCst)).collect()
    }

    fn add(counters: &[AtomicU32], ids: &[Id]) {
        for &id in ids {
            counters[id as usize].fetch_add(1, Ordering::SeqCst);
        }
    }

    fn running(&self) -> bool {
        self.trainers.load(Ordering::SeqCst) > 0 && !self.failed.load(Ordering::SeqCst)
    }

    /// Checks rows, of `floats` floats each, that were read between two reads of the counters.
    fn check(&self, ids: &[Id], rows: &[f32], floats: usize, least: &[u32], zeros: bool) {
        let most = World::count(&self.begun, ids);
        for (at, &id) in ids.iter().enumerate() {
            let row = &rows[at * floats..][..floats];
            if zeros
                && row.iter().all(|value| value.to_bits() == 0)
                && (least[at] == 0 || self.on_full == OnFull::Evict)
            {
                continue;
            }
            let steps = self.life.steps(row);
            let steps = steps.unwrap_or_else(|| panic!("the row of id {id} is of no step: {row:?}"));
            // A row that was evicted by policy is initialized again.
            let least = if self.on_full == OnFull::Evict { 0 } else { least[at] };
            assert!(least <= steps && steps <= most[at], "id {id}: {steps} steps, of {least} to {}", most[at]);
        }
    }

    /// A trainer. It plans ahead, releases some plans, and trains the others.
    fn train(&self, number: u64, steps: u64) {
        let mut dice = Dice(number << 32);
        let mut waiting: VecDeque<(Plan, Vec<Id>)> = VecDeque::new();
        for step in 0..steps {
            let ids = dice.batch(step);
            let ahead = dice.roll(4) > 0;
            waiting.push_back((self.rig.plan(&ids, PlanMode { is_prefetch: ahead, ..PlanMode::TRAIN }).unwrap(), ids));
            if dice.roll(12) == 0 {
                // The plan is dropped while its reads run.
                waiting.pop_back();
            }
            let window = 1 + dice.roll(3) as usize;
            while waiting.len() > window {
                let (plan, ids) = waiting.pop_front().unwrap();
                self.finish(&plan, &ids, dice.roll(10) == 0);
            }
        }
        while let Some((plan, ids)) = waiting.pop_front() {
            self.finish(&plan, &ids, false);
        }
    }

    fn finish(&self, plan: &Plan, ids: &[Id], abandon: bool) {
        plan.wait(&mut []).unwrap();
        let least = World::count(&self.done, ids);
        let out = self.rig.forward(plan, ids.len(), 1).unwrap();
        self.check(ids, &out, DIM, &least, false);
        if abandon {
            return plan.release();
        }
        World::add(&self.begun, ids);
        self.rig.backward_with(plan, &vec![1.0; out.len()]).unwrap();
        World::add(&self.done, ids);
    }

    fn evaluate(&self, number: u64) {
        let mut dice = Dice(number << 32 | 1 << 60);
        let mut step = 0;
        while self.running() {
            step += 1;
            let ids = dice.batch(step);
            let zeros = dice.roll(2) == 0;
            let least = World::count(&self.done, &ids);
            let out = self.rig.evaluate(&ids, 1, zeros).unwrap();
            self.check(&ids, &out, DIM, &least, zeros);
            let least = World::count(&self.done, &ids);
            let rows = self.rig.table.read_rows(&ids).unwrap();
            self.check(&ids, &rows.vectors, 2 * DIM, &least, false);
            for (header, id) in rows.headers.iter().zip(&ids) {
                assert_eq!(header.id, *id);
            }
        }
    }

    /// Exports. Training may end an export, and it returns intact rows, each once.
    fn export(&self) {
        while self.running() {
            let least = World::count(&self.done, &(0..IDS).collect::<Vec<Id>>());
            let mut seen = vec![false; (IDS + OWN) as usize];
            let sink = &mut |chunk: embcache::cache::RowChunk| {
                for (at, header) in chunk.headers.iter().enumerate() {
                    assert!(!std::mem::replace(&mut seen[header.id as usize], true), "id {} twice", header.id);
                    if header.id < IDS {
                        let row = &chunk.vectors[at * 2 * DIM..][..2 * DIM];
                        self.check(&[header.id], row, 2 * DIM, &least[header.id as usize..], false);
                        assert_eq!(Some(header.count), self.life.steps(row), "the count of id {}", header.id);
                    }
                }
                Ok(())
            };
            match self.rig.table.for_each_chunk(64, sink) {
                Ok(()) => _ = self.exports.fetch_add(1, Ordering::Relaxed),
                Err(error) => assert_eq!(error.kind(), Kind::State, "{error}"),
            }
        }
    }

    /// Takes snapshots, which nothing ends. Every row is intact, occurs once, and has the state of the snapshot.
    fn moment(&self, engine: &Arc<dyn IoEngine>, dir: &Path) {
        let all: Vec<Id> = (0..IDS).collect();
        let mut dice = Dice(1 << 63);
        while self.running() {
            let limit = if dice.roll(2) == 0 { 1 } else { 1 << 20 };
            let images = Arc::new(PreImages::new(Arc::clone(engine), dir.with_extension("images"), limit, 1));
            let least = World::count(&self.done, &all);
            let moment = self.rig.table.snapshot(&images, 0).unwrap();
            let most = World::count(&self.begun, &all);
            if dice.roll(8) == 0 {
                continue;
            }
            let mut seen = vec![false; (IDS + OWN) as usize];
            let sink = &mut |chunk: embcache::cache::RowChunk| {
                for (at, header) in chunk.headers.iter().enumerate() {
                    assert!(!std::mem::replace(&mut seen[header.id as usize], true), "id {} twice", header.id);
                    let row = &chunk.vectors[at * 2 * DIM..][..2 * DIM];
                    if header.id >= IDS {
                        assert_eq!(row, vector(header.id, header.count), "id {}", header.id);
                        continue;
                    }
                    assert_eq!(Some(header.count), self.life.steps(row), "the count of id {}", header.id);
                    let (least, most) = (least[header.id as usize], most[header.id as usize]);
                    let least = if self.on_full == OnFull::Evict { 0 } else { least };
                    assert!(least <= header.count && header.count <= most, "id {}: {}", header.id, header.count);
                }
                if dice.roll(4) == 0 {
                    std::thread::yield_now();
                }
                Ok(())
            };
            moment.for_each_chunk(32, sink).unwrap();
            let there = |id: Id| seen[id as usize] || least[id as usize] == 0 || self.on_full == OnFull::Evict;
            assert!(all.iter().all(|&id| there(id)), "a row is missing");
            self.moments.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Imports, reads and removes rows that no other thread uses.
    fn import(&self) {
        let mut dice = Dice(1 << 61);
        let mut version = vec![0_u32; OWN as usize];
        let busy = |error: &Error| error.kind() == Kind::State || error.kind() == Kind::Capacity;
        while self.running() {
            let first = dice.roll(OWN as u64) as Id;
            let mut ids: Vec<Id> = (0..=dice.roll(90) as Id).map(|at| IDS + (first + at * 3) % OWN).collect();
            ids.sort_unstable();
            ids.dedup();
            let place = |id: Id| (id - IDS) as usize;
            if dice.roll(3) > 0 {
                let next: Vec<u32> = ids.iter().map(|&id| version[place(id)] + 1).collect();
                let headers: Vec<RowHeader> = ids
                    .iter()
                    .zip(&next)
                    .map(|(&id, &count)| RowHeader { id, count, ..RowHeader::default() })
                    .collect();
                let vectors: Vec<f32> = ids.iter().zip(&next).flat_map(|(&id, &next)| vector(id, next)).collect();
                match self.rig.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }) {
                    Ok(()) => ids.iter().zip(next).for_each(|(&id, next)| version[place(id)] = next),
                    Err(error) => panic!("{error}"),
                }
            } else {
                let there = ids.iter().filter(|&&id| version[place(id)] > 0).count() as u64;
                match self.rig.table.remove_rows(&ids) {
                    Ok(removed) => assert!(removed == there || self.on_full == OnFull::Evict, "{removed} of {there}"),
                    Err(error) => assert!(busy(&error), "{error}"),
                }
                for &id in &ids {
                    version[place(id)] = 0;
                }
            }
            let rows = self.rig.table.read_rows(&ids).unwrap();
            for (at, &id) in ids.iter().enumerate() {
                let version = version[place(id)];
                if self.on_full == OnFull::Evict && !rows.found[at] {
                    continue;
                }
                assert_eq!(rows.found[at], version > 0, "id {id}");
                if version > 0 {
                    assert_eq!(rows.vectors[at * 2 * DIM..][..2 * DIM], vector(id, version), "id {id}");
                }
            }
        }
    }

    fn flush(&self) {
        let mut dice = Dice(1 << 62);
        while self.running() {
            let token = self.token.fetch_add(1, Ordering::SeqCst) + 1;
            self.rig.table.flush(token).unwrap();
            if dice.roll(4) == 0 {
                self.rig.table.forget_published(token).unwrap();
            }
        }
    }

    /// Checks the invariants.
    fn watch(&self) {
        while self.running() {
            let stats = self.rig.table.stats().unwrap();
            let ssd = stats.ssd.unwrap();
            assert!(
                ssd.tier.bytes <= ssd.tier.capacity_bytes,
                "{} bytes of {}",
                ssd.tier.bytes,
                ssd.tier.capacity_bytes
            );
            assert!(ssd.live_share <= 1.0, "{}", ssd.live_share);
            std::thread::yield_now();
        }
    }
}

/// An imported row.
fn vector(id: Id, version: u32) -> Vec<f32> {
    (0..2 * DIM).map(|at| (id * 64 + at as Id) as f32 + version as f32 / 1024.0).collect()
}

/// Runs everything concurrently on `engine`, checks every row, and checks it again after a flush and a resume.
fn stress(engine: &Arc<dyn IoEngine>, dir: &Path, policy: PolicyKind, on_full: OnFull) {
    let steps = STEPS * times();
    let rig = Rig::open(wanted(policy, on_full, Some(dir), ReopenMode::Discard), engine.clone()).unwrap();
    let zeros = || (0..IDS).map(|_| AtomicU32::new(0)).collect();
    let world = Arc::new(World {
        rig,
        life: Life::new((STEPS * TRAINERS * times()) as usize),
        on_full,
        begun: zeros(),
        done: zeros(),
        trainers: AtomicU64::new(TRAINERS),
        exports: AtomicU64::new(0),
        moments: AtomicU64::new(0),
        token: AtomicU64::new(0),
        failed: AtomicBool::new(false),
    });
    let reported = Arc::clone(&world);
    watched(
        move || format!("{:?}", reported.rig.table.stats()),
        || {
            let world = &*world;
            std::thread::scope(|scope| {
                let spawn = |work: Box<dyn FnOnce() + Send>| {
                    scope.spawn(move || {
                        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                        if let Err(panic) = ended {
                            world.failed.store(true, Ordering::SeqCst);
                            std::panic::resume_unwind(panic);
                        }
                    });
                };
                for number in 0..TRAINERS {
                    spawn(Box::new(move || {
                        world.train(number, steps);
                        world.trainers.fetch_sub(1, Ordering::SeqCst);
                    }));
                }
                spawn(Box::new(|| world.evaluate(0)));
                spawn(Box::new(|| world.evaluate(1)));
                spawn(Box::new(|| world.export()));
                spawn(Box::new(|| world.moment(engine, dir)));
                spawn(Box::new(|| world.import()));
                spawn(Box::new(|| world.flush()));
                spawn(Box::new(|| world.watch()));
            });
            overflow(world);
            at_rest(world, engine, dir, policy);
        },
    );
}

/// Uses all rows in one batch. While all threads run, plans may or may not overflow, depending on the load of the
/// machine.
fn overflow(world: &World) {
    let all: Vec<Id> = (0..IDS).collect();
    let plan = |ids: &[Id]| world.rig.plan(ids, PlanMode::EVALUATE).unwrap();
    let plans: Vec<Plan> = all.chunks(16).map(plan).collect();
    for plan in &plans {
        world.rig.place(plan).unwrap();
    }
    let rows: u32 = plans.iter().map(|plan| plan.overflow_rows().unwrap()[0]).sum();
    assert!(rows > 0, "all rows fit the budget");
}

/// Checks that nothing is pinned, and that every row reflects its operations, in RAM, on SSD and after a resume.
fn at_rest(world: &World, engine: &Arc<dyn IoEngine>, dir: &Path, policy: PolicyKind) {
    let stats = world.rig.table.stats().unwrap();
    assert_eq!(stats.pinned_rows, 0, "a pin was not returned");
    let ssd = stats.ssd.unwrap();
    assert!(world.moments.load(Ordering::Relaxed) > 0, "no moment ended");
    assert!(stats.host.evictions > 0 && ssd.tier.hits > 0, "nothing moved");
    assert!(world.on_full == OnFull::Error || stats.dropped_rows > 0, "nothing was dropped");
    let rows = rows_of(world, &world.rig);
    if world.on_full == OnFull::Error {
        for id in 0..IDS {
            let done = world.done[id as usize].load(Ordering::SeqCst);
            assert_eq!(rows.iter().find(|row| row.0 == id).map_or(0, |row| row.1), done, "id {id}");
        }
    }
    world.rig.table.flush(u64::MAX / 2).unwrap();
    assert_eq!(rows_of(world, &world.rig), rows, "a flush changes no row");
    world.rig.table.close().unwrap();
    let files: u64 = engine
        .list(dir)
        .unwrap()
        .iter()
        .map(|path| engine.open(path, embcache::io::IoOpenMode::Read).and_then(|file| file.len()).unwrap())
        .sum();
    let cap = world.rig.table.config().ssd.as_ref().unwrap().bytes;
    assert!(files <= cap, "{files} bytes of files, and the cap is {cap}");
    let resumed = Rig::open(wanted(policy, world.on_full, Some(dir), ReopenMode::Resume), engine.clone()).unwrap();
    assert_eq!(rows_of(world, &resumed), rows, "a resume brings every row back");
    assert_eq!(resumed.table.step().unwrap(), stats.step);
}

/// Returns the ids and the steps of all rows, sorted. Each row is checked to be intact.
fn rows_of(world: &World, rig: &Rig) -> Vec<(Id, u32)> {
    let mut rows = Vec::new();
    let sink = &mut |chunk: embcache::cache::RowChunk| {
        for (at, header) in chunk.headers.iter().enumerate() {
            let row = &chunk.vectors[at * 2 * DIM..][..2 * DIM];
            if header.id < IDS {
                assert_eq!(world.life.steps(row), Some(header.count), "id {}", header.id);
            } else {
                assert_eq!(row, vector(header.id, header.count), "id {}", header.id);
            }
            rows.push((header.id, header.count));
        }
        Ok(())
    };
    rig.table.for_each_chunk(100, sink).unwrap();
    rows.sort_unstable();
    assert!(rows.windows(2).all(|pair| pair[0].0 < pair[1].0), "an id twice");
    assert_eq!(rows.len() as u64, rig.table.len().unwrap());
    rows
}

#[test]
fn every_row_is_intact_and_counted_in_memory() {
    for policy in PolicyKind::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        stress(&engine, &PathBuf::from("/base/m/t/0-of-1"), policy, OnFull::Error);
    }
}

#[test]
fn every_row_is_intact_in_full_table_with_eviction() {
    for policy in PolicyKind::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(MemoryEngine::default());
        stress(&engine, &PathBuf::from("/base/m/t/0-of-1"), policy, OnFull::Evict);
    }
}

fn on_disk(engine: &Arc<dyn IoEngine>) {
    // The folder is in the build directory, which is on a disk. The temporary directory may be in RAM.
    let scratch = tempfile::Builder::new().prefix("stress-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    stress(engine, &scratch.path().join("t"), PolicyKind::S3Fifo, OnFull::Error);
}

#[test]
fn every_row_is_intact_and_counted_on_disk_by_pread() {
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    on_disk(&engine);
}

#[test]
fn every_row_is_intact_and_counted_on_disk_by_io_uring() {
    match UringEngine::new(true) {
        Ok(engine) => {
            let engine: Arc<dyn IoEngine> = Arc::new(engine);
            on_disk(&engine);
        }
        Err(error) => assert_eq!(error.kind(), Kind::Unsupported, "{error}"),
    }
}
