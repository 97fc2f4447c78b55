//! The forward pass: gathers rows, and pools them.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // See `simd`.

use std::ops::Range;

use super::optimizer::prefetched_bytes;
use super::row_store::RowStore;
use super::thread_pool::{DisjointPtr, parallel_ranges};
use crate::runtime::simd::{ColumnLanes, FloatLanes, InstructionSet, LANES, SimdJob, WideLanes, prefetch_range};
use crate::types::{CacheSlot, NO_SLOT};

/// A row is prefetched this many occurrences before its use.
const AHEAD: usize = 12;

/// Sums or averages the rows of each bag of one feature into columns `column..column + D` of the output.
///
/// - `slots`: `[N]`, the slot of each occurrence of this feature. `NO_SLOT` counts as the row `absent`.
/// - `absent`: `[D]`, or `None` for zeros.
/// - `offsets`: `[B + 1]`, the start of each bag in `slots`. The first is 0, the last N; they are non-decreasing. The
///   caller checks this.
/// - `weights`: `[N]` per-sample weights, or `None`.
/// - `mean`: if true, divides the sum by the bag's length. An empty bag is zeros.
/// - `out`: `[B, out_columns]` float32, row-major. Only this feature's columns are written.
///
/// # Safety
/// Every slot is valid in `rows`, and no thread writes these rows during the call.
///
/// # Panics
/// Panics if the lengths of the arguments do not match.
#[allow(clippy::too_many_arguments)]
pub unsafe fn forward_pooled<R: RowStore>(
    rows: &R,
    slots: &[CacheSlot],
    absent: Option<&[f32]>,
    offsets: &[i64],
    weights: Option<&[f32]>,
    mean: bool,
    out: &mut [f32],
    out_columns: usize,
    column: usize,
    threads: usize,
) {
    let bags = offsets.len() - 1;
    let dim = rows.layout().dim;
    assert!(offsets[bags] as usize <= slots.len(), "offsets end past the slots");
    assert!(weights.is_none_or(|weights| weights.len() >= slots.len()), "fewer weights than slots");
    assert!(absent.is_none_or(|absent| absent.len() == dim), "the absent row is of another width");
    assert!(bags == 0 || (bags - 1) * out_columns + column + dim <= out.len(), "the output is too short");
    let job = PooledForward {
        isa: InstructionSet::best(),
        rows,
        slots,
        absent,
        offsets,
        weights,
        mean,
        out: out.as_mut_ptr(),
        out_columns,
        column,
    };
    // SAFETY: the caller guarantees valid slots whose rows are not written, and the length of `out` was checked above.
    unsafe { job.run(threads) };
}

/// Copies the row of each occurrence: `out[i] = rows[slots[i]]`, with `out` as `[N, D]` float32. `NO_SLOT` reads as
/// `absent`, which is `[D]`, or zeros.
///
/// # Safety
/// Every slot is valid in `rows`, and no thread writes these rows during the call.
///
/// # Panics
/// Panics if `out` is too short.
pub unsafe fn forward_sequence<R: RowStore>(
    rows: &R,
    slots: &[CacheSlot],
    absent: Option<&[f32]>,
    out: &mut [f32],
    threads: usize,
) {
    let dim = rows.layout().dim;
    assert!(absent.is_none_or(|absent| absent.len() == dim), "the absent row is of another width");
    assert!(slots.len() * dim <= out.len(), "the output is too short");
    let out = DisjointPtr(out.as_mut_ptr());
    parallel_ranges(
        threads,
        slots.len(),
        |position| (position * dim) as u64,
        |range| {
            InstructionSet::best().run(SequenceJob { rows, slots, absent, out: &out, range });
        },
    );
}

/// One call of [`forward_pooled`].
#[derive(Clone, Copy)]
pub(super) struct PooledForward<'a, R> {
    pub(super) isa: InstructionSet,
    pub(super) rows: &'a R,
    pub(super) slots: &'a [CacheSlot],
    pub(super) absent: Option<&'a [f32]>,
    pub(super) offsets: &'a [i64],
    pub(super) weights: Option<&'a [f32]>,
    pub(super) mean: bool,
    pub(super) out: *mut f32,
    pub(super) out_columns: usize,
    pub(super) column: usize,
}

// SAFETY: each thread writes only its own bags, and rows are only read.
unsafe impl<R: Sync> Sync for PooledForward<'_, R> {}

impl<R: RowStore> PooledForward<'_, R> {
    /// Pools all bags on `threads` threads.
    ///
    /// # Safety
    /// Every slot is valid in `rows`, and no thread writes these rows during the call. `out` has the feature's columns
    /// of every bag, and no other code uses it during the call.
    pub(super) unsafe fn run(self, threads: usize) {
        let dim = self.rows.layout().dim as u64;
        let job = &self;
        let cost_before = |bag: usize| (job.offsets[bag] as u64 + bag as u64) * dim;
        parallel_ranges(threads, self.offsets.len() - 1, cost_before, |bags| {
            if job.weights.is_some() {
                job.isa.run(PooledJob::<_, true> { call: job, bags });
            } else {
                job.isa.run(PooledJob::<_, false> { call: job, bags });
            }
        });
    }
}

struct PooledJob<'a, R, const WEIGHTED: bool> {
    call: &'a PooledForward<'a, R>,
    bags: Range<usize>,
}

impl<R: RowStore, const WEIGHTED: bool> SimdJob for PooledJob<'_, R, WEIGHTED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let dim = self.call.rows.layout().dim;
        for bag in self.bags.clone() {
            let range = self.call.offsets[bag] as usize..self.call.offsets[bag + 1] as usize;
            let out = self.call.out.wrapping_add(bag * self.call.out_columns + self.call.column);
            let mut at = 0;
            while at + WideLanes::FLOATS <= dim {
                self.pool_columns::<WideLanes>(&range, out, at, WideLanes::FLOATS);
                at += WideLanes::FLOATS;
            }
            while at + LANES <= dim {
                self.pool_columns::<FloatLanes>(&range, out, at, LANES);
                at += LANES;
            }
            if at < dim {
                self.pool_columns::<FloatLanes>(&range, out, at, dim - at);
            }
        }
    }
}

impl<R: RowStore, const WEIGHTED: bool> PooledJob<'_, R, WEIGHTED> {
    /// Pools `count` columns of a bag, starting at column `at`.
    #[inline(always)]
    fn pool_columns<C: ColumnLanes>(&self, range: &Range<usize>, out: *mut f32, at: usize, count: usize) {
        let PooledForward { rows, slots, absent, weights, mean, .. } = *self.call;
        let mut sum = C::zero();
        for position in range.clone() {
            if let Some(&slot) = slots.get(position + AHEAD)
                && slot != NO_SLOT
            {
                C::prefetch(rows.weights(slot).wrapping_add(at));
            }
            let slot = slots[position];
            let row = if slot == NO_SLOT {
                let Some(row) = absent_row(absent) else { continue };
                row
            } else {
                rows.weights(slot).cast_const()
            };
            // SAFETY: the caller of `forward_pooled` guarantees that the slot is valid, and the absent row is as wide
            // as the others. `at + count` is at most the row's width.
            let mut value = unsafe { C::load(row.add(at), count) };
            if WEIGHTED && let Some(weights) = weights {
                value = value.times(weights[position]);
            }
            sum = sum.plus(value);
        }
        if mean && !range.is_empty() {
            sum = sum.over(range.len() as f32);
        }
        // SAFETY: `forward_pooled` checked the length of the output, and only this thread writes this bag's columns.
        unsafe { sum.store(out.add(at), count) };
    }
}

/// The row that an occurrence without a slot reads. Most occurrences have a slot, so their path is kept short.
#[cold]
fn absent_row(absent: Option<&[f32]>) -> Option<*const f32> {
    absent.map(<[f32]>::as_ptr)
}

struct SequenceJob<'a, R> {
    rows: &'a R,
    slots: &'a [CacheSlot],
    absent: Option<&'a [f32]>,
    out: &'a DisjointPtr<f32>,
    range: Range<usize>,
}

impl<R: RowStore> SimdJob for SequenceJob<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let dim = self.rows.layout().dim;
        for position in self.range.clone() {
            if let Some(&slot) = self.slots.get(position + AHEAD)
                && slot != NO_SLOT
            {
                prefetch_range(self.rows.weights(slot).cast(), prefetched_bytes(dim));
            }
            let slot = self.slots[position];
            // SAFETY: the caller of `forward_sequence` guarantees that the slot is valid. `forward_sequence` checked
            // that the output is `[N, D]` and the absent row `[D]`, and rows and output do not overlap because the
            // output is borrowed exclusively.
            unsafe {
                let to = self.out.at(position * dim);
                if slot != NO_SLOT {
                    to.copy_from_nonoverlapping(self.rows.weights(slot), dim);
                } else if let Some(absent) = absent_row(self.absent) {
                    to.copy_from_nonoverlapping(absent, dim);
                } else {
                    to.write_bytes(0, dim);
                }
            }
        }
    }
}
