//! Sorts the rows of each bucket by `uint64(id)`.
//!
//! In a small bucket, the rank of a row is the number of smaller ids, which are counted. A large bucket is sorted by
//! comparison.
//!
//! A group of rows is written to a file in this order. A row's *number* is its index in arrival order, its *file row*
//! is its position in the file.
#![allow(unsafe_code)]

use crate::simd::{InstructionSet, SimdJob};
use crate::types::Id;

/// Buckets of at most this many rows are sorted by counting smaller ids, larger ones by comparison.
pub(crate) const MAX_COUNTED_ROWS: usize = 128;
/// Number of ids that counting reads past those of the last bucket. Their values do not matter.
pub(crate) const EXTRA_IDS: usize = 16;
/// Number of rows counted at once if the CPU has no AVX-512.
const LANES: usize = 8;

/// The rows to sort, and the outputs.
#[derive(Debug)]
pub(crate) struct BucketSort<'a> {
    /// The first file row of each bucket, then the number of rows: `[buckets + 1]`.
    pub(crate) starts: &'a [i64],
    /// The ids by bucket, unordered within a bucket, followed by `EXTRA_IDS` more: `[n + EXTRA_IDS]`.
    pub(crate) ids: &'a [u64],
    /// The row number of each id, a permutation: `[n]`.
    pub(crate) numbers: &'a [u32],
    /// Output: the file row of each number, `[n]`.
    pub(crate) file_rows: &'a mut [u32],
    /// Output: the number of each file row, `[n]`.
    pub(crate) rows: &'a mut [u32],
}

impl BucketSort<'_> {
    /// Sorts the rows. Returns a duplicate id, if there is one.
    pub(crate) fn run_on(self, isa: InstructionSet) -> Option<Id> {
        let n = self.rows.len();
        assert!(self.numbers.len() == n && self.file_rows.len() == n && self.ids.len() == n + EXTRA_IDS, "of {n} rows");
        #[cfg(target_arch = "x86_64")]
        if isa == InstructionSet::Avx512 && i32::try_from(n).is_ok() {
            // SAFETY: `isa` states that the CPU has AVX-512 F, and `n` fits an i32.
            return isa.run(BucketSortJob(self, |bucket: SortBucket<'_>| unsafe { wide::count(bucket) }));
        }
        isa.run(BucketSortJob(self, count))
    }
}

/// One bucket of a [`BucketSort`], with first file row `start`.
struct SortBucket<'a> {
    ids: &'a [u64],
    numbers: &'a [u32],
    start: u32,
    file_rows: &'a mut [u32],
    rows: &'a mut [u32],
}

/// Sorts each bucket. The function sorts a small bucket and returns the number of pairs of distinct ids.
struct BucketSortJob<'a, F>(BucketSort<'a>, F);

impl<F: Fn(SortBucket<'_>) -> usize> SimdJob for BucketSortJob<'_, F> {
    type Output = Option<Id>;

    #[allow(clippy::inline_always)] // Compiled for each instruction set.
    #[inline(always)]
    fn run(self) -> Option<Id> {
        let Self(BucketSort { starts, ids, numbers, file_rows, rows }, count) = self;
        let mut sorted = Vec::new();
        for bounds in starts.windows(2) {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            let (len, numbers, rows) = (end - start, &numbers[start..end], &mut rows[start..end]);
            if len <= MAX_COUNTED_ROWS {
                let ids = &ids[start..end + EXTRA_IDS];
                // One of two distinct ids is smaller. So a missing pair means a duplicate id.
                if count(SortBucket { ids, numbers, start: start as u32, file_rows, rows })
                    != len * len.saturating_sub(1) / 2
                {
                    return Some(find_duplicate(&ids[..len]));
                }
            } else {
                let ids = &ids[start..end];
                sort(ids, numbers, &mut sorted);
                if sorted.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                    return Some(find_duplicate(ids));
                }
                for ((file_row, row), &(_, number)) in (start as u32..).zip(rows).zip(&sorted) {
                    *row = number;
                    file_rows[number as usize] = file_row;
                }
            }
        }
        None
    }
}

#[allow(clippy::inline_always)] // Compiled for each instruction set.
#[inline(always)]
fn count(bucket: SortBucket<'_>) -> usize {
    let SortBucket { ids, numbers, start, file_rows, rows } = bucket;
    let mut below_all = 0;
    for (block, of_block) in ids.chunks_exact(LANES).zip(numbers.chunks(LANES)) {
        let below = count_below(&ids[..numbers.len()], block);
        for (&number, &below) in of_block.iter().zip(&below) {
            rows[below as usize] = number;
            file_rows[number as usize] = start + below as u32;
            below_all += below as usize;
        }
    }
    below_all
}

/// Number of `ids` that are smaller than each id of `block`.
#[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for each instruction set; plain loops over lanes.
#[inline(always)]
fn count_below(ids: &[u64], block: &[u64]) -> [u64; LANES] {
    let mut below = [0_u64; LANES];
    for &id in ids {
        for lane in 0..LANES {
            below[lane] += u64::from(id < block[lane]);
        }
    }
    below
}

fn sort(ids: &[u64], numbers: &[u32], sorted: &mut Vec<(u64, u32)>) {
    sorted.clear();
    sorted.extend(ids.iter().copied().zip(numbers.iter().copied()));
    sorted.sort_unstable();
}

/// Returns a duplicate id.
fn find_duplicate(ids: &[u64]) -> Id {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map_or(0, |pair| pair[0]) as Id
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{
        _mm512_add_epi32, _mm512_castsi256_si512, _mm512_cmpgt_epu64_mask, _mm512_cvtepi64_epi32, _mm512_inserti64x4,
        _mm512_loadu_si512, _mm512_mask_add_epi32, _mm512_mask_add_epi64, _mm512_mask_cmplt_epu32_mask,
        _mm512_mask_i32scatter_epi32, _mm512_maskz_loadu_epi32, _mm512_reduce_add_epi32, _mm512_set1_epi32,
        _mm512_set1_epi64, _mm512_setzero_si512,
    };

    use super::{EXTRA_IDS, SortBucket};

    /// Number of rows counted at once, half of them per register.
    const LANES: usize = EXTRA_IDS;

    /// # Safety
    /// The CPU has AVX-512 F, and there are fewer than 2^31 file rows.
    #[allow(clippy::inline_always)] // Compiled for the instruction set.
    #[inline(always)]
    pub(crate) unsafe fn count(bucket: SortBucket<'_>) -> usize {
        let SortBucket { ids, numbers, start, file_rows, rows } = bucket;
        let len = numbers.len();
        debug_assert!(ids.len() == len + LANES && rows.len() == len);
        // SAFETY: the CPU has the instructions. Blocks start among the bucket's ids, and `LANES` more follow them.
        // Lanes past the bucket's end access no numbers and rows, and every accessed file row is in range: fewer than
        // `len` ids are smaller than an id, since none is smaller than itself.
        unsafe {
            let (zero, one) = (_mm512_setzero_si512(), _mm512_set1_epi64(1));
            let all = _mm512_set1_epi32(file_rows.len() as i32);
            let mut below_all = zero;
            for block in (0..len).step_by(LANES) {
                let low = _mm512_loadu_si512(ids.as_ptr().add(block).cast());
                let high = _mm512_loadu_si512(ids.as_ptr().add(block + LANES / 2).cast());
                let (mut below_low, mut below_high) = (zero, zero);
                for &id in ids.get_unchecked(..len) {
                    let id = _mm512_set1_epi64(id as i64);
                    below_low = _mm512_mask_add_epi64(below_low, _mm512_cmpgt_epu64_mask(low, id), below_low, one);
                    below_high = _mm512_mask_add_epi64(below_high, _mm512_cmpgt_epu64_mask(high, id), below_high, one);
                }
                let below = _mm512_castsi256_si512(_mm512_cvtepi64_epi32(below_low));
                let below = _mm512_inserti64x4::<1>(below, _mm512_cvtepi64_epi32(below_high));
                let lanes = ((1_u32 << (len - block).min(LANES)) - 1) as u16;
                let numbers = _mm512_maskz_loadu_epi32(lanes, numbers.as_ptr().add(block).cast());
                let file_row = _mm512_add_epi32(below, _mm512_set1_epi32(start as i32));
                _mm512_mask_i32scatter_epi32::<4>(rows.as_mut_ptr().cast(), lanes, below, numbers);
                let there = _mm512_mask_cmplt_epu32_mask(lanes, numbers, all);
                _mm512_mask_i32scatter_epi32::<4>(file_rows.as_mut_ptr().cast(), there, numbers, file_row);
                below_all = _mm512_mask_add_epi32(below_all, lanes, below_all, below);
            }
            _mm512_reduce_add_epi32(below_all) as usize
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::hash_id;

    /// Every instruction set orders buckets of any size alike, and finds ids that occur twice.
    #[test]
    fn instruction_sets_sort_alike_and_detect_duplicate_ids() {
        let sizes = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, MAX_COUNTED_ROWS, MAX_COUNTED_ROWS + 1, 500];
        let n: usize = sizes.iter().sum();
        let starts: Vec<i64> = sizes
            .iter()
            .scan(0, |end, size| Some(std::mem::replace(end, *end + *size as i64)))
            .chain([n as i64])
            .collect();
        let ids: Vec<u64> = (0..n + EXTRA_IDS).map(|row| hash_id(row as i64)).collect();
        let numbers: Vec<u32> = (0..n).map(|row| (row * 601 % n) as u32).collect();
        assert_ne!(n % 601, 0, "a permutation");
        for isa in InstructionSet::all() {
            for twice in [None, Some((3, 9)), Some((60, 74)), Some((300, 350)), Some((n - 1, n - 300))] {
                let mut ids = ids.clone();
                if let Some((one, other)) = twice {
                    ids[one] = ids[other];
                }
                let (mut file_rows, mut rows) = (vec![0; n], vec![0; n]);
                let sort = BucketSort {
                    starts: &starts,
                    ids: &ids,
                    numbers: &numbers,
                    file_rows: &mut file_rows,
                    rows: &mut rows,
                };
                let found = sort.run_on(isa);
                if let Some((one, _)) = twice {
                    assert_eq!(found, Some(ids[one] as Id), "{isa:?}");
                    continue;
                }
                assert_eq!(found, None, "{isa:?}");
                for bounds in starts.windows(2) {
                    let bucket = bounds[0] as usize..bounds[1] as usize;
                    let mut expected: Vec<(u64, u32)> = bucket.clone().map(|row| (ids[row], numbers[row])).collect();
                    expected.sort_unstable();
                    for (file_row, (_, number)) in bucket.zip(expected) {
                        assert_eq!(
                            (rows[file_row], file_rows[number as usize] as usize),
                            (number, file_row),
                            "{isa:?}"
                        );
                    }
                }
            }
        }
    }
}
