//! FTRL-Proximal, by column.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // See `simd`.

use super::optimizer::{Hyperparameters, RowUpdate, decayed};
use super::row_store::RowStore;
use crate::runtime::simd::{FloatLanes, by_lanes};
use crate::types::CacheSlot;

/// The slots are `z`, the sum of gradients that determines the weights, and `n`, the sum of their squares.
#[derive(Clone, Copy)]
pub(super) struct FtrlUpdate {
    /// 1 / lr.
    per_lr: f32,
    weight_decay: f32,
    beta: f32,
    l1: f32,
    l2: f32,
}

impl FtrlUpdate {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        let Hyperparameters { lr, weight_decay, beta, l1, l2, .. } = *numbers;
        Self {
            per_lr: (1.0 / lr) as f32,
            weight_decay: weight_decay as f32,
            beta: beta as f32,
            l1: l1 as f32,
            l2: l2 as f32,
        }
    }
}

impl RowUpdate for FtrlUpdate {
    const VECTOR_SLOTS: usize = 2;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let weights = rows.weights(slot);
        let (sums, squares) = (rows.vector_slot(0, slot), rows.vector_slot(1, slot));
        let (per_lr, beta, l2) =
            (FloatLanes::splat(self.per_lr), FloatLanes::splat(self.beta), FloatLanes::splat(self.l2));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that each part of the row and the
            // gradient have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let g = decayed(FloatLanes::load_first(gradient.add(at), count), w, self.weight_decay);
                let before = FloatLanes::load_first(squares.add(at), count);
                let n = before + g * g;
                n.store_first(squares.add(at), count);
                let root = n.sqrt();
                let sigma = (root - before.sqrt()) * per_lr;
                let z = FloatLanes::load_first(sums.add(at), count) + (g - sigma * w);
                z.store_first(sums.add(at), count);
                let divisor = (beta + root) * per_lr + l2;
                (FloatLanes::splat(0.0) - z.shrunk(self.l1)).over_or_zero(divisor).store_first(weights.add(at), count);
            }
        });
    }
}
