//! Encodes groups of rows. Rows are sorted and copied column by column. The checksum of a chunk is computed
//! while the chunk is still in a core's cache.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::format::{ColumnField, GroupLayout};
use super::sort::{BLOCK_ROWS, GroupOrder, GroupOrderError, RowMetadataBlock};
use crate::checkpoint::manifest::CHUNK_BYTES;
use crate::checkpoint::manifest::manifests::GroupShape;
use crate::checkpoint::manifest::spec::TableSpec;
use crate::error::{Error, Kind, Result};
use crate::kernels::thread_pool::for_each_on_half;
use crate::rows::{RowLayout, RowList, WeightPrecision};
use crate::runtime::memory;
use crate::runtime::simd::prefetch_range;
use crate::runtime::sync::lock;

/// Number of chunks of a column that one thread fills at a time.
const CHUNKS_PER_TASK: usize = (512 << 10) / CHUNK_BYTES;
/// Number of rows whose metadata one thread fills at a time: whole chunks of every column.
const ROWS_PER_TASK: usize = CHUNK_BYTES / 4;
/// Prefetch distance of a copy, in rows.
const AHEAD: usize = 8;

/// Encodes groups of the rows of one rank's shard of a table.
pub(crate) struct GroupEncoder<'a> {
    spec: &'a TableSpec,
    /// Buckets of the rank.
    pub(crate) buckets: Range<u32>,
    /// Number of floats in the vector part of a row.
    pub(crate) vector_floats: usize,
    order: GroupOrder,
    /// Checksums of the rows' parts of each column, if every chunk consists of whole rows.
    sums: Vec<Vec<u32>>,
    /// Shifts a checksum by a row's part of a column.
    shift: ChecksumShift,
}

impl<'a> GroupEncoder<'a> {
    /// Creates an encoder of rows of this layout.
    pub(crate) fn new(spec: &'a TableSpec, layout: RowLayout, buckets: Range<u32>) -> Self {
        let (dim, vector_floats) = (spec.dim as usize, layout.vector_floats());
        let joins = spec.precision.is_none() && CHUNK_BYTES.is_multiple_of(dim * 4);
        let parts = if joins { vector_floats / dim } else { 0 };
        let (sums, shift) = (vec![Vec::new(); parts], ChecksumShift::for_bytes(dim * 4));
        Self { spec, buckets, vector_floats, order: GroupOrder::default(), sums, shift }
    }

    /// Orders `rows`, which are in any order, for [`Self::fill`]. Returns the shape of their group.
    pub(crate) fn order(&mut self, rows: RowList<'_>) -> Result<GroupShape> {
        let of_rows = rows.len() * (GroupOrder::ROW_BYTES + 4 * self.sums.len());
        memory::check_system_memory("order rows for a file", of_rows + self.buckets.len() * GroupOrder::BUCKET_BYTES)?;
        let ordered = self.order.make(rows, self.vector_floats, &self.buckets, self.spec.bucketing());
        ordered.map_err(|misplaced| self.order_error(misplaced))?;
        let id = |row: &u32| rows.get(*row as usize).header.id;
        let bucket = |row: Option<&u32>| row.map(|row| self.spec.bucketing().of(id(row)));
        let (first, last) = (bucket(self.order.rows.first()), bucket(self.order.rows.last()));
        let (bucket_begin, bucket_end) =
            (first.unwrap_or(self.buckets.start), last.map_or(self.buckets.start, |last| last + 1));
        Ok(GroupShape { rows: rows.len(), bucket_begin, bucket_end, ..GroupShape::default() })
    }

    fn order_error(&self, why: GroupOrderError) -> Error {
        let what = match why {
            GroupOrderError::ForeignBucket(id, bucket) => {
                format!("row {id} is of bucket {bucket}, which is not within {:?}", self.buckets)
            }
            GroupOrderError::DuplicateId(id) => format!("row {id} is there twice"),
            GroupOrderError::WrongWidth(id) => format!("row {id} does not come with {} floats", self.vector_floats),
        };
        Kind::Input.error(format!("table {:?}: {what}", self.spec.table))
    }

    /// Fills the columns of ordered rows, and their checksums.
    pub(crate) fn fill(
        &mut self,
        rows: RowList<'_>,
        layout: &GroupLayout,
        data: &mut [u8],
        checksums: &mut [u32],
    ) -> Result<()> {
        let GroupColumns { mut vectors, mut metadata, offsets } = GroupColumns::of(layout, data, checksums);
        for (to, bucket) in offsets.bytes.chunks_exact_mut(size_of::<u32>()).zip(layout.offsets.buckets()) {
            let first_row = self.order.starts[(bucket - self.buckets.start) as usize] as u32;
            to.copy_from_slice(&first_row.to_le_bytes());
        }
        for sums in &mut self.sums {
            sums.resize(rows.len(), 0);
        }
        let dim = self.spec.dim as usize;
        let mut bytes: Vec<&mut [u8]> = vectors.iter_mut().map(|column| &mut *column.bytes).collect();
        let filled = match self.spec.precision {
            None => scatter(rows, &self.order.file_rows, &mut bytes, dim, &mut self.sums),
            Some(precision) => self.store(rows, precision, bytes[0]).map(|()| true)?,
        };
        let widths: Vec<usize> = metadata.iter().map(|column| column.bytes.len() / rows.len().max(1)).collect();
        let metadata = (0..rows.len()).step_by(ROWS_PER_TASK).map(|first| {
            let parts =
                metadata.iter_mut().zip(&widths).map(|(column, width)| column.split_front(ROWS_PER_TASK * width));
            GroupTask::Metadata(first, parts.collect())
        });
        let parts = vectors.into_iter().chain([offsets]).flat_map(GroupColumnPart::tasks);
        for_each_on_half(metadata.chain(parts), |task| match task {
            GroupTask::Metadata(first, mut parts) => {
                let mut block = RowMetadataBlock::new();
                for begin in (0..ROWS_PER_TASK.min(rows.len() - first)).step_by(BLOCK_ROWS) {
                    let count = self.order.metadata(rows, first + begin, &mut block);
                    for part in &mut parts {
                        let bytes = block.column(part.field, count);
                        part.put(begin * (bytes.len() / count), bytes);
                    }
                }
            }
            GroupTask::Chunks(start, mut part) => match part.field {
                ColumnField::Vector(column) if !filled => {
                    self.fill_vectors(rows, column * dim..(column + 1) * dim, start, part.bytes, part.sums);
                }
                ColumnField::Vector(column) if column < self.sums.len() => {
                    let first = start / (dim * 4);
                    self.join_checksums(&self.sums[column][first..first + part.bytes.len() / (dim * 4)], part.sums);
                }
                _ => part.compute_checksums(),
            },
        });
        Ok(())
    }

    /// Fills the weight column of a serving checkpoint. Returns `Input`, which names a row that the precision cannot
    /// represent.
    fn store(&self, rows: RowList<'_>, precision: WeightPrecision, column: &mut [u8]) -> Result<()> {
        let dim = self.spec.dim as usize;
        let row_bytes = precision.row_bytes(dim);
        let refused = Mutex::new(None);
        let tasks = column.chunks_mut(ROWS_PER_TASK * row_bytes).zip(self.order.rows.chunks(ROWS_PER_TASK));
        for_each_on_half(tasks, |(bytes, numbers)| {
            for (at, (number, into)) in numbers.iter().zip(bytes.chunks_exact_mut(row_bytes)).enumerate() {
                if let Some(&later) = numbers.get(at + AHEAD) {
                    prefetch_range(rows.get(later as usize).vector.as_ptr().cast(), dim * 4);
                }
                let row = rows.get(*number as usize);
                if precision.store(&row.vector[..dim], dim, into).is_err() {
                    lock(&refused).get_or_insert(row.header.id);
                }
            }
        });
        let refused = refused.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Some(id) = refused else { return Ok(()) };
        let what = format!(
            "table {:?}: {} cannot hold the weights of row {id}, because one is not a finite number or is too large for it: \
             choose another precision, such as fp32",
            self.spec.table,
            precision.name()
        );
        Err(Kind::Input.error(what))
    }

    /// Joins the checksums of rows to checksums of chunks.
    fn join_checksums(&self, of_rows: &[u32], sums: &mut [u32]) {
        let rows = CHUNK_BYTES / (self.spec.dim as usize * 4);
        for (sum, of_rows) in sums.iter_mut().zip(of_rows.chunks(rows)) {
            *sum = self.shift.join(of_rows);
        }
    }

    /// Fills chunks of weights, or of a slot, whose rows are not aligned to cache lines.
    fn fill_vectors(&self, rows: RowList<'_>, floats: Range<usize>, start: usize, bytes: &mut [u8], sums: &mut [u32]) {
        let row_bytes = floats.len() * 4;
        let part = |row: &u32| &rows.get(*row as usize).vector[floats.clone()];
        let mut at = start;
        for (sum, chunk) in sums.iter_mut().zip(bytes.chunks_mut(CHUNK_BYTES)) {
            let mut rest = &mut *chunk;
            // A chunk can start and end within a row if the row size is not a power of two.
            while !rest.is_empty() {
                let (row, skip) = (at / row_bytes, at % row_bytes);
                if let Some(later) = self.order.rows.get(row + AHEAD) {
                    prefetch_range(part(later).as_ptr().cast(), row_bytes);
                }
                let from: &[u8] = &bytemuck::cast_slice(part(&self.order.rows[row]))[skip..];
                let (to, after) = rest.split_at_mut(from.len().min(rest.len()));
                to.copy_from_slice(&from[..to.len()]);
                at += to.len();
                rest = after;
            }
            *sum = crc32c::crc32c(chunk);
        }
    }
}

/// A column of a group that is being encoded, or whole chunks of one, and the checksums of its chunks.
struct GroupColumnPart<'a> {
    field: ColumnField,
    bytes: &'a mut [u8],
    sums: &'a mut [u32],
}

/// A unit of work of one thread.
enum GroupTask<'a> {
    /// Fills the metadata of the rows of the file, starting at this number.
    Metadata(usize, Vec<GroupColumnPart<'a>>),
    /// Computes or joins the checksums of chunks, starting at this byte of their column. Also fills in vectors that
    /// were not scattered.
    Chunks(usize, GroupColumnPart<'a>),
}

impl<'a> GroupColumnPart<'a> {
    /// Splits off the first `bytes` (whole chunks), or the rest if it is shorter.
    fn split_front(&mut self, bytes: usize) -> GroupColumnPart<'a> {
        let end = bytes.min(self.bytes.len());
        let (bytes, later) = std::mem::take(&mut self.bytes).split_at_mut(end);
        let (sums, later_sums) = std::mem::take(&mut self.sums).split_at_mut(bytes.len().div_ceil(CHUNK_BYTES));
        (self.bytes, self.sums) = (later, later_sums);
        GroupColumnPart { field: self.field, bytes, sums }
    }

    fn tasks(mut self) -> impl Iterator<Item = GroupTask<'a>> {
        let starts = (0..self.bytes.len()).step_by(CHUNKS_PER_TASK * CHUNK_BYTES);
        starts.map(move |start| GroupTask::Chunks(start, self.split_front(CHUNKS_PER_TASK * CHUNK_BYTES)))
    }

    /// Writes bytes that are part of one chunk. The bytes of a chunk are written in order.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let sum = &mut self.sums[at / CHUNK_BYTES];
        *sum = crc32c::crc32c_append(*sum, bytes);
        copy_past_caches(&mut self.bytes[at..][..bytes.len()], bytes);
    }

    fn compute_checksums(&mut self) {
        for (sum, chunk) in self.sums.iter_mut().zip(self.bytes.chunks(CHUNK_BYTES)) {
            *sum = crc32c::crc32c(chunk);
        }
    }
}

/// The checksummed columns of a group that is being encoded. Their bytes are aligned for their types, because wider
/// columns come first in an aligned buffer.
struct GroupColumns<'a> {
    vectors: Vec<GroupColumnPart<'a>>,
    metadata: Vec<GroupColumnPart<'a>>,
    offsets: GroupColumnPart<'a>,
}

impl<'a> GroupColumns<'a> {
    /// Columns of a group without tombstones.
    fn of(layout: &GroupLayout, bytes: &'a mut [u8], sums: &'a mut [u32]) -> Self {
        let mut all = GroupColumnPart { field: ColumnField::Checksums, bytes, sums };
        let offsets = GroupColumnPart { field: ColumnField::BucketOffsets, bytes: &mut [], sums: &mut [] };
        let mut columns = Self { vectors: Vec::new(), metadata: Vec::new(), offsets };
        for column in layout.checked_columns() {
            let part = GroupColumnPart { field: column.field, ..all.split_front(column.bytes) };
            match column.field {
                ColumnField::Vector(_) => columns.vectors.push(part),
                ColumnField::BucketOffsets => columns.offsets = part,
                field if field.is_per_row() => columns.metadata.push(part),
                _ => {}
            }
        }
        columns
    }
}

/// Shifts a checksum: from that of some bytes to that of the same bytes followed by `n` zeros, for a fixed `n`. CRC-32C
/// is linear, so this combines the checksums of two rows.
struct ChecksumShift([[u32; 256]; 4]);

impl ChecksumShift {
    fn for_bytes(bytes: usize) -> Self {
        let of_bit: [u32; 32] = std::array::from_fn(|bit| crc32c::crc32c_combine(1 << bit, 0, bytes));
        let of_byte = |index: usize, byte: usize| {
            (0..8).filter(|bit| (byte >> bit) & 1 == 1).fold(0, |sum, bit| sum ^ of_bit[index * 8 + bit])
        };
        Self(std::array::from_fn(|index| std::array::from_fn(|byte| of_byte(index, byte))))
    }

    fn apply(&self, checksum: u32) -> u32 {
        let bytes = checksum.to_le_bytes();
        self.0.iter().zip(bytes).fold(0, |sum, (table, byte)| sum ^ table[usize::from(byte)])
    }

    /// Returns the checksum of several rows, each as long as this shift, from the checksum of each row.
    fn join(&self, rows: &[u32]) -> u32 {
        rows.iter().copied().reduce(|sum, row| self.apply(sum) ^ row).unwrap_or(0)
    }
}

/// Copies each row `i` to file row `file_rows[i]` of the columns. Part `k` of the vector part, `dim` floats wide, goes
/// to column `k`. If `sums` is not empty, the CRC-32C of that part goes to the same file row of `sums[k]`. `file_rows`
/// is a permutation of the rows' numbers.
///
/// Returns false, and does nothing, if rows do not fill whole cache lines or the CPU has no non-temporal stores.
///
/// # Panics
/// If a file row is outside its column.
fn scatter(rows: RowList<'_>, file_rows: &[u32], columns: &mut [&mut [u8]], dim: usize, sums: &mut [Vec<u32>]) -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86::scatter(rows, file_rows, columns, dim, sums, x86::can_fold());
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Copies bytes that are not read soon, with non-temporal stores if the CPU supports them.
///
/// # Panics
/// If the lengths differ.
fn copy_past_caches(to: &mut [u8], from: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    x86::copy_past_caches(to, from);
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86 {
    use std::arch::x86_64::{
        __m512i, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_cvtsi128_si64, _mm_extract_epi64, _mm_loadu_ps, _mm_sfence,
        _mm_stream_ps, _mm_xor_si128, _mm512_castsi512_si128, _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32,
        _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set_epi64, _mm512_setzero_si512, _mm512_stream_ps,
        _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
    };
    use std::ptr;

    use super::AHEAD;
    use crate::kernels::thread_pool::{DisjointPtr, for_each_on_half};
    use crate::rows::RowList;
    use crate::runtime::simd::prefetch_range;

    /// Number of floats per cache line, the unit of non-temporal stores.
    const LINE: usize = 16;
    /// Number of rows that one thread copies at a time.
    const ROWS_PER_TASK: usize = 2048;
    /// Number of rows that are copied interleaved. Each step of a row's checksum depends on the previous one; steps of
    /// several rows overlap. The rows come from different parts of memory, because the hardware prefetcher works within
    /// a page, and so on several pages in parallel.
    const INTERLEAVED_ROWS: usize = 4;

    /// True if the CPU supports [`FoldingCopyKernel`].
    pub(super) fn can_fold() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq")
    }

    /// Implements [`super::scatter`]. `folding` may be true only if [`can_fold`] is.
    pub(super) fn scatter(
        rows: RowList<'_>,
        file_rows: &[u32],
        columns: &mut [&mut [u8]],
        dim: usize,
        sums: &mut [Vec<u32>],
        folding: bool,
    ) -> bool {
        let aligned = |column: &&mut [u8]| column.as_ptr().addr().is_multiple_of(LINE * 4);
        if !is_x86_feature_detected!("sse4.2") || !dim.is_multiple_of(LINE) || !columns.iter().all(aligned) {
            return false;
        }
        let bytes = rows.len() * dim * 4;
        assert!(columns.iter().all(|column| column.len() == bytes), "columns of {} rows", rows.len());
        assert!(sums.is_empty() || sums.len() == columns.len(), "checksums of each column, or of none");
        assert!(sums.iter().all(|sums| sums.len() == rows.len()), "a checksum a row");
        assert_eq!(file_rows.len(), rows.len(), "one file row for each row");
        assert!(rows.floats() >= columns.len() * dim, "rows as wide as all columns");
        assert!(!folding || can_fold(), "a processor that folds");
        let all = rows.len();
        let columns: Vec<DisjointPtr<u8>> = columns.iter_mut().map(|column| DisjointPtr(column.as_mut_ptr())).collect();
        let sums: Vec<DisjointPtr<u32>> = sums.iter_mut().map(|sums| DisjointPtr(sums.as_mut_ptr())).collect();
        let to = ScatterTarget { all, dim, columns: &columns, sums: &sums };
        for_each_on_half((0..all).step_by(ROWS_PER_TASK), |begin| {
            // Includes the first rows of the next task, which are prefetched at the end.
            let later = rows.range(begin..all.min(begin + ROWS_PER_TASK + AHEAD));
            let file_rows = &file_rows[begin..all.min(begin + ROWS_PER_TASK)];
            // SAFETY: `folding` states that its instructions were detected, and every CPU with SSE 4.2 has the others.
            // Columns and checksums are borrowed exclusively by this call, for `rows.len()` rows; file rows are unique,
            // so no two tasks write the same.
            unsafe { if folding { to.copy_folding(later, file_rows) } else { to.copy(later, file_rows) } }
        });
        true
    }

    /// A cache line.
    type StreamLine = [u8; LINE * 4];

    /// # Safety
    /// `to` is aligned to cache lines.
    unsafe fn stream_lines_sse(to: &mut [StreamLine], from: &[StreamLine]) {
        for (to, from) in to.iter_mut().zip(from) {
            let (to, from): (*mut f32, *const f32) = (to.as_mut_ptr().cast(), from.as_ptr().cast());
            for at in (0..LINE).step_by(4) {
                // SAFETY: every x86-64 CPU has SSE; both pointers are within a line, and `to` is aligned to one.
                unsafe { _mm_stream_ps(to.add(at), _mm_loadu_ps(from.add(at))) };
            }
        }
    }

    /// # Safety
    /// The CPU has AVX-512 F, and `to` is aligned to cache lines.
    #[target_feature(enable = "avx512f")]
    unsafe fn stream_lines_avx512(to: &mut [StreamLine], from: &[StreamLine]) {
        for (to, from) in to.iter_mut().zip(from) {
            // SAFETY: both pointers are to a line, and `to` is aligned to one.
            unsafe { _mm512_stream_ps(to.as_mut_ptr().cast(), _mm512_loadu_ps(from.as_ptr().cast())) };
        }
    }

    pub(super) fn copy_past_caches(to: &mut [u8], from: &[u8]) {
        assert_eq!(to.len(), from.len(), "as many bytes as there is room for");
        let before = to.as_ptr().align_offset(LINE * 4).min(to.len());
        let (head, lines) = to.split_at_mut(before);
        let (head_from, lines_from) = from.split_at(before);
        head.copy_from_slice(head_from);
        let (lines, tail) = lines.as_chunks_mut::<{ LINE * 4 }>();
        let (lines_from, tail_from) = lines_from.as_chunks();
        // SAFETY: every x86-64 CPU has SSE, which `stream_lines_sse` needs, and `stream_lines_avx512` is called only if
        // AVX-512 F was detected. The lines of `to` start at its first aligned byte.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                stream_lines_avx512(lines, lines_from);
            } else {
                stream_lines_sse(lines, lines_from);
            }
        }
        tail.copy_from_slice(tail_from);
        // SAFETY: every x86-64 CPU has SSE. The fence orders the non-temporal stores before all later stores.
        unsafe { _mm_sfence() };
    }

    /// Columns that start at cache lines and fit `all` rows of `dim` floats, and as many checksums, or none.
    struct ScatterTarget<'a> {
        all: usize,
        dim: usize,
        columns: &'a [DisjointPtr<u8>],
        sums: &'a [DisjointPtr<u32>],
    }

    impl ScatterTarget<'_> {
        /// # Safety
        /// No other thread uses the rows' file rows.
        #[target_feature(enable = "sse4.2")]
        unsafe fn copy(&self, rows: RowList<'_>, file_rows: &[u32]) {
            // SAFETY: the caller guarantees exclusive use of these file rows, and this function is compiled for the
            // instructions of `WordCopyKernel`.
            unsafe { self.copy_each::<WordCopyKernel>(rows, file_rows) }
        }

        /// # Safety
        /// No other thread uses the rows' file rows.
        #[target_feature(enable = "sse4.2,avx512f,vpclmulqdq")]
        unsafe fn copy_folding(&self, rows: RowList<'_>, file_rows: &[u32]) {
            // SAFETY: the caller guarantees exclusive use of these file rows, and this function is compiled for the
            // instructions of `FoldingCopyKernel`.
            unsafe { self.copy_each::<FoldingCopyKernel>(rows, file_rows) }
        }

        /// Copies the first of `rows`, as many as there are file rows.
        ///
        /// # Safety
        /// No other thread uses the rows' file rows, and the CPU has the instructions of `C`.
        #[allow(clippy::inline_always)] // Compiled for the instruction set of the caller.
        #[inline(always)]
        unsafe fn copy_each<C: RowCopyKernel>(&self, rows: RowList<'_>, file_rows: &[u32]) {
            let stretch = file_rows.len() / INTERLEAVED_ROWS;
            for begin in 0..stretch {
                // SAFETY: the caller guarantees exclusive use of the file rows and the CPU's instructions. `begin` and
                // the rows at each multiple of `stretch` after it are among the rows.
                unsafe { self.copy_interleaved::<C, INTERLEAVED_ROWS>(rows, file_rows, begin, stretch) };
            }
            for begin in stretch * INTERLEAVED_ROWS..file_rows.len() {
                // SAFETY: the caller guarantees exclusive use of the file rows and the CPU's instructions. `begin` is a
                // row.
                unsafe { self.copy_interleaved::<C, 1>(rows, file_rows, begin, 0) };
            }
            // SAFETY: every CPU with SSE 4.2 has it. The fence orders the non-temporal stores before all later stores.
            unsafe { _mm_sfence() };
        }

        /// Copies `N` rows, `stretch` apart, starting at number `begin`.
        ///
        /// # Safety
        /// No other thread uses the rows' file rows, and the CPU has the instructions of `C`.
        #[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for the caller's instructions; plain loops.
        #[inline(always)]
        unsafe fn copy_interleaved<C: RowCopyKernel, const N: usize>(
            &self,
            rows: RowList<'_>,
            file_rows: &[u32],
            begin: usize,
            stretch: usize,
        ) {
            let (mut from, mut file_row) = ([ptr::null::<f32>(); N], [0; N]);
            for n in 0..N {
                let row = begin + n * stretch;
                if row + AHEAD < rows.len() {
                    let later = rows.get(row + AHEAD).vector;
                    prefetch_range(later.as_ptr().cast(), size_of_val(later));
                }
                from[n] = rows.get(row).vector.as_ptr();
                file_row[n] = file_rows[row] as usize;
                assert!(file_row[n] < self.all, "file rows are among the rows");
            }
            for (part, column) in self.columns.iter().enumerate() {
                let mut to = [ptr::null_mut::<f32>(); N];
                for n in 0..N {
                    #[allow(clippy::cast_ptr_alignment)] // Rows are whole lines, and columns start at one.
                    let at = column.at(file_row[n] * self.dim * 4).cast();
                    to[n] = at;
                }
                let sums = self.sums.get(part);
                // SAFETY: the caller guarantees the instructions and exclusive use of these file rows. Rows are as wide
                // as all columns.
                let checksums = unsafe { C::copy(from, to, self.dim, sums.is_some()) };
                for n in 0..N {
                    if let Some(sums) = sums {
                        // SAFETY: the file row is within `sums`, and belongs only to this row.
                        unsafe { sums.at(file_row[n]).write(checksums[n]) };
                    }
                    from[n] = from[n].wrapping_add(self.dim);
                }
            }
        }
    }

    /// Copies rows with non-temporal stores.
    trait RowCopyKernel {
        /// Copies `N` rows of `dim` floats. Returns their checksums if `wanted`.
        ///
        /// # Safety
        /// The CPU has the instructions. `dim` is whole cache lines, readable at `from` and writable at `to`, and `to`
        /// is aligned to lines.
        unsafe fn copy<const N: usize>(from: [*const f32; N], to: [*mut f32; N], dim: usize, wanted: bool) -> [u32; N];
    }

    /// Uses SSE 4.2 and computes checksums by words.
    struct WordCopyKernel;

    impl RowCopyKernel for WordCopyKernel {
        #[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for the caller's instructions; plain loops.
        #[inline(always)]
        unsafe fn copy<const N: usize>(from: [*const f32; N], to: [*mut f32; N], dim: usize, wanted: bool) -> [u32; N] {
            let mut checksums = [u64::from(u32::MAX); N];
            for at in (0..dim).step_by(LINE) {
                for n in 0..N {
                    for at in (at..at + LINE).step_by(4) {
                        // SAFETY: the caller guarantees `dim` floats at each address, and lines at the targets; `at` is
                        // below `dim`.
                        unsafe { _mm_stream_ps(to[n].add(at), _mm_loadu_ps(from[n].add(at))) };
                    }
                }
                if !wanted {
                    continue;
                }
                for word in (at..at + LINE).step_by(2) {
                    for n in 0..N {
                        // SAFETY: the caller guarantees `dim` floats at each address, and `word + 1` is below `dim`.
                        let word = unsafe { from[n].add(word).cast::<u64>().read_unaligned() };
                        // SAFETY: the caller guarantees that the CPU has SSE 4.2.
                        checksums[n] = unsafe { _mm_crc32_u64(checksums[n], word) };
                    }
                }
            }
            checksums.map(|checksum| !(checksum as u32))
        }
    }

    /// Uses AVX-512 F and VPCLMULQDQ, by cache lines: the checksum state of a row is folded onto its next line by
    /// polynomial multiplication (Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
    /// Instruction, 2009).
    struct FoldingCopyKernel;

    impl RowCopyKernel for FoldingCopyKernel {
        #[allow(clippy::inline_always, clippy::needless_range_loop)] // Compiled for the caller's instructions; plain loops.
        #[inline(always)]
        unsafe fn copy<const N: usize>(from: [*const f32; N], to: [*mut f32; N], dim: usize, _: bool) -> [u32; N] {
            // SAFETY: the caller guarantees the instructions, whole lines of `dim` floats at each source, and as many
            // aligned ones at each target.
            unsafe {
                let onto_next = _mm512_set_epi64(
                    LINE_FACTORS[1],
                    LINE_FACTORS[0],
                    LINE_FACTORS[1],
                    LINE_FACTORS[0],
                    LINE_FACTORS[1],
                    LINE_FACTORS[0],
                    LINE_FACTORS[1],
                    LINE_FACTORS[0],
                );
                // The last of a line's four parts is not multiplied.
                let onto_last = _mm512_set_epi64(
                    0,
                    0,
                    PART_FACTORS[2][1],
                    PART_FACTORS[2][0],
                    PART_FACTORS[1][1],
                    PART_FACTORS[1][0],
                    PART_FACTORS[0][1],
                    PART_FACTORS[0][0],
                );
                let mut folded = [_mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)); N];
                for n in 0..N {
                    let line = _mm512_loadu_si512(from[n].cast());
                    _mm512_stream_si512(to[n].cast(), line);
                    folded[n] = _mm512_xor_si512(folded[n], line);
                }
                for at in (LINE..dim).step_by(LINE) {
                    for n in 0..N {
                        let line = _mm512_loadu_si512(from[n].add(at).cast());
                        _mm512_stream_si512(to[n].add(at).cast(), line);
                        folded[n] = fold(folded[n], onto_next, line);
                    }
                }
                let mut checksums = [0; N];
                for n in 0..N {
                    let parts = folded[n];
                    let all = fold(parts, onto_last, _mm512_setzero_si512());
                    let two = _mm_xor_si128(_mm512_castsi512_si128(all), _mm512_extracti32x4_epi32::<1>(all));
                    let two = _mm_xor_si128(two, _mm512_extracti32x4_epi32::<2>(all));
                    let two = _mm_xor_si128(two, _mm512_extracti32x4_epi32::<3>(parts));
                    let checksum = _mm_crc32_u64(0, _mm_cvtsi128_si64(two) as u64);
                    checksums[n] = !(_mm_crc32_u64(checksum, _mm_extract_epi64::<1>(two) as u64) as u32);
                }
                checksums
            }
        }
    }

    /// Multiplies each part of 128 bits by its two factors, and adds `next`.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and VPCLMULQDQ.
    #[allow(clippy::inline_always)] // A call would move registers through memory.
    #[inline(always)]
    unsafe fn fold(parts: __m512i, by: __m512i, next: __m512i) -> __m512i {
        // SAFETY: the caller guarantees that the CPU has AVX-512 F and VPCLMULQDQ.
        unsafe {
            let (low, high) =
                (_mm512_clmulepi64_epi128::<0x00>(parts, by), _mm512_clmulepi64_epi128::<0x11>(parts, by));
            _mm512_ternarylogic_epi64::<0x96>(low, high, next)
        }
    }

    /// Factors that move 128 bits across a line of 512 bits.
    const LINE_FACTORS: [i64; 2] = factors(512);
    /// Factors that move the first three parts of a line, of 128 bits each, onto its last part.
    const PART_FACTORS: [[i64; 2]; 3] = [factors(384), factors(256), factors(128)];

    /// Factors that move the first and the second half of 128 bits by `bits`, modulo the polynomial.
    const fn factors(bits: u32) -> [i64; 2] {
        [power(bits + 32) << 1, power(bits - 32) << 1]
    }

    /// The polynomial x^`n` modulo the polynomial of CRC-32C, bit-reflected.
    const fn power(n: u32) -> i64 {
        let (mut power, mut by) = (1_u32 << 31, 0);
        while by < n {
            power = (power >> 1) ^ (if power & 1 == 1 { 0x82f6_3b78 } else { 0 });
            by += 1;
        }
        power as i64
    }
}

#[cfg(test)]
mod tests;
