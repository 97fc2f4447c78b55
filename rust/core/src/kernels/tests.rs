//! The kernels against a plain reference in `f64`, and their bits across instruction sets, threads and row stores.
#![allow(unsafe_code)]

use super::backward::{backward_on, weight_gradient_on};
use super::forward::Pooled;
use super::*;
use crate::config::OptimizerKind;
use crate::rows::{Arena, RowLayout};
use crate::simd::Isa;
use crate::types::{CacheSlot, NO_SLOT, hash_id};

const DIMS: [usize; 9] = [1, 3, 16, 20, 64, 65, 100, 128, 200];
const KINDS: [OptimizerKind; 5] = [
    OptimizerKind::Sgd,
    OptimizerKind::Adagrad,
    OptimizerKind::RowWiseAdagrad,
    OptimizerKind::Adam,
    OptimizerKind::AdamW,
];

/// Random numbers in `[-1, 1)`.
fn floats(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|index| (hash_id((seed << 32 | index) as i64) >> 40) as f32 / 8_388_608.0 - 1.0).collect()
}

fn below(seed: u64, index: usize, bound: usize) -> usize {
    (hash_id((seed << 32 | index as u64) as i64) % bound as u64) as usize
}

/// A table in an arena: the second half of its slots in overflow.
struct Table {
    arena: Arena,
    layout: RowLayout,
    rows: u32,
}

impl Table {
    fn new(layout: RowLayout, rows: u32, seed: u64) -> Self {
        let arena = Arena::new(layout, rows / 2).expect("mapped");
        arena.reserve_overflow(rows - rows / 2).expect("mapped");
        let table = Self { arena, layout, rows };
        let values = floats(seed, rows as usize * layout.vector_floats());
        for slot in 0..rows {
            let row = table.arena.row(slot);
            let from = slot as usize * layout.vector_floats();
            for (column, value) in values[from..from + layout.vector_floats()].iter().enumerate() {
                // Slots are sums of squares.
                let value = if column < layout.dim { *value } else { value.abs() * 0.1 };
                // SAFETY: the row is within the arena, and the test is its only user.
                unsafe { row.vector.add(column).write(value) };
            }
            // SAFETY: as above.
            unsafe { (*row.header).scalar = if layout.scalar_slot { values[from].abs() * 0.1 } else { 0.0 } };
        }
        table
    }

    fn store(&self) -> ArenaRows<'_> {
        ArenaRows { arena: &self.arena, layout: self.layout }
    }

    /// Weights, vector slots and scalar of each row.
    fn snapshot(&self) -> Vec<Vec<f32>> {
        (0..self.rows)
            .map(|slot| {
                let row = self.arena.row(slot);
                // SAFETY: as in `new`.
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

/// A batch of two features over one table: skewed slots, some `NO_SLOT`, empty bags at both ends and inside.
struct Batch {
    slots: Vec<CacheSlot>,
    index: TransposedIndex,
    /// Of feature 0 and of feature 1, each from 0.
    offsets: [Vec<i64>; 2],
    weights: Vec<f32>,
    grad: Vec<f32>,
    columns: usize,
}

const BAGS: usize = 50;

impl Batch {
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
        let mut index = TransposedIndex::from_inverse(&inverse, distinct.len());
        index.slots = distinct;
        let columns = 2 * dim + 5;
        Self {
            weights: floats(seed + 4, slots.len()),
            grad: floats(seed + 5, BAGS * columns),
            slots,
            index,
            offsets,
            columns,
        }
    }

    fn column(feature: usize, dim: usize) -> usize {
        [2, dim + 4][feature]
    }

    /// Positions of a feature in the batch.
    fn range(&self, feature: usize) -> std::ops::Range<usize> {
        let first = *self.offsets[0].last().expect("not empty") as usize;
        [0..first, first..self.slots.len()][feature].clone()
    }

    fn pooled(&self, dim: usize, weighted: bool, mean: bool) -> PooledGradient {
        let features = [0, 1].map(|feature| PooledFeature {
            column: Batch::column(feature, dim),
            offsets: &self.offsets[feature],
            weights: weighted.then(|| &self.weights[self.range(feature)]),
            mean,
        });
        PooledGradient::new(self.columns, &features, 3).expect("small")
    }

    fn forward<R: RowStore>(&self, isa: Isa, rows: &R, weighted: bool, mean: bool, threads: usize) -> Vec<f32> {
        let dim = rows.layout().dim;
        let mut out = vec![f32::NAN; BAGS * self.columns];
        for feature in 0..2 {
            let range = self.range(feature);
            Pooled {
                isa,
                rows,
                slots: &self.slots[range.clone()],
                offsets: &self.offsets[feature],
                weights: weighted.then(|| &self.weights[range]),
                mean,
                out: out.as_mut_ptr(),
                out_columns: self.columns,
                column: Batch::column(feature, dim),
            }
            .deal(threads);
        }
        out
    }

    /// What each occurrence adds to its row's gradient, in `f64`: `[N][D]`.
    fn occurrence_gradients(&self, dim: usize, weighted: bool, mean: bool) -> Vec<Vec<f64>> {
        let mut gradients = Vec::new();
        for feature in 0..2 {
            for bag in 0..BAGS {
                let length = self.offsets[feature][bag + 1] - self.offsets[feature][bag];
                for _ in 0..length {
                    let scale = if weighted { f64::from(self.weights[gradients.len()]) } else { 1.0 };
                    let scale = if mean { scale / length as f64 } else { scale };
                    let start = bag * self.columns + Batch::column(feature, dim);
                    gradients.push(self.grad[start..start + dim].iter().map(|g| f64::from(*g) * scale).collect());
                }
            }
        }
        gradients
    }
}

fn numbers(weight_decay: f64) -> Hyperparameters {
    Hyperparameters { lr: 0.05, eps: 1e-3, beta1: 0.9, beta2: 0.99, weight_decay }
}

/// One update in `f64`, from the formulas in `optimizer`'s table. `row`: weights, vector slots, scalar.
fn reference_update(row: &mut [f64], g: &[f64], kind: OptimizerKind, h: &Hyperparameters, step: u64) {
    let dim = g.len();
    let (w, slots) = row.split_at_mut(dim);
    let l2: Vec<f64> = (0..dim).map(|column| g[column] + h.weight_decay * w[column]).collect();
    match kind {
        OptimizerKind::Sgd => (0..dim).for_each(|column| w[column] -= h.lr * l2[column]),
        OptimizerKind::Adagrad => {
            for column in 0..dim {
                slots[column] += l2[column] * l2[column];
                w[column] -= h.lr * l2[column] / (slots[column].sqrt() + h.eps);
            }
        }
        OptimizerKind::RowWiseAdagrad => {
            slots[0] += l2.iter().map(|g| g * g).sum::<f64>() / dim as f64;
            (0..dim).for_each(|column| w[column] -= h.lr * l2[column] / (slots[0].sqrt() + h.eps));
        }
        OptimizerKind::Adam | OptimizerKind::AdamW => {
            let coupled = kind == OptimizerKind::Adam;
            for column in 0..dim {
                let g = if coupled { l2[column] } else { g[column] };
                let (m, v) = (column, dim + column);
                slots[m] = h.beta1 * slots[m] + (1.0 - h.beta1) * g;
                slots[v] = h.beta2 * slots[v] + (1.0 - h.beta2) * g * g;
                let m_hat = slots[m] / (1.0 - h.beta1.powf(step as f64));
                let v_hat = slots[v] / (1.0 - h.beta2.powf(step as f64));
                let decay = if coupled { 0.0 } else { h.weight_decay * w[column] };
                w[column] -= h.lr * (m_hat / (v_hat.sqrt() + h.eps) + decay);
            }
        }
    }
}

fn assert_close(got: f64, expected: f64, what: impl Fn() -> String) {
    let tolerance = 2e-5 * expected.abs().max(1.0);
    assert!((got - expected).abs() <= tolerance, "{}: {got}, not {expected}", what());
}

#[test]
fn pooled_forward_agrees_with_the_reference() {
    for dim in DIMS {
        let table = Table::new(OptimizerKind::RowWiseAdagrad.layout(dim), 40, 1);
        let rows = table.snapshot();
        let batch = Batch::new(40, dim, 2);
        for (weighted, mean) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut expected = vec![f64::NAN; BAGS * batch.columns];
            for feature in 0..2 {
                let first = batch.range(feature).start;
                for bag in 0..BAGS {
                    let bounds = &batch.offsets[feature][bag..bag + 2];
                    for column in 0..dim {
                        let sum: f64 = (first + bounds[0] as usize..first + bounds[1] as usize)
                            .filter(|&position| batch.slots[position] != NO_SLOT)
                            .map(|position| {
                                let value = f64::from(rows[batch.slots[position] as usize][column]);
                                value * if weighted { f64::from(batch.weights[position]) } else { 1.0 }
                            })
                            .sum();
                        let length = (bounds[1] - bounds[0]).max(1) as f64;
                        expected[bag * batch.columns + Batch::column(feature, dim) + column] =
                            if mean { sum / length } else { sum };
                    }
                }
            }
            let got = batch.forward(Isa::best(), &table.store(), weighted, mean, 1);
            for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert_eq!(got.is_nan(), expected.is_nan(), "only the features' columns are written ({at})");
                if !expected.is_nan() {
                    assert_close(f64::from(*got), *expected, || {
                        format!("dim {dim} weighted {weighted} mean {mean} at {at}")
                    });
                }
            }
        }
    }
}

#[test]
fn sequence_forward_copies_rows_and_zeros() {
    for dim in DIMS {
        let table = Table::new(OptimizerKind::Adam.layout(dim), 40, 1);
        let rows = table.snapshot();
        let slots: Vec<CacheSlot> =
            (0..3000).map(|i| if i % 7 == 0 { NO_SLOT } else { below(3, i, 40) as u32 }).collect();
        for threads in [1, 3] {
            let mut out = vec![f32::NAN; slots.len() * dim];
            // SAFETY: slots are below 40, and nobody writes.
            unsafe { forward_sequence(&table.store(), &slots, &mut out, threads) };
            for (slot, out) in slots.iter().zip(out.chunks(dim)) {
                let expected = if *slot == NO_SLOT { vec![0.0; dim] } else { rows[*slot as usize][..dim].to_vec() };
                assert_eq!(out, expected);
            }
        }
    }
}

#[test]
fn every_optimizer_agrees_with_its_formula_over_several_steps() {
    for (kind, dim, weight_decay) in
        KINDS.into_iter().flat_map(|kind| DIMS.map(|dim| [(kind, dim, 0.0), (kind, dim, 0.1)]).into_iter().flatten())
    {
        let table = Table::new(kind.layout(dim), 40, 7);
        let mut expected: Vec<Vec<f64>> =
            table.snapshot().iter().map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect();
        for step in 1..=4 {
            let batch = Batch::new(40, dim, 10 + step);
            let (weighted, mean) = (step % 2 == 0, step > 2);
            let optimizer = OptimizerStep { kind, hyperparameters: numbers(weight_decay), step };
            let gradients = batch.occurrence_gradients(dim, weighted, mean);
            for (row, &slot) in batch.index.slots.iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT) {
                let range = batch.index.starts[row] as usize..batch.index.starts[row + 1] as usize;
                let mut g = vec![0.0; dim];
                for &position in &batch.index.occurrences[range] {
                    assert_eq!(batch.slots[position as usize], slot);
                    g.iter_mut().zip(&gradients[position as usize]).for_each(|(sum, value)| *sum += value);
                }
                reference_update(&mut expected[slot as usize], &g, kind, &optimizer.hyperparameters, step);
            }
            let pooled = batch.pooled(dim, weighted, mean);
            // SAFETY: the batch's slots are below 40 and distinct in the index; the gradient has all its columns.
            unsafe { backward(&table.store(), &batch.index, &pooled.of_rows(&batch.grad), &optimizer, 1) };
        }
        for (slot, (row, expected)) in table.snapshot().iter().zip(&expected).enumerate() {
            for (at, (got, expected)) in row.iter().zip(expected).enumerate() {
                assert_close(f64::from(*got), *expected, || format!("{kind:?} dim {dim} slot {slot} value {at}"));
            }
        }
    }
}

#[test]
fn sequence_gradients_are_summed_by_row() {
    let (dim, kind) = (20, OptimizerKind::Sgd);
    let table = Table::new(kind.layout(dim), 4, 1);
    let before = table.snapshot();
    let inverse = [0, 1, 0, 2, 0];
    let mut index = TransposedIndex::from_inverse(&inverse, 3);
    index.slots = vec![3, NO_SLOT, 1];
    let grad = floats(9, inverse.len() * dim);
    let optimizer = OptimizerStep { kind, hyperparameters: numbers(0.0), step: 1 };
    // SAFETY: slots are below 4 and distinct; the gradient is `[5, D]`.
    unsafe { backward(&table.store(), &index, &Gradient::Sequence { grad: &grad }, &optimizer, 1) };
    let after = table.snapshot();
    assert_eq!(after[0], before[0]);
    assert_eq!(after[2], before[2]);
    for column in 0..dim {
        let sum = grad[column] + grad[2 * dim + column] + grad[4 * dim + column];
        assert_eq!(after[3][column].to_bits(), (before[3][column] - 0.05 * sum).to_bits());
        assert_eq!(after[1][column].to_bits(), (before[1][column] - 0.05 * grad[3 * dim + column]).to_bits());
    }
}

#[test]
fn the_weight_gradient_is_the_dot_product_with_the_row() {
    for dim in DIMS {
        let table = Table::new(OptimizerKind::Adagrad.layout(dim), 40, 1);
        let rows = table.snapshot();
        let batch = Batch::new(40, dim, 2);
        for mean in [false, true] {
            let pooled = batch.pooled(dim, true, mean);
            let mut out = vec![f32::NAN; batch.slots.len()];
            // SAFETY: slots are below 40, and nobody writes.
            unsafe { weight_gradient(&table.store(), &batch.slots, &pooled.of_weights(&batch.grad), &mut out, 1) };
            let gradients = batch.occurrence_gradients(dim, false, mean);
            for (position, got) in out.iter().enumerate() {
                let slot = batch.slots[position];
                let expected = if slot == NO_SLOT {
                    0.0
                } else {
                    gradients[position].iter().zip(&rows[slot as usize]).map(|(g, w)| g * f64::from(*w)).sum()
                };
                assert_close(f64::from(*got), expected, || format!("dim {dim} mean {mean} position {position}"));
            }
        }
    }
}

/// Output, weight gradients and rows after two steps.
fn run_all(isa: Isa, threads: usize, kind: OptimizerKind, dim: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    // Enough rows and bags that every thread gets a part.
    let table = Table::new(kind.layout(dim), 400, 3);
    let (mut outs, mut dots) = (Vec::new(), Vec::new());
    for step in 1..=2 {
        let batch = Batch::new(400, dim, step);
        let (weighted, mean) = (step == 2, step == 1);
        outs.extend(batch.forward(isa, &table.store(), weighted, mean, threads).iter().map(|value| value.to_bits()));
        let pooled = batch.pooled(dim, weighted, mean);
        let mut dot = vec![0.0; batch.slots.len()];
        let optimizer = OptimizerStep { kind, hyperparameters: numbers(0.01), step };
        // SAFETY: slots are below 400 and distinct in the index; the gradient has all its columns.
        unsafe {
            weight_gradient_on(isa, &table.store(), &batch.slots, &pooled.of_weights(&batch.grad), &mut dot, threads);
            backward_on(isa, &table.store(), &batch.index, &pooled.of_rows(&batch.grad), &optimizer, threads);
        }
        dots.extend(dot.iter().map(|value| value.to_bits()));
    }
    (outs, dots, bits(&table.snapshot()))
}

#[test]
fn instruction_sets_and_thread_counts_change_no_bit() {
    for kind in KINDS {
        for dim in DIMS {
            let expected = run_all(Isa::Baseline, 1, kind, dim);
            for isa in Isa::all() {
                for threads in [1, 2, 3, 8] {
                    assert!(
                        run_all(isa, threads, kind, dim) == expected,
                        "{kind:?} dim {dim} {isa:?} {threads} threads"
                    );
                }
            }
        }
    }
}

#[test]
fn tensors_and_arena_rows_change_no_bit() {
    for kind in KINDS {
        for dim in [3, 20, 64] {
            let layout = kind.layout(dim);
            let table = Table::new(layout, 40, 5);
            let rows = table.snapshot();
            let mut parts: Vec<Vec<f32>> = (0..3)
                .map(|part| rows.iter().flat_map(|row| row.iter().skip(part * dim).take(dim).copied()).collect())
                .collect();
            let mut scalars: Vec<f32> = rows.iter().map(|row| *row.last().expect("not empty")).collect();
            let [weights, first, second] = &mut parts[..] else { unreachable!("three parts") };
            let tensors = TensorRows {
                layout,
                weights: weights.as_mut_ptr(),
                vector_slots: [first.as_mut_ptr(), second.as_mut_ptr()],
                scalars: scalars.as_mut_ptr(),
            };
            let batch = Batch::new(40, dim, 6);
            let isa = Isa::best();
            let from_arena = batch.forward(isa, &table.store(), true, false, 1);
            let from_tensors = batch.forward(isa, &tensors, true, false, 1);
            assert_eq!(bits(&[from_arena]), bits(&[from_tensors]));
            let pooled = batch.pooled(dim, true, false);
            let optimizer = OptimizerStep { kind, hyperparameters: numbers(0.01), step: 3 };
            // SAFETY: slots are below 40 and distinct in the index; the tensors have 40 rows.
            unsafe {
                backward(&table.store(), &batch.index, &pooled.of_rows(&batch.grad), &optimizer, 1);
                backward(&tensors, &batch.index, &pooled.of_rows(&batch.grad), &optimizer, 1);
            }
            for (slot, row) in table.snapshot().iter().enumerate() {
                for part in 0..=layout.vector_slots {
                    let tensor = &parts[part][slot * dim..(slot + 1) * dim];
                    assert_eq!(&row[part * dim..(part + 1) * dim], tensor, "{kind:?} dim {dim} part {part}");
                }
                assert_eq!(row[layout.vector_floats()].to_bits(), scalars[slot].to_bits());
            }
        }
    }
}

#[test]
fn a_forked_child_runs_on_threads_of_its_own() {
    let expected = run_all(Isa::best(), 2, OptimizerKind::Sgd, 64);
    // SAFETY: the child only computes, reads memory that no other thread of the parent changes, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let same = run_all(Isa::best(), 2, OptimizerKind::Sgd, 64) == expected;
        // SAFETY: ends this process without the test harness's exit handlers.
        unsafe { libc::_exit(if same { 42 } else { 1 }) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42, "the child ended with status {status}");
}
