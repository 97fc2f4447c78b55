//! Tests of the kernels against a simple reference in float64.
#![allow(unsafe_code)]

use super::*;

/// One update in float64 by the formulas in the table of `optimizer`. `row` is weights, vector slots, scalar.
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
        OptimizerKind::Lamb => {
            let mut direction = vec![0.0; dim];
            for column in 0..dim {
                let (m, v) = (column, dim + column);
                slots[m] = h.beta1 * slots[m] + (1.0 - h.beta1) * g[column];
                slots[v] = h.beta2 * slots[v] + (1.0 - h.beta2) * g[column] * g[column];
                let m_hat = slots[m] / (1.0 - h.beta1.powf(step as f64));
                let v_hat = slots[v] / (1.0 - h.beta2.powf(step as f64));
                direction[column] = m_hat / (v_hat.sqrt() + h.eps) + h.weight_decay * w[column];
            }
            let norm = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
            let trust = norm(w) / norm(&direction);
            (0..dim).for_each(|column| w[column] -= h.lr * trust * direction[column]);
        }
        OptimizerKind::Ftrl => {
            for column in 0..dim {
                let (g, z, n) = (l2[column], column, dim + column);
                let sigma = ((slots[n] + g * g).sqrt() - slots[n].sqrt()) / h.lr;
                slots[z] += g - sigma * w[column];
                slots[n] += g * g;
                w[column] = if slots[z].abs() <= h.l1 {
                    0.0
                } else {
                    -(slots[z] - slots[z].signum() * h.l1) / ((h.beta + slots[n].sqrt()) / h.lr + h.l2)
                };
            }
        }
        OptimizerKind::PartialRowWiseAdam => {
            let mean_square = g.iter().map(|g| g * g).sum::<f64>() / dim as f64;
            slots[dim] = h.beta2 * slots[dim] + (1.0 - h.beta2) * mean_square;
            let root = (slots[dim] / (1.0 - h.beta2.powf(step as f64))).sqrt() + h.eps;
            for column in 0..dim {
                slots[column] = h.beta1 * slots[column] + (1.0 - h.beta1) * g[column];
                let m_hat = slots[column] / (1.0 - h.beta1.powf(step as f64));
                w[column] -= h.lr * (m_hat / root + h.weight_decay * w[column]);
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
        let table = KernelTable::new(OptimizerKind::RowWiseAdagrad.layout(dim), 40, 1);
        let rows = table.values();
        for (seed, weighted, mean) in
            [(1, false, false), (2, false, false), (2, true, false), (1, true, true), (2, false, true), (2, true, true)]
        {
            let batch = KernelBatch::new(40, dim, seed);
            let mut expected = vec![f64::NAN; BAGS * batch.columns];
            for feature in 0..2 {
                let first = batch.range(feature).start;
                for bag in 0..BAGS {
                    let bounds = &batch.offsets[feature][bag..bag + 2];
                    for column in 0..dim {
                        let sum: f64 = (first + bounds[0] as usize..first + bounds[1] as usize)
                            .map(|position| {
                                let value = f64::from(batch.read(&rows, batch.slots[position], column));
                                value * if weighted { f64::from(batch.weights[position]) } else { 1.0 }
                            })
                            .sum();
                        let length = (bounds[1] - bounds[0]).max(1) as f64;
                        expected[bag * batch.columns + KernelBatch::column(feature, dim) + column] =
                            if mean { sum / length } else { sum };
                    }
                }
            }
            let got = batch.forward(InstructionSet::best(), &table.store(), weighted, mean, 1);
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
fn sequence_forward_copies_rows_and_missing_values() {
    for dim in DIMS {
        let table = KernelTable::new(OptimizerKind::Adam.layout(dim), 40, 1);
        let rows = table.values();
        let slots: Vec<CacheSlot> =
            (0..3000).map(|i| if i % 7 == 0 { NO_SLOT } else { below(3, i, 40) as u32 }).collect();
        let row = floats(9, dim);
        for (threads, absent) in [(1, None), (3, None), (1, Some(row.as_slice())), (3, Some(row.as_slice()))] {
            let mut out = vec![f32::NAN; slots.len() * dim];
            // SAFETY: slots are below 40, and no thread writes the rows.
            unsafe { forward_sequence(&table.store(), &slots, absent, &mut out, threads) };
            for (slot, out) in slots.iter().zip(out.chunks(dim)) {
                let none = absent.map_or_else(|| vec![0.0; dim], <[f32]>::to_vec);
                let expected = if *slot == NO_SLOT { none } else { rows[*slot as usize][..dim].to_vec() };
                assert_eq!(out, expected);
            }
        }
    }
}

#[test]
fn every_optimizer_agrees_with_its_formula_over_several_steps() {
    for (kind, dim, weight_decay) in OptimizerKind::ALL
        .into_iter()
        .flat_map(|kind| DIMS.map(|dim| [(kind, dim, 0.0), (kind, dim, 0.1)]).into_iter().flatten())
    {
        let table = KernelTable::new(kind.layout(dim), 40, 7);
        let mut expected: Vec<Vec<f64>> =
            table.values().iter().map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect();
        for step in 1..=4 {
            let batch = KernelBatch::new(40, dim, 10 + step);
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
            // SAFETY: the batch's slots are below 40 and distinct in the index, and the gradient has all its columns.
            unsafe { backward(&table.store(), &batch.index, &pooled.of_rows(&batch.grad), &optimizer, 1) };
        }
        for (slot, (row, expected)) in table.values().iter().zip(&expected).enumerate() {
            for (at, (got, wanted)) in row.iter().zip(expected).enumerate() {
                // FTRL's z is the difference of sums that grow as √n / lr.
                let of_z = kind == OptimizerKind::Ftrl && (dim..2 * dim).contains(&at);
                let scale = if of_z { (expected[at + dim].sqrt() / numbers(0.0).lr).max(1.0) } else { 1.0 };
                assert_close(f64::from(*got) / scale, wanted / scale, || {
                    format!("{kind:?} dim {dim} slot {slot} value {at}")
                });
            }
        }
    }
}

#[test]
fn sequence_gradients_are_summed_by_row() {
    let (dim, kind) = (20, OptimizerKind::Sgd);
    let table = KernelTable::new(kind.layout(dim), 4, 1);
    let before = table.values();
    let inverse = [0, 1, 0, 2, 0];
    let mut index = TransposedIndex::from_inverse(&inverse, 3, 1);
    index.slots = vec![3, NO_SLOT, 1];
    let grad = floats(9, inverse.len() * dim);
    let optimizer = OptimizerStep { kind, hyperparameters: numbers(0.0), step: 1 };
    // SAFETY: slots are below 4 and distinct, and the gradient is `[5, D]`.
    unsafe { backward(&table.store(), &index, &GradientView::Sequence { grad: &grad }, &optimizer, 1) };
    let after = table.values();
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
        let table = KernelTable::new(OptimizerKind::Adagrad.layout(dim), 40, 1);
        let rows = table.values();
        for (seed, mean) in [(1, false), (2, false), (2, true)] {
            let batch = KernelBatch::new(40, dim, seed);
            let pooled = batch.pooled(dim, true, mean);
            let mut out = vec![f32::NAN; batch.slots.len()];
            // SAFETY: slots are below 40, and no thread writes the rows.
            unsafe {
                let (absent, gradient) = (batch.absent.as_deref(), pooled.of_weights(&batch.grad));
                weight_gradient(&table.store(), &batch.slots, absent, &gradient, &mut out, 1);
            }
            let gradients = batch.occurrence_gradients(dim, false, mean);
            for (position, got) in out.iter().enumerate() {
                let row = (0..dim).map(|column| f64::from(batch.read(&rows, batch.slots[position], column)));
                let expected = gradients[position].iter().zip(row).map(|(g, w)| g * w).sum();
                assert_close(f64::from(*got), expected, || format!("dim {dim} mean {mean} position {position}"));
            }
        }
    }
}
