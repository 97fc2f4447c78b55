//! The tables and batches of the kernel tests.
#![allow(unsafe_code)]

use super::forward::PooledForward;
use super::*;
use crate::config::OptimizerKind;
use crate::rows::{RowArena, RowLayout};
use crate::runtime::simd::InstructionSet;
use crate::types::{CacheSlot, NO_SLOT, hash_id};

mod bits;
mod formulas;

const DIMS: [usize; 9] = [1, 3, 16, 20, 64, 65, 100, 128, 200];

/// Pseudo-random numbers in `[-1, 1)`.
fn floats(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|index| (hash_id((seed << 32 | index) as i64) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
}

fn below(seed: u64, index: usize, bound: usize) -> usize {
    (hash_id((seed << 32 | index as u64) as i64) % bound as u64) as usize
}

/// A table in an arena. The second half of its slots is in the overflow area.
struct KernelTable {
    arena: RowArena,
    layout: RowLayout,
    rows: u32,
}

impl KernelTable {
    fn new(layout: RowLayout, rows: u32, seed: u64) -> Self {
        let arena = RowArena::new(layout, rows / 2).expect("mapped");
        arena.reserve_overflow(rows - rows / 2).expect("mapped");
        let table = Self { arena, layout, rows };
        let values = floats(seed, rows as usize * layout.vector_floats());
        for slot in 0..rows {
            let row = table.arena.row(slot);
            let drawn = &values[slot as usize * layout.vector_floats()..][..layout.vector_floats()];
            // SAFETY: the row is within the arena, and this test is its only user.
            let (vector, header) =
                unsafe { (std::slice::from_raw_parts_mut(row.vector, layout.vector_floats()), &mut *row.header) };
            // Optimizer slots are sums of squares, so they are not negative.
            let value = |(column, value): (usize, &f32)| if column < layout.dim { *value } else { value.abs() * 0.1 };
            vector.iter_mut().zip(drawn.iter().enumerate().map(value)).for_each(|(to, value)| *to = value);
            header.scalar = if layout.scalar_slot { drawn[0].abs() * 0.1 } else { 0.0 };
        }
        table
    }

    fn store(&self) -> ArenaRows<'_> {
        ArenaRows { arena: &self.arena, layout: self.layout }
    }

    /// The weights, the vector slots and the scalar of each row.
    fn values(&self) -> Vec<Vec<f32>> {
        (0..self.rows)
            .map(|slot| {
                let row = self.arena.row(slot);
                // SAFETY: the row is within the arena, and no thread writes it while the table is borrowed.
                unsafe {
                    let mut values = std::slice::from_raw_parts(row.vector, self.layout.vector_floats()).to_vec();
                    values.push((*row.header).scalar);
                    values
                }
            })
            .collect()
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|value| value.to_bits()).collect()
}

/// A batch of two features of one table. Its slots are skewed, some are `NO_SLOT`, and there are empty bags at both ends
/// and inside.
struct KernelBatch {
    slots: Vec<CacheSlot>,
    index: TransposedIndex,
    /// The offsets of feature 0 and of feature 1. Both start at 0.
    offsets: [Vec<i64>; 2],
    weights: Vec<f32>,
    grad: Vec<f32>,
    columns: usize,
    /// The row that `NO_SLOT` reads: random in batches of an even seed, and zeros in others.
    absent: Option<Vec<f32>>,
}

const BAGS: usize = 50;

impl KernelBatch {
    fn new(rows: u32, dim: usize, seed: u64) -> Self {
        let mut offsets = [vec![0_i64], vec![0_i64]];
        let mut total = 0;
        for (feature, offsets) in offsets.iter_mut().enumerate() {
            let mut end = 0;
            for bag in 0..BAGS {
                let length = if bag == 0 || bag == BAGS - 1 { 0 } else { below(seed, bag * 2 + feature, 30) };
                end += length as i64;
                offsets.push(end);
            }
            total += end as usize;
        }
        let slots: Vec<CacheSlot> = (0..total)
            .map(|position| match below(seed + 1, position, 10) {
                0 => NO_SLOT,
                1..=4 => below(seed + 2, position, 3) as u32,
                _ => below(seed + 3, position, rows as usize) as u32,
            })
            .collect();
        let mut distinct: Vec<CacheSlot> = Vec::new();
        let inverse: Vec<u32> = slots
            .iter()
            .map(|slot| {
                let at = distinct.iter().position(|other| other == slot).unwrap_or_else(|| {
                    distinct.push(*slot);
                    distinct.len() - 1
                });
                at as u32
            })
            .collect();
        let mut index = TransposedIndex::from_inverse(&inverse, distinct.len(), 1);
        index.slots = distinct;
        let columns = 2 * dim + 5;
        Self {
            weights: floats(seed + 4, slots.len()),
            grad: floats(seed + 5, BAGS * columns),
            slots,
            index,
            offsets,
            columns,
            absent: seed.is_multiple_of(2).then(|| floats(seed + 6, dim)),
        }
    }

    /// Returns a column of the row that a slot reads, in a table with these rows.
    fn read(&self, rows: &[Vec<f32>], slot: CacheSlot, column: usize) -> f32 {
        match &self.absent {
            Some(absent) if slot == NO_SLOT => absent[column],
            None if slot == NO_SLOT => 0.0,
            _ => rows[slot as usize][column],
        }
    }

    fn column(feature: usize, dim: usize) -> usize {
        [2, dim + 4][feature]
    }

    /// The positions of a feature in the batch.
    fn range(&self, feature: usize) -> std::ops::Range<usize> {
        let first = *self.offsets[0].last().expect("not empty") as usize;
        [0..first, first..self.slots.len()][feature].clone()
    }

    fn pooled(&self, dim: usize, weighted: bool, mean: bool) -> PooledGradient {
        let features = [0, 1].map(|feature| PooledFeature {
            column: KernelBatch::column(feature, dim),
            offsets: &self.offsets[feature],
            weights: weighted.then(|| &self.weights[self.range(feature)]),
            mean,
        });
        PooledGradient::new(self.columns, &features, 3).expect("small")
    }

    fn forward<R: RowStore>(
        &self,
        isa: InstructionSet,
        rows: &R,
        weighted: bool,
        mean: bool,
        threads: usize,
    ) -> Vec<f32> {
        let dim = rows.layout().dim;
        let mut out = vec![f32::NAN; BAGS * self.columns];
        for feature in 0..2 {
            let range = self.range(feature);
            let call = PooledForward {
                isa,
                rows,
                slots: &self.slots[range.clone()],
                absent: self.absent.as_deref(),
                offsets: &self.offsets[feature],
                weights: weighted.then(|| &self.weights[range]),
                mean,
                out: out.as_mut_ptr(),
                out_columns: self.columns,
                column: KernelBatch::column(feature, dim),
            };
            // SAFETY: the batch's slots are within the table, no thread writes its rows, and `out` has the columns of
            // all bags.
            unsafe { call.run(threads) };
        }
        out
    }

    /// The addend of each occurrence to its row's gradient, in float64: `[N][D]`.
    fn occurrence_gradients(&self, dim: usize, weighted: bool, mean: bool) -> Vec<Vec<f64>> {
        let mut gradients = Vec::new();
        for feature in 0..2 {
            for bag in 0..BAGS {
                let length = self.offsets[feature][bag + 1] - self.offsets[feature][bag];
                for _ in 0..length {
                    let scale = if weighted { f64::from(self.weights[gradients.len()]) } else { 1.0 };
                    let scale = if mean { scale / length as f64 } else { scale };
                    let start = bag * self.columns + KernelBatch::column(feature, dim);
                    gradients.push(self.grad[start..start + dim].iter().map(|g| f64::from(*g) * scale).collect());
                }
            }
        }
        gradients
    }
}

fn numbers(weight_decay: f64) -> Hyperparameters {
    Hyperparameters { lr: 0.05, eps: 1e-3, beta1: 0.9, beta2: 0.99, weight_decay, beta: 0.5, l1: 0.02, l2: 0.1 }
}
