//! Two tables that are trained alternately with the same batches.

use std::time::Instant;

use embcache::cache::{Lookup, PlanMode, RowBlock, Table};
use embcache::config::TableConfig;
use embcache::io::default_engine;
use embcache::kernels::Hyperparameters;
use embcache::rows::RowHeader;

use crate::measure::{Rounds, Scale, median};
use crate::plain_kernels::{BAG, DIM};
use crate::workload::{BATCH_IDS, Ids, scattered_id, zipf_ranks};

/// A table in RAM with the rows of ranks `0..rows`, of [`DIM`] weights.
///
/// # Panics
/// Panics for a configuration that cannot be opened or is too small for the rows.
pub fn table_in_ram(config: TableConfig, rows: u64) -> Table {
    let floats = config.layout().vector_floats();
    let engine = default_engine().expect("an engine for files, which are not used");
    let table = Table::open(config, None, engine).expect("a table in RAM");
    for begin in (0..rows).step_by(100_000) {
        let ids = (begin..rows.min(begin + 100_000)).map(scattered_id);
        let headers: Vec<RowHeader> = ids.map(|id| RowHeader { id, ..RowHeader::default() }).collect();
        let vectors = vec![0.5; headers.len() * floats];
        table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("rows that fit");
    }
    table
}

/// Training steps of rowwise Adagrad on zipf-drawn ids, on a table with a feature and on one without it.
pub struct TrainedInTurn {
    ids: Ids,
    rows: u64,
    lookups: [Lookup; 2],
    out: Vec<f32>,
    grad: Vec<f32>,
}

impl TrainedInTurn {
    /// Creates the rounds for tables with the rows of ranks `0..rows`: first the one with the feature, then the one
    /// without it.
    ///
    /// # Panics
    /// Panics for a table that is closed.
    pub fn new(scale: Scale, rows: u64, tables: [Table; 2]) -> Self {
        let batch = BATCH_IDS / 2 / BAG * BAG;
        let ranks = zipf_ranks(1, batch * scale.pick(20, 2), rows, 1.05);
        Self {
            ids: Ids::from_ranks(&ranks, batch, scattered_id),
            rows,
            lookups: tables.map(|table| Lookup::new(&[table], &[0]).expect("one feature of one table")),
            out: vec![0.0; batch / BAG * DIM],
            grad: vec![0.01; batch / BAG * DIM],
        }
    }
}

fn train(lookup: &Lookup, ids: &[i64], out: &mut [f32], grad: &[f32]) {
    let offsets: Vec<i64> = (0..=ids.len() / BAG).map(|bag| (bag * BAG) as i64).collect();
    let plan = lookup.plan(ids, &[0, ids.len() as i64], PlanMode::TRAIN, &[]).expect("ids of the table");
    plan.wait(&mut []).expect("rows in RAM");
    plan.forward_pooled(&offsets, None, &[false], out, &mut [None], 1).expect("a batch's room");
    let numbers = Hyperparameters { lr: 0.01, eps: 1e-8, beta1: 0.9, beta2: 0.999, ..Hyperparameters::default() };
    plan.backward_pooled(grad, &[numbers], None, &mut [None], 1).expect("an update");
}

impl Rounds for TrainedInTurn {
    /// The median of the ratios of all batches. Both tables are trained alternately with each batch, in an order in
    /// which each is the second and the third or the first and the fourth: so a uniform change of the machine's speed
    /// affects neither, and both find the batch in the CPU cache equally often.
    fn ours(&mut self) -> f64 {
        let mut ratios = Vec::new();
        for pass in 0..2 {
            for (number, ids) in self.ids.batches().enumerate() {
                let outer = (pass + number) % 2;
                let mut seconds = [0.0; 2];
                for table in [outer, 1 - outer, 1 - outer, outer] {
                    let begin = Instant::now();
                    train(&self.lookups[table], ids, &mut self.out, &self.grad);
                    seconds[table] += begin.elapsed().as_secs_f64();
                }
                ratios.push(seconds[1] / seconds[0]);
            }
        }
        median(&ratios)
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, self.rows))
    }
}
