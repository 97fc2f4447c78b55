//! Gather and pool.
#![allow(unsafe_code)]

use super::rows::RowStore;
use crate::types::{CacheSlot, NO_SLOT};

/// Sum (or average) the rows of each bag of one feature into columns `column..column + D` of the output.
///
/// - `slots`: `[N]`, the slot of each occurrence of this feature; `NO_SLOT` counts as a row of zeros.
/// - `offsets`: `[B + 1]`, where each bag starts in `slots`; first 0, last N, not decreasing (checked by the caller).
/// - `weights`: `[N]` per-sample weights or `None`.
/// - `mean`: divide by the bag's length; an empty bag is zeros.
/// - `out`: `[B, out_columns]` row-major; only this feature's columns are written.
///
/// # Safety
/// Every slot is valid in `rows`, and no row is written during the call.
#[allow(clippy::too_many_arguments)]
pub unsafe fn forward_pooled<R: RowStore>(
    rows: &R,
    slots: &[CacheSlot],
    offsets: &[i64],
    weights: Option<&[f32]>,
    mean: bool,
    out: &mut [f32],
    out_columns: usize,
    column: usize,
    threads: usize,
) {
    let _ = threads;
    let dim = rows.layout().dim;
    for bag in 0..offsets.len() - 1 {
        let range = offsets[bag] as usize..offsets[bag + 1] as usize;
        let length = range.len();
        let out = &mut out[bag * out_columns + column..][..dim];
        out.fill(0.0);
        for position in range {
            if slots[position] == NO_SLOT {
                continue;
            }
            let weight = weights.map_or(1.0, |w| w[position]);
            // SAFETY: the caller promises valid slots that nobody writes.
            let row = unsafe { std::slice::from_raw_parts(rows.weights(slots[position]), dim) };
            for (sum, value) in out.iter_mut().zip(row) {
                *sum += weight * value;
            }
        }
        if mean && length > 0 {
            out.iter_mut().for_each(|sum| *sum /= length as f32);
        }
    }
}

/// Copy the row of each occurrence: `out[i] = rows[slots[i]]`, `out` `[N, D]`.
///
/// # Safety
/// As [`forward_pooled`].
pub unsafe fn forward_sequence<R: RowStore>(rows: &R, slots: &[CacheSlot], out: &mut [f32], threads: usize) {
    let _ = threads;
    let dim = rows.layout().dim;
    for (slot, out) in slots.iter().zip(out.chunks_exact_mut(dim)) {
        if *slot == NO_SLOT {
            out.fill(0.0);
        } else {
            // SAFETY: as in forward_pooled.
            out.copy_from_slice(unsafe { std::slice::from_raw_parts(rows.weights(*slot), dim) });
        }
    }
}
