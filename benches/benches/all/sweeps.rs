//! Measures sweeps, by which rows that were not trained for long leave a table: the time of one over rows in RAM, and what rows on SSD that
//! left by one add to a delta.
//!
//! `EMBCACHE_BENCH_SWEEP_ROWS` sets the number of rows in RAM (10M, of which one in ten leaves).

use std::collections::BTreeMap;
use std::sync::Arc;

use embcache::cache::Table;
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::{IoEngine, default_engine};
use embcache_benches::{
    BAG, Bench, Better, DIM, Group, Ids, Rounds, Saved, Scale, Scratch, Training, cpu_seconds, give_rows, save,
    scattered_id, setting, table_config, uniform_ranks,
};

const OPTIMIZER: OptimizerKind = OptimizerKind::RowWiseAdagrad;
const IMPORT_ROWS: u64 = 65_536;
/// One row in so many leaves.
const LEAVES: u64 = 10;
/// Steps without training after which a row leaves, and the step of the tables. Rows that were trained in a bench are far from leaving.
const STEPS: u64 = 1 << 40;
const NOW: u64 = 1 << 41;
const ROUNDS: usize = 5;

pub(crate) fn group() -> Group {
    Group::Alone(vec![
        Bench {
            name: "sweep_ttl_in_ram_ns_per_row",
            unit: "ns",
            better: Better::Lower,
            limit: None,
            make: |scale| Box::new(InRam::make(scale)),
        },
        Bench {
            name: "sweep_ttl_delta_bytes",
            unit: "bytes",
            better: Better::Lower,
            limit: None,
            make: |scale| Box::new(OnSsd::make(scale)),
        },
    ])
}

/// A rule by which rows leave when they are asked to.
fn eviction() -> EvictionConfig {
    EvictionConfig { rule: EvictionRule::Unused { steps: STEPS }, every_steps: None }
}

struct InRam {
    table: Table,
    training: Training,
    rows: u64,
    /// The seconds of each step while a sweep was under way, and of as many steps without one.
    steps: [Vec<f64>; 2],
}

impl InRam {
    fn make(scale: Scale) -> Self {
        let rows = setting("EMBCACHE_BENCH_SWEEP_ROWS", scale.pick(10_000_000, 20_000));
        let config = TableConfig { eviction: Some(eviction()), ..table_config(OPTIMIZER, rows + 4096) };
        let table = Table::open(config, None, default_engine().expect("an engine")).expect("a table in RAM");
        table.set_step(NOW).expect("open");
        for first in (0..rows).step_by(IMPORT_ROWS as usize) {
            give_rows(&table, DIM, first..(first + IMPORT_ROWS).min(rows), NOW);
        }
        // A batch so small that its step takes hardly longer than what the step waits for.
        let staying = uniform_ranks(6, 64 * BAG, rows - rows / LEAVES);
        let ids = Ids::from_ranks(&staying, BAG, |at| scattered_id(at / (LEAVES - 1) * LEAVES + at % (LEAVES - 1) + 1));
        let training = Training::new(&table, DIM, ids);
        Self { table, training, rows, steps: [Vec::new(), Vec::new()] }
    }

    /// Put in the rows that leave, as trained last at `last_step`.
    fn give_leaving(&self, last_step: u64) {
        for first in (0..self.rows).step_by((IMPORT_ROWS * LEAVES) as usize) {
            let some = first..(first + IMPORT_ROWS * LEAVES).min(self.rows);
            give_rows(&self.table, DIM, some.step_by(LEAVES as usize), last_step);
        }
        assert_eq!(self.table.len().expect("open"), self.rows);
    }

    /// The rows that do not leave.
    fn staying(&self) -> u64 {
        self.rows - self.rows.div_ceil(LEAVES)
    }
}

impl Rounds for InRam {
    fn ours(&mut self) -> f64 {
        self.give_leaving(0);
        let begin = cpu_seconds();
        self.table.sweep().expect("begun");
        assert_eq!(self.table.len().expect("to its end"), self.staying());
        let seconds = cpu_seconds() - begin;
        // The same beside training: how long the longest step is that goes on with the sweep.
        self.give_leaving(0);
        self.training.step();
        self.table.sweep().expect("begun");
        let mut count = 0;
        while self.table.stats().expect("open").eviction.is_some_and(|stats| stats.is_sweeping) {
            self.steps[0].push(self.training.step());
            count += 1;
        }
        self.steps[1].extend(self.training.steps(count));
        self.training.pause();
        assert_eq!(self.table.len().expect("open"), self.staying());
        seconds * 1e9 / self.rows as f64
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        let [with, without] = self.steps.each_ref().map(|steps| steps.iter().copied().fold(0.0, f64::max) * 1e3);
        BTreeMap::from([
            ("longest_step_ms", with),
            ("longest_step_without_ms", without),
            ("steps", self.steps[0].len() as f64),
            ("rows", self.rows as f64),
        ])
    }
}

struct OnSsd {
    table: Table,
    rows: u64,
    engine: Arc<dyn IoEngine>,
    rounds: u64,
    scratch: Scratch,
}

impl OnSsd {
    fn make(scale: Scale) -> Self {
        let rows = scale.pick(1_000_000, 20_000);
        let scratch = Scratch::new(4 * rows * 400 + (128 << 20)).unwrap_or_else(|why| panic!("{why}"));
        let bytes = 2 * rows * 400 + (64 << 20);
        let ssd =
            SsdConfig { dir: scratch.path().join("ssd"), bytes, reopen: ReopenMode::Never, resume_commit_id: None };
        let config =
            TableConfig { eviction: Some(eviction()), ssd: Some(ssd), ..table_config(OPTIMIZER, rows / 20 + 20_000) };
        let engine = default_engine().expect("an engine");
        let table = Table::open(config, None, engine.clone()).expect("a table");
        Self { table, rows, engine, rounds: 0, scratch }
    }
}

impl Rounds for OnSsd {
    fn ours(&mut self) -> f64 {
        self.rounds += 1;
        let root = self.scratch.path().join(self.rounds.to_string());
        std::fs::create_dir(&root).expect("a folder of our own");
        self.table.clear().expect("no batch is in flight");
        self.table.set_step(NOW).expect("open");
        for first in (0..self.rows).step_by(IMPORT_ROWS as usize) {
            give_rows(&self.table, DIM, first..(first + IMPORT_ROWS).min(self.rows), 0);
        }
        let save = |ancestor: Option<&Saved>| save(&self.table, &self.engine, &root, ancestor.map(|one| &one.ancestor));
        let full = save(None);
        let before = save(Some(&full));
        self.table.sweep().expect("begun");
        let after = save(Some(&before));
        assert_eq!(self.table.len().expect("open"), 0, "every row has left");
        std::fs::remove_dir_all(&root).expect("removed");
        (after.bytes - before.bytes) as f64
    }

    fn rounds(&self) -> usize {
        ROUNDS
    }

    fn figures(&self) -> BTreeMap<&'static str, f64> {
        BTreeMap::from([("rows", self.rows as f64)])
    }
}
