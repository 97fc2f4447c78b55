//! Optimizer formulas, FBGEMM's (`fbgemm_gpu/codegen/genscript/optimizers.py`), in `f32`.
//!
//! `g` is the row's gradient, summed over the batch; every operation is by column unless it says row. Weight decay `d` touches
//! only rows of the batch. `eps` is added to the root, after bias correction.
//!
//! | optimizer | update |
//! | --- | --- |
//! | SGD | `g' = g + d·w; w −= lr·g'` |
//! | Adagrad | `g' = g + d·w; sum += g'²; w −= lr·g' / (√sum + eps)` |
//! | rowwise Adagrad | `g' = g + d·w; sum += mean over the row of g'²; w −= lr / (√sum + eps) · g'` |
//! | Adam | `g' = g + d·w; m = β₁·m + (1−β₁)·g'; v = β₂·v + (1−β₂)·g'²; w −= lr·(m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)` |
//! | `AdamW` | as Adam with `g' = g`, and `w −= lr·(… + d·w)` of the `w` before |
//!
//! FBGEMM has no weight decay in SGD and Adagrad, and calls `AdamW` Adam; there the formulas are torch's. `t` is the table's step.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)]

use super::rows::RowStore;
use crate::config::OptimizerKind;
use crate::prefetch::{prefetch_address, prefetch_range};
use crate::simd::{Lanes, by_lanes};
use crate::types::CacheSlot;

/// Hyperparameters of one update; those an optimizer does not have are ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Learning rate.
    pub lr: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Weight decay, for rows of the batch only.
    pub weight_decay: f64,
}

/// One update of a table: the optimizer, its hyperparameters and the step it is (from 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerStep {
    /// Which formula.
    pub kind: OptimizerKind,
    /// With which numbers.
    pub hyperparameters: Hyperparameters,
    /// The table's step counter, this update included.
    pub step: u64,
}

/// The update of one row by its summed gradient.
pub(super) trait RowUpdate: Copy + Sync {
    /// Vector slots that it reads and writes.
    const VECTOR_SLOTS: usize;
    /// Whether it reads and writes the scalar slot.
    const SCALAR_SLOT: bool;

    /// Update the row in `slot` by `gradient`, `[dim]`.
    ///
    /// # Safety
    /// `slot` is valid in `rows` and used by nobody else; `dim` floats can be read at `gradient`, which is not in `rows`.
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize);

    /// Ask for all that [`RowUpdate::update`] will touch.
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

/// Bytes to ask for of a row part of `dim` floats: the processor's own prefetcher follows longer ones.
#[inline(always)]
pub(super) fn prefetched_bytes(dim: usize) -> usize {
    (dim * 4).min(512)
}

/// `g + d·w`.
#[inline(always)]
fn decayed(gradient: Lanes, weights: Lanes, weight_decay: f32) -> Lanes {
    if weight_decay == 0.0 { gradient } else { gradient + Lanes::splat(weight_decay) * weights }
}

#[derive(Clone, Copy)]
pub(super) struct Sgd {
    lr: f32,
    weight_decay: f32,
}

impl Sgd {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        Self { lr: numbers.lr as f32, weight_decay: numbers.weight_decay as f32 }
    }
}

impl RowUpdate for Sgd {
    const VECTOR_SLOTS: usize = 0;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let weights = rows.weights(slot);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count <= dim` floats of the row and of the gradient.
            unsafe {
                let w = Lanes::load_first(weights.add(at), count);
                let g = decayed(Lanes::load_first(gradient.add(at), count), w, self.weight_decay);
                (w - Lanes::splat(self.lr) * g).store_first(weights.add(at), count);
            }
        });
    }
}

#[derive(Clone, Copy)]
pub(super) struct Adagrad {
    lr: f32,
    eps: f32,
    weight_decay: f32,
}

impl Adagrad {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        Self { lr: numbers.lr as f32, eps: numbers.eps as f32, weight_decay: numbers.weight_decay as f32 }
    }
}

impl RowUpdate for Adagrad {
    const VECTOR_SLOTS: usize = 1;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let (weights, sums) = (rows.weights(slot), rows.vector_slot(0, slot));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count <= dim` floats of each part of the row and of the gradient.
            unsafe {
                let w = Lanes::load_first(weights.add(at), count);
                let g = decayed(Lanes::load_first(gradient.add(at), count), w, self.weight_decay);
                let sum = Lanes::load_first(sums.add(at), count) + g * g;
                sum.store_first(sums.add(at), count);
                let step = Lanes::splat(self.lr) * g / (sum.sqrt() + Lanes::splat(self.eps));
                (w - step).store_first(weights.add(at), count);
            }
        });
    }
}

#[derive(Clone, Copy)]
pub(super) struct RowWiseAdagrad(Adagrad);

impl RowWiseAdagrad {
    pub(super) fn new(numbers: &Hyperparameters) -> Self {
        Self(Adagrad::new(numbers))
    }
}

impl RowUpdate for RowWiseAdagrad {
    const VECTOR_SLOTS: usize = 0;
    const SCALAR_SLOT: bool = true;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let Adagrad { lr, eps, weight_decay } = self.0;
        let weights = rows.weights(slot);
        let mut squares = Lanes::splat(0.0);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count <= dim` floats of the row and of the gradient.
            unsafe {
                let mut g = Lanes::load_first(gradient.add(at), count);
                if weight_decay != 0.0 {
                    g = decayed(g, Lanes::load_first(weights.add(at), count), weight_decay);
                }
                squares = squares + g * g;
            }
        });
        let scalar = rows.scalar(slot);
        // SAFETY: the row's own scalar slot.
        let sum = unsafe { *scalar } + squares.sum() / dim as f32;
        // SAFETY: as above.
        unsafe { *scalar = sum };
        let multiplier = Lanes::splat(lr / (sum.sqrt() + eps));
        by_lanes!(dim, |at, count| {
            // SAFETY: as in the first loop.
            unsafe {
                let w = Lanes::load_first(weights.add(at), count);
                let g = decayed(Lanes::load_first(gradient.add(at), count), w, weight_decay);
                (w - multiplier * g).store_first(weights.add(at), count);
            }
        });
    }
}

/// Adam, and with `DECOUPLED` weight decay `AdamW`.
#[derive(Clone, Copy)]
pub(super) struct Adam<const DECOUPLED: bool> {
    lr: f32,
    eps: f32,
    weight_decay: f32,
    beta1: f32,
    beta2: f32,
    /// 1 − β₁ and 1 − β₂.
    fresh1: f32,
    fresh2: f32,
    /// 1 / (1 − β₁ᵗ) and 1 / (1 − β₂ᵗ).
    correction1: f32,
    correction2: f32,
}

impl<const DECOUPLED: bool> Adam<DECOUPLED> {
    /// What depends on the step is computed here in `f64`, once an update.
    pub(super) fn new(numbers: &Hyperparameters, step: u64) -> Self {
        let Hyperparameters { lr, eps, beta1, beta2, weight_decay } = *numbers;
        Self {
            lr: lr as f32,
            eps: eps as f32,
            weight_decay: weight_decay as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            fresh1: (1.0 - beta1) as f32,
            fresh2: (1.0 - beta2) as f32,
            correction1: (1.0 / (1.0 - power(beta1, step))) as f32,
            correction2: (1.0 / (1.0 - power(beta2, step))) as f32,
        }
    }
}

/// `base` to the `exponent` by squaring: a platform's own may round otherwise.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

impl<const DECOUPLED: bool> RowUpdate for Adam<DECOUPLED> {
    const VECTOR_SLOTS: usize = 2;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let weights = rows.weights(slot);
        let (firsts, seconds) = (rows.vector_slot(0, slot), rows.vector_slot(1, slot));
        let (beta1, fresh1, correction1) =
            (Lanes::splat(self.beta1), Lanes::splat(self.fresh1), Lanes::splat(self.correction1));
        let (beta2, fresh2, correction2) =
            (Lanes::splat(self.beta2), Lanes::splat(self.fresh2), Lanes::splat(self.correction2));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count <= dim` floats of each part of the row and of the gradient.
            unsafe {
                let w = Lanes::load_first(weights.add(at), count);
                let mut g = Lanes::load_first(gradient.add(at), count);
                if !DECOUPLED {
                    g = decayed(g, w, self.weight_decay);
                }
                let first = beta1 * Lanes::load_first(firsts.add(at), count) + fresh1 * g;
                first.store_first(firsts.add(at), count);
                let second = beta2 * Lanes::load_first(seconds.add(at), count) + fresh2 * (g * g);
                second.store_first(seconds.add(at), count);
                let mut direction = first * correction1 / ((second * correction2).sqrt() + Lanes::splat(self.eps));
                if DECOUPLED {
                    direction = decayed(direction, w, self.weight_decay);
                }
                (w - Lanes::splat(self.lr) * direction).store_first(weights.add(at), count);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_agree_with_repeated_multiplication() {
        for base in [0.9, 0.999, 0.0, 1.0_f64] {
            let mut expected = 1.0;
            for exponent in 0..2000 {
                assert!((power(base, exponent) - expected).abs() <= 1e-12, "{base}^{exponent}");
                expected *= base;
            }
        }
        assert!(power(0.999, u64::MAX).abs() < 1e-300);
    }
}
