//! Order of a group's rows in their file, by bucket, then by `uint64(id)`; and the rows' metadata in that order. A
//! row's *number* is its index in arrival order, its *file row* is its position in the file.

use std::ops::Range;

use super::format::ColumnField;
use crate::checkpoint::manifest::CHUNK_BYTES;
use crate::rows::{RowHeader, RowList};
use crate::runtime::simd::{InstructionSet, SimdJob};
use crate::runtime::simd::{prefetch, prefetch_address};
use crate::types::{BucketMapper, Id};

/// Prefetch distance in rows.
const AHEAD: usize = 16;
/// Buckets of at most this many rows are sorted by counting smaller ids, larger ones by comparison.
const MAX_COUNTED_ROWS: usize = 128;
/// Number of ids that counting reads past those of the last bucket. Their values do not matter.
const EXTRA_IDS: usize = 16;
/// Number of rows counted at once if the CPU has no AVX-512.
const LANES: usize = 8;

/// Number of rows whose metadata are gathered at once. Their part of a column is within one chunk.
pub(crate) const BLOCK_ROWS: usize = 1024;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(BLOCK_ROWS * 8));

/// Metadata of some rows by column, small enough for a core's L1 cache.
#[derive(Debug)]
pub(crate) struct RowMetadataBlock {
    ids: [Id; BLOCK_ROWS],
    last_steps: [u64; BLOCK_ROWS],
    counts: [u32; BLOCK_ROWS],
    scores: [f32; BLOCK_ROWS],
    scalars: [f32; BLOCK_ROWS],
    modified_epochs: [u32; BLOCK_ROWS],
}

impl RowMetadataBlock {
    pub(crate) fn new() -> Self {
        Self {
            ids: [0; BLOCK_ROWS],
            last_steps: [0; BLOCK_ROWS],
            counts: [0; BLOCK_ROWS],
            scores: [0.0; BLOCK_ROWS],
            scalars: [0.0; BLOCK_ROWS],
            modified_epochs: [0; BLOCK_ROWS],
        }
    }

    fn put(&mut self, row: usize, header: &RowHeader) {
        self.ids[row] = header.id;
        self.last_steps[row] = header.last_step;
        self.counts[row] = header.count;
        self.scores[row] = header.score;
        self.scalars[row] = header.scalar;
        self.modified_epochs[row] = header.modified_epoch;
    }

    /// The first `rows` of a column. Empty if the field is not a metadata column.
    pub(crate) fn column(&self, field: ColumnField, rows: usize) -> &[u8] {
        match field {
            ColumnField::Id => bytemuck::cast_slice(&self.ids[..rows]),
            ColumnField::LastStep => bytemuck::cast_slice(&self.last_steps[..rows]),
            ColumnField::Count => bytemuck::cast_slice(&self.counts[..rows]),
            ColumnField::Score => bytemuck::cast_slice(&self.scores[..rows]),
            ColumnField::Scalar => bytemuck::cast_slice(&self.scalars[..rows]),
            ColumnField::ModifiedEpoch => bytemuck::cast_slice(&self.modified_epochs[..rows]),
            ColumnField::BucketOffsets | ColumnField::Tombstone | ColumnField::Vector(_) | ColumnField::Checksums
            // Fields of counts files.
            | ColumnField::Generation | ColumnField::Shows | ColumnField::Clicks | ColumnField::Age => &[],
        }
    }
}

/// The order of a group. Its memory is reused for the next group.
#[derive(Debug, Default)]
pub(crate) struct GroupOrder {
    /// By file row: the row's number in arrival order.
    pub(crate) rows: Vec<u32>,
    /// By number in arrival order: the file row. The inverse of `rows`.
    pub(crate) file_rows: Vec<u32>,
    /// First row of each bucket, then the number of rows.
    pub(crate) starts: Vec<i64>,
    /// Ids in arrival order.
    arrival_ids: Vec<u64>,
    /// Bucket of each id in `arrival_ids`, relative to the rank's first bucket.
    buckets: Vec<u32>,
    /// Ids sorted by bucket, unordered within a bucket, followed by padding that the sort may read.
    ids: Vec<u64>,
    /// Index in `arrival_ids` of each id in `ids`.
    numbers: Vec<u32>,
    ends: Vec<u32>,
}

/// Reason why rows cannot be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupOrderError {
    /// A row of another rank's bucket.
    ForeignBucket(Id, u32),
    /// A duplicate row.
    DuplicateId(Id),
    /// A row whose vector part has another length than the table's rows.
    WrongWidth(Id),
}

impl GroupOrder {
    /// Bytes of memory per row.
    pub(crate) const ROW_BYTES: usize = 2 * 8 + 4 * 4;
    /// Bytes of memory per bucket.
    pub(crate) const BUCKET_BYTES: usize = 8 + 4;

    /// Orders `rows`, fewer than 2³², with `floats` each. Runs on one thread: the data fits into a core's caches, and
    /// sorting is much faster than copying the rows.
    pub(crate) fn make(
        &mut self,
        rows: RowList<'_>,
        floats: usize,
        owned: &Range<u32>,
        bucketing: BucketMapper,
    ) -> Result<(), GroupOrderError> {
        let n = rows.len();
        if n > 0 && rows.floats() != floats {
            return Err(GroupOrderError::WrongWidth(rows.get(0).header.id));
        }
        self.arrival_ids.resize(n, 0);
        self.buckets.resize(n, 0);
        self.ids.resize(n + EXTRA_IDS, 0);
        self.numbers.resize(n, 0);
        self.rows.resize(n, 0);
        self.file_rows.resize(n, 0);
        self.ends.clear();
        self.ends.resize(owned.len(), 0);
        let ends = &mut self.ends[..];
        for ((row, arrival_id), in_bucket) in rows.iter().zip(&mut self.arrival_ids).zip(&mut self.buckets) {
            let id = row.header.id;
            // A bucket below the first wraps to a number greater than all of them.
            let bucket = bucketing.of(id).wrapping_sub(owned.start);
            let Some(count) = ends.get_mut(bucket as usize) else {
                return Err(GroupOrderError::ForeignBucket(id, bucket.wrapping_add(owned.start)));
            };
            *count += 1;
            (*arrival_id, *in_bucket) = (id as u64, bucket);
        }
        self.starts.clear();
        let mut row = 0;
        for end in &mut *ends {
            self.starts.push(i64::from(row));
            // After this, `end` is the position of the next row of the bucket.
            (row, *end) = (row + *end, row);
        }
        self.starts.push(i64::from(row));
        let (ids, numbers) = (&mut self.ids[..], &mut self.numbers[..]);
        for ((number, &id), &bucket) in (0..n).zip(&self.arrival_ids).zip(&self.buckets) {
            // Close to the position of a later row.
            let later = ends[self.buckets[(number + AHEAD).min(n - 1)] as usize] as usize;
            prefetch(ids, later);
            prefetch(numbers, later);
            let next = &mut ends[bucket as usize];
            ids[*next as usize] = id;
            numbers[*next as usize] = number as u32;
            *next += 1;
        }
        let (starts, ids, numbers) = (&self.starts[..], &self.ids[..], &self.numbers[..]);
        let (file_rows, rows) = (&mut self.file_rows[..], &mut self.rows[..]);
        let duplicate = BucketSort { starts, ids, numbers, file_rows, rows }.run_on(InstructionSet::best());
        duplicate.map_or(Ok(()), |id| Err(GroupOrderError::DuplicateId(id)))
    }

    /// Gathers the metadata of rows of the file, starting at row `first`. Returns the number of rows.
    pub(crate) fn metadata(&self, rows: RowList<'_>, first: usize, to: &mut RowMetadataBlock) -> usize {
        let count = BLOCK_ROWS.min(self.rows.len() - first);
        for (at, &row) in self.rows[first..][..count].iter().enumerate() {
            if let Some(&later) = self.rows.get(first + at + AHEAD) {
                prefetch_address(rows.get(later as usize).header);
            }
            to.put(at, rows.get(row as usize).header);
        }
        count
    }
}

/// The rows to sort, and the outputs.
#[derive(Debug)]
struct BucketSort<'a> {
    /// The first file row of each bucket, then the number of rows: `[buckets + 1]`.
    starts: &'a [i64],
    /// The ids by bucket, unordered within a bucket, followed by `EXTRA_IDS` more: `[n + EXTRA_IDS]`.
    ids: &'a [u64],
    /// The row number of each id, a permutation: `[n]`.
    numbers: &'a [u32],
    /// Output: the file row of each number, `[n]`.
    file_rows: &'a mut [u32],
    /// Output: the number of each file row, `[n]`.
    rows: &'a mut [u32],
}

impl BucketSort<'_> {
    /// Sorts the rows. Returns a duplicate id, if there is one.
    #[allow(unsafe_code)]
    fn run_on(self, isa: InstructionSet) -> Option<Id> {
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
#[allow(unsafe_code)]
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
                let in_range = _mm512_mask_cmplt_epu32_mask(lanes, numbers, all);
                _mm512_mask_i32scatter_epi32::<4>(file_rows.as_mut_ptr().cast(), in_range, numbers, file_row);
                below_all = _mm512_mask_add_epi32(below_all, lanes, below_all, below);
            }
            _mm512_reduce_add_epi32(below_all) as usize
        }
    }
}

#[cfg(test)]
mod tests;
