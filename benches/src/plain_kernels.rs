//! The limits of the kernel benches: plain loops over rows of 64 float32 that prefetch. They receive the data of a
//! plan: the slots of the occurrences, the distinct slots, and the inverse. A bag has [`BAG`] occurrences, pooling is a
//! sum, and there is no weight decay.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // Functions that are not inlined into the version for an instruction set are compiled for the baseline.

use crate::plain::{huge_pages, prefetch};

/// Columns of a row.
pub const DIM: usize = 64;
/// Occurrences per bag.
pub const BAG: usize = 20;
/// Number of occurrences to prefetch.
const AHEAD: usize = 12;
/// Number of distinct rows to prefetch.
const ROWS_AHEAD: usize = 8;
const LR: f32 = 0.02;
const EPS: f32 = 1e-8;
const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;

type Columns = [f32; DIM];

/// The update of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainOptimizer {
    /// A row has weights. The sums, one per row, are stored elsewhere.
    RowWiseAdagrad,
    /// A row has weights, then sums.
    Adagrad,
    /// A row has weights, then first moments, then second moments. Bias corrections are those of the first step.
    Adam,
}

/// A table of rows, one after another.
#[derive(Clone, Debug)]
pub struct PlainTable {
    /// The address of the first row. A row has weights, then optimizer slots.
    pub rows: *mut f32,
    /// Floats of a row.
    pub stride: usize,
    /// The sums of rowwise Adagrad: `[R]`.
    pub sums: Vec<f32>,
    starts: Vec<u32>,
    ranks: Vec<u32>,
    occurrences: Vec<u32>,
}

/// Creates versions of `$body` for AVX-512 and AVX2, and a function that chooses among them.
macro_rules! versions {
    ($($name:ident: $body:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// # Safety
        /// Slots are those of rows of the table, which no other code uses. Outputs and gradients have `DIM` columns per
        /// bag.
        pub unsafe fn $name($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                unsafe fn avx512($($argument: $type),*) {
                    // SAFETY: the caller keeps the contract of `$body`.
                    unsafe { $body($($argument),*) }
                }
                #[target_feature(enable = "avx2")]
                unsafe fn avx2($($argument: $type),*) {
                    // SAFETY: the caller keeps the contract of `$body`.
                    unsafe { $body($($argument),*) }
                }
                if is_x86_feature_detected!("avx512f") {
                    // SAFETY: AVX-512 was detected, and the caller keeps the contract of `$body`.
                    return unsafe { avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: AVX2 was detected, and the caller keeps the contract of `$body`.
                    return unsafe { avx2($($argument),*) };
                }
            }
            // SAFETY: the caller keeps the contract of `$body`.
            unsafe { $body($($argument),*) }
        }
    )*};
}

versions! {
    plain_forward: forward(table: &PlainTable, slots: &[u32], out: &mut [f32]);
    plain_backward: backward(table: &mut PlainTable, distinct: &[u32], inverse: &[u32], grad: &[f32], optimizer: PlainOptimizer);
}

#[inline(always)]
fn prefetch_row(row: *const f32, floats: usize) {
    for line in (0..floats).step_by(16) {
        prefetch(row.wrapping_add(line));
    }
}

#[inline(always)]
unsafe fn forward(table: &PlainTable, slots: &[u32], out: &mut [f32]) {
    for (bag, out) in out.chunks_exact_mut(DIM).enumerate() {
        let mut sums = [0.0_f32; DIM];
        for position in bag * BAG..(bag + 1) * BAG {
            if let Some(&slot) = slots.get(position + AHEAD) {
                prefetch_row(table.rows.wrapping_add(slot as usize * table.stride), DIM);
            }
            // SAFETY: the caller guarantees that the slot belongs to a row of the table, which no other code writes.
            let row = unsafe { &*table.rows.add(slots[position] as usize * table.stride).cast::<Columns>() };
            for column in 0..DIM {
                sums[column] += row[column];
            }
        }
        out.copy_from_slice(&sums);
    }
}

#[inline(always)]
unsafe fn backward(table: &mut PlainTable, distinct: &[u32], inverse: &[u32], grad: &[f32], optimizer: PlainOptimizer) {
    table.transpose(inverse, distinct.len());
    for row in 0..distinct.len() {
        if let Some(&slot) = distinct.get(row + ROWS_AHEAD) {
            prefetch_row(table.rows.wrapping_add(slot as usize * table.stride), table.stride);
            prefetch(table.sums.as_ptr().wrapping_add(slot as usize));
        }
        let occurrences = &table.occurrences[table.starts[row] as usize..table.starts[row + 1] as usize];
        let from = |position: u32| position as usize / BAG * DIM;
        let mut g: Columns = [0.0; DIM];
        g.copy_from_slice(&grad[from(occurrences[0])..][..DIM]);
        for &position in &occurrences[1..] {
            for (sum, value) in g.iter_mut().zip(&grad[from(position)..][..DIM]) {
                *sum += value;
            }
        }
        let slot = distinct[row] as usize;
        // SAFETY: the caller guarantees that the slot belongs to a row of the table, which no other code uses.
        let values = unsafe { std::slice::from_raw_parts_mut(table.rows.add(slot * table.stride), table.stride) };
        let (weights, slots) = values.split_at_mut(DIM);
        match optimizer {
            PlainOptimizer::RowWiseAdagrad => {
                let mut squares = [0.0_f32; 16];
                for part in g.chunks_exact(16) {
                    for (square, g) in squares.iter_mut().zip(part) {
                        *square += g * g;
                    }
                }
                table.sums[slot] += squares.iter().sum::<f32>() / DIM as f32;
                let multiplier = LR / (table.sums[slot].sqrt() + EPS);
                for (weight, g) in weights.iter_mut().zip(&g) {
                    *weight -= multiplier * g;
                }
            }
            PlainOptimizer::Adagrad => {
                for ((weight, sum), g) in weights.iter_mut().zip(slots).zip(&g) {
                    *sum += g * g;
                    *weight -= LR * g / (sum.sqrt() + EPS);
                }
            }
            PlainOptimizer::Adam => {
                let (firsts, seconds) = slots.split_at_mut(DIM);
                for (((weight, first), second), g) in weights.iter_mut().zip(firsts).zip(seconds).zip(&g) {
                    *first = BETA1 * *first + (1.0 - BETA1) * g;
                    *second = BETA2 * *second + (1.0 - BETA2) * g * g;
                    let root = (*second * (1.0 / (1.0 - BETA2))).sqrt() + EPS;
                    *weight -= LR * (*first * (1.0 / (1.0 - BETA1))) / root;
                }
            }
        }
    }
}

impl PlainTable {
    /// Creates a table of `count` rows at address `rows`.
    pub fn new(rows: *mut f32, stride: usize, count: usize) -> Self {
        let sums = vec![0.0; count];
        huge_pages(&sums);
        Self { rows, stride, sums, starts: Vec::new(), ranks: Vec::new(), occurrences: Vec::new() }
    }

    #[inline(always)]
    fn transpose(&mut self, inverse: &[u32], distinct: usize) {
        self.starts.clear();
        self.starts.resize(distinct + 1, 0);
        self.ranks.resize(inverse.len(), 0);
        for (&row, rank) in inverse.iter().zip(&mut self.ranks) {
            *rank = self.starts[row as usize];
            self.starts[row as usize] += 1;
        }
        let mut total = 0;
        for start in &mut self.starts {
            let count = *start;
            *start = total;
            total += count;
        }
        self.occurrences.resize(inverse.len(), 0);
        for (position, (&row, &rank)) in inverse.iter().zip(&self.ranks).enumerate() {
            self.occurrences[(self.starts[row as usize] + rank) as usize] = position as u32;
        }
    }
}

/// Rows of [`DIM`] float32 in fresh memory, as before the first initializations of a table. In huge pages.
pub struct FreshRows {
    rows: Vec<[f32; DIM]>,
}

impl FreshRows {
    /// Allocates memory for this number of rows.
    pub fn new(rows: usize) -> Self {
        // `vec!` would write the zeros of an array of this size, and the memory would not be fresh.
        let rows = bytemuck::zeroed_vec(rows);
        huge_pages(&rows);
        Self { rows }
    }

    /// Returns the memory to the OS, so that it is fresh again.
    pub fn forget(&mut self) {
        *self = Self::new(self.rows.len());
    }

    /// A row.
    pub fn row(&mut self, number: usize) -> &mut [f32] {
        &mut self.rows[number]
    }
}
