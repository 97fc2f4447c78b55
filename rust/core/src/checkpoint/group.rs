//! A group of rows as the bytes of its file: ordered, copied column by column, each chunk's checksum taken while it is in a core's cache.

use std::ops::Range;

use super::format::{CHUNK_BYTES, DataShape, Field, FileLayout, group_rows};
use super::manifest::{DataFile, TableSpec};
use super::order::{Metadata, Misplaced, Order};
use super::stream::{Shift, scatter};
use crate::config::OptimizerKind;
use crate::error::{Error, Kind, Result};
use crate::kernels::threads::for_each_on_half;
use crate::memory;
use crate::prefetch::prefetch_range;
use crate::rows::RowRef;

/// Chunks of a column that one thread fills or checks at a time.
const CHUNKS_PER_TASK: usize = (512 << 10) / CHUNK_BYTES;
/// How many rows ahead a copy asks for memory.
const AHEAD: usize = 8;

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
        let layout = self.layout(rows.len())?;
        let header = layout.header(self.spec, &self.buckets);
        let len = header.len() + layout.data_bytes;
        let (head, data) = image[..len].split_at_mut(header.len());
        head.copy_from_slice(&header);
        let (columns, rest) = Columns::of(&layout, data);
        let sums = self.fill(rows, columns)?;
        let mut checksums: Vec<u32> = Vec::with_capacity(layout.column(Field::Checksums).shape[0]);
        for column in layout.checked_columns() {
            let of_column = sums.iter().find(|(field, _)| *field == column.field);
            checksums.extend(of_column.map_or(&[][..], |(_, sums)| sums.as_slice()));
        }
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

    /// Fill the columns; the checksums of each.
    fn fill(&mut self, rows: &[RowRef<'_>], columns: Columns<'_>) -> Result<Vec<(Field, Vec<u32>)>> {
        let Columns { mut vectors, mut metadata, starts } = columns;
        let (wanted, total) = (self.vector_floats, self.spec.total_num_buckets);
        let made = self.order.make(rows, wanted, &self.buckets, total, values_of(&mut metadata));
        made.map_err(|misplaced| self.refuse(misplaced))?;
        starts.copy_from_slice(bytemuck::cast_slice(&self.order.starts));
        for sums in &mut self.sums {
            sums.resize(rows.len(), 0);
        }
        let dim = self.spec.dim as usize;
        let placed = scatter(rows, &self.order.places, &mut vectors, dim, &mut self.sums);
        let vectors = (0..).zip(vectors).map(|(part, bytes)| (Field::Vector(part), bytes));
        let columns: Vec<(Field, &mut [u8])> =
            vectors.chain(metadata).chain([(Field::BucketOffsets, starts)]).collect();
        let mut sums: Vec<(Field, Vec<u32>)> =
            columns.iter().map(|(field, bytes)| (*field, vec![0; bytes.len().div_ceil(CHUNK_BYTES)])).collect();
        let tasks = columns.into_iter().zip(&mut sums).flat_map(|((field, bytes), (_, sums))| {
            let parts = bytes.chunks_mut(CHUNKS_PER_TASK * CHUNK_BYTES).zip(sums.chunks_mut(CHUNKS_PER_TASK));
            parts.enumerate().map(move |(task, part)| (field, task * CHUNKS_PER_TASK * CHUNK_BYTES, part))
        });
        for_each_on_half(tasks, |(field, start, (bytes, sums))| match field {
            Field::Vector(part) if !placed => {
                self.fill_vectors(rows, part * dim..(part + 1) * dim, start, bytes, sums);
            }
            Field::Vector(part) if part < self.sums.len() => {
                self.join_checksums(&self.sums[part][start / (dim * 4)..][..bytes.len() / (dim * 4)], sums);
            }
            _ => take_checksums(bytes, sums),
        });
        Ok(sums)
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
}

/// The checked columns of a file that is made. Their bytes are aligned for their types: wider columns lie first, in a buffer aligned for
/// all.
struct Columns<'a> {
    vectors: Vec<&'a mut [u8]>,
    metadata: Vec<(Field, &'a mut [u8])>,
    starts: &'a mut [u8],
}

impl<'a> Columns<'a> {
    /// Of a file without tombstones; and what comes after them.
    fn of(layout: &FileLayout, mut data: &'a mut [u8]) -> (Self, &'a mut [u8]) {
        let mut columns = Self { vectors: Vec::new(), metadata: Vec::new(), starts: &mut [] };
        for column in layout.checked_columns() {
            let (bytes, rest) = data.split_at_mut(column.bytes);
            data = rest;
            match column.field {
                Field::Vector(_) => columns.vectors.push(bytes),
                Field::BucketOffsets => columns.starts = bytes,
                field if field.is_of_rows() => columns.metadata.push((field, bytes)),
                _ => {}
            }
        }
        (columns, data)
    }
}

/// Columns of metadata as values.
fn values_of<'a>(columns: &'a mut [(Field, &mut [u8])]) -> Metadata<'a> {
    fn values<T: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [T] {
        bytemuck::cast_slice_mut(bytes)
    }
    let mut to = Metadata::default();
    for (field, bytes) in columns {
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
    to
}

fn take_checksums(bytes: &[u8], sums: &mut [u32]) {
    for (sum, chunk) in sums.iter_mut().zip(bytes.chunks(CHUNK_BYTES)) {
        *sum = crc32c::crc32c(chunk);
    }
}
