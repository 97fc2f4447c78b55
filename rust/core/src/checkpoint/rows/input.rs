//! Reads data files: checks a file against the manifest and its own header, then reads and verifies the rows of some
//! buckets, group by group, into a buffer, from which they are passed on as columns.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::format::{ColumnField, FileColumn, FileLayout, GROUP_BYTES, GroupLayout, LINE_BYTES, MAX_HEADER_BYTES};
use crate::cache::RowColumns;
use crate::checkpoint::chunked_file::{check_crc32c, check_length, for_each_piece};
use crate::checkpoint::manifest::CHUNK_BYTES;
use crate::checkpoint::manifest::manifests::{DataFile, GroupEntry, GroupShape, RankShare};
use crate::error::{Error, Result};
use crate::io::{ALIGNMENT, BufPool, IoEngine, IoFile, IoOpenMode, PooledBuf};
use crate::kernels::thread_pool::for_each;
use crate::rows::{RowLayout, WeightPrecision};
use crate::runtime::memory;
use crate::runtime::sync::lock;
use crate::types::{BucketMapper, Id};

/// Size of one read request.
const READ_BYTES: usize = 1 << 20;
/// Number of threads that read one file.
const READERS: usize = 4;
/// Number of chunks that one thread verifies at a time.
const CHUNKS_PER_TASK: usize = (512 << 10) / CHUNK_BYTES;
/// Number of rows that one thread converts to float32 at a time.
const ROWS_PER_TASK: usize = 4096;

/// A file: its path, its rank's shard of the table, its manifest entry, and the requested buckets.
pub(super) struct DataFileRequest<'a> {
    pub(super) path: Arc<Path>,
    pub(super) share: &'a RankShare,
    pub(super) file: &'a DataFile,
    /// The layout of each group. `None` if its size overflows.
    pub(super) layouts: Vec<Option<GroupLayout>>,
    /// The requested buckets of the rank.
    pub(super) buckets: Range<u32>,
}

impl DataFileRequest<'_> {
    /// Opens the file, and checks its length and header. Returns its groups, unchecked.
    pub(super) fn open(self, engine: &dyn IoEngine) -> Result<Vec<GroupReader>> {
        let Self { path, share, file, layouts, buckets } = self;
        let too_long = || Error::corruption(&path, 0, "the file's length", "as long as its rows", file.bytes);
        let mut groups = Vec::with_capacity(layouts.len());
        for (layout, entry) in layouts.into_iter().zip(&file.groups) {
            let layout = layout.filter(|layout| layout.data_bytes as u64 <= file.bytes).ok_or_else(too_long)?;
            if entry.rows > 1 && (entry.rows as usize).saturating_mul(layout.row_bytes()) > GROUP_BYTES {
                let most = format!("within {GROUP_BYTES} bytes");
                return Err(Error::corruption(&path, 0, "the number of rows", most, entry.rows));
            }
            groups.push((entry.offset, layout));
        }
        let layout = FileLayout { spec: &share.spec, buckets: &share.buckets(), groups: &groups, bytes: file.bytes };
        check_offsets(&path, &layout)?;
        let io = engine.open(&path, IoOpenMode::Read)?;
        check_length(&*io, file.bytes)?;
        check_header(&path, &*io, &layout, file.header_crc32c)?;
        let ends: Vec<u64> = (0..groups.len()).map(|k| layout.end_of(k)).collect();
        let readers = groups.into_iter().zip(&file.groups).zip(ends).map(|(((offset, layout), entry), end)| {
            let GroupEntry { bucket_begin, bucket_end, checksums_crc32c, .. } = *entry;
            let begin = buckets.start.clamp(bucket_begin, bucket_end);
            GroupReader {
                path: Arc::clone(&path),
                file_bytes: file.bytes,
                start: offset as usize,
                end: end as usize,
                shape: entry.shape(0),
                layout,
                checksums_crc32c,
                buckets: begin..buckets.end.clamp(begin, bucket_end),
                rows: 0..0,
                slots: share.spec.precision.is_none(),
            }
        });
        Ok(readers.collect())
    }
}

/// Checks that the groups of a file follow each other, with as much padding as their alignment needs.
fn check_offsets(path: &Path, layout: &FileLayout<'_>) -> Result<()> {
    let first = layout.groups.first().map_or(0, |(offset, _)| *offset);
    let header = 8..=MAX_HEADER_BYTES as u64;
    let is_placed = |k: usize, (offset, group): &(u64, GroupLayout)| {
        let end = offset.checked_add(group.data_bytes as u64);
        let padding = end.and_then(|end| layout.end_of(k).checked_sub(end));
        let is_aligned = offset % LINE_BYTES as u64 == group.lead as u64;
        is_aligned && padding.is_some_and(|padding| padding < (ALIGNMENT + LINE_BYTES) as u64)
    };
    let misplaced = layout.groups.iter().enumerate().find(|(k, group)| !is_placed(*k, group));
    if !header.contains(&first) || misplaced.is_some() || !layout.bytes.is_multiple_of(ALIGNMENT as u64) {
        let (found, expected) = misplaced.map_or((first, header.end()), |(_, (offset, _))| (*offset, &layout.bytes));
        return Err(Error::corruption(path, 0, "the offset of a group", format!("within {expected}, aligned"), found));
    }
    Ok(())
}

/// Verifies the header of a file.
fn check_header(path: &Path, io: &dyn IoFile, layout: &FileLayout<'_>, crc32c: u32) -> Result<()> {
    let mut header = vec![0; layout.groups.first().map_or(8, |(offset, _)| *offset as usize)];
    io.read_at(0, &mut header)?;
    check_crc32c(path, 0, || "the header's checksum", &header, crc32c)?;
    let (length, text) = header.split_at(8);
    if length != (text.len() as u64).to_le_bytes() {
        let found = format!("{length:?}");
        return Err(Error::corruption(path, 0, "the header's length field", text.len(), found));
    }
    layout
        .check_header(text)
        .map_err(|what| Error::corruption(path, 8, "the header", "that of the manifest's counts", what))
}

/// One group of a data file.
#[derive(Debug)]
pub(crate) struct GroupReader {
    path: Arc<Path>,
    file_bytes: u64,
    /// Offset of its first column in the file.
    start: usize,
    /// End of its padding.
    end: usize,
    shape: GroupShape,
    pub(super) layout: GroupLayout,
    checksums_crc32c: u32,
    /// The requested buckets of this group.
    pub(super) buckets: Range<u32>,
    /// The rows of these buckets.
    pub(crate) rows: Range<usize>,
    /// True if the optimizer's slots are read.
    pub(crate) slots: bool,
}

impl GroupReader {
    /// Checks padding, checksums and bucket offsets, and finds the rows of the requested buckets.
    pub(super) fn check(&mut self, engine: &dyn IoEngine, bucketing: BucketMapper) -> Result<()> {
        let io = self.reopen(engine)?;
        self.check_padding(&*io)?;
        self.rows = self.find_rows(&io, bucketing)?;
        Ok(())
    }

    /// True if it has rows or tombstones of the requested buckets.
    pub(super) fn is_requested(&self) -> bool {
        !self.buckets.is_empty()
    }

    pub(super) fn reopen(&self, engine: &dyn IoEngine) -> Result<Arc<dyn IoFile>> {
        let file = engine.open(&self.path, IoOpenMode::Read)?;
        check_length(&*file, self.file_bytes)?;
        Ok(file)
    }

    fn read_checksums(&self, file: &dyn IoFile) -> Result<Vec<u32>> {
        let column = self.layout.column(ColumnField::Checksums);
        let offset = (self.start + column.start) as u64;
        let mut checksums = memory::zeros("read checksums", column.shape[0])?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut checksums);
        file.read_at(offset, bytes)?;
        check_crc32c(&self.path, offset, || "the checksum of the checksums", bytes, self.checksums_crc32c)?;
        Ok(checksums)
    }

    /// Checks the padding: a changed byte is detected anywhere in a file, even in padding.
    fn check_padding(&self, file: &dyn IoFile) -> Result<()> {
        let start = self.start + self.layout.data_bytes;
        let mut bytes = vec![0; self.end - start];
        file.read_at(start as u64, &mut bytes)?;
        match bytes.iter().position(|&byte| byte != 0) {
            Some(at) => Err(Error::corruption(&self.path, (start + at) as u64, "the padding", 0, bytes[at])),
            None => Ok(()),
        }
    }

    /// Finds the rows of the requested buckets.
    fn find_rows(&self, file: &Arc<dyn IoFile>, bucketing: BucketMapper) -> Result<Range<usize>> {
        let column = self.layout.column(ColumnField::BucketOffsets);
        let (staging, checksums) = (Arc::new(BufPool::new(0, 0)), self.read_checksums(&**file)?);
        let staged = self.read_columns(&staging, file, &[(column, 0..column.bytes)], &checksums)?;
        let offsets: &[u32] = staged.values(column, 0..column.bytes);
        let rows = self.shape.rows as u32;
        if !offsets.is_sorted() || (offsets.first(), offsets.last()) != (Some(&0), Some(&rows)) {
            let (offset, expected) = ((self.start + column.start) as u64, format!("ascending from 0 to {rows}"));
            return Err(Error::corruption(&self.path, offset, "bucket_offsets", expected, "not"));
        }
        let ids = self.layout.column(ColumnField::Id);
        let first_row = |bucket: u32| {
            if bucket >= self.shape.bucket_end {
                return Ok(self.shape.rows);
            }
            let at = self.layout.offsets.before(bucket);
            let (begin, end) = (offsets[at] as usize, offsets[at + 1] as usize);
            if self.layout.offsets.has(bucket) || begin == end {
                return Ok(begin);
            }
            // The rows between two offsets are searched.
            let range = begin * size_of::<Id>()..end * size_of::<Id>();
            let staged = self.read_columns(&staging, file, &[(ids, range.clone())], &checksums)?;
            let between: &[Id] = staged.values(ids, range);
            Ok(begin + between.partition_point(|&id| bucketing.of(id) < bucket))
        };
        let begin = first_row(self.buckets.start)?;
        Ok(begin..first_row(self.buckets.end)?.max(begin))
    }

    /// Reads and verifies a column of integers, [`READ_BYTES`] at a time. `take` receives the index of the first value
    /// of each window.
    pub(super) fn for_each_window<T: bytemuck::Pod>(
        &self,
        file: &Arc<dyn IoFile>,
        column: &FileColumn,
        mut take: impl FnMut(usize, &[T]) -> Result<()>,
    ) -> Result<()> {
        let checksums = self.read_checksums(&**file)?;
        let staging = Arc::new(BufPool::new(0, 0));
        for begin in (0..column.bytes).step_by(READ_BYTES) {
            let range = begin..column.bytes.min(begin + READ_BYTES);
            let staged = self.read_columns(&staging, file, &[(column, range.clone())], &checksums)?;
            take(begin / size_of::<T>(), staged.values(column, range))?;
        }
        Ok(())
    }

    /// Byte ranges of the requested rows in each of their columns.
    fn requested_ranges(&self) -> Vec<(&FileColumn, Range<usize>)> {
        let is_requested = |column: &&FileColumn| column.field.is_per_row() && (self.slots || !column.field.is_slot());
        self.layout
            .columns
            .iter()
            .filter(is_requested)
            .map(|column| {
                let row = column.bytes_per_row();
                (column, self.rows.start * row..self.rows.end * row)
            })
            .collect()
    }

    /// Number of bytes that [`Self::stage`] reads.
    pub(crate) fn staged_bytes(&self) -> usize {
        self.plan_reads(&self.requested_ranges()).last().map_or(0, |extent| extent.staged_at + extent.len)
    }

    /// Reads and verifies the requested rows, into a buffer of `staging`.
    pub(crate) fn stage(
        &self,
        engine: &dyn IoEngine,
        staging: &Arc<BufPool>,
        bucketing: BucketMapper,
    ) -> Result<StagedColumns<'_>> {
        let file = self.reopen(engine)?;
        let staged = self.read_columns(staging, &file, &self.requested_ranges(), &self.read_checksums(&*file)?)?;
        let ids = (ColumnField::Id, self.rows.start);
        self.check_sorted(ids, staged.rows(ColumnField::Id), bucketing, &self.buckets, None)?;
        Ok(staged)
    }

    /// Plans the reads for byte ranges of columns, in file order: extends them to complete checksum chunks and to the
    /// blocks of direct I/O.
    fn plan_reads(&self, requested: &[(&FileColumn, Range<usize>)]) -> Vec<StagedRange> {
        let mut extents: Vec<StagedRange> = Vec::new();
        for (column, range) in requested {
            let start = self.start + column.start;
            let chunks = chunks_of(range, column.bytes);
            let offset = (start + chunks.start) / ALIGNMENT * ALIGNMENT;
            let end = (start + chunks.end).next_multiple_of(ALIGNMENT);
            match extents.last_mut() {
                Some(last) if offset <= last.offset + last.len => last.len = last.len.max(end - last.offset),
                last => {
                    let staged_at = last.map_or(0, |last| last.staged_at + last.len);
                    extents.push(StagedRange { offset, len: end - offset, staged_at });
                }
            }
        }
        extents
    }

    /// Reads byte ranges of columns, and verifies every chunk that they touch.
    fn read_columns(
        &self,
        staging: &Arc<BufPool>,
        file: &Arc<dyn IoFile>,
        requested: &[(&FileColumn, Range<usize>)],
        checksums: &[u32],
    ) -> Result<StagedColumns<'_>> {
        let extents = self.plan_reads(requested);
        let mut buffer = staging.take_at_least(extents.last().map_or(0, |last| last.staged_at + last.len))?;
        let mut pieces = Vec::new();
        let mut rest = &mut buffer[..];
        for extent in &extents {
            let (bytes, later) = rest.split_at_mut(extent.len);
            let parts = bytes.chunks_mut(READ_BYTES).enumerate();
            pieces.extend(parts.map(|(n, part)| ((extent.offset + n * READ_BYTES) as u64, part)));
            rest = later;
        }
        for_each_piece(READERS, pieces, |(offset, part)| file.read_at(offset, part))?;
        let staged = StagedColumns { group: self, buffer, ranges: extents };
        self.verify(&staged, requested, checksums)?;
        Ok(staged)
    }

    /// Verifies the checksums of the chunks that contain byte ranges of columns.
    fn verify(
        &self,
        staged: &StagedColumns<'_>,
        requested: &[(&FileColumn, Range<usize>)],
        checksums: &[u32],
    ) -> Result<()> {
        let chunks = requested.iter().flat_map(|(column, range)| {
            let range = chunks_of(range, column.bytes);
            range.clone().step_by(CHUNK_BYTES).map(move |start| (*column, start..range.end.min(start + CHUNK_BYTES)))
        });
        let chunks: Vec<(&FileColumn, Range<usize>)> = chunks.collect();
        let check = |(column, range): &(&FileColumn, Range<usize>)| {
            let what = || format!("the checksum of {} bytes of {:?}", range.len(), column.name);
            let offset = (self.start + column.start + range.start) as u64;
            let expected = checksums[column.first_checksum + range.start / CHUNK_BYTES];
            check_crc32c(&self.path, offset, what, staged.bytes(column, range), expected)
        };
        // Reports the first corrupted chunk of the file, independent of thread timing.
        let first: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        for_each(chunks.chunks(CHUNKS_PER_TASK).enumerate(), |(task, some)| {
            if let Some(error) = some.iter().find_map(|chunk| check(chunk).err()) {
                let mut first = lock(&first);
                if first.as_ref().is_none_or(|(earlier, _)| task < *earlier) {
                    *first = Some((task, error));
                }
            }
        });
        let first = first.into_inner().unwrap_or_else(PoisonError::into_inner);
        first.map_or(Ok(()), |(_, error)| Err(error))
    }

    pub(crate) fn tombstones(&self) -> u64 {
        self.layout.column(ColumnField::Tombstone).shape[0] as u64
    }

    /// Passes the tombstones of the requested buckets to `sink`, window by window.
    pub(crate) fn read_tombstones(
        &self,
        engine: &dyn IoEngine,
        bucketing: BucketMapper,
        sink: &mut dyn FnMut(&[Id]) -> Result<()>,
    ) -> Result<()> {
        let (all, mut last, mut requested) = (self.shape.bucket_begin..self.shape.bucket_end, None, Vec::new());
        self.for_each_window(&self.reopen(engine)?, self.layout.column(ColumnField::Tombstone), |begin, ids| {
            last = self.check_sorted((ColumnField::Tombstone, begin), ids, bucketing, &all, last)?;
            requested.clear();
            requested.extend(ids.iter().filter(|&&id| self.buckets.contains(&bucketing.of(id))));
            if requested.is_empty() { Ok(()) } else { sink(&requested) }
        })
    }

    /// Checks that the ids of a column, starting at row `first`, belong to `buckets`, and are unique and sorted after
    /// `before`. Returns the key of the last one.
    fn check_sorted(
        &self,
        (field, first): (ColumnField, usize),
        ids: &[Id],
        bucketing: BucketMapper,
        buckets: &Range<u32>,
        mut before: Option<(u32, u64)>,
    ) -> Result<Option<(u32, u64)>> {
        for (row, &id) in ids.iter().enumerate() {
            let key = (bucketing.of(id), id as u64);
            if !buckets.contains(&key.0) || before.is_some_and(|before| before >= key) {
                let column = self.layout.column(field);
                let offset = self.start + column.start + (first + row) * 8;
                return Err(Error::corruption(
                    &self.path,
                    offset as u64,
                    "the id",
                    format!("of buckets {buckets:?} and in order"),
                    id,
                ));
            }
            before = Some(key);
        }
        Ok(before)
    }

    pub(super) fn row_file_offsets(&self) -> RowFileOffsets {
        let start = |field| self.start + self.layout.column(field).start;
        RowFileOffsets {
            path: Arc::clone(&self.path),
            bytes: self.file_bytes,
            end: self.end,
            rows: self.shape.rows,
            ids: start(ColumnField::Id),
            last_steps: start(ColumnField::LastStep),
            weights: start(ColumnField::Vector(0)),
            scores: start(ColumnField::Score),
        }
    }
}

/// Extends a byte range of a column of `bytes` bytes to complete chunks.
fn chunks_of(range: &Range<usize>, bytes: usize) -> Range<usize> {
    range.start / CHUNK_BYTES * CHUNK_BYTES..range.end.next_multiple_of(CHUNK_BYTES).min(bytes)
}

/// A checked group of a data file, with the byte offsets in the file of the columns from which rows are served.
#[derive(Clone, Debug)]
pub(crate) struct RowFileOffsets {
    pub(crate) path: Arc<Path>,
    /// Length of the file.
    pub(crate) bytes: u64,
    /// End of the group.
    pub(crate) end: usize,
    pub(crate) rows: usize,
    /// The first column.
    pub(crate) ids: usize,
    pub(crate) last_steps: usize,
    pub(crate) weights: usize,
    pub(crate) scores: usize,
}

/// A range of whole blocks of a file, and its offset in the staging buffer.
struct StagedRange {
    offset: usize,
    len: usize,
    staged_at: usize,
}

/// Columns that a serving checkpoint stores in another form, or omits.
pub(crate) struct DecodedColumns {
    /// `[n, D]`, as float32.
    weights: Vec<f32>,
    /// Zeros: no row is modified after such a checkpoint.
    modified_epochs: Vec<u32>,
}

/// Verified bytes of some columns of one group.
pub(crate) struct StagedColumns<'a> {
    group: &'a GroupReader,
    buffer: PooledBuf,
    ranges: Vec<StagedRange>,
}

impl StagedColumns<'_> {
    /// Bytes of a range of a column that was read.
    fn bytes(&self, column: &FileColumn, range: &Range<usize>) -> &[u8] {
        let offset = self.group.start + column.start + range.start;
        let after = self.ranges.partition_point(|range| range.offset <= offset);
        // Nothing was read of an empty column.
        let Some(staged) = self.ranges.get(after.wrapping_sub(1)) else { return &[] };
        let start = staged.staged_at + (offset - staged.offset);
        &self.buffer[start..start + range.len()]
    }

    /// Values of a range of a column. They are aligned: ranges are staged at whole blocks, and columns of wide values
    /// come first in a file.
    fn values<T: bytemuck::Pod>(&self, column: &FileColumn, range: Range<usize>) -> &[T] {
        bytemuck::cast_slice(self.bytes(column, &range))
    }

    /// Values of the requested rows in one of their columns.
    pub(super) fn rows<T: bytemuck::Pod>(&self, field: ColumnField) -> &[T] {
        let column = self.group.layout.column(field);
        let (row, rows) = (column.bytes_per_row(), &self.group.rows);
        self.values(column, rows.start * row..rows.end * row)
    }

    /// Decodes the requested rows of a serving checkpoint to the columns of other checkpoints.
    pub(crate) fn decode(&self, precision: WeightPrecision, dim: usize) -> Result<DecodedColumns> {
        let rows = &self.group.rows;
        let mut weights = memory::zeros("read rows", rows.len() * dim)?;
        let column = self.group.layout.column(ColumnField::Vector(0));
        let row = column.bytes_per_row();
        let stored: &[u8] = self.rows(ColumnField::Vector(0));
        for_each(
            stored.chunks(row * ROWS_PER_TASK).zip(weights.chunks_mut(dim * ROWS_PER_TASK)),
            |(stored, weights)| {
                let rows = stored.chunks_exact(row).zip(weights.chunks_exact_mut(dim));
                rows.for_each(|(stored, into)| precision.load(stored, into));
            },
        );
        Ok(DecodedColumns { weights, modified_epochs: memory::zeros("read rows", rows.len())? })
    }

    /// The requested rows. `decoded` is required for a serving checkpoint.
    pub(crate) fn columns<'a>(&'a self, layout: RowLayout, decoded: Option<&'a DecodedColumns>) -> RowColumns<'a> {
        let slots = self.group.slots;
        RowColumns {
            ids: self.rows(ColumnField::Id),
            last_steps: self.rows(ColumnField::LastStep),
            counts: self.rows(ColumnField::Count),
            scores: self.rows(ColumnField::Score),
            scalars: (slots && layout.scalar_slot).then(|| self.rows(ColumnField::Scalar)),
            modified_epochs: decoded
                .map_or_else(|| self.rows(ColumnField::ModifiedEpoch), |served| &served.modified_epochs),
            parts: match decoded {
                Some(served) => vec![&served.weights],
                None => (0..=if slots { layout.vector_slots } else { 0 })
                    .map(|part| self.rows(ColumnField::Vector(part)))
                    .collect(),
            },
        }
    }
}
