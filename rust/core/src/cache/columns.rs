//! Rows as columns, the form in which checkpoint files store them.

use std::borrow::Cow;
use std::ops::Range;

use crate::error::Result;
use crate::memory;
use crate::rows::RowHeader;
use crate::types::Id;

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
