//! Measures rows that are planned, born and committed, as in the first steps of a training.

use std::time::Instant;

use embcache::cache::{Lookup, PlanMode, Table};
use embcache::config::{OptimizerKind, TableConfig};
use embcache::io::default_engine;
use embcache::rows::{InitializerSpec, RowInitializer};
use embcache_benches::{
    BATCH_IDS, Bench, Better, FreshRows, Group, PlainIndex, Rounds, Scale, scattered_id, table_config,
};

/// The limit prefetches the entry of an id this many ids before its turn.
const AHEAD: usize = 32;

const LIMIT: &str = "plain loop: ids into an open-addressing table, Philox in the widest registers, numbers written to rows in fresh memory";
const TWICE: &str = "twice the one-thread figure of the same run";
const UNIFORM: InitializerSpec = InitializerSpec::Uniform { low: -0.01, high: 0.01 };

pub(crate) fn group() -> Group {
    let bench = |name, limit, make| Bench { name, unit: "rows/s", better: Better::Higher, limit, make };
    Group::Alone(vec![
        bench("births_uniform", Some(LIMIT), |scale| births(scale, UNIFORM, 1)),
        bench("births_uniform_two_threads", Some(TWICE), |scale| births(scale, UNIFORM, 2)),
        bench("births_normal_two_threads", None, |scale| {
            births(scale, InitializerSpec::Normal { mean: 0.0, std: 0.01 }, 2)
        }),
    ])
}

struct Births {
    table: Table,
    lookup: Lookup,
    threads: usize,
    batches: Vec<Vec<i64>>,
    plain: Plain,
}

/// The rows of the limit.
struct Plain {
    birth: RowInitializer,
    index: PlainIndex,
    rows: FreshRows,
}

fn births(scale: Scale, initializer: InitializerSpec, threads: usize) -> Box<dyn Rounds> {
    let batches: Vec<Vec<i64>> = (0..scale.pick(20, 2))
        .map(|batch| (0..BATCH_IDS as u64).map(|at| scattered_id(batch * BATCH_IDS as u64 + at)).collect())
        .collect();
    let optimizer = OptimizerKind::RowWiseAdagrad;
    let rows = (batches.len() * BATCH_IDS) as u64;
    let config = TableConfig { initializer, ..table_config(optimizer, rows + rows / 100) };
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, None, engine).expect("a table in RAM");
    let lookup = Lookup::new(std::slice::from_ref(&table), &[0]).expect("one feature of one table");
    let plain = Plain {
        birth: RowInitializer::new(initializer, 0, 1).expect("an initializer that is sound"),
        index: PlainIndex::with_room(rows as usize),
        rows: FreshRows::new(rows as usize),
    };
    Box::new(Births { table, lookup, threads, batches, plain })
}

impl Births {
    fn with_threads(&mut self, threads: usize) -> f64 {
        self.table.clear().expect("no batch is in flight");
        let begin = Instant::now();
        for ids in &self.batches {
            let plan = self.lookup.plan(ids, &[0, ids.len() as i64], PlanMode { threads, ..PlanMode::TRAIN }, &[]);
            let plan = plan.expect("room for the rows");
            plan.wait(&mut []).expect("rows in RAM");
            plan.commit().expect("a plan to train");
        }
        (self.batches.len() * BATCH_IDS) as f64 / begin.elapsed().as_secs_f64()
    }

    fn plainly(&mut self) -> f64 {
        let Plain { birth, index, rows } = &mut self.plain;
        index.clear();
        rows.forget();
        let begin = Instant::now();
        let mut place = 0;
        for ids in &self.batches {
            for (at, &id) in ids.iter().enumerate() {
                if let Some(later) = ids.get(at + AHEAD) {
                    index.prefetch(*later);
                }
                index.put(id, place as u64 + 1);
                birth.fill(id, rows.row(place));
                place += 1;
            }
        }
        place as f64 / begin.elapsed().as_secs_f64()
    }
}

impl Rounds for Births {
    fn ours(&mut self) -> f64 {
        self.with_threads(self.threads)
    }

    fn limit(&mut self) -> Option<f64> {
        match self.threads {
            1 => Some(self.plainly()),
            _ => Some(2.0 * self.with_threads(1)),
        }
    }

    fn check(&mut self) {
        self.ours();
        assert_eq!(self.table.len().expect("an open table"), (self.batches.len() * BATCH_IDS) as u64);
    }
}
