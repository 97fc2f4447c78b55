//! Measures rows that are planned, born and committed, as in the first steps of a training.

use std::time::Instant;

use embcache::cache::{Lookup, PlanMode, Table};
use embcache::config::{OptimizerKind, TableConfig};
use embcache::io::default_engine;
use embcache::rows::Initializer;
use embcache_benches::{BATCH_IDS, Bench, Better, Group, Rounds, Scale, scattered_id, table_config};

pub(crate) fn group() -> Group {
    let bench = |name, make| Bench { name, unit: "rows/s", better: Better::Higher, limit: None, make };
    Group::Alone(vec![
        bench("births_uniform", |scale| births(scale, Initializer::Uniform { low: -0.01, high: 0.01 }, 1)),
        bench("births_uniform_two_threads", |scale| births(scale, Initializer::Uniform { low: -0.01, high: 0.01 }, 2)),
        bench("births_normal_two_threads", |scale| births(scale, Initializer::Normal { mean: 0.0, std: 0.01 }, 2)),
    ])
}

struct Births {
    table: Table,
    lookup: Lookup,
    threads: usize,
    batches: Vec<Vec<i64>>,
}

fn births(scale: Scale, initializer: Initializer, threads: usize) -> Box<dyn Rounds> {
    let batches: Vec<Vec<i64>> = (0..scale.pick(20, 2))
        .map(|batch| (0..BATCH_IDS as u64).map(|at| scattered_id(batch * BATCH_IDS as u64 + at)).collect())
        .collect();
    let optimizer = OptimizerKind::RowWiseAdagrad;
    let rows = (batches.len() * BATCH_IDS) as u64;
    let config = TableConfig { initializer, ..table_config(optimizer, rows + rows / 100) };
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, None, engine).expect("a table in RAM");
    let lookup = Lookup::new(std::slice::from_ref(&table), &[0]).expect("one feature of one table");
    Box::new(Births { table, lookup, threads, batches })
}

impl Rounds for Births {
    fn ours(&mut self) -> f64 {
        self.table.clear().expect("no batch is in flight");
        let begin = Instant::now();
        for ids in &self.batches {
            let plan =
                self.lookup.plan(ids, &[0, ids.len() as i64], PlanMode { threads: self.threads, ..PlanMode::TRAIN });
            let plan = plan.expect("room for the rows");
            plan.wait().expect("rows in RAM");
            plan.commit().expect("a plan to train");
        }
        (self.batches.len() * BATCH_IDS) as f64 / begin.elapsed().as_secs_f64()
    }

    fn check(&mut self) {
        self.ours();
        assert_eq!(self.table.len().expect("an open table"), (self.batches.len() * BATCH_IDS) as u64);
    }
}
