//! The backward pass by distinct row, fused with the optimizer.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // See `simd`.

use std::ops::Range;
use std::sync::Mutex;

use super::adam::{AdamUpdate, LambUpdate, PartialRowWiseAdamUpdate};
use super::exact_sum::{EXACT_PLACES, add_row};
use super::ftrl::FtrlUpdate;
use super::gradients::{GradientView, TransposedIndex};
use super::optimizer::{AdagradUpdate, OptimizerStep, RowUpdate, RowWiseAdagradUpdate, SgdUpdate, prefetched_bytes};
use super::row_store::{RowStore, TensorRows};
use super::thread_pool::{DisjointPtr, parallel_ranges};
use crate::config::OptimizerKind;
use crate::rows::RowLayout;
use crate::runtime::simd::{ColumnLanes, FloatLanes, InstructionSet, LANES, SimdJob, WideLanes, prefetch_range};
use crate::runtime::sync::lock;
use crate::types::{CacheSlot, NO_SLOT};

/// A row is prefetched this many distinct rows before its update.
const ROWS_AHEAD: usize = 8;
/// A row is prefetched this many occurrences before its dot product.
const OCCURRENCES_AHEAD: usize = 12;
/// Number of gradients of a row that are summed one after another. The sums of such parts are then summed one after
/// another. So several GPU programs can sum the gradients of a frequent row, with bitwise identical results.
const OCCURRENCES_OF_A_PART: usize = 256;
/// The cost of updating a distinct row in addition to summing its occurrences, in occurrences. The row comes from
/// memory.
const ROW_COST: u64 = 4;

/// Sums each distinct row's gradient in the order of its occurrences, in parts of 256, and then updates the row once.
///
/// # Safety
/// Every slot of `index` is valid in `rows` and occurs in `index` once, and no other code uses these rows during the
/// call. The occurrences of `index` are within `gradient`, and each has its `D` floats there.
///
/// # Panics
/// Panics if the lengths of the parts of `index` do not match.
pub unsafe fn backward<R: RowStore>(
    rows: &R,
    index: &TransposedIndex,
    gradient: &GradientView<'_>,
    optimizer: &OptimizerStep,
    threads: usize,
) {
    // SAFETY: the caller keeps this function's contract, which is that of `backward_on`.
    unsafe { backward_on(InstructionSet::best(), rows, index, gradient, optimizer, threads) };
}

/// Like [`backward`], on a given instruction set.
///
/// # Safety
/// See [`backward`].
pub(super) unsafe fn backward_on<R: RowStore>(
    isa: InstructionSet,
    rows: &R,
    index: &TransposedIndex,
    gradient: &GradientView<'_>,
    optimizer: &OptimizerStep,
    threads: usize,
) {
    let call = BackwardCall { isa, rows, index, source: GradientSource::new(gradient, rows.layout().dim) };
    let numbers = &optimizer.hyperparameters;
    match optimizer.kind {
        OptimizerKind::Sgd => call.run(SgdUpdate::new(numbers), threads),
        OptimizerKind::Adagrad => call.run(AdagradUpdate::new(numbers), threads),
        OptimizerKind::RowWiseAdagrad => call.run(RowWiseAdagradUpdate::new(numbers), threads),
        OptimizerKind::Adam => call.run(AdamUpdate::<false>::new(numbers, optimizer.step), threads),
        OptimizerKind::AdamW => call.run(AdamUpdate::<true>::new(numbers, optimizer.step), threads),
        OptimizerKind::PartialRowWiseAdam => call.run(PartialRowWiseAdamUpdate::new(numbers, optimizer.step), threads),
        OptimizerKind::Ftrl => call.run(FtrlUpdate::new(numbers), threads),
        OptimizerKind::Lamb => call.run(LambUpdate::new(numbers, optimizer.step), threads),
    }
}

/// Sums the gradients of each of the distinct rows at the positions `positions` like [`backward`], and adds these sums
/// up exactly, column by column: `[D × EXACT_PLACES]`.
///
/// # Safety
/// The occurrences of `index` are within `gradient`, and each has its `dim` floats there.
pub(crate) unsafe fn add_up_exactly(
    index: &TransposedIndex,
    positions: &[u32],
    gradient: &GradientView<'_>,
    dim: usize,
    threads: usize,
) -> Vec<i64> {
    let source = GradientSource::new(gradient, dim);
    let all = Mutex::new(vec![0; dim * EXACT_PLACES]);
    let cost_before = |row: usize| row as u64 * ROW_COST * dim as u64;
    parallel_ranges(threads, positions.len(), cost_before, |range| {
        let mut sums = vec![0; dim * EXACT_PLACES];
        InstructionSet::best().run(SumJob { index, positions: &positions[range], source, sums: &mut sums });
        lock(&all).iter_mut().zip(sums).for_each(|(all, some)| *all += some);
    });
    all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Updates one row, whose `values` are those of the layout with its scalar slot last, by its gradient `[D]`.
///
/// # Panics
/// Panics if the lengths do not match the layout.
pub(crate) fn update_row(layout: RowLayout, values: &mut [f32], gradient: &[f32], optimizer: &OptimizerStep) {
    assert!(values.len() == layout.floats() && gradient.len() == layout.dim, "the row is of another layout");
    let start = values.as_mut_ptr();
    let part = |number: usize| start.wrapping_add(number * layout.dim);
    let rows = TensorRows {
        layout,
        weights: start,
        vector_slots: [part(1), part(2)],
        scalars: start.wrapping_add(layout.vector_floats()),
    };
    let index = TransposedIndex { slots: vec![0], starts: vec![0, 1], occurrences: vec![0] };
    // SAFETY: slot 0 is the only row, whose parts match the layout, and `values` is borrowed exclusively. Its one
    // occurrence has `dim` floats.
    unsafe { backward(&rows, &index, &GradientView::Sequence { grad: gradient }, optimizer, 1) };
}

/// The gradient of the per-sample weights: `out[i] = scale[i] × dot(gradient of occurrence i, row of slots[i])`, with
/// the row before the update; for `NO_SLOT` it is `absent`, which is `[D]`, or zeros. `gradient` comes from
/// [`super::PooledGradient::of_weights`], and `out` is `[N]` float32.
///
/// # Safety
/// See [`super::forward_pooled`]. In addition, the first `N` occurrences of `gradient` are those of `slots`, and each
/// has its `D` floats there.
///
/// # Panics
/// Panics if `out` and `slots` differ in length.
pub unsafe fn weight_gradient<R: RowStore>(
    rows: &R,
    slots: &[CacheSlot],
    absent: Option<&[f32]>,
    gradient: &GradientView<'_>,
    out: &mut [f32],
    threads: usize,
) {
    // SAFETY: the caller keeps this function's contract, which is that of `weight_gradient_on`.
    unsafe { weight_gradient_on(InstructionSet::best(), rows, slots, absent, gradient, out, threads) };
}

/// Like [`weight_gradient`], on a given instruction set.
///
/// # Safety
/// See [`weight_gradient`].
pub(super) unsafe fn weight_gradient_on<R: RowStore>(
    isa: InstructionSet,
    rows: &R,
    slots: &[CacheSlot],
    absent: Option<&[f32]>,
    gradient: &GradientView<'_>,
    out: &mut [f32],
    threads: usize,
) {
    assert_eq!(slots.len(), out.len(), "out and slots must have the same length");
    let dim = rows.layout().dim;
    assert!(absent.is_none_or(|absent| absent.len() == dim), "the absent row is of another width");
    let source = GradientSource::new(gradient, dim);
    let out = DisjointPtr(out.as_mut_ptr());
    parallel_ranges(
        threads,
        slots.len(),
        |position| (position * dim) as u64,
        |range| {
            isa.run(DotJob { rows, slots, absent, source, out: &out, range });
        },
    );
}

/// A [`GradientView`] as addresses, in one form for all its cases. A branch on a null address is the same for an entire
/// call.
#[derive(Clone, Copy)]
struct GradientSource {
    grad: *const f32,
    /// The start of each occurrence's gradient. If null, the gradient of occurrence `i` starts at `i × dim`.
    starts: *const u32,
    /// The factor of each occurrence. Null if all are 1.
    scale: *const f32,
    dim: usize,
}

// SAFETY: no code writes through these addresses, which belong to slices that outlive the call.
unsafe impl Sync for GradientSource {}
// SAFETY: the slices belong to no thread, and outlive the call.
unsafe impl Send for GradientSource {}

impl GradientSource {
    fn new(gradient: &GradientView<'_>, dim: usize) -> Self {
        match *gradient {
            GradientView::Pooled { grad, starts, scale, .. } => Self {
                grad: grad.as_ptr(),
                starts: starts.as_ptr(),
                scale: scale.map_or(std::ptr::null(), <[f32]>::as_ptr),
                dim,
            },
            GradientView::Sequence { grad } => {
                Self { grad: grad.as_ptr(), starts: std::ptr::null(), scale: std::ptr::null(), dim }
            }
        }
    }

    /// Returns the address of the gradient of the occurrence at `position`.
    ///
    /// # Safety
    /// `position` is the position of an occurrence of the gradient.
    #[inline(always)]
    unsafe fn at(&self, position: u32) -> *const f32 {
        let position = position as usize;
        let start = if self.starts.is_null() {
            position * self.dim
        } else {
            // SAFETY: the caller guarantees that `position` is an occurrence, and each occurrence has a start.
            unsafe { *self.starts.add(position) as usize }
        };
        self.grad.wrapping_add(start)
    }

    /// Returns `count` columns of an occurrence's gradient, starting at column `at`, scaled.
    ///
    /// # Safety
    /// See [`GradientSource::at`]. `at + count` is at most the row's width.
    #[inline(always)]
    unsafe fn columns<C: ColumnLanes>(&self, position: u32, at: usize, count: usize) -> C {
        // SAFETY: the caller guarantees that the occurrence has its `dim` floats in the gradient, and a scale unless
        // that is null.
        unsafe {
            let value = C::load(self.at(position).add(at), count);
            if self.scale.is_null() { value } else { value.times(*self.scale.add(position as usize)) }
        }
    }

    /// Writes the sum of the gradients of `occurrences`, in `count` columns starting at column `at`, to `sum`.
    ///
    /// # Safety
    /// See [`GradientSource::columns`], for each occurrence, of which there is at least one. `sum` has capacity for all
    /// of `C` at `at`.
    #[inline(always)]
    unsafe fn sum_columns<C: ColumnLanes>(&self, occurrences: &[u32], at: usize, count: usize, sum: *mut f32) {
        // SAFETY: the caller guarantees that each occurrence is in the gradient, and `sum` has capacity for `C` at
        // `at`.
        unsafe {
            let (first, others) = occurrences.split_at(occurrences.len().min(OCCURRENCES_OF_A_PART));
            let mut columns: C = self.sum_part(first, at, count);
            for part in others.chunks(OCCURRENCES_OF_A_PART) {
                columns = columns.plus(self.sum_part(part, at, count));
            }
            columns.store(sum.add(at), C::FLOATS);
        }
    }

    /// Returns the sum of the gradients of `occurrences`, one after another, in `count` columns starting at column
    /// `at`.
    ///
    /// # Safety
    /// See [`GradientSource::columns`], for each occurrence, of which there is at least one.
    #[inline(always)]
    unsafe fn sum_part<C: ColumnLanes>(&self, occurrences: &[u32], at: usize, count: usize) -> C {
        // SAFETY: the caller guarantees that each occurrence is in the gradient.
        unsafe {
            // The sum starts with the first gradient and not with zero, so that the gradient of a single occurrence is
            // bitwise unchanged.
            let mut columns: C = self.columns(occurrences[0], at, count);
            for &position in &occurrences[1..] {
                columns = columns.plus(self.columns(position, at, count));
            }
            columns
        }
    }

    /// Returns the sum of the gradients of `occurrences`, of which there is at least one. It is written to `sum`,
    /// unless it is the unscaled gradient of one occurrence, which is returned without a copy.
    ///
    /// # Safety
    /// Each occurrence is in the gradient, and `sum` has capacity for `dim` floats rounded up to whole lanes.
    #[inline(always)]
    unsafe fn sum(&self, occurrences: &[u32], sum: *mut f32) -> *const f32 {
        // SAFETY: the caller guarantees the occurrences. Every step below is within `dim`, or within the last whole
        // lanes of `sum`.
        unsafe {
            if occurrences.len() == 1 && self.scale.is_null() {
                return self.at(occurrences[0]);
            }
            let mut at = 0;
            while at + WideLanes::FLOATS <= self.dim {
                self.sum_columns::<WideLanes>(occurrences, at, WideLanes::FLOATS, sum);
                at += WideLanes::FLOATS;
            }
            while at + LANES <= self.dim {
                self.sum_columns::<FloatLanes>(occurrences, at, LANES, sum);
                at += LANES;
            }
            if at < self.dim {
                self.sum_columns::<FloatLanes>(occurrences, at, self.dim - at, sum);
            }
        }
        sum
    }
}

/// One call of [`backward`].
struct BackwardCall<'a, R> {
    isa: InstructionSet,
    rows: &'a R,
    index: &'a TransposedIndex,
    source: GradientSource,
}

impl<R: RowStore> BackwardCall<'_, R> {
    fn run<U: RowUpdate>(&self, update: U, threads: usize) {
        let TransposedIndex { slots, starts, occurrences } = self.index;
        assert_eq!(slots.len() + 1, starts.len(), "starts must have one element more than slots");
        assert_eq!(starts[slots.len()] as usize, occurrences.len(), "starts must end at the number of occurrences");
        let dim = self.source.dim as u64;
        let cost_before = |row: usize| (u64::from(starts[row]) + row as u64 * ROW_COST) * dim;
        parallel_ranges(threads, slots.len(), cost_before, |range| {
            self.isa.run(UpdateJob { call: self, update, range });
        });
    }
}

struct UpdateJob<'a, R, U> {
    call: &'a BackwardCall<'a, R>,
    update: U,
    range: Range<usize>,
}

impl<R: RowStore, U: RowUpdate> SimdJob for UpdateJob<'_, R, U> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let BackwardCall { rows, index, source, .. } = *self.call;
        let dim = source.dim;
        let mut sum = vec![FloatLanes::splat(0.0); dim.div_ceil(LANES)];
        let sum: *mut f32 = sum.as_mut_ptr().cast();
        let slots = &index.slots[..self.range.end];
        for row in self.range.clone() {
            if let Some(&slot) = slots.get(row + ROWS_AHEAD)
                && slot != NO_SLOT
            {
                U::prefetch(rows, slot, dim);
            }
            let occurrences = &index.occurrences[index.starts[row] as usize..index.starts[row + 1] as usize];
            if slots[row] == NO_SLOT || occurrences.is_empty() {
                continue;
            }
            // SAFETY: the caller of `backward` guarantees that slots are valid and distinct and that occurrences are
            // within the gradient. `sum` has `dim` floats rounded up to whole lanes.
            unsafe {
                let gradient = source.sum(occurrences, sum);
                self.update.update(rows, slots[row], gradient, dim);
            }
        }
    }
}

struct SumJob<'a> {
    index: &'a TransposedIndex,
    positions: &'a [u32],
    source: GradientSource,
    sums: &'a mut [i64],
}

impl SimdJob for SumJob<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let dim = self.source.dim;
        let mut sum = vec![FloatLanes::splat(0.0); dim.div_ceil(LANES)];
        let sum: *mut f32 = sum.as_mut_ptr().cast();
        for &row in self.positions {
            let starts = &self.index.starts[row as usize..];
            let occurrences = &self.index.occurrences[starts[0] as usize..starts[1] as usize];
            if !occurrences.is_empty() {
                // SAFETY: the caller of `add_up_exactly` guarantees that occurrences are within the gradient. `sum` has
                // `dim` floats rounded up to whole lanes, and no thread writes it while the slice is read.
                let row = unsafe { std::slice::from_raw_parts(self.source.sum(occurrences, sum), dim) };
                add_row(self.sums, row);
            }
        }
    }
}

struct DotJob<'a, R> {
    rows: &'a R,
    slots: &'a [CacheSlot],
    absent: Option<&'a [f32]>,
    source: GradientSource,
    out: &'a DisjointPtr<f32>,
    range: Range<usize>,
}

impl<R: RowStore> SimdJob for DotJob<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let dim = self.source.dim;
        for position in self.range.clone() {
            if let Some(&slot) = self.slots.get(position + OCCURRENCES_AHEAD)
                && slot != NO_SLOT
            {
                prefetch_range(self.rows.weights(slot).cast(), prefetched_bytes(dim));
            }
            let slot = self.slots[position];
            let mut products = FloatLanes::splat(0.0);
            let row = if slot == NO_SLOT {
                self.absent.map(<[f32]>::as_ptr)
            } else {
                Some(self.rows.weights(slot).cast_const())
            };
            if let Some(row) = row {
                // SAFETY: the caller of `weight_gradient` guarantees that this occurrence is within the gradient.
                let gradient = unsafe { self.source.at(position as u32) };
                crate::runtime::simd::by_lanes!(dim, |at, count| {
                    // SAFETY: the slot is valid or the row is the absent one, and `at + count` is at most `dim`, the
                    // width of the rows and of the gradient.
                    unsafe {
                        products = products
                            + FloatLanes::load_first(gradient.add(at), count)
                                * FloatLanes::load_first(row.add(at), count);
                    }
                });
            }
            // SAFETY: `scale` and `out` have a float for each position, and only this thread has this position.
            unsafe {
                let scale = if self.source.scale.is_null() { 1.0 } else { *self.source.scale.add(position) };
                *self.out.at(position) = products.sum() * scale;
            }
        }
    }
}
