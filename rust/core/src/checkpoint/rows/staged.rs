//! The rows of a data file that were read and verified, and the offsets of its columns.

use std::ops::Range;
use std::path::PathBuf;

use super::format::{ColumnField, FileColumn, FileLayout};
use crate::cache::RowColumns;
use crate::error::Result;
use crate::io::PooledBuf;
use crate::kernels::threads::for_each;
use crate::memory;
use crate::rows::{RowLayout, WeightPrecision};

/// Number of rows that one thread converts to float32 at a time.
const ROWS_PER_TASK: usize = 4096;

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
pub(super) struct StagedRange {
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) staged_at: usize,
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
    pub(super) layout: &'a FileLayout,
    pub(super) header_bytes: usize,
    /// The requested rows of the file.
    pub(super) rows: &'a Range<usize>,
    /// True if the optimizer's slots were read.
    pub(super) slots: bool,
    pub(super) buffer: PooledBuf,
    pub(super) ranges: Vec<StagedRange>,
}

impl StagedColumns<'_> {
    /// Bytes of a range of a column that was read.
    pub(super) fn bytes(&self, column: &FileColumn, range: &Range<usize>) -> &[u8] {
        let offset = self.header_bytes + column.start + range.start;
        let after = self.ranges.partition_point(|extent| extent.offset <= offset);
        // Nothing was read of an empty column.
        let Some(extent) = self.ranges.get(after.wrapping_sub(1)) else { return &[] };
        let start = extent.staged_at + (offset - extent.offset);
        &self.buffer[start..start + range.len()]
    }

    /// Values of a range of a column. They are aligned: ranges are staged at whole blocks, and columns of wide values
    /// come first in a file.
    pub(super) fn values<T: bytemuck::Pod>(&self, column: &FileColumn, range: Range<usize>) -> &[T] {
        bytemuck::cast_slice(self.bytes(column, &range))
    }

    /// Values of the requested rows in one of their columns.
    pub(super) fn rows<T: bytemuck::Pod>(&self, field: ColumnField) -> &[T] {
        let column = self.layout.column(field);
        let (row, rows) = (column.bytes_per_row(), self.rows);
        self.values(column, rows.start * row..rows.end * row)
    }

    /// Decodes the requested rows of a serving checkpoint to the columns of other checkpoints.
    pub(crate) fn decode(&self, precision: WeightPrecision, dim: usize) -> Result<DecodedColumns> {
        let rows = self.rows;
        let mut weights = memory::zeros("read rows", rows.len() * dim)?;
        let column = self.layout.column(ColumnField::Vector(0));
        let row = column.bytes_per_row();
        let stored = self.bytes(column, &(rows.start * row..rows.end * row));
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
        let slots = self.slots;
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
