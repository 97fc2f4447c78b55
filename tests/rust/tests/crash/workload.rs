//! The workload of the crash tests: two tables over all tiers that train, drop rows, remove rows, import, flush, save,
//! and close.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::cache::Table;
use embcache::checkpoint::{CheckpointChain, CheckpointSave, LatestCheckpoint, RankWriter};
use embcache::config::{EvictionConfig, EvictionRule, OnFull, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, MemoryEngine};
use embcache::ssd::SsdTier;
use embcache::types::{Id, hash_id, table_key};
use embcache::{Error, Kind, Result};
use embcache_tests::{Contents, Rig, config, directory_in};

pub(crate) const CHECKPOINTS: &str = "/checkpoints/sparse";
const DIM: usize = 16;
const BAG: usize = 4;
const HALF_LIFE: u64 = 16;
pub(crate) const STEPS: u64 = 26;
const NAMES: [&str; 2] = ["item", "user"];

/// A variant of the workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kinds {
    pub(crate) device_rows: Option<u32>,
    pub(crate) on_full: OnFull,
    /// The cap of each table's SSD tier in bytes.
    pub(crate) ssd_bytes: u64,
    /// The number of ids to draw from.
    pub(crate) ids: i64,
    /// If true, rows expire by a rule: in one table every three steps, and in the other by calls.
    pub(crate) swept: bool,
}

/// The rows fit, and compaction has work to do.
pub(crate) const ROOMY: Kinds =
    Kinds { device_rows: None, on_full: OnFull::Error, ssd_bytes: 192 << 10, ids: 260, swept: false };
/// The same with a device tier.
pub(crate) const DEVICE: Kinds = Kinds { device_rows: Some(12), ..ROOMY };
/// The rows do not fit. Each step drops some, which leave tombstones.
pub(crate) const EVICTING: Kinds = Kinds { on_full: OnFull::Evict, ssd_bytes: 144 << 10, ids: 2000, ..ROOMY };

/// Rows that fit expire by a rule, so that flushes and saves happen during sweeps.
pub(crate) const SWEPT: Kinds = Kinds { swept: true, ..ROOMY };

/// The rule of a table with sweeps. A part of it reads the records of rows.
fn eviction(table: usize) -> EvictionConfig {
    let seldom = EvictionRule::All(vec![EvictionRule::Unused { steps: 5 }, EvictionRule::ScoreBelow(1.2)]);
    let rule = EvictionRule::Any(vec![EvictionRule::Unused { steps: 11 }, seldom]);
    EvictionConfig { rule, every_steps: if table == 0 { NonZeroU64::new(3) } else { None } }
}

pub(crate) fn directory(table: usize) -> PathBuf {
    PathBuf::from(format!("/base/m/{}/0-of-1", NAMES[table]))
}

fn optimizer(table: usize) -> OptimizerKind {
    [OptimizerKind::RowWiseAdagrad, OptimizerKind::Adagrad][table]
}

fn table_config(table: usize, kinds: Kinds, reopen: ReopenMode, resume_token: Option<u64>) -> TableConfig {
    let mut wanted = config(DIM, optimizer(table), 20);
    wanted.name = NAMES[table].into();
    wanted.key = table_key(NAMES[table]);
    wanted.device_rows = kinds.device_rows;
    wanted.on_full = kinds.on_full;
    wanted.score_half_life_steps = HALF_LIFE;
    wanted.eviction = kinds.swept.then(|| eviction(table));
    wanted.ssd =
        Some(SsdConfig { dir: directory(table), bytes: kinds.ssd_bytes, reopen, resume_commit_id: resume_token });
    wanted
}

/// Opens both tables.
pub(crate) fn open(
    engine: &Arc<dyn IoEngine>,
    kinds: Kinds,
    reopen: ReopenMode,
    resume_token: Option<u64>,
) -> Result<Vec<Rig>> {
    (0..2).map(|table| Rig::open(table_config(table, kinds, reopen, resume_token), engine.clone())).collect()
}

/// The rows and the step counter of each table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Snapshot(pub(crate) Vec<(Contents, u64)>);

impl Snapshot {
    pub(crate) fn of(rigs: &[Rig]) -> Result<Self> {
        rigs.iter().map(|rig| Ok((rig.contents()?, rig.table.step()?))).collect::<Result<_>>().map(Self)
    }

    /// The tables only in RAM, with these rows, none of which is evicted.
    pub(crate) fn in_ram(&self) -> Vec<Rig> {
        self.in_ram_as(false)
    }

    /// The tables only in RAM, with these rows, which expire by a rule if they are `swept`.
    pub(crate) fn in_ram_as(&self, swept: bool) -> Vec<Rig> {
        let rigs: Vec<Rig> = (0..2)
            .map(|table| {
                let mut wanted = config(DIM, optimizer(table), 50_000);
                wanted.name = NAMES[table].into();
                wanted.key = table_key(NAMES[table]);
                wanted.score_half_life_steps = HALF_LIFE;
                wanted.eviction = swept.then(|| eviction(table));
                Rig::open(wanted, Arc::new(MemoryEngine::default())).expect("memory")
            })
            .collect();
        for (rig, (rows, step)) in rigs.iter().zip(&self.0) {
            rig.import(rows).expect("imported");
            rig.table.set_step(*step).expect("set");
        }
        rigs
    }
}

/// The ids of a step.
pub(crate) fn ids_of(step: u64, table: usize, kinds: Kinds) -> Vec<Id> {
    (0..36)
        .map(|draw| (hash_id((step << 20) as i64 + draw * 2 + table as i64) % kinds.ids as u64) as i64 - 50)
        .collect()
}

/// The parts of one table's step: it trains, and in some steps it removes rows or imports some.
pub(crate) const PARTS: u64 = 2;

/// Runs one of these parts.
pub(crate) fn do_part(rig: &Rig, step: u64, table: usize, part: u64, kinds: Kinds) -> Result<()> {
    match (part, step % 9, table) {
        (0, ..) => train(rig, step, table, kinds),
        (_, 4, _) => {
            let gone: Vec<Id> = (-50..kinds.ids).filter(|id| id % 13 == step as i64 % 13).collect();
            rig.table.remove_rows(&gone).map(|_| ())
        }
        (_, 7, 0) => {
            let some: Contents = rig.contents()?.into_iter().step_by(5).collect();
            rig.import(&some.into_iter().map(|(id, (header, bits))| (id, (header, halved(&bits)))).collect())
        }
        (_, _, 1) if kinds.swept && step % 5 == 2 => rig.table.sweep(),
        _ => Ok(()),
    }
}

/// Trains one step of one table.
pub(crate) fn train(rig: &Rig, step: u64, table: usize, kinds: Kinds) -> Result<()> {
    rig.train(&ids_of(step, table, kinds), BAG, step as u32).map(|_| ())
}

/// Saves both tables as one rank.
pub(crate) fn save(engine: &Arc<dyn IoEngine>, tables: &[&Table], random: u64) -> Result<()> {
    let directory = directory_in(engine, CHECKPOINTS);
    let save = CheckpointSave::begin(&directory, random)?;
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1)?.with_group_bytes(6000);
    for table in tables {
        writer.write_rows_of("m", table, BTreeMap::from([("lr".to_owned(), 0.1)]))?;
    }
    save.publish(&[writer.finish()?], 1).map(|_| ())
}

/// The checkpoint that `LATEST` names, read into tables in RAM; `None` if there is none.
pub(crate) fn load(engine: &Arc<dyn IoEngine>) -> Result<Option<Snapshot>> {
    let directory = directory_in(engine, CHECKPOINTS);
    let latest = match LatestCheckpoint::read(&directory) {
        Err(error) if error.kind() == Kind::Path => return Ok(None),
        latest => latest?,
    };
    let checkpoint = CheckpointChain::open(&directory, latest)?;
    let empty = Snapshot(vec![(Contents::new(), 0), (Contents::new(), 0)]).in_ram();
    for rig in &empty {
        let config = rig.table.config();
        checkpoint.table_reader("m", &config.name, config.buckets.clone())?.load_into(&rig.table)?;
    }
    Snapshot::of(&empty).map(Some)
}

/// One run of the workload, and its progress.
#[derive(Debug, Default)]
pub(crate) struct Run {
    /// The flushes of both tables under one commit id that finished, and the one that was running.
    pub(crate) flushed: Vec<(u64, Snapshot)>,
    pub(crate) flushing: Option<(u64, Snapshot)>,
    /// The last save that succeeded, and those that started after it.
    pub(crate) saved: Option<Snapshot>,
    pub(crate) saving: Vec<Snapshot>,
    /// The number of parts done, over all tables.
    pub(crate) parts: u64,
    /// True if a table ever discarded its states for space.
    pub(crate) given_up: bool,
    /// Tables in RAM with the same operations, for runs with sweeps: reading the rows of the original tables would
    /// finish their sweeps.
    twins: Vec<Rig>,
    /// Number of flushes and saves during a sweep.
    pub(crate) amid_sweeps: u64,
}

impl Run {
    /// Runs everything until a call fails. Saves may fail, because they go to another store than training.
    pub(crate) fn go(&mut self, engine: &Arc<dyn IoEngine>, kinds: Kinds, rigs: &[Rig]) -> Result<()> {
        if kinds.swept {
            self.twins = Snapshot(vec![(Contents::new(), 0); 2]).in_ram_as(true);
        }
        for step in 0..STEPS {
            for (table, rig) in rigs.iter().enumerate() {
                for part in 0..PARTS {
                    let done = do_part(rig, step, table, part, kinds);
                    self.given_up |= rig.table.published_given_up();
                    done?;
                    if let Some(twin) = self.twins.get(table) {
                        do_part(twin, step, table, part, kinds)?;
                    }
                    self.parts += 1;
                }
            }
            if step % 4 == 3 {
                self.flush(rigs, step)?;
            }
            if step % 10 == 5
                && let Err(error) = self.save(engine, rigs, step)
                && !is_of_storage(&error)
            {
                return Err(error);
            }
        }
        rigs.iter().try_for_each(|rig| rig.table.close())
    }

    /// The rows of the tables after a running sweep has finished.
    fn snapshot(&mut self, rigs: &[Rig]) -> Result<Snapshot> {
        if self.twins.is_empty() {
            return Snapshot::of(rigs);
        }
        let is_swept =
            |rig: &Rig| rig.table.stats().is_ok_and(|stats| stats.eviction.is_some_and(|now| now.is_sweeping));
        self.amid_sweeps += u64::from(rigs.iter().any(is_swept));
        Snapshot::of(&self.twins)
    }

    fn flush(&mut self, rigs: &[Rig], token: u64) -> Result<()> {
        self.flushing = Some((token, self.snapshot(rigs)?));
        let flushed = rigs.iter().try_for_each(|rig| rig.table.flush(token));
        self.given_up |= rigs.iter().any(|rig| rig.table.published_given_up());
        flushed?;
        self.flushed.extend(self.flushing.take());
        Ok(())
    }

    fn save(&mut self, engine: &Arc<dyn IoEngine>, rigs: &[Rig], step: u64) -> Result<()> {
        let snapshot = self.snapshot(rigs)?;
        self.saving.push(snapshot);
        let tables: Vec<&Table> = rigs.iter().map(|rig| &rig.table).collect();
        save(engine, &tables, step)?;
        self.saved = self.saving.pop();
        self.saving.clear();
        Ok(())
    }

    /// The latest commit id that both tables of an image have, if any, and the rows of that state.
    pub(crate) fn newest(&self, engine: &dyn IoEngine, context: &str) -> Option<(u64, &Snapshot)> {
        let tokens: Vec<Vec<u64>> = (0..2)
            .map(|table| {
                SsdTier::published_commit_ids(&directory(table), engine).unwrap_or_else(|e| panic!("{context}: {e}"))
            })
            .collect();
        let newest = tokens[0].iter().rev().find(|token| tokens[1].contains(token));
        let acknowledged = self.flushed.last().map(|(token, _)| *token);
        assert!(
            newest >= acknowledged.as_ref() || self.given_up,
            "{context}: {acknowledged:?} was flushed and {tokens:?} are there"
        );
        newest.map(|newest| {
            let known = self.flushed.iter().chain(&self.flushing).find(|(token, _)| token == newest);
            let (token, snapshot) = known.unwrap_or_else(|| panic!("{context}: nobody flushed {newest}"));
            (*token, snapshot)
        })
    }
}

fn halved(bits: &[u32]) -> Vec<u32> {
    bits.iter().map(|&bits| (f32::from_bits(bits) / 2.0).to_bits()).collect()
}

/// A file system on which the base directories are durable.
pub(crate) fn disk() -> MemoryEngine {
    let memory = MemoryEngine::default();
    for dir in ["/base/m", CHECKPOINTS] {
        memory.create_dir_all(Path::new(dir)).unwrap();
        for dir in Path::new(dir).ancestors() {
            memory.sync_dir(dir).unwrap();
        }
    }
    memory
}

/// True if a disk fault may cause this error.
pub(crate) fn is_of_storage(error: &Error) -> bool {
    matches!(error.kind(), Kind::Storage | Kind::ReadOnly)
}
