//! Tests of the cache against a table in RAM and a `BTreeMap`: with any tiers, results are bitwise identical.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use embcache::Kind;
use embcache::cache::{BaseCheckpoint, GroupSink, Plan, PlanMode, RowBlock};
use embcache::config::{OptimizerKind, PolicyKind, ReopenMode, SsdConfig};
use embcache::io::MemoryEngine;
use embcache::rows::{RowHeader, RowList};
use embcache::types::Id;
use embcache_tests::{Rig, config};
use proptest::prelude::*;

const DIM: usize = 3;
const BAG: usize = 3;

/// The ids of the runs. There are few, so that they recur, and the extremes are among them.
fn an_id() -> impl Strategy<Value = Id> {
    prop_oneof![4 => 0_i64..24, 1 => Just(-1), 1 => Just(i64::MIN), 1 => Just(i64::MAX), 1 => -9_i64..0]
}

fn some_ids() -> impl Strategy<Value = Vec<Id>> {
    prop::collection::vec(an_id(), 0..14)
}

/// Receives the rows of a delta, three at a time.
struct Modified {
    since: u32,
    floats: usize,
    rows: usize,
    contents: Contents,
}

impl Modified {
    fn add(&mut self, headers: &[RowHeader], vectors: &[f32]) {
        assert!(headers.iter().all(|header| header.modified_epoch >= self.since));
        self.rows += headers.len();
        self.contents.extend(bits(headers, vectors, self.floats));
    }
}

impl GroupSink for Modified {
    fn vector_floats(&self) -> usize {
        self.floats
    }

    fn wait_for_space(&mut self) -> embcache::Result<usize> {
        Ok(3)
    }

    fn take(&mut self, rows: RowList<'_>) -> embcache::Result<()> {
        assert!(!rows.is_empty() && rows.len() <= 3);
        let headers: Vec<RowHeader> = rows.iter().map(|row| *row.header).collect();
        self.add(&headers, &rows.iter().flat_map(|row| row.vector.iter().copied()).collect::<Vec<f32>>());
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Train(Vec<Id>),
    Prefetch(Vec<Id>),
    TrainPrefetched,
    DropPrefetched,
    Abandon(Vec<Id>),
    Evaluate(Vec<Id>, bool),
    Import(Vec<Id>),
    Remove(Vec<Id>),
    Clear,
    Export,
    Flush,
    Resume,
    /// A checkpoint, or the start of one that fails.
    Save(bool),
    Delta,
}

fn a_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => some_ids().prop_map(Step::Train),
        5 => some_ids().prop_map(Step::Prefetch),
        6 => Just(Step::TrainPrefetched),
        1 => Just(Step::DropPrefetched),
        2 => some_ids().prop_map(Step::Abandon),
        3 => (some_ids(), any::<bool>()).prop_map(|(ids, zeros)| Step::Evaluate(ids, zeros)),
        2 => some_ids().prop_map(Step::Import),
        1 => some_ids().prop_map(Step::Remove),
        1 => Just(Step::Export),
        2 => Just(Step::Flush),
        1 => Just(Step::Resume),
        1 => Just(Step::Clear),
        2 => prop::bool::weighted(0.8).prop_map(Step::Save),
        3 => Just(Step::Delta),
    ]
}

#[derive(Clone, Debug)]
struct Tiers {
    device_rows: Option<u32>,
    host_rows: u64,
    ssd: bool,
    policy: PolicyKind,
    threads: usize,
    optimizer: OptimizerKind,
}

fn some_tiers() -> impl Strategy<Value = Tiers> {
    let policy = prop::sample::select(PolicyKind::ALL.to_vec());
    let optimizer = prop::sample::select(OptimizerKind::ALL.to_vec());
    (prop::option::of(1_u32..20), 1_u64..24, any::<bool>(), policy, 1_usize..3, optimizer).prop_map(
        |(device_rows, host_rows, ssd, policy, threads, optimizer)| Tiers {
            device_rows,
            // Without an SSD tier the host tier is the last one, so every row must fit there.
            host_rows: if ssd { host_rows } else { host_rows + 64 },
            ssd,
            policy,
            threads,
            optimizer,
        },
    )
}

fn ancestor(number: usize, next_epoch: u32) -> BaseCheckpoint {
    BaseCheckpoint { name: format!("checkpoint {number}"), manifest_xxh3: number as u64, next_epoch }
}

type Contents = BTreeMap<Id, (Vec<u32>, u32, u32, u64)>;

fn bits(headers: &[RowHeader], vectors: &[f32], floats: usize) -> Contents {
    headers
        .iter()
        .enumerate()
        .map(|(position, header)| {
            let vector = vectors[position * floats..][..floats].iter().map(|value| value.to_bits()).collect();
            (header.id, (vector, header.scalar.to_bits(), header.count, header.last_step))
        })
        .collect()
}

fn contents(rig: &Rig) -> Contents {
    let floats = rig.table.config().layout().vector_floats();
    let mut all = Contents::new();
    let mut rows = 0;
    rig.table
        .for_each_chunk(5, &mut |chunk| {
            rows += chunk.headers.len();
            all.extend(bits(&chunk.headers, &chunk.vectors, floats));
            Ok(())
        })
        .expect("an export of a table at rest");
    assert_eq!(rows, all.len(), "a row was exported twice");
    assert_eq!(rows as u64, rig.table.len().expect("a length"));
    all
}

fn out_bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|value| value.to_bits()).collect()
}

/// The contents of the last flush.
#[derive(Clone)]
struct Flushed {
    contents: Contents,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
    step: u64,
    counts: BTreeMap<Id, u32>,
}

struct Run {
    tiers: Tiers,
    engine: Arc<MemoryEngine>,
    rig: Rig,
    oracle: Rig,
    counts: BTreeMap<Id, u32>,
    waiting: VecDeque<(Plan, Vec<Id>)>,
    flushed: Option<Flushed>,
    /// The contents of each checkpoint.
    saved: Vec<Contents>,
    token: u64,
    salt: u32,
}

fn open(tiers: &Tiers, engine: &Arc<MemoryEngine>, reopen: ReopenMode) -> embcache::Result<Rig> {
    let mut wanted = config(DIM, tiers.optimizer, tiers.host_rows);
    wanted.policy = tiers.policy;
    wanted.host_bytes = tiers.host_rows * embcache::cache::host_row_bytes(&wanted.layout(), tiers.policy);
    wanted.device_rows = tiers.device_rows;
    if tiers.ssd {
        wanted.ssd =
            Some(SsdConfig { dir: PathBuf::from("/base/m/t/0-of-1"), bytes: 1 << 20, reopen, resume_commit_id: None });
    }
    let mut rig = Rig::open(wanted, Arc::<MemoryEngine>::clone(engine))?;
    rig.threads = tiers.threads;
    Ok(rig)
}

impl Run {
    fn new(tiers: Tiers) -> Self {
        let engine = Arc::new(MemoryEngine::default());
        let rig = open(&tiers, &engine, ReopenMode::Never).expect("a table");
        let oracle =
            Rig::open(config(DIM, tiers.optimizer, 10_000), Arc::<MemoryEngine>::clone(&engine)).expect("an oracle");
        Self {
            tiers,
            engine,
            rig,
            oracle,
            counts: BTreeMap::new(),
            waiting: VecDeque::new(),
            flushed: None,
            saved: Vec::new(),
            token: 0,
            salt: 0,
        }
    }

    fn trained(&mut self, ids: &[Id], out: &[f32]) {
        let expected = self.oracle.train(ids, BAG, self.salt).expect("the oracle trains");
        assert_eq!(out_bits(out), out_bits(&expected));
        for &id in ids {
            *self.counts.entry(id).or_default() += 1;
        }
        self.salt += 1;
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Train(ids) => {
                let out = self.rig.train(&ids, BAG, self.salt).expect("a step");
                self.trained(&ids, &out);
            }
            Step::Prefetch(ids) => {
                let plan = self.rig.plan(&ids, PlanMode::TRAIN_PREFETCH).expect("a plan ahead");
                self.waiting.push_back((plan, ids));
            }
            Step::TrainPrefetched => {
                if let Some((plan, ids)) = self.waiting.pop_front() {
                    let out = self.rig.finish(&plan, ids.len(), BAG, self.salt).expect("a prefetched step");
                    self.trained(&ids, &out);
                }
            }
            Step::DropPrefetched => drop(self.waiting.pop_back()),
            Step::Abandon(ids) => {
                let plan = self.rig.plan(&ids, PlanMode::TRAIN).expect("a plan");
                self.rig.place(&plan).expect("its rows");
                self.rig.forward(&plan, ids.len(), BAG).expect("its forward");
            }
            Step::Evaluate(ids, zeros) => {
                let out = self.rig.evaluate(&ids, BAG, zeros).expect("an evaluation");
                let expected = self.oracle.evaluate(&ids, BAG, zeros).expect("the oracle's");
                assert_eq!(out_bits(&out), out_bits(&expected));
            }
            Step::Import(ids) => self.import(ids),
            Step::Remove(ids) => {
                self.waiting.clear();
                let gone = self.rig.table.remove_rows(&ids).expect("a removal");
                assert_eq!(gone, self.oracle.table.remove_rows(&ids).expect("the oracle's"));
                self.counts.retain(|id, _| !ids.contains(id));
            }
            Step::Clear => {
                self.waiting.clear();
                self.rig.table.clear().expect("a clear");
                self.oracle.table.clear().expect("the oracle's");
                self.counts.clear();
            }
            Step::Export => self.compare(),
            Step::Flush => {
                if self.tiers.ssd {
                    self.token += 1;
                    self.rig.table.flush(self.token).expect("a flush");
                    self.keep_flushed();
                }
            }
            Step::Resume => self.resume(),
            Step::Save(published) => {
                let next_epoch = self.rig.table.epoch().expect("an epoch") + 1;
                self.rig.table.set_epoch(next_epoch).expect("an epoch");
                if published {
                    self.rig.table.saved_as(ancestor(self.saved.len(), next_epoch)).expect("noted");
                    self.saved.push(contents(&self.rig));
                }
            }
            Step::Delta => self.compare_deltas(),
        }
    }

    /// Checks that each delta, applied to a possible base checkpoint, gives the table.
    fn compare_deltas(&self) {
        let table = &self.rig.table;
        let floats = table.config().layout().vector_floats();
        let now = contents(&self.rig);
        for ancestor in table.base_checkpoints().expect("ancestors") {
            let mut rebuilt = self.saved[ancestor.manifest_xxh3 as usize].clone();
            for id in table.tombstones_since(&ancestor).expect("an ancestor") {
                rebuilt.remove(&id);
            }
            let since = ancestor.next_epoch;
            let mut changed = Modified { since, floats, rows: 0, contents: Contents::new() };
            table.for_each_modified_group(since, &mut changed).expect("the rows of a table at rest");
            assert_eq!(changed.rows, changed.contents.len(), "a row is there twice");
            let changed = changed.contents;
            rebuilt.extend(changed);
            assert_eq!(rebuilt, now);
        }
    }

    fn import(&mut self, mut ids: Vec<Id>) {
        ids.sort_unstable();
        ids.dedup();
        let layout = self.rig.table.config().layout();
        let floats = layout.vector_floats();
        let scalar = if layout.scalar_slot { 0.5 } else { 0.0 };
        let vectors: Vec<f32> = (0..ids.len() * floats).map(|place| (place as u32 + self.salt) as f32 / 7.0).collect();
        let headers: Vec<RowHeader> = ids
            .iter()
            .map(|&id| RowHeader { id, scalar, count: 3, last_step: 1, score: 1.5, modified_epoch: 2 })
            .collect();
        let block = RowBlock { headers: &headers, vectors: &vectors };
        if self.rig.table.import_rows(block).map_err(|error| error.kind()) == Err(Kind::State) {
            // A prefetched batch uses one of these rows.
            self.waiting.clear();
            self.rig.table.import_rows(block).expect("an import once nothing is in flight");
        }
        self.oracle.table.import_rows(block).expect("the oracle's");
        self.counts.extend(ids.iter().map(|&id| (id, 3)));
    }

    fn compare(&self) {
        let mine = contents(&self.rig);
        assert_eq!(mine, contents(&self.oracle));
        let counts: BTreeMap<Id, u32> = mine.iter().map(|(&id, row)| (id, row.2)).collect();
        assert_eq!(counts, self.counts);
        let all: Vec<Id> = mine.keys().copied().chain([123_456]).collect();
        let read = self.rig.table.read_rows(&all).expect("rows by id");
        assert_eq!(read.found.iter().filter(|&&found| found).count(), mine.len());
        let expected = self.oracle.table.read_rows(&all).expect("the oracle's");
        // The oracle saves no checkpoints, so it has no epochs.
        let without_epoch = |header: &RowHeader| RowHeader { modified_epoch: 0, ..*header };
        assert!(read.headers.iter().map(without_epoch).eq(expected.headers.iter().map(without_epoch)));
        assert_eq!(out_bits(&read.vectors), out_bits(&expected.vectors));
    }

    fn keep_flushed(&mut self) {
        let (mut headers, mut vectors) = (Vec::new(), Vec::new());
        self.oracle
            .table
            .for_each_chunk(1000, &mut |chunk| {
                headers.extend(chunk.headers);
                vectors.extend(chunk.vectors);
                Ok(())
            })
            .expect("the oracle's rows");
        let step = self.oracle.table.step().expect("a step");
        let (contents, counts) = (contents(&self.oracle), self.counts.clone());
        self.flushed = Some(Flushed { contents, headers, vectors, step, counts });
    }

    fn resume(&mut self) {
        let Some(Flushed { contents: expected, headers, vectors, step, counts }) = self.flushed.clone() else { return };
        self.waiting.clear();
        self.rig.table.close().expect("a close");
        self.rig = open(&self.tiers, &self.engine, ReopenMode::Resume).expect("a resumed table");
        assert_eq!(contents(&self.rig), expected);
        assert_eq!(self.rig.table.step().expect("a step"), step);
        self.compare_deltas();
        self.oracle.table.clear().expect("a clear");
        self.oracle.table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("the flushed rows");
        self.oracle.table.set_step(step).expect("a step");
        self.counts = counts;
    }

    fn end(mut self) {
        self.waiting.clear();
        assert_eq!(self.rig.table.stats().expect("counters").pinned_rows, 0, "a pin leaked");
        self.compare();
    }
}

proptest! {
    #[test]
    fn any_tiers_give_the_bits_of_one_table_in_memory(tiers in some_tiers(), steps in prop::collection::vec(a_step(), 1..40)) {
        let mut run = Run::new(tiers);
        for step in steps {
            run.step(step);
        }
        run.end();
    }
}
