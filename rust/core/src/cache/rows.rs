//! Containers of rows for the table API: blocks, chunks, lookup results, device tensors.

use crate::rows::{RowHeader, RowRef};

/// Rows to write: `n` headers (id, metadata, scalar slot) and `[n, V]` vector parts.
#[derive(Clone, Copy, Debug)]
pub struct RowBlock<'a> {
    /// `[n]`
    pub headers: &'a [RowHeader],
    /// `[n, V]`
    pub vectors: &'a [f32],
}

/// Rows found by id, in the order of the ids.
#[derive(Clone, Debug, Default)]
pub struct FoundRows {
    /// `[n]`: true if the table has the row. Otherwise the other fields contain the row's initial values.
    pub found: Vec<bool>,
    /// `[n]`
    pub headers: Vec<RowHeader>,
    /// `[n, V]`
    pub vectors: Vec<f32>,
}

/// Rows of a walk over a table, in owned memory.
#[derive(Clone, Debug, Default)]
pub struct RowChunk {
    /// `[n]`: id, metadata, scalar slot.
    pub headers: Vec<RowHeader>,
    /// `[n, V]`
    pub vectors: Vec<f32>,
}

impl RowChunk {
    /// Adds a copy of a row.
    #[inline]
    pub(super) fn push(&mut self, row: RowRef<'_>) {
        self.headers.push(*row.header);
        self.vectors.extend_from_slice(row.vector);
    }

    /// The row at a position; its vector part has `floats` floats.
    #[inline]
    pub(super) fn row(&self, position: usize, floats: usize) -> RowRef<'_> {
        RowRef { header: &self.headers[position], vector: &self.vectors[position * floats..][..floats] }
    }
}

/// The tensors of a device tier in RAM, for the native kernels. `S` is the number of slots. If another thread may
/// replace them with larger ones, look them up and use them within [`Plan::exclusively`](super::Plan::exclusively).
#[derive(Debug)]
pub struct DeviceTensors<'a> {
    /// `[S, D]`
    pub weights: &'a mut [f32],
    /// Each `[S, D]`
    pub vector_slots: Vec<&'a mut [f32]>,
    /// `[S]` if the layout has a scalar slot.
    pub scalars: Option<&'a mut [f32]>,
}
