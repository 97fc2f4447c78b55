//! Measures the forward, and the forward with backward and update, on bags of 20 rows of 64 float32 whose slots are known.
#![allow(unsafe_code)]

use std::time::Instant;

use embcache::config::OptimizerKind;
use embcache::index::IdDeduper;
use embcache::kernels::{
    ArenaRows, Hyperparameters, OptimizerStep, PooledFeature, PooledGradient, TransposedIndex, backward, forward_pooled,
};
use embcache::rows::{InitializerSpec, RowArena, RowInitializer, RowLayout};
use embcache_benches::{
    BAG, BATCH_IDS, Bench, Better, DIM, Group, Ids, PlainOptimizer, PlainTable, Rounds, Scale, plain_backward,
    plain_forward, scattered_slot, uniform_ranks, zipf_ranks,
};

const FORWARD: &str = "plain gather-sum with prefetch";
const TRAIN: &str = "plain loops with prefetch: gather-sum, transpose, sum and update by row";
const TWICE: &str = "twice the one-thread figure of the same run";

pub(crate) fn group() -> Group {
    let bench = |name, limit, make| Bench { name, unit: "rows/s", better: Better::Higher, limit: Some(limit), make };
    Group::Alone(vec![
        bench("forward_pooled_zipf105_10m", FORWARD, |scale| forward(scale, Skew::Zipf, 10_000_000)),
        bench("forward_pooled_uniform_10m", FORWARD, |scale| forward(scale, Skew::Uniform, 10_000_000)),
        bench("forward_pooled_zipf105_1m", FORWARD, |scale| forward(scale, Skew::Zipf, 1_000_000)),
        bench("train_rowwise_adagrad_zipf105_1m", TRAIN, |scale| {
            train(scale, Skew::Zipf, OptimizerKind::RowWiseAdagrad, 1_000_000, 1)
        }),
        bench("train_rowwise_adagrad_zipf105_10m", TRAIN, |scale| {
            train(scale, Skew::Zipf, OptimizerKind::RowWiseAdagrad, 10_000_000, 1)
        }),
        bench("train_rowwise_adagrad_uniform_10m", TRAIN, |scale| {
            train(scale, Skew::Uniform, OptimizerKind::RowWiseAdagrad, 10_000_000, 1)
        }),
        bench("train_adagrad_zipf105_10m", TRAIN, |scale| {
            train(scale, Skew::Zipf, OptimizerKind::Adagrad, 10_000_000, 1)
        }),
        bench("train_adam_zipf105_4m", TRAIN, |scale| train(scale, Skew::Zipf, OptimizerKind::Adam, 4_000_000, 1)),
        bench("train_rowwise_adagrad_two_threads", TWICE, |scale| {
            train(scale, Skew::Zipf, OptimizerKind::RowWiseAdagrad, 10_000_000, 2)
        }),
    ])
}

#[derive(Clone, Copy)]
enum Skew {
    Zipf,
    Uniform,
}

/// The data of a batch that a plan has.
struct Batch {
    /// The slot of each occurrence: `[N]`.
    slots: Vec<u32>,
    /// The distinct slots: `[U]`.
    distinct: Vec<u32>,
    /// For each occurrence the index of its slot in `distinct`: `[N]`.
    inverse: Vec<u32>,
}

struct Kernels {
    ids: Ids,
    rows: u32,
    batches: Vec<Batch>,
    offsets: Vec<i64>,
    arena: RowArena,
    layout: RowLayout,
    plain: PlainTable,
    /// The pooled output: `[B, DIM]`.
    out: Vec<f32>,
    /// Its gradient: `[B, DIM]`.
    grad: Vec<f32>,
    /// The optimizer; `None` to measure the forward alone.
    optimizer: Option<(OptimizerKind, PlainOptimizer)>,
    threads: usize,
    step: u64,
}

fn forward(scale: Scale, skew: Skew, rows: u32) -> Box<dyn Rounds> {
    Box::new(Kernels::new(scale, skew, None, rows, BATCH_IDS, 1))
}

fn train(scale: Scale, skew: Skew, kind: OptimizerKind, rows: u32, threads: usize) -> Box<dyn Rounds> {
    Box::new(Kernels::new(scale, skew, Some(kind), rows, BATCH_IDS / 2, threads))
}

impl Kernels {
    fn new(scale: Scale, skew: Skew, kind: Option<OptimizerKind>, rows: u32, batch: usize, threads: usize) -> Self {
        let rows = scale.pick(rows, rows / 100);
        let count = batch * scale.pick(40, 2);
        let ranks = match skew {
            Skew::Zipf => zipf_ranks(1, count, u64::from(rows), 1.05),
            Skew::Uniform => uniform_ranks(1, count, u64::from(rows)),
        };
        let ids = Ids::from_ranks(&ranks, batch, |rank| scattered_slot(rank, u64::from(rows)));
        let mut deduper = IdDeduper::default();
        let mut deduped = embcache::index::DedupedIds::default();
        let batches = ids
            .batches()
            .map(|ids| {
                deduper.dedupe(ids, &mut deduped);
                Batch {
                    slots: ids.iter().map(|&slot| slot as u32).collect(),
                    distinct: deduped.unique.iter().map(|&slot| slot as u32).collect(),
                    inverse: deduped.inverse.clone(),
                }
            })
            .collect();
        let layout = kind.unwrap_or(OptimizerKind::RowWiseAdagrad).layout(DIM);
        let arena = RowArena::new(layout, rows).expect("the machine has the memory");
        let birth = RowInitializer::new(InitializerSpec::Uniform { low: -0.01, high: 0.01 }, 1, 1).expect("valid");
        for slot in 0..rows {
            let row = arena.row(slot);
            // SAFETY: the row is within the arena, and nobody else uses it.
            unsafe {
                birth.fill(i64::from(slot), std::slice::from_raw_parts_mut(row.vector, DIM));
                row.vector.add(DIM).write_bytes(0, layout.vector_floats() - DIM);
                (*row.header).scalar = 0.0;
            }
        }
        let plain = PlainTable::new(arena.row(0).vector, layout.vector_floats(), rows as usize);
        let bags = batch / BAG;
        let optimizer = kind.map(|kind| match kind {
            OptimizerKind::RowWiseAdagrad => (kind, PlainOptimizer::RowWiseAdagrad),
            OptimizerKind::Adagrad => (kind, PlainOptimizer::Adagrad),
            OptimizerKind::Adam => (kind, PlainOptimizer::Adam),
            _ => panic!("no bench trains with {kind:?}"),
        });
        Self {
            ids,
            rows,
            batches,
            offsets: (0..=bags).map(|bag| (bag * BAG) as i64).collect(),
            arena,
            layout,
            plain,
            out: vec![0.0; bags * DIM],
            grad: vec![0.01; bags * DIM],
            optimizer,
            threads,
            step: 0,
        }
    }

    fn step(&mut self, batch: usize, threads: usize) {
        let Batch { slots, distinct, inverse } = &self.batches[batch];
        let rows = ArenaRows { arena: &self.arena, layout: self.layout };
        // SAFETY: slots are within the arena, and nobody writes its rows during the call.
        unsafe { forward_pooled(&rows, slots, None, &self.offsets, None, false, &mut self.out, DIM, 0, threads) };
        let Some((kind, _)) = self.optimizer else { return };
        self.step += 1;
        let features = [PooledFeature { column: 0, offsets: &self.offsets, weights: None, mean: false }];
        let pooled = PooledGradient::new(DIM, &features, threads).expect("a small output");
        let mut index = TransposedIndex::from_inverse(inverse, distinct.len(), threads);
        index.slots.clone_from(distinct);
        let hyperparameters =
            Hyperparameters { lr: 0.02, eps: 1e-8, beta1: 0.9, beta2: 0.999, ..Hyperparameters::default() };
        let update = OptimizerStep { kind, hyperparameters, step: self.step };
        // SAFETY: slots are within the arena and distinct in the index, nobody else uses the rows, and the gradient has all its
        // columns.
        unsafe { backward(&rows, &index, &pooled.of_rows(&self.grad), &update, threads) };
    }

    fn plain_step(&mut self, batch: usize) {
        let Batch { slots, distinct, inverse } = &self.batches[batch];
        // SAFETY: slots are within the arena, whose rows lie one after another, and nobody else uses them.
        unsafe {
            plain_forward(&self.plain, slots, &mut self.out);
            if let Some((_, optimizer)) = self.optimizer {
                plain_backward(&mut self.plain, distinct, inverse, &self.grad, optimizer);
            }
        }
    }

    fn round(&mut self, step: impl Fn(&mut Self, usize)) -> f64 {
        let begin = Instant::now();
        for batch in 0..self.batches.len() {
            step(self, batch);
        }
        self.ids.values.len() as f64 / begin.elapsed().as_secs_f64()
    }

    /// Call `change` with the vector part of each distinct row of a batch, to read it or to write it.
    fn each_row(&self, batch: usize, mut change: impl FnMut(usize, &mut [f32])) {
        for (row, &slot) in self.batches[batch].distinct.iter().enumerate() {
            // SAFETY: the slot is within the arena, and nobody else uses its row.
            change(row, unsafe {
                std::slice::from_raw_parts_mut(self.arena.row(slot).vector, self.layout.vector_floats())
            });
        }
    }

    fn copy_rows(&self, batch: usize) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        self.each_row(batch, |_, row| rows.push(row.to_vec()));
        rows
    }
}

impl Rounds for Kernels {
    fn ours(&mut self) -> f64 {
        let threads = self.threads;
        self.round(|this, batch| this.step(batch, threads))
    }

    fn limit(&mut self) -> Option<f64> {
        Some(if self.threads == 1 {
            self.round(Self::plain_step)
        } else {
            self.threads as f64 * self.round(|this, batch| this.step(batch, 1))
        })
    }

    fn data(&self) -> Option<(&Ids, u64)> {
        Some((&self.ids, u64::from(self.rows)))
    }

    fn check(&mut self) {
        let before = self.copy_rows(0);
        self.step(0, self.threads);
        let (out, after) = (self.out.clone(), self.copy_rows(0));
        self.each_row(0, |row, values| values.copy_from_slice(&before[row]));
        self.plain_step(0);
        let close = |ours: &[f32], plain: &[f32]| {
            ours.iter()
                .zip(plain)
                .for_each(|(a, b)| assert!((a - b).abs() <= 1e-4 * b.abs().max(0.01), "{a} is not {b}"));
        };
        close(&out, &self.out);
        for (ours, plain) in after.iter().zip(self.copy_rows(0)) {
            close(ours, &plain);
        }
    }
}
