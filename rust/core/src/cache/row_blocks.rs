//! Containers of rows: blocks, chunks and lookup results for the table API, columns as checkpoint files store them, and
//! large groups, passed in place or gathered from smaller parts.

use std::borrow::Cow;
use std::ops::Range;

use crate::error::{Kind, Result};
use crate::rows::{RowHeader, RowList, RowRef};
use crate::runtime::memory;
use crate::types::Id;

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

/// `n` rows of a table of width `D`, with a slice for each field.
#[derive(Clone, Debug)]
pub struct RowColumns<'a> {
    /// `[n]`
    pub ids: &'a [Id],
    /// `[n]`
    pub last_steps: &'a [u64],
    /// `[n]`
    pub counts: &'a [u32],
    /// `[n]`
    pub scores: &'a [f32],
    /// `[n]` for an optimizer with a scalar slot.
    pub scalars: Option<&'a [f32]>,
    /// `[n]`
    pub modified_epochs: &'a [u32],
    /// `[n, D]` each: the weights, then the vector slots. Missing vector slots of the table are zeros.
    pub parts: Vec<&'a [f32]>,
}

impl RowColumns<'_> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the header of a row.
    pub fn header(&self, row: usize) -> RowHeader {
        RowHeader {
            id: self.ids[row],
            last_step: self.last_steps[row],
            count: self.counts[row],
            score: self.scores[row],
            scalar: self.scalars.map_or(0.0, |scalars| scalars[row]),
            modified_epoch: self.modified_epochs[row],
        }
    }

    /// Copies the vector part of a row: the present parts, then zeros.
    pub fn copy_vector(&self, row: usize, into: &mut [f32]) {
        let dim = self.parts[0].len() / self.len();
        let (given, slots) = into.split_at_mut(dim * self.parts.len());
        for (part, into) in self.parts.iter().zip(given.chunks_exact_mut(dim)) {
            into.copy_from_slice(&part[row * dim..(row + 1) * dim]);
        }
        slots.fill(0.0);
    }

    /// Returns the same rows without optimizer slots.
    #[must_use]
    pub fn without_slots(&self) -> Self {
        Self { scalars: None, parts: self.parts[..1].to_vec(), ..self.clone() }
    }
}

/// A subset of the rows of [`RowColumns`].
#[derive(Clone, Copy, Debug)]
pub struct PickedRows<'a> {
    columns: &'a RowColumns<'a>,
    /// The row numbers, ascending. `None` means all rows.
    numbers: Option<&'a [u32]>,
}

impl<'a> PickedRows<'a> {
    /// Selects all rows.
    pub fn all(columns: &'a RowColumns<'a>) -> Self {
        Self { columns, numbers: None }
    }

    /// Selects the rows with these numbers, which must ascend.
    pub fn some(columns: &'a RowColumns<'a>, numbers: &'a [u32]) -> Self {
        Self { columns, numbers: Some(numbers) }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.numbers.map_or(self.columns.len(), <[u32]>::len)
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn number(&self, at: usize) -> usize {
        self.numbers.map_or(at, |numbers| numbers[at] as usize)
    }

    /// The ids of a range of positions.
    pub(super) fn ids(&self, range: Range<usize>) -> Cow<'a, [Id]> {
        match self.numbers {
            None => Cow::Borrowed(&self.columns.ids[range]),
            Some(numbers) => Cow::Owned(numbers[range].iter().map(|&row| self.columns.ids[row as usize]).collect()),
        }
    }

    /// Returns the header of the row at a position.
    pub fn header(&self, at: usize) -> RowHeader {
        self.columns.header(self.number(at))
    }

    /// Copies the vector part of the row at a position.
    pub fn copy_vector(&self, at: usize, into: &mut [f32]) {
        self.columns.copy_vector(self.number(at), into);
    }

    /// Returns copies of rows, one after the other: headers `[n]` and vector parts `[n, floats]`.
    pub(super) fn block(&self, rows: Range<usize>, floats: usize) -> Result<(Vec<RowHeader>, Vec<f32>)> {
        let mut vectors = memory::zeros("copy rows", rows.len() * floats)?;
        let mut headers = Vec::new();
        memory::reserve(&mut headers, "copy rows", rows.len())?;
        for (row, vector) in rows.zip(vectors.chunks_exact_mut(floats)) {
            headers.push(self.header(row));
            self.copy_vector(row, vector);
        }
        Ok((headers, vectors))
    }
}

/// Accepts rows in groups. Each group has at most as many rows as the sink has space for.
pub trait GroupSink {
    /// Number of floats in a row's vector part.
    fn vector_floats(&self) -> usize;
    /// Announces the approximate number of rows, `usize::MAX` if unknown. A sink may prefer smaller groups for few
    /// rows.
    fn expect_rows(&mut self, rows: usize) {
        let _ = rows;
    }
    /// Waits until there is space for a group. Returns its maximum number of rows, at least 1.
    fn wait_for_space(&mut self) -> Result<usize>;
    /// Accepts a group. It has at most as many rows as there is space for. The rows are readable only during the call.
    /// The caller may hold the lock of the rows' table, so this must not block.
    fn take(&mut self, rows: RowList<'_>) -> Result<()>;
}

/// Copies rows that arrive in small parts into groups.
pub struct GroupGatherer<'a> {
    sink: &'a mut dyn GroupSink,
    floats: usize,
    /// Number of rows of a full group. Requested from the sink when a group starts.
    group_rows: usize,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

opaque_debug!(GroupGatherer<'_>, self, rows = self.headers.len());

impl<'a> GroupGatherer<'a> {
    /// Passes groups to `sink`.
    pub fn new(sink: &'a mut dyn GroupSink) -> Self {
        let floats = sink.vector_floats();
        Self { sink, floats, group_rows: 0, headers: Vec::new(), vectors: Vec::new() }
    }

    /// Adds rows: headers `[n]` and vector parts `[n, V]`. Groups are smaller if memory for full ones cannot be
    /// allocated.
    ///
    /// Errors: `Input` if the vector parts have another length; `Memory`; those of the sink.
    pub fn add(&mut self, mut headers: &[RowHeader], mut vectors: &[f32]) -> Result<()> {
        if vectors.len() != headers.len() * self.floats {
            return Err(Kind::Input.error(format!(
                "{} rows come with {} floats instead of {} each",
                headers.len(),
                vectors.len(),
                self.floats
            )));
        }
        while !headers.is_empty() {
            if self.headers.is_empty() {
                self.group_rows = self.sink.wait_for_space()?;
                if self.headers.capacity() == 0 {
                    // Allocates the full size, because growing would keep the group in memory twice. Memory that is not
                    // filled yet is not resident.
                    self.headers = memory::vec_with_capacity(self.group_rows);
                    self.vectors = memory::vec_with_capacity(self.group_rows * self.floats);
                }
            }
            let fits = headers.len().min(self.group_rows - self.headers.len());
            if let Err(refused) = self.reserve(fits) {
                // Passes a smaller group to the sink, which releases its memory.
                if self.headers.is_empty() {
                    return Err(refused);
                }
                self.finish()?;
                continue;
            }
            let (head, rest) = headers.split_at(fits);
            let (values, rest_values) = vectors.split_at(fits * self.floats);
            self.headers.extend_from_slice(head);
            self.vectors.extend_from_slice(values);
            (headers, vectors) = (rest, rest_values);
            if self.headers.len() == self.group_rows {
                self.finish()?;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, rows: usize) -> Result<()> {
        memory::reserve(&mut self.headers, "gather rows for a file", rows)?;
        memory::reserve(&mut self.vectors, "gather rows for a file", rows * self.floats)
    }

    /// Passes the last, unfinished group to the sink, if there is one.
    pub fn finish(&mut self) -> Result<()> {
        if self.headers.is_empty() {
            return Ok(());
        }
        self.sink.take(RowList::block(&self.headers, &self.vectors, self.floats))?;
        self.headers.clear();
        self.vectors.clear();
        Ok(())
    }
}
