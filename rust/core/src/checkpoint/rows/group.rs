//! Encodes a group of rows as a file. Rows are sorted and copied column by column. The checksum of a chunk is computed
//! while the chunk is still in a core's cache.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::format::{ColumnField, FileLayout, group_rows};
use super::order::{BLOCK_ROWS, GroupOrder, GroupOrderError, RowMetadataBlock};
use super::stream::{ChecksumShift, copy_past_caches, scatter};
use crate::checkpoint::manifest::manifests::{DataFile, DataShape, TableSpec};
use crate::checkpoint::manifest::names::CHUNK_BYTES;
use crate::config::OptimizerKind;
use crate::error::{Error, Kind, Result};
use crate::kernels::threads::for_each_on_half;
use crate::memory;
use crate::prefetch::prefetch_range;
use crate::rows::{RowList, WeightPrecision};
use crate::sync::lock;

/// Number of chunks of a column that one thread fills or verifies at a time.
const CHUNKS_PER_TASK: usize = (512 << 10) / CHUNK_BYTES;
/// Number of rows whose metadata one thread fills at a time: whole chunks of every column.
const ROWS_PER_TASK: usize = CHUNK_BYTES / 4;
/// Prefetch distance of a copy, in rows.
const AHEAD: usize = 8;

/// Encodes files of the rows of one rank's shard of a table.
#[derive(Debug)]
pub(crate) struct GroupEncoder<'a> {
    spec: &'a TableSpec,
    optimizer: OptimizerKind,
    buckets: Range<u32>,
    /// Number of rows of a full group.
    pub(crate) capacity: usize,
    /// Number of floats in the vector part of a row.
    pub(crate) vector_floats: usize,
    order: GroupOrder,
    /// Checksums of the rows' parts of each column, if every chunk consists of whole rows.
    sums: Vec<Vec<u32>>,
    /// Shifts a checksum by a row's part of a column.
    shift: ChecksumShift,
}

impl<'a> GroupEncoder<'a> {
    /// Creates an encoder of groups of at most `bytes`.
    pub(crate) fn new(spec: &'a TableSpec, optimizer: OptimizerKind, buckets: Range<u32>, bytes: usize) -> Self {
        let dim = spec.dim as usize;
        let capacity = group_rows(optimizer, dim, spec.precision, bytes);
        let vector_floats = optimizer.layout(dim).vector_floats();
        let joins = spec.precision.is_none() && CHUNK_BYTES.is_multiple_of(dim * 4);
        let parts = if joins { vector_floats / dim } else { 0 };
        let (sums, shift) = (vec![Vec::new(); parts], ChecksumShift::for_bytes(dim * 4));
        Self { spec, optimizer, buckets, capacity, vector_floats, order: GroupOrder::default(), sums, shift }
    }

    /// Number of rows in a group of at most `bytes`.
    pub(crate) fn rows_of(&self, bytes: usize) -> usize {
        group_rows(self.optimizer, self.spec.dim as usize, self.spec.precision, bytes)
    }

    fn layout(&self, rows: usize) -> Result<FileLayout> {
        let shape = DataShape { rows, buckets: self.buckets.len(), tombstones: 0 };
        FileLayout::new(self.optimizer, self.spec.dim as usize, self.spec.precision, shape)
            .ok_or_else(|| Error::new(Kind::Input, "a group's size overflows"))
    }

    /// Size of a file with `rows` rows.
    pub(crate) fn file_bytes(&self, rows: usize) -> Result<usize> {
        let layout = self.layout(rows)?;
        Ok(layout.header(self.spec, &self.buckets).len() + layout.data_bytes)
    }

    /// Writes the file of `rows`, which are in any order, to the start of `image`, which must be large enough.
    pub(crate) fn write(&mut self, rows: RowList<'_>, image: &mut [u8]) -> Result<DataFile> {
        let of_rows = rows.len() * (GroupOrder::ROW_BYTES + 4 * self.sums.len());
        memory::check_system_memory("order rows for a file", of_rows + self.buckets.len() * GroupOrder::BUCKET_BYTES)?;
        let layout = self.layout(rows.len())?;
        let header = layout.header(self.spec, &self.buckets);
        let len = header.len() + layout.data_bytes;
        let (head, data) = image[..len].split_at_mut(header.len());
        head.copy_from_slice(&header);
        let mut checksums: Vec<u32> = vec![0; layout.column(ColumnField::Checksums).shape[0]];
        let (checked, rest) = data.split_at_mut(layout.column(ColumnField::Checksums).start);
        self.fill(rows, GroupColumns::of(&layout, checked, &mut checksums))?;
        let checksums: &[u8] = bytemuck::cast_slice(&checksums);
        let (to, pad) = rest.split_at_mut(checksums.len());
        to.copy_from_slice(checksums);
        pad.fill(0);
        Ok(DataFile {
            rows: rows.len() as u64,
            tombstones: 0,
            bytes: len as u64,
            header_crc32c: crc32c::crc32c(&header),
            checksums_crc32c: crc32c::crc32c(checksums),
        })
    }

    fn order_error(&self, why: GroupOrderError) -> Error {
        let what = match why {
            GroupOrderError::ForeignBucket(id, bucket) => {
                format!("row {id} is of bucket {bucket}, which is not within {:?}", self.buckets)
            }
            GroupOrderError::DuplicateId(id) => format!("row {id} is there twice"),
            GroupOrderError::WrongWidth(id) => format!("row {id} does not come with {} floats", self.vector_floats),
        };
        Error::new(Kind::Input, format!("table {:?}: {what}", self.spec.table))
    }

    /// Fills the columns and their checksums.
    fn fill(&mut self, rows: RowList<'_>, columns: GroupColumns<'_>) -> Result<()> {
        let GroupColumns { mut vectors, mut metadata, starts } = columns;
        let made = self.order.make(rows, self.vector_floats, &self.buckets, self.spec.bucketing());
        made.map_err(|misplaced| self.order_error(misplaced))?;
        starts.bytes.copy_from_slice(bytemuck::cast_slice(&self.order.starts));
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
        let parts = vectors.into_iter().chain([starts]).flat_map(GroupColumnPart::tasks);
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
        Err(Error::new(Kind::Input, what))
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

/// A column of a file that is being encoded, or whole chunks of one, and the checksums of its chunks.
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

/// The checksummed columns of a file that is being encoded. Their bytes are aligned for their types, because wider
/// columns come first in an aligned buffer.
struct GroupColumns<'a> {
    vectors: Vec<GroupColumnPart<'a>>,
    metadata: Vec<GroupColumnPart<'a>>,
    starts: GroupColumnPart<'a>,
}

impl<'a> GroupColumns<'a> {
    /// Columns of a file without tombstones.
    fn of(layout: &FileLayout, bytes: &'a mut [u8], sums: &'a mut [u32]) -> Self {
        let mut all = GroupColumnPart { field: ColumnField::Pad, bytes, sums };
        let starts = GroupColumnPart { field: ColumnField::BucketOffsets, bytes: &mut [], sums: &mut [] };
        let mut columns = Self { vectors: Vec::new(), metadata: Vec::new(), starts };
        for column in layout.checked_columns() {
            let part = GroupColumnPart { field: column.field, ..all.split_front(column.bytes) };
            match column.field {
                ColumnField::Vector(_) => columns.vectors.push(part),
                ColumnField::BucketOffsets => columns.starts = part,
                field if field.is_per_row() => columns.metadata.push(part),
                _ => {}
            }
        }
        columns
    }
}
