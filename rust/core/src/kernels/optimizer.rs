//! The formulas of the optimizers, in float32. They are FBGEMM's (`fbgemm_gpu/codegen/genscript/optimizers.py`).
//!
//! `g` is the row's gradient, summed over the batch. Every operation is by column unless it says row. Weight decay `d` applies to
//! the rows of the batch only. `eps` is added to the root, after the bias correction.
//!
//! | optimizer | update |
//! | --- | --- |
//! | SGD | `g' = g + d·w; w −= lr·g'` |
//! | Adagrad | `g' = g + d·w; sum += g'²; w −= lr·g' / (√sum + eps)` |
//! | rowwise Adagrad | `g' = g + d·w; sum += mean over the row of g'²; w −= lr / (√sum + eps) · g'` |
//! | Adam | `g' = g + d·w; m = β₁·m + (1−β₁)·g'; v = β₂·v + (1−β₂)·g'²; w −= lr·(m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)` |
//! | `AdamW` | as Adam with `g' = g`, and `w −= lr·(… + d·w)` of the `w` before |
//!
//! FBGEMM has no weight decay in SGD and Adagrad, so those formulas are torch's. FBGEMM calls Adam what is `AdamW` here; Adam here
//! is torch's. `t` is the table's step.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)]

use super::rows::RowStore;
use crate::config::OptimizerKind;
use crate::prefetch::{prefetch_address, prefetch_range};
use crate::simd::{Lanes, by_lanes};
use crate::types::CacheSlot;

/// The hyperparameters of an update. An optimizer ignores those that it does not have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Learning rate.
    pub lr: f64,
    /// The number that is added to the root of the second moment.
    pub eps: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// The weight decay, of the rows of the batch only.
    pub weight_decay: f64,
}

/// An update of a table: the optimizer, its hyperparameters, and the number of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerStep {
    /// The optimizer.
    pub kind: OptimizerKind,
    /// Its hyperparameters.
    pub hyperparameters: Hyperparameters,
    /// The table's step counter, with this update counted. The first step is 1.
    pub step: u64,
}

/// The update of one row by its summed gradient.
pub(super) trait RowUpdate: Copy + Sync {
    /// The number of vector slots that the update reads and writes.
    const VECTOR_SLOTS: usize;
    /// Whether the update reads and writes the scalar slot.
    const SCALAR_SLOT: bool;

    /// Update the row in `slot` by `gradient`, which is `[dim]`.
    ///
    /// # Safety
    /// `slot` is valid in `rows`, whose layout has the slots above, and nobody else uses the row. `dim` floats can be read at
    /// `gradient`, which is not in `rows`.
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize);

    /// Prefetch all that [`RowUpdate::update`] will touch.
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

/// Bytes to prefetch of a part of a row of `dim` floats. The processor's own prefetcher loads the rest of a longer one.
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
            // SAFETY: `at + count` is at most `dim`, and by the caller's promise the row's weights and the gradient have `dim`
            // floats.
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
            // SAFETY: `at + count` is at most `dim`, and by the caller's promise each part of the row and the gradient have `dim`
            // floats.
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
            // SAFETY: `at + count` is at most `dim`, and by the caller's promise the row's weights and the gradient have `dim`
            // floats.
            unsafe {
                let mut g = Lanes::load_first(gradient.add(at), count);
                if weight_decay != 0.0 {
                    g = decayed(g, Lanes::load_first(weights.add(at), count), weight_decay);
                }
                squares = squares + g * g;
            }
        });
        let scalar = rows.scalar(slot);
        // SAFETY: by the caller's promise the slot is valid and nobody else uses its row, so its scalar may be read and written.
        let sum = unsafe {
            *scalar += squares.sum() / dim as f32;
            *scalar
        };
        let multiplier = Lanes::splat(lr / (sum.sqrt() + eps));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and by the caller's promise the row's weights and the gradient have `dim`
            // floats.
            unsafe {
                let w = Lanes::load_first(weights.add(at), count);
                let g = decayed(Lanes::load_first(gradient.add(at), count), w, weight_decay);
                (w - multiplier * g).store_first(weights.add(at), count);
            }
        });
    }
}

/// Adam; with `DECOUPLED` weight decay it is `AdamW`.
#[derive(Clone, Copy)]
pub(super) struct Adam<const DECOUPLED: bool> {
    lr: f32,
    eps: f32,
    weight_decay: f32,
    beta1: f32,
    beta2: f32,
    /// 1 − β₁ and 1 − β₂, the shares of the new gradient in the moments.
    fresh1: f32,
    fresh2: f32,
    /// The bias corrections 1 / (1 − β₁ᵗ) and 1 / (1 − β₂ᵗ).
    correction1: f32,
    correction2: f32,
}

impl<const DECOUPLED: bool> Adam<DECOUPLED> {
    /// The numbers of an update. Those that depend on the step are computed in float64, once an update.
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

/// `base` to the power of `exponent`, by repeated squaring. A platform's own function may round in another way.
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
            // SAFETY: `at + count` is at most `dim`, and by the caller's promise each part of the row and the gradient have `dim`
            // floats.
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
