//! The occurrences of each row, and the locations of their gradients.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::thread_pool::{DisjointPtr, parallel_ranges};
use crate::error::{Kind, Result};
use crate::types::CacheSlot;

/// Minimum occurrences of a batch that one thread transposes.
const LEAST_OF_A_PART: usize = if cfg!(test) { 2 } else { 16_384 };
/// Maximum number of threads that transpose a batch. Each has its own counts of all rows.
const MOST_PARTS: usize = 4;

/// The transposed inverse of a batch: for each distinct row the positions of its occurrences. Occurrences of `NO_SLOT`
/// are omitted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransposedIndex {
    /// The slots of the distinct rows: `[U]`. A row whose slot is `NO_SLOT` is not updated.
    pub slots: Vec<CacheSlot>,
    /// The index in `occurrences` at which each row's occurrences start: `[U + 1]`.
    pub starts: Vec<u32>,
    /// The positions of the occurrences in the batch, ascending within a row: `[N]`.
    pub occurrences: Vec<u32>,
}

impl TransposedIndex {
    /// Transposes `inverse`, which is `[N]` with rows in `0..unique`, or `NO_SLOT` to omit an occurrence. This counts
    /// and does not sort. The plan fills in `slots` later. The result does not depend on `threads`.
    pub fn from_inverse(inverse: &[u32], unique: usize, threads: usize) -> Self {
        let parts = threads.min(inverse.len() / LEAST_OF_A_PART).clamp(1, MOST_PARTS);
        let of_part = inverse.len().div_ceil(parts);
        let in_parts = |work: &(dyn Fn(usize, &[u32]) + Sync)| {
            let some = |part: usize| &inverse[part * of_part..inverse.len().min((part + 1) * of_part)];
            let cost = |part: usize| (part * of_part) as u64 * COST;
            parallel_ranges(parts, parts, cost, |range| range.for_each(|part| work(part, some(part))));
        };
        // Number of occurrences of each row in each part: `[parts, U]`. NO_SLOT is out of range.
        let mut counts = vec![0_u32; parts * unique];
        // The rank of each occurrence among the occurrences of its row in its part. With it the second pass does not
        // wait for the count of a frequent row.
        let mut ranks = vec![0_u32; inverse.len()];
        let (to_counts, to_ranks) = (DisjointPtr(counts.as_mut_ptr()), DisjointPtr(ranks.as_mut_ptr()));
        in_parts(&|part, inverse| {
            // SAFETY: both ranges are in the vectors above, and only the thread of this part uses them.
            let (counts, ranks) = unsafe {
                let ranks = std::slice::from_raw_parts_mut(to_ranks.at(part * of_part), inverse.len());
                (std::slice::from_raw_parts_mut(to_counts.at(part * unique), unique), ranks)
            };
            for (&row, rank) in inverse.iter().zip(ranks) {
                if let Some(count) = counts.get_mut(row as usize) {
                    *rank = *count;
                    *count += 1;
                }
            }
        });
        let mut starts = vec![0_u32; unique + 1];
        let mut total = 0;
        for (row, start) in starts[..unique].iter_mut().enumerate() {
            *start = total;
            for part in 0..parts {
                // From here it is the start of the row's occurrences in the part.
                total += std::mem::replace(&mut counts[part * unique + row], total);
            }
        }
        starts[unique] = total;
        let mut occurrences = vec![0_u32; total as usize];
        let to = DisjointPtr(occurrences.as_mut_ptr());
        in_parts(&|part, inverse| {
            let (starts, ranks) = (&counts[part * unique..(part + 1) * unique], &ranks[part * of_part..]);
            for (at, (&row, &rank)) in inverse.iter().zip(ranks).enumerate() {
                if let Some(&start) = starts.get(row as usize) {
                    // SAFETY: the occurrences of a row in a part have their own range, which starts at `start`, and
                    // each has a distinct rank below their number. The total length of all ranges is the length of
                    // `occurrences`.
                    unsafe { to.at((start + rank) as usize).write((part * of_part + at) as u32) };
                }
            }
        });
        Self { slots: Vec::new(), starts, occurrences }
    }
}

/// The locations of the gradients of the occurrences.
#[derive(Clone, Copy, Debug)]
pub enum GradientView<'a> {
    /// Gradients of pooled bags. `grad` is `[B, columns]`. The gradient of occurrence `i` is the `D` floats of `grad`
    /// at `starts[i]`, times `scale[i]`. [`PooledGradient`] builds these two arrays.
    Pooled {
        /// `[B, columns]` float32, row-major.
        grad: &'a [f32],
        /// The number of columns of `grad`.
        columns: usize,
        /// `[N]`: the start of each occurrence's gradient in `grad` (`bag × columns + column`).
        starts: &'a [u32],
        /// `[N]`: the per-sample weight divided by the mean's divisor; `None` if all are 1.
        scale: Option<&'a [f32]>,
    },
    /// Gradients of a sequence. `grad` is `[N, D]`.
    Sequence {
        /// `[N, D]` float32, row-major.
        grad: &'a [f32],
    },
}

/// One feature of a table in a batch of bags.
#[derive(Clone, Copy, Debug)]
pub struct PooledFeature<'a> {
    /// The feature's first column in the pooled output.
    pub column: usize,
    /// `[B + 1]`: the start of each bag among the feature's own occurrences. The first is 0, and they are
    /// non-decreasing.
    pub offsets: &'a [i64],
    /// The per-sample weights of the feature's occurrences.
    pub weights: Option<&'a [f32]>,
    /// True if bags are averaged instead of summed.
    pub mean: bool,
}

/// The cost of an occurrence, in floats accessed.
const COST: u64 = 2;

/// For each occurrence of a table's features, one feature after another, the location of its gradient in the gradient
/// of the pooled output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PooledGradient {
    columns: usize,
    /// `[N]`: see [`GradientView::Pooled`].
    starts: Vec<u32>,
    /// `[N]`: the weight divided by the bag's length; empty if all are 1.
    scale: Vec<f32>,
    /// `[N]`: 1 divided by the bag's length; empty if all are 1.
    divisor: Vec<f32>,
}

/// The arrays of a [`PooledGradient`] under construction, whose bags are written by several threads.
struct GradientWriter {
    starts: DisjointPtr<u32>,
    scale: Option<DisjointPtr<f32>>,
    divisor: Option<DisjointPtr<f32>>,
}

impl GradientWriter {
    /// Writes the positions of one bag of a feature. The feature's occurrences start at position `begin`, and the bag's
    /// gradient at `start`.
    ///
    /// # Safety
    /// The arrays have capacity for these positions, and no other thread writes or reads them.
    #[inline]
    unsafe fn write_bag(&self, feature: &PooledFeature<'_>, bag: usize, begin: usize, start: u32) {
        let (from, to) = (feature.offsets[bag] as usize, feature.offsets[bag + 1] as usize);
        let share = if feature.mean { 1.0 / (to - from) as f32 } else { 1.0 };
        // SAFETY: the caller guarantees that the array has capacity for the positions, and only this thread uses them.
        let of_bag = |all: &DisjointPtr<f32>| unsafe {
            std::slice::from_raw_parts_mut(all.at(begin + from).cast::<MaybeUninit<f32>>(), to - from)
        };
        // SAFETY: the caller guarantees that `starts` has capacity for the positions, and only this thread uses them.
        let starts = unsafe {
            std::slice::from_raw_parts_mut(self.starts.at(begin + from).cast::<MaybeUninit<u32>>(), to - from)
        };
        starts.fill(MaybeUninit::new(start));
        match (&self.scale, feature.weights) {
            (Some(scale), Some(weights)) => {
                for (scale, weight) in of_bag(scale).iter_mut().zip(&weights[from..to]) {
                    scale.write(weight * share);
                }
            }
            (Some(scale), None) => of_bag(scale).fill(MaybeUninit::new(share)),
            (None, _) => {}
        }
        if let Some(divisor) = &self.divisor {
            of_bag(divisor).fill(MaybeUninit::new(share));
        }
    }
}

impl PooledGradient {
    /// Computes the positions for the gradient `[B, columns]` of the pooled output. Returns `Kind::Input` if that has
    /// `2^32` elements or more.
    ///
    /// # Panics
    /// Panics if the offsets of a feature decrease or do not start at 0.
    pub fn new(columns: usize, features: &[PooledFeature<'_>], threads: usize) -> Result<Self> {
        let count = |feature: &PooledFeature<'_>| feature.offsets.last().map_or(0, |&end| end as usize);
        let total = features.iter().map(count).sum();
        let mean = features.iter().any(|feature| feature.mean);
        let scaled = mean || features.iter().any(|feature| feature.weights.is_some());
        let mut gradient = Self {
            columns,
            starts: Vec::with_capacity(total),
            scale: Vec::with_capacity(if scaled { total } else { 0 }),
            divisor: Vec::with_capacity(if mean { total } else { 0 }),
        };
        let writes = GradientWriter {
            starts: DisjointPtr(gradient.starts.as_mut_ptr()),
            scale: scaled.then_some(DisjointPtr(gradient.scale.as_mut_ptr())),
            divisor: mean.then_some(DisjointPtr(gradient.divisor.as_mut_ptr())),
        };
        let mut begin = 0;
        for feature in features {
            let bags = feature.offsets.len().saturating_sub(1);
            // One comparison per bag. The unsafe writes below depend on it.
            let starts_at_0 = feature.offsets.first().is_none_or(|&first| first == 0);
            assert!(starts_at_0 && feature.offsets.is_sorted(), "offsets must start at 0 and must not decrease");
            if bags.saturating_mul(columns) > u32::MAX as usize {
                return Err(Kind::Input.error(format!(
                    "the pooled output has {bags} × {columns} elements, 2^32 or more: use smaller batches"
                )));
            }
            let cost_before =
                |bag: usize| feature.offsets.get(bag).map_or(0, |&offset| offset as u64 + bag as u64) * COST;
            parallel_ranges(threads, bags, cost_before, |bags| {
                for bag in bags {
                    let start = (bag * columns + feature.column) as u32;
                    // SAFETY: offsets start at 0, are non-decreasing, and end at the feature's count. So each position
                    // belongs to one bag, and all are below `total`, for which there is capacity.
                    unsafe { writes.write_bag(feature, bag, begin, start) };
                }
            });
            begin += count(feature);
        }
        // SAFETY: there is capacity for `total`, and the bags of all features, one after another, cover all positions.
        unsafe {
            gradient.starts.set_len(total);
            gradient.scale.set_len(if scaled { total } else { 0 });
            gradient.divisor.set_len(if mean { total } else { 0 });
        }
        Ok(gradient)
    }

    /// The gradients of the rows, for [`super::backward`].
    pub fn of_rows<'a>(&'a self, grad: &'a [f32]) -> GradientView<'a> {
        self.view(grad, &self.scale)
    }

    /// The gradients for [`super::weight_gradient`]: the mean's divisor without the per-sample weights.
    pub fn of_weights<'a>(&'a self, grad: &'a [f32]) -> GradientView<'a> {
        self.view(grad, &self.divisor)
    }

    fn view<'a>(&'a self, grad: &'a [f32], scale: &'a [f32]) -> GradientView<'a> {
        let scale = if scale.is_empty() { None } else { Some(scale) };
        GradientView::Pooled { grad, columns: self.columns, starts: &self.starts, scale }
    }
}

#[cfg(test)]
mod tests;
