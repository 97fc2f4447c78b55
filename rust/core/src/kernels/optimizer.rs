//! The formulas of the optimizers, in float32. For optimizers that FBGEMM has, they are FBGEMM's
//! (`fbgemm_gpu/codegen/genscript/optimizers.py`).
//!
//! `g` is the row's gradient, summed over the batch. Every operation is by column unless stated as by row. Weight decay
//! `d` applies only to the rows of the batch. `eps` is added to the root, after the bias correction.
//!
//! | optimizer | update |
//! | --- | --- |
//! | SGD | `g' = g + d·w; w −= lr·g'` |
//! | Adagrad | `g' = g + d·w; sum += g'²; w −= lr·g' / (√sum + eps)` |
//! | rowwise Adagrad | `g' = g + d·w; sum += mean over the row of g'²; w −= lr / (√sum + eps) · g'` |
//! | Adam | `g' = g + d·w; m = β₁·m + (1−β₁)·g'; v = β₂·v + (1−β₂)·g'²; w −= lr·(m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)` |
//! | `AdamW` | like Adam with `g' = g`, and `w −= lr·(… + d·w)` of the `w` before |
//! | partial rowwise Adam | like `AdamW`, with one `v` per row, and the mean over the row of `g²` in place of `g²` |
//! | LAMB | `r = (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps) + d·w` with the moments of `AdamW`; `w −= lr · (‖w‖ / ‖r‖) · r` with the norms of the row |
//! | FTRL | `g' = g + d·w; σ = (√(n+g'²) − √n) / lr; z += g' − σ·w; n += g'²; w = −shrunk(z) / ((beta + √n) / lr + l2)` |
//!
//! `shrunk(z)` is `z` moved towards 0 by `l1`, and 0 if `|z| ≤ l1`. FTRL is FTRL-Proximal of "Ad click prediction: a
//! view from the trenches" (`McMahan` et al., KDD 2013). A weight is 0 if the divisor is 0.
//!
//! FBGEMM has no weight decay in SGD and Adagrad, so those formulas are torch's. FBGEMM's Adam is `AdamW` here; Adam
//! here is torch's. LAMB's ratio of norms is 1 if a norm is 0; FBGEMM's is 0 or NaN in that case. `t` is the table's
//! step.
//!
//! Adam and its variants are in `adam`, and FTRL is in `ftrl`.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)]

use super::row_store::RowStore;
use crate::config::OptimizerKind;
use crate::runtime::simd::{FloatLanes, by_lanes, prefetch_address, prefetch_range};
use crate::types::CacheSlot;

/// The hyperparameters of an update. An optimizer ignores those that it does not use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hyperparameters {
    /// Learning rate. More than 0 for FTRL, which divides by it.
    pub lr: f64,
    /// The constant that is added to the root of the second moment.
    pub eps: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// The weight decay, for the rows of the batch only.
    pub weight_decay: f64,
    /// FTRL: the constant that is added to the root of the sum of squares.
    pub beta: f64,
    /// FTRL: the strength of the L1 regularization.
    pub l1: f64,
    /// FTRL: the strength of the L2 regularization.
    pub l2: f64,
}

/// An update of a table: the optimizer, its hyperparameters, and the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerStep {
    /// The optimizer.
    pub kind: OptimizerKind,
    /// Its hyperparameters.
    pub hyperparameters: Hyperparameters,
    /// The table's step counter, including this update. The first step is 1.
    pub step: u64,
}

/// The update of one row by its summed gradient.
pub(super) trait RowUpdate: Copy + Sync {
    /// The number of vector slots that the update reads and writes.
    const VECTOR_SLOTS: usize;
    /// True if the update reads and writes the scalar slot.
    const SCALAR_SLOT: bool;

    /// Updates the row in `slot` by `gradient`, which is `[dim]`.
    ///
    /// # Safety
    /// `slot` is valid in `rows`, whose layout has the slots above, and no other code uses the row. `dim` floats can be
    /// read at `gradient`, which is not in `rows`.
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize);

    /// Prefetches everything that [`RowUpdate::update`] accesses.
    #[inline(always)]
    fn prefetch<R: RowStore>(rows: &R, slot: CacheSlot, dim: usize) {
        let bytes = prefetched_bytes(dim);
        prefetch_range(rows.weights(slot).cast(), bytes);
        for which in 0..Self::VECTOR_SLOTS {
            prefetch_range(rows.vector_slot(which, slot).cast(), bytes);
        }
        if Self::SCALAR_SLOT {
            prefetch_address(rows.scalar(slot));
        }
    }
}

/// Bytes to prefetch of a part of a row of `dim` floats. The hardware prefetcher loads the rest of a longer part.
#[inline(always)]
pub(super) fn prefetched_bytes(dim: usize) -> usize {
    (dim * 4).min(512)
}

/// `g + d·w`.
#[inline(always)]
pub(super) fn decayed(gradient: FloatLanes, weights: FloatLanes, weight_decay: f32) -> FloatLanes {
    if weight_decay == 0.0 { gradient } else { gradient + FloatLanes::splat(weight_decay) * weights }
}

#[derive(Clone, Copy)]
pub(super) struct SgdUpdate {
    lr: f32,
    weight_decay: f32,
}

impl SgdUpdate {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        Self { lr: numbers.lr as f32, weight_decay: numbers.weight_decay as f32 }
    }
}

impl RowUpdate for SgdUpdate {
    const VECTOR_SLOTS: usize = 0;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let weights = rows.weights(slot);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that the row's weights and the gradient
            // have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let g = decayed(FloatLanes::load_first(gradient.add(at), count), w, self.weight_decay);
                (w - FloatLanes::splat(self.lr) * g).store_first(weights.add(at), count);
            }
        });
    }
}

#[derive(Clone, Copy)]
pub(super) struct AdagradUpdate {
    lr: f32,
    eps: f32,
    weight_decay: f32,
}

impl AdagradUpdate {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        Self { lr: numbers.lr as f32, eps: numbers.eps as f32, weight_decay: numbers.weight_decay as f32 }
    }
}

impl RowUpdate for AdagradUpdate {
    const VECTOR_SLOTS: usize = 1;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let (weights, sums) = (rows.weights(slot), rows.vector_slot(0, slot));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that each part of the row and the
            // gradient have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let g = decayed(FloatLanes::load_first(gradient.add(at), count), w, self.weight_decay);
                let sum = FloatLanes::load_first(sums.add(at), count) + g * g;
                sum.store_first(sums.add(at), count);
                let step = FloatLanes::splat(self.lr) * g / (sum.sqrt() + FloatLanes::splat(self.eps));
                (w - step).store_first(weights.add(at), count);
            }
        });
    }
}

#[derive(Clone, Copy)]
pub(super) struct RowWiseAdagradUpdate(AdagradUpdate);

impl RowWiseAdagradUpdate {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        Self(AdagradUpdate::new(numbers))
    }
}

impl RowUpdate for RowWiseAdagradUpdate {
    const VECTOR_SLOTS: usize = 0;
    const SCALAR_SLOT: bool = true;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let AdagradUpdate { lr, eps, weight_decay } = self.0;
        let weights = rows.weights(slot);
        let mut squares = FloatLanes::splat(0.0);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that the row's weights and the gradient
            // have `dim` floats.
            unsafe {
                let mut g = FloatLanes::load_first(gradient.add(at), count);
                if weight_decay != 0.0 {
                    g = decayed(g, FloatLanes::load_first(weights.add(at), count), weight_decay);
                }
                squares = squares + g * g;
            }
        });
        let scalar = rows.scalar(slot);
        // SAFETY: the caller guarantees that the slot is valid and no other code uses its row, so its scalar may be
        // read and written.
        let sum = unsafe {
            *scalar += squares.sum() / dim as f32;
            *scalar
        };
        let multiplier = FloatLanes::splat(lr / (sum.sqrt() + eps));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that the row's weights and the gradient
            // have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let g = decayed(FloatLanes::load_first(gradient.add(at), count), w, weight_decay);
                (w - multiplier * g).store_first(weights.add(at), count);
            }
        });
    }
}
