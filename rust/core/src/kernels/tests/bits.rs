//! Tests that kernels return bitwise identical results on every instruction set, number of threads and kind of memory.
#![allow(unsafe_code)]

use super::*;
use crate::kernels::backward::{backward_on, weight_gradient_on};

/// The outputs, the weight gradients and the rows after two steps.
fn run_all(isa: InstructionSet, threads: usize, kind: OptimizerKind, dim: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    // There are enough rows and bags for every thread.
    let table = KernelTable::new(kind.layout(dim), 400, 3);
    let (mut outs, mut dots) = (Vec::new(), Vec::new());
    for step in 1..=2 {
        let batch = KernelBatch::new(400, dim, step);
        let (weighted, mean) = (step == 2, step == 1);
        outs.extend(batch.forward(isa, &table.store(), weighted, mean, threads).iter().map(|value| value.to_bits()));
        let pooled = batch.pooled(dim, weighted, mean);
        let mut dot = vec![0.0_f32; batch.slots.len()];
        let optimizer = OptimizerStep { kind, hyperparameters: numbers(0.01), step };
        // SAFETY: slots are below 400 and distinct in the index, and the gradient has all its columns.
        unsafe {
            let (absent, gradient) = (batch.absent.as_deref(), pooled.of_weights(&batch.grad));
            weight_gradient_on(isa, &table.store(), &batch.slots, absent, &gradient, &mut dot, threads);
            backward_on(isa, &table.store(), &batch.index, &pooled.of_rows(&batch.grad), &optimizer, threads);
        }
        dots.extend(dot.iter().map(|value| value.to_bits()));
    }
    (outs, dots, bits(&table.values()))
}

#[test]
fn instruction_sets_and_thread_counts_change_no_bit() {
    for kind in OptimizerKind::ALL {
        for dim in DIMS {
            let expected = run_all(InstructionSet::Baseline, 1, kind, dim);
            for isa in InstructionSet::all() {
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
fn a_frequent_rows_gradients_are_summed_by_parts_of_256() {
    for (count, dim) in [(255, 3), (256, 65), (257, 3), (600, 16), (1025, 100)] {
        let table = KernelTable::new(RowLayout { dim, vector_slots: 0, scalar_slot: false }, 2, 9);
        let before = table.values();
        let grad = floats(10, count * dim);
        let occurrences: Vec<u32> = (0..count as u32).rev().collect();
        let in_turn = |some: &[u32], column: usize| {
            let one = |position: &u32| grad[*position as usize * dim + column];
            some[1..].iter().fold(one(&some[0]), |sum, position| sum + one(position))
        };
        let expected: Vec<u32> = (0..dim)
            .map(|column| {
                let parts: Vec<f32> = occurrences.chunks(256).map(|part| in_turn(part, column)).collect();
                let sum = parts[1..].iter().fold(parts[0], |sum, part| sum + part);
                (before[1][column] - 0.5 * sum).to_bits()
            })
            .collect();
        let index = TransposedIndex { slots: vec![1], starts: vec![0, count as u32], occurrences };
        let numbers = Hyperparameters { lr: 0.5, ..Hyperparameters::default() };
        let step = OptimizerStep { kind: OptimizerKind::Sgd, hyperparameters: numbers, step: 1 };
        // SAFETY: the table has slot 1 and one user, and each occurrence has `dim` floats.
        unsafe { backward(&table.store(), &index, &GradientView::Sequence { grad: &grad }, &step, 1) };
        assert_eq!(bits(&[table.values()[1][..dim].to_vec()]), expected, "{count} × {dim}");
    }
}

#[test]
fn tensors_and_arena_rows_change_no_bit() {
    for kind in OptimizerKind::ALL {
        for dim in [3, 20, 64] {
            let layout = kind.layout(dim);
            let table = KernelTable::new(layout, 40, 5);
            let rows = table.values();
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
            let batch = KernelBatch::new(40, dim, 6);
            let isa = InstructionSet::best();
            let from_arena = batch.forward(isa, &table.store(), true, false, 1);
            let from_tensors = batch.forward(isa, &tensors, true, false, 1);
            assert_eq!(bits(&[from_arena]), bits(&[from_tensors]));
            let pooled = batch.pooled(dim, true, false);
            let optimizer = OptimizerStep { kind, hyperparameters: numbers(0.01), step: 3 };
            // SAFETY: slots are below 40 and distinct in the index, and the tensors have 40 rows.
            unsafe {
                backward(&table.store(), &batch.index, &pooled.of_rows(&batch.grad), &optimizer, 1);
                backward(&tensors, &batch.index, &pooled.of_rows(&batch.grad), &optimizer, 1);
            }
            for (slot, row) in table.values().iter().enumerate() {
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
    let expected = run_all(InstructionSet::best(), 2, OptimizerKind::Sgd, 64);
    // SAFETY: the child only computes, reads memory that no other thread of the parent changes, and exits by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let same = run_all(InstructionSet::best(), 2, OptimizerKind::Sgd, 64) == expected;
        // SAFETY: _exit terminates this process without the test harness's exit handlers.
        unsafe { libc::_exit(if same { 42 } else { 1 }) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: this waits for the child that was created above, and `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42, "the child ended with status {status}");
}
