//! Reads a data file: checks it against the manifest and its own header, then reads and verifies the rows of some
//! buckets into a buffer, from which they are passed on as columns.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::format::{ColumnField, FileColumn, FileLayout, GROUP_BYTES, MAX_HEADER_BYTES};
use crate::cache::RowColumns;
use crate::checkpoint::chunked_file::{check_crc32c, check_length, for_each_piece};
use crate::checkpoint::manifest::CHUNK_BYTES;
use crate::checkpoint::manifest::manifests::{DataFile, RankShare};
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
pub(super) type DataFileRequest<'a> = (PathBuf, &'a RankShare, &'a DataFile, Range<u32>);

/// One data file with verified header, checksums and bucket offsets.
#[derive(Debug)]
pub(crate) struct GroupReader {
    path: PathBuf,
    file_bytes: u64,
    header_bytes: usize,
    pub(super) layout: FileLayout,
    checksums_crc32c: u32,
    /// The requested buckets of this file.
    pub(super) buckets: Range<u32>,
    /// The rows of these buckets.
    pub(crate) rows: Range<usize>,
    /// True if the optimizer's slots are read.
    pub(crate) slots: bool,
}

impl GroupReader {
    /// Opens a file of rows, or of counts, with the layout that its manifest describes.
    pub(crate) fn open(
        layout: Option<FileLayout>,
        engine: &dyn IoEngine,
        (path, share, file, buckets): DataFileRequest<'_>,
    ) -> Result<Self> {
        let shape = share.shape(file);
        let layout = layout
            .filter(|layout| layout.data_bytes as u64 <= file.bytes)
            .ok_or_else(|| Error::corruption(&path, 0, "the file's length", "as long as its rows", file.bytes))?;
        let row_bytes: usize =
            layout.columns.iter().filter(|column| column.field.is_per_row()).map(FileColumn::bytes_per_row).sum();
        if shape.rows > 1 && shape.rows.saturating_mul(row_bytes) > GROUP_BYTES {
            return Err(Error::corruption(
                &path,
                0,
                "the number of rows",
                format!("within {GROUP_BYTES} bytes"),
                shape.rows,
            ));
        }
        let mut group = Self {
            path,
            file_bytes: file.bytes,
            header_bytes: (file.bytes - layout.data_bytes as u64) as usize,
            layout,
            checksums_crc32c: file.checksums_crc32c,
            buckets,
            rows: 0..0,
            slots: share.spec.precision.is_none(),
        };
        let io = group.reopen(engine)?;
        group.check_header(&*io, file.header_crc32c)?;
        group.check_padding(&*io)?;
        group.rows = group.read_rows_of_buckets(&io, share, shape.rows)?;
        Ok(group)
    }

    pub(super) fn reopen(&self, engine: &dyn IoEngine) -> Result<Arc<dyn IoFile>> {
        let file = engine.open(&self.path, IoOpenMode::Read)?;
        check_length(&*file, self.file_bytes)?;
        Ok(file)
    }

    fn check_header(&self, file: &dyn IoFile, crc32c: u32) -> Result<()> {
        let is_header = 8..=MAX_HEADER_BYTES;
        if !is_header.contains(&self.header_bytes) || self.header_bytes % ALIGNMENT != self.layout.lead {
            return Err(Error::corruption(
                &self.path,
                0,
                "the header's length",
                format!("within {MAX_HEADER_BYTES}, {} past a multiple of {ALIGNMENT}", self.layout.lead),
                self.header_bytes,
            ));
        }
        let mut header = vec![0; self.header_bytes];
        file.read_at(0, &mut header)?;
        check_crc32c(&self.path, 0, || "the header's checksum", &header, crc32c)?;
        let (length, text) = header.split_at(8);
        if length != (text.len() as u64).to_le_bytes() {
            return Err(Error::corruption(
                &self.path,
                0,
                "the header's length field",
                text.len(),
                format!("{length:?}"),
            ));
        }
        self.layout
            .check_header(text)
            .map_err(|what| Error::corruption(&self.path, 8, "the header", "that of the manifest's counts", what))
    }

    fn read_checksums(&self, file: &dyn IoFile) -> Result<Vec<u32>> {
        let column = self.layout.column(ColumnField::Checksums);
        let offset = (self.header_bytes + column.start) as u64;
        let mut checksums = memory::zeros("read checksums", column.shape[0])?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut checksums);
        file.read_at(offset, bytes)?;
        check_crc32c(&self.path, offset, || "the checksum of the checksums", bytes, self.checksums_crc32c)?;
        Ok(checksums)
    }

    /// Checks the padding: a changed byte is detected anywhere in a file, even in padding.
    fn check_padding(&self, file: &dyn IoFile) -> Result<()> {
        let column = self.layout.column(ColumnField::Pad);
        let offset = (self.header_bytes + column.start) as u64;
        let mut bytes = vec![0; column.bytes];
        file.read_at(offset, &mut bytes)?;
        match bytes.iter().position(|&byte| byte != 0) {
            Some(at) => Err(Error::corruption(&self.path, offset + at as u64, "the padding", 0, bytes[at])),
            None => Ok(()),
        }
    }

    /// Finds the rows of the requested buckets. The column of bucket offsets is read in windows, because its length
    /// comes from a manifest.
    fn read_rows_of_buckets(&self, file: &Arc<dyn IoFile>, share: &RankShare, rows: usize) -> Result<Range<usize>> {
        let column = self.layout.column(ColumnField::BucketOffsets);
        let first = self.buckets.start - share.bucket_begin..self.buckets.end - share.bucket_begin;
        let requested = [first.start as usize, first.end as usize];
        let (mut found, mut last, mut ascending) = ([0; 2], 0, true);
        self.for_each_window(file, column, |begin, starts: &[i64]| {
            ascending &= (begin > 0 || starts.first() == Some(&0)) && starts.is_sorted();
            ascending &= starts.first().is_none_or(|&start| start >= last);
            last = starts.last().copied().unwrap_or(last);
            for (bucket, found) in requested.iter().zip(&mut found) {
                let start = bucket.checked_sub(begin).and_then(|at| starts.get(at));
                *found = start.map_or(*found, |&start| start as usize);
            }
            Ok(())
        })?;
        if !ascending || last != rows as i64 {
            let offset = (self.header_bytes + column.start) as u64;
            return Err(Error::corruption(
                &self.path,
                offset,
                "bucket_offsets",
                format!("ascending from 0 to {rows}"),
                "not",
            ));
        }
        Ok(found[0]..found[1])
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
            let start = self.header_bytes + column.start;
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
            let offset = (self.header_bytes + column.start + range.start) as u64;
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
        let (all, mut last, mut requested) = (0..bucketing.total(), None, Vec::new());
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
                let offset = self.header_bytes + column.start + (first + row) * 8;
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
        let start = |field| self.header_bytes + self.layout.column(field).start;
        RowFileOffsets {
            path: self.path.clone(),
            bytes: self.file_bytes,
            rows: self.layout.column(ColumnField::Id).shape[0],
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

/// A checked data file, with the byte offsets of the columns from which rows are served.
#[derive(Clone, Debug)]
pub(crate) struct RowFileOffsets {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) rows: usize,
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
        let offset = self.group.header_bytes + column.start + range.start;
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
