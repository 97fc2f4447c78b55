//! A group of rows as the bytes of its file: ordered, copied column by column, each chunk's checksum taken while it is in a core's cache.

use std::ops::Range;

use super::format::{CHUNK_BYTES, Column, DataShape, Field, FileLayout, group_rows};
use super::manifest::{DataFile, TableSpec};
use super::order::{Misplaced, Order};
use super::stream::{Shift, scatter};
use crate::config::OptimizerKind;
use crate::error::{Error, Kind, Result};
use crate::kernels::threads::for_each;
use crate::memory;
use crate::prefetch::{prefetch, prefetch_range};
use crate::rows::RowRef;
use crate::types::Id;

/// Rows whose metadata one thread copies at a time: whole chunks of every such column.
const METADATA_ROWS: usize = CHUNK_BYTES / 4;
/// Chunks of weights or slots that one thread copies at a time.
const CHUNKS_PER_TASK: usize = (512 << 10) / CHUNK_BYTES;
/// How many rows ahead a copy asks for memory, of weights and slots,
const AHEAD: usize = 8;
/// and of metadata.
const METADATA_AHEAD: usize = 40;

/// How the rows of one rank's part of a table become files.
#[derive(Debug)]
pub(super) struct GroupFormat<'a> {
    spec: &'a TableSpec,
    optimizer: OptimizerKind,
    buckets: Range<u32>,
    /// Rows of a full group.
    pub(super) capacity: usize,
    /// Floats of a row's vector part.
    pub(super) vector_floats: usize,
    order: Order,
    /// Checksums of the rows' parts of each column, where chunks are whole rows.
    sums: Vec<Vec<u32>>,
    /// By a row's part of a column.
    shift: Shift,
}

impl<'a> GroupFormat<'a> {
    /// Of groups of at most `bytes`.
    pub(super) fn new(spec: &'a TableSpec, optimizer: OptimizerKind, buckets: Range<u32>, bytes: usize) -> Self {
        let dim = spec.dim as usize;
        let capacity = group_rows(optimizer, dim, bytes);
        let vector_floats = optimizer.layout(dim).vector_floats();
        let parts = if CHUNK_BYTES.is_multiple_of(dim * 4) { vector_floats / dim } else { 0 };
        let (sums, shift) = (vec![Vec::new(); parts], Shift::by(dim * 4));
        Self { spec, optimizer, buckets, capacity, vector_floats, order: Order::default(), sums, shift }
    }

    fn layout(&self, rows: usize) -> Result<FileLayout> {
        let shape = DataShape { rows, buckets: self.buckets.len(), tombstones: 0 };
        FileLayout::new(self.optimizer, self.spec.dim as usize, shape)
            .ok_or_else(|| Error::new(Kind::Input, "a group's size overflows"))
    }

    /// Bytes of the file of `rows` rows.
    pub(super) fn file_bytes(&self, rows: usize) -> Result<usize> {
        let layout = self.layout(rows)?;
        Ok(layout.header(self.spec, &self.buckets).len() + layout.data_bytes)
    }

    /// Make the file of `rows`, in any order, at the start of `image`, which has room for it.
    pub(super) fn write(&mut self, rows: &[RowRef<'_>], image: &mut [u8]) -> Result<DataFile> {
        memory::room("order rows for a file", rows.len() * (Order::ROW_BYTES + 4 * self.sums.len()))?;
        let made = self.order.make(rows, self.vector_floats, &self.buckets, self.spec.total_num_buckets);
        made.map_err(|misplaced| self.refuse(misplaced))?;
        self.sums.iter_mut().for_each(|sums| sums.resize(rows.len(), 0));
        let layout = self.layout(rows.len())?;
        let header = layout.header(self.spec, &self.buckets);
        let len = header.len() + layout.data_bytes;
        let (head, data) = image[..len].split_at_mut(header.len());
        head.copy_from_slice(&header);
        let mut checksums = vec![0; layout.column(Field::Checksums).shape[0]];
        self.fill(&layout, rows, data, &mut checksums);
        let checksums: &[u8] = bytemuck::cast_slice(&checksums);
        data[layout.column(Field::Checksums).range()].copy_from_slice(checksums);
        data[layout.column(Field::Pad).range()].fill(0);
        Ok(DataFile {
            rows: rows.len() as u64,
            tombstones: 0,
            bytes: len as u64,
            header_crc32c: crc32c::crc32c(&header),
            checksums_crc32c: crc32c::crc32c(checksums),
        })
    }

    fn refuse(&self, misplaced: Misplaced) -> Error {
        let what = match misplaced {
            Misplaced::Foreign(id, bucket) => {
                format!("row {id} is of bucket {bucket}, which is not within {:?}", self.buckets)
            }
            Misplaced::Twice(id) => format!("row {id} is there twice"),
            Misplaced::Floats(id) => format!("row {id} does not come with {} floats", self.vector_floats),
        };
        Error::new(Kind::Input, format!("table {:?}: {what}", self.spec.table))
    }

    /// Fill the checked columns and `checksums`. A column's bytes are aligned for its type: wider columns lie first, in a buffer
    /// aligned for all.
    fn fill(&mut self, layout: &FileLayout, rows: &[RowRef<'_>], data: &mut [u8], checksums: &mut [u32]) {
        let (mut vectors, mut vector_sums, mut metadata) = (Vec::new(), Vec::new(), Vec::new());
        let (mut data, mut checksums) = (data, checksums);
        for column in layout.checked_columns() {
            let (bytes, rest) = data.split_at_mut(column.bytes);
            let (sums, rest_sums) = checksums.split_at_mut(column.bytes.div_ceil(CHUNK_BYTES));
            (data, checksums) = (rest, rest_sums);
            match column.field {
                Field::Vector(_) => {
                    vectors.push(bytes);
                    vector_sums.push(sums);
                }
                field if field.is_of_rows() => metadata.push((column, bytes, sums)),
                field => {
                    if field == Field::BucketOffsets {
                        bytes.copy_from_slice(bytemuck::cast_slice(&self.order.starts));
                    }
                    take_checksums(bytes, sums);
                }
            }
        }
        let dim = self.spec.dim as usize;
        let placed = scatter(rows, &self.order.places, &mut vectors, dim, &mut self.sums);
        let vectors = vectors.into_iter().zip(vector_sums).enumerate().flat_map(|(part, (bytes, sums))| {
            let tasks = bytes.chunks_mut(CHUNKS_PER_TASK * CHUNK_BYTES).zip(sums.chunks_mut(CHUNKS_PER_TASK));
            tasks.enumerate().map(move |(task, (bytes, sums))| Task::Vectors {
                part,
                start: task * CHUNKS_PER_TASK * CHUNK_BYTES,
                bytes,
                sums,
            })
        });
        for_each(vectors.chain(metadata_tasks(&self.order.rows, metadata)), |task| match task {
            Task::Vectors { part, start, bytes, sums } if placed => match self.sums.get(part) {
                Some(of_rows) => self.join_checksums(&of_rows[start / (dim * 4)..][..bytes.len() / (dim * 4)], sums),
                None => take_checksums(bytes, sums),
            },
            Task::Vectors { part, start, bytes, sums } => {
                self.fill_vectors(rows, part * dim..(part + 1) * dim, start, bytes, sums);
            }
            Task::Metadata { rows, columns } => self.fill_metadata(rows, columns),
        });
    }

    /// Checksums of chunks from those of their rows.
    fn join_checksums(&self, of_rows: &[u32], sums: &mut [u32]) {
        let rows = CHUNK_BYTES / (self.spec.dim as usize * 4);
        for (sum, of_rows) in sums.iter_mut().zip(of_rows.chunks(rows)) {
            *sum = self.shift.join(of_rows);
        }
    }

    /// Fill chunks of weights or of a slot whose rows share lines.
    fn fill_vectors(
        &self,
        rows: &[RowRef<'_>],
        floats: Range<usize>,
        start: usize,
        bytes: &mut [u8],
        sums: &mut [u32],
    ) {
        let row_bytes = floats.len() * 4;
        let part = |row: &u32| &rows[*row as usize].vector[floats.clone()];
        let mut at = start;
        for (sum, chunk) in sums.iter_mut().zip(bytes.chunks_mut(CHUNK_BYTES)) {
            let mut rest = &mut *chunk;
            // Chunks begin and end within rows where those are no power of two wide.
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

    /// Fill the columns of metadata for `rows`, by their numbers.
    fn fill_metadata(&self, rows: &[u32], columns: Vec<MetadataPart<'_>>) {
        fn values<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
            bytemuck::cast_slice_mut(bytes)
        }
        let mut to = Metadata::default();
        let mut checked = Vec::with_capacity(columns.len());
        for (field, bytes, sums) in columns {
            checked.push((field, sums));
            match field {
                Field::Id => to.ids = values(bytes),
                Field::LastStep => to.last_steps = values(bytes),
                Field::Count => to.counts = values(bytes),
                Field::Score => to.scores = values(bytes),
                Field::Scalar => to.scalars = values(bytes),
                Field::ModifiedEpoch => to.modified_epochs = values(bytes),
                Field::BucketOffsets | Field::Tombstone | Field::Vector(_) | Field::Checksums | Field::Pad => {}
            }
        }
        let headers = &self.order.headers;
        for (at, &row) in rows.iter().enumerate() {
            if let Some(&later) = rows.get(at + METADATA_AHEAD) {
                prefetch(headers, later as usize);
            }
            let header = &headers[row as usize].0;
            to.ids[at] = header.id;
            to.last_steps[at] = header.last_step;
            to.counts[at] = header.count;
            to.scores[at] = header.score;
            if let Some(scalar) = to.scalars.get_mut(at) {
                *scalar = header.scalar;
            }
            to.modified_epochs[at] = header.modified_epoch;
        }
        for (field, sums) in checked {
            take_checksums(to.bytes(field), sums);
        }
    }
}

/// Columns of metadata as values; no scalars where the optimizer has none.
#[derive(Default)]
struct Metadata<'a> {
    ids: &'a mut [Id],
    last_steps: &'a mut [u64],
    counts: &'a mut [u32],
    scores: &'a mut [f32],
    scalars: &'a mut [f32],
    modified_epochs: &'a mut [u32],
}

impl Metadata<'_> {
    fn bytes(&self, field: Field) -> &[u8] {
        match field {
            Field::Id => bytemuck::cast_slice(self.ids),
            Field::LastStep => bytemuck::cast_slice(self.last_steps),
            Field::Count => bytemuck::cast_slice(self.counts),
            Field::Score => bytemuck::cast_slice(self.scores),
            Field::Scalar => bytemuck::cast_slice(self.scalars),
            Field::ModifiedEpoch => bytemuck::cast_slice(self.modified_epochs),
            Field::BucketOffsets | Field::Tombstone | Field::Vector(_) | Field::Checksums | Field::Pad => &[],
        }
    }
}

/// Some rows' part of a column of metadata, and the place of its checksums.
type MetadataPart<'a> = (Field, &'a mut [u8], &'a mut [u32]);

/// A part of the columns, and the place of its checksums.
enum Task<'a> {
    /// Whole chunks from byte `start` on of a part of the rows' vector parts: weights, or a slot.
    Vectors { part: usize, start: usize, bytes: &'a mut [u8], sums: &'a mut [u32] },
    /// The metadata of some rows, in all of their columns.
    Metadata { rows: &'a [u32], columns: Vec<MetadataPart<'a>> },
}

fn metadata_tasks<'a>(rows: &'a [u32], columns: Vec<(&Column, &'a mut [u8], &'a mut [u32])>) -> Vec<Task<'a>> {
    let mut tasks: Vec<_> = rows.chunks(METADATA_ROWS).map(|rows| (rows, Vec::with_capacity(columns.len()))).collect();
    for (column, bytes, sums) in columns {
        let bytes_per_task = METADATA_ROWS * column.bytes_per_row();
        let parts = bytes.chunks_mut(bytes_per_task).zip(sums.chunks_mut(bytes_per_task / CHUNK_BYTES));
        for ((_, columns), (bytes, sums)) in tasks.iter_mut().zip(parts) {
            columns.push((column.field, bytes, sums));
        }
    }
    tasks.into_iter().map(|(rows, columns)| Task::Metadata { rows, columns }).collect()
}

fn take_checksums(bytes: &[u8], sums: &mut [u32]) {
    for (sum, chunk) in sums.iter_mut().zip(bytes.chunks(CHUNK_BYTES)) {
        *sum = crc32c::crc32c(chunk);
    }
}
