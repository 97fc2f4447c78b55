//! The optimizers whose moments are corrected by the table's step: Adam and its variants.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // See `simd`.

use super::optimizer::{Hyperparameters, RowUpdate, decayed};
use super::row_store::RowStore;
use crate::runtime::simd::{FloatLanes, by_lanes};
use crate::types::CacheSlot;

/// The constants of an update, in float32. Those that depend on the step are computed in float64, once per update.
#[derive(Clone, Copy)]
struct AdamConstants {
    lr: f32,
    eps: f32,
    weight_decay: f32,
    beta1: f32,
    beta2: f32,
    /// 1 − β₁ and 1 − β₂, the weights of the new gradient in the moments.
    fresh1: f32,
    fresh2: f32,
    /// The bias corrections 1 / (1 − β₁ᵗ) and 1 / (1 − β₂ᵗ).
    correction1: f32,
    correction2: f32,
}

impl AdamConstants {
    fn new(numbers: &Hyperparameters, step: u64) -> Self {
        let Hyperparameters { lr, eps, beta1, beta2, weight_decay, .. } = *numbers;
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

/// `base` to the power of `exponent`, by repeated squaring. The platform's function may round differently.
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

/// Adam; with `DECOUPLED` weight decay it is `AdamW`.
#[derive(Clone, Copy)]
pub(super) struct AdamUpdate<const DECOUPLED: bool>(AdamConstants);

impl<const DECOUPLED: bool> AdamUpdate<DECOUPLED> {
    pub(super) fn new(numbers: &Hyperparameters, step: u64) -> Self {
        Self(AdamConstants::new(numbers, step))
    }
}

impl<const DECOUPLED: bool> RowUpdate for AdamUpdate<DECOUPLED> {
    const VECTOR_SLOTS: usize = 2;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let numbers = &self.0;
        let weights = rows.weights(slot);
        let (firsts, seconds) = (rows.vector_slot(0, slot), rows.vector_slot(1, slot));
        let (beta1, fresh1, correction1) = (
            FloatLanes::splat(numbers.beta1),
            FloatLanes::splat(numbers.fresh1),
            FloatLanes::splat(numbers.correction1),
        );
        let (beta2, fresh2, correction2) = (
            FloatLanes::splat(numbers.beta2),
            FloatLanes::splat(numbers.fresh2),
            FloatLanes::splat(numbers.correction2),
        );
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that each part of the row and the
            // gradient have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let mut g = FloatLanes::load_first(gradient.add(at), count);
                if !DECOUPLED {
                    g = decayed(g, w, numbers.weight_decay);
                }
                let first = beta1 * FloatLanes::load_first(firsts.add(at), count) + fresh1 * g;
                first.store_first(firsts.add(at), count);
                let second = beta2 * FloatLanes::load_first(seconds.add(at), count) + fresh2 * (g * g);
                second.store_first(seconds.add(at), count);
                let mut direction =
                    first * correction1 / ((second * correction2).sqrt() + FloatLanes::splat(numbers.eps));
                if DECOUPLED {
                    direction = decayed(direction, w, numbers.weight_decay);
                }
                (w - FloatLanes::splat(numbers.lr) * direction).store_first(weights.add(at), count);
            }
        });
    }
}

/// Adam with one second moment per row, and decoupled weight decay.
#[derive(Clone, Copy)]
pub(super) struct PartialRowWiseAdamUpdate(AdamConstants);

impl PartialRowWiseAdamUpdate {
    pub(super) fn new(numbers: &Hyperparameters, step: u64) -> Self {
        Self(AdamConstants::new(numbers, step))
    }
}

impl RowUpdate for PartialRowWiseAdamUpdate {
    const VECTOR_SLOTS: usize = 1;
    const SCALAR_SLOT: bool = true;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let numbers = &self.0;
        let (weights, firsts) = (rows.weights(slot), rows.vector_slot(0, slot));
        let mut squares = FloatLanes::splat(0.0);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that the gradient has `dim` floats.
            let g = unsafe { FloatLanes::load_first(gradient.add(at), count) };
            squares = squares + g * g;
        });
        let second = rows.scalar(slot);
        // SAFETY: the caller guarantees that the slot is valid and no other code uses its row, so its scalar may be
        // read and written.
        let root = unsafe {
            *second = numbers.beta2 * *second + numbers.fresh2 * (squares.sum() / dim as f32);
            (*second * numbers.correction2).sqrt() + numbers.eps
        };
        let (beta1, fresh1) = (FloatLanes::splat(numbers.beta1), FloatLanes::splat(numbers.fresh1));
        let multiplier = FloatLanes::splat(numbers.correction1 / root);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that each part of the row and the
            // gradient have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let g = FloatLanes::load_first(gradient.add(at), count);
                let first = beta1 * FloatLanes::load_first(firsts.add(at), count) + fresh1 * g;
                first.store_first(firsts.add(at), count);
                let direction = decayed(first * multiplier, w, numbers.weight_decay);
                (w - FloatLanes::splat(numbers.lr) * direction).store_first(weights.add(at), count);
            }
        });
    }
}

/// LAMB: the direction of `AdamW`, scaled to the norm of the row's weights.
#[derive(Clone, Copy)]
pub(super) struct LambUpdate(AdamConstants);

impl LambUpdate {
    pub(super) fn new(numbers: &Hyperparameters, step: u64) -> Self {
        Self(AdamConstants::new(numbers, step))
    }

    /// The direction of some columns, from their updated moments. It is 0 if the root of the second moment and `eps`
    /// are 0, as in the lanes after a row's end, which must not count in the sum of squares over a row.
    #[inline(always)]
    fn direction(&self, first: FloatLanes, second: FloatLanes, w: FloatLanes) -> FloatLanes {
        let numbers = &self.0;
        let root = (second * FloatLanes::splat(numbers.correction2)).sqrt() + FloatLanes::splat(numbers.eps);
        decayed((first * FloatLanes::splat(numbers.correction1)).over_or_zero(root), w, numbers.weight_decay)
    }
}

impl RowUpdate for LambUpdate {
    const VECTOR_SLOTS: usize = 2;
    const SCALAR_SLOT: bool = false;

    #[inline(always)]
    unsafe fn update<R: RowStore>(&self, rows: &R, slot: CacheSlot, gradient: *const f32, dim: usize) {
        let numbers = &self.0;
        let weights = rows.weights(slot);
        let (firsts, seconds) = (rows.vector_slot(0, slot), rows.vector_slot(1, slot));
        let (beta1, fresh1) = (FloatLanes::splat(numbers.beta1), FloatLanes::splat(numbers.fresh1));
        let (beta2, fresh2) = (FloatLanes::splat(numbers.beta2), FloatLanes::splat(numbers.fresh2));
        let (mut of_weights, mut of_direction) = (FloatLanes::splat(0.0), FloatLanes::splat(0.0));
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that each part of the row and the
            // gradient have `dim` floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let g = FloatLanes::load_first(gradient.add(at), count);
                let first = beta1 * FloatLanes::load_first(firsts.add(at), count) + fresh1 * g;
                first.store_first(firsts.add(at), count);
                let second = beta2 * FloatLanes::load_first(seconds.add(at), count) + fresh2 * (g * g);
                second.store_first(seconds.add(at), count);
                let direction = self.direction(first, second, w);
                of_weights = of_weights + w * w;
                of_direction = of_direction + direction * direction;
            }
        });
        let trust = trust_ratio(of_weights.sum(), of_direction.sum());
        let multiplier = FloatLanes::splat(numbers.lr * trust);
        by_lanes!(dim, |at, count| {
            // SAFETY: `at + count` is at most `dim`, and the caller guarantees that each part of the row has `dim`
            // floats.
            unsafe {
                let w = FloatLanes::load_first(weights.add(at), count);
                let (first, second) =
                    (FloatLanes::load_first(firsts.add(at), count), FloatLanes::load_first(seconds.add(at), count));
                (w - multiplier * self.direction(first, second, w)).store_first(weights.add(at), count);
            }
        });
    }
}

/// The norm of the weights divided by the norm of the direction, from the sums of their squares. It is 1 if either is
/// 0, so that a row of zeros can be updated.
#[inline(always)]
fn trust_ratio(of_weights: f32, of_direction: f32) -> f32 {
    if of_weights == 0.0 || of_direction == 0.0 { 1.0 } else { of_weights.sqrt() / of_direction.sqrt() }
}

#[cfg(test)]
mod tests;
