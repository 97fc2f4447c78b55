//! Backward by distinct row, with the optimizer fused.
#![allow(unsafe_code)]

use super::optimizer::OptimizerStep;
use super::rows::RowStore;
use crate::types::CacheSlot;

/// Which occurrences each distinct row has: a batch's inverse, transposed. `NO_SLOT` occurrences are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransposedIndex {
    /// Slots of the distinct rows: `[U]`.
    pub slots: Vec<CacheSlot>,
    /// Where each row's occurrences start: `[U + 1]`.
    pub starts: Vec<u32>,
    /// Positions of the occurrences in the batch, ascending within a row: `[N]`.
    pub occurrences: Vec<u32>,
}

impl TransposedIndex {
    /// Transpose `inverse` (`[N]`, positions in `0..unique`) by counting; `slots` is filled later by the plan.
    pub fn from_inverse(inverse: &[u32], unique: usize) -> Self {
        let mut starts = vec![0_u32; unique + 1];
        for &row in inverse {
            starts[row as usize + 1] += 1;
        }
        for row in 0..unique {
            starts[row + 1] += starts[row];
        }
        let mut next = starts.clone();
        let mut occurrences = vec![0; inverse.len()];
        for (position, &row) in inverse.iter().enumerate() {
            occurrences[next[row as usize] as usize] = position as u32;
            next[row as usize] += 1;
        }
        Self { slots: Vec::new(), starts, occurrences }
    }
}

/// Where the gradient of an occurrence is.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Bags: `grad` `[B, columns]`; occurrence `i` reads columns `column[i]..+D` of row `bag[i]`, times `scale[i]`.
    Pooled {
        /// `[B, columns]`, row-major.
        grad: &'a [f32],
        /// Columns of `grad`.
        columns: usize,
        /// `[N]`: start of the occurrence's gradient in `grad` (`b × columns + column`), divided by nothing.
        starts: &'a [u32],
        /// `[N]`: per-sample weight and mean divisor together; `None` for 1.
        scale: Option<&'a [f32]>,
    },
    /// Sequences: `grad` `[N, D]`.
    Sequence {
        /// `[N, D]`, row-major.
        grad: &'a [f32],
    },
}

/// Sum each distinct row's gradient in occurrence order, then update the row once.
///
/// # Safety
/// Every slot of `index` is valid in `rows`, distinct, and used by nobody else during the call.
pub unsafe fn backward<R: RowStore>(
    rows: &R,
    index: &TransposedIndex,
    gradient: &Gradient<'_>,
    optimizer: &OptimizerStep,
    threads: usize,
) {
    let _ = (rows, index, gradient, optimizer, threads);
}

/// The gradient of the per-sample weights: `out[i] = dot(grad of occurrence i's bag, row of slots[i])`, from the weights before
/// the update. `gradient` must be `Pooled`; its `scale` is not applied.
///
/// # Safety
/// As [`super::forward_pooled`].
pub unsafe fn weight_gradient<R: RowStore>(
    rows: &R,
    slots: &[CacheSlot],
    gradient: &Gradient<'_>,
    out: &mut [f32],
    threads: usize,
) {
    let _ = (rows, slots, gradient, out, threads);
}
