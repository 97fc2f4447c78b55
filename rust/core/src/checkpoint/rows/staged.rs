//! The rows of a data file as they were read and verified, and where they lie in the file.

use std::ops::Range;
use std::path::PathBuf;

use super::format::{Column, Field, FileLayout};
use crate::cache::RowColumns;
use crate::error::Result;
use crate::io::PooledBuf;
use crate::kernels::threads::for_each;
use crate::memory;
use crate::rows::{Precision, RowLayout};

/// How many rows one thread turns into float32 at a time.
const ROWS_PER_TASK: usize = 4096;

/// A data file that was checked, and where the columns start in it that a row is served from, in bytes.
#[derive(Clone, Debug)]
pub(crate) struct FileOfRows {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) rows: usize,
    pub(crate) ids: usize,
    pub(crate) last_steps: usize,
    pub(crate) weights: usize,
    pub(crate) scores: usize,
}

/// A range of whole blocks of a file, and where its bytes lie in the staging buffer.
pub(super) struct Extent {
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) staged_at: usize,
}

/// What a file of a serving checkpoint has in another form than a row does, or not at all.
pub(crate) struct Served {
    /// `[n, D]`, as float32.
    weights: Vec<f32>,
    /// Zeros: nothing is modified since such a checkpoint.
    modified_epochs: Vec<u32>,
}

/// Verified bytes of some columns of one group.
pub(crate) struct Staged<'a> {
    pub(super) layout: &'a FileLayout,
    pub(super) header_bytes: usize,
    /// The wanted rows of the file.
    pub(super) rows: &'a Range<usize>,
    /// Whether the optimizer's slots were read.
    pub(super) slots: bool,
    pub(super) buffer: PooledBuf,
    pub(super) extents: Vec<Extent>,
}

impl Staged<'_> {
    /// A byte range of a column that was read.
    pub(super) fn bytes(&self, column: &Column, range: &Range<usize>) -> &[u8] {
        let offset = self.header_bytes + column.start + range.start;
        let after = self.extents.partition_point(|extent| extent.offset <= offset);
        // Nothing of an empty column was read.
        let Some(extent) = self.extents.get(after.wrapping_sub(1)) else { return &[] };
        let start = extent.staged_at + (offset - extent.offset);
        &self.buffer[start..start + range.len()]
    }

    /// The values there. They are aligned: extents are staged at whole blocks, and columns of wide values lie first in a file.
    pub(super) fn values<T: bytemuck::Pod>(&self, column: &Column, range: Range<usize>) -> &[T] {
        bytemuck::cast_slice(self.bytes(column, &range))
    }

    /// The values of the wanted rows in one of their columns.
    pub(super) fn rows<T: bytemuck::Pod>(&self, field: Field) -> &[T] {
        let column = self.layout.column(field);
        let (row, rows) = (column.bytes_per_row(), self.rows);
        self.values(column, rows.start * row..rows.end * row)
    }

    /// What is made of the wanted rows of a serving checkpoint, so that they are columns as those of any other.
    pub(crate) fn served(&self, precision: Precision, dim: usize) -> Result<Served> {
        let rows = self.rows;
        let mut weights = memory::zeros("read rows", rows.len() * dim)?;
        let column = self.layout.column(Field::Vector(0));
        let row = column.bytes_per_row();
        let stored = self.bytes(column, &(rows.start * row..rows.end * row));
        for_each(
            stored.chunks(row * ROWS_PER_TASK).zip(weights.chunks_mut(dim * ROWS_PER_TASK)),
            |(stored, weights)| {
                let rows = stored.chunks_exact(row).zip(weights.chunks_exact_mut(dim));
                rows.for_each(|(stored, into)| precision.load(stored, into));
            },
        );
        Ok(Served { weights, modified_epochs: memory::zeros("read rows", rows.len())? })
    }

    /// The wanted rows. `served` is what was made of those of a serving checkpoint.
    pub(crate) fn columns<'a>(&'a self, layout: RowLayout, served: Option<&'a Served>) -> RowColumns<'a> {
        let slots = self.slots;
        RowColumns {
            ids: self.rows(Field::Id),
            last_steps: self.rows(Field::LastStep),
            counts: self.rows(Field::Count),
            scores: self.rows(Field::Score),
            scalars: (slots && layout.scalar_slot).then(|| self.rows(Field::Scalar)),
            modified_epochs: served.map_or_else(|| self.rows(Field::ModifiedEpoch), |served| &served.modified_epochs),
            parts: match served {
                Some(served) => vec![&served.weights],
                None => (0..=if slots { layout.vector_slots } else { 0 })
                    .map(|part| self.rows(Field::Vector(part)))
                    .collect(),
            },
        }
    }
}
