//! What a lookup writes: the row of each id, and whether there is one.

use super::files::RowFileSet;
use super::missing::MissingWeights;
use crate::rows::WeightPrecision;
use crate::types::Id;

/// Bytes that are copied by one instruction where the processor has one for so many.
const COPIED_BYTES: usize = 64;

/// Where a lookup writes rows, in one of the forms that it gives.
pub(super) trait RowOutput {
    /// Write the row at a position, from the bytes that a file has of it.
    fn put(&mut self, files: &RowFileSet, position: usize, row: &[u8]);

    /// Write what an id without a row reads.
    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id);

    /// Where the row at a position is written as the bytes of a file that has float32; `None` where that is not this form.
    fn float32(&mut self, position: usize) -> Option<&mut [u8]>;

    /// Whether [`Output::float32`] gives places.
    fn is_float32(&self) -> bool;
}

/// Rows as float32: `[N, D]`.
pub(super) struct Float32Output<'a> {
    pub(super) out: &'a mut [f32],
    pub(super) dim: usize,
}

impl Float32Output<'_> {
    #[inline(always)]
    #[allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.
    fn row(&mut self, position: usize) -> &mut [f32] {
        &mut self.out[position * self.dim..][..self.dim]
    }
}

impl RowOutput for Float32Output<'_> {
    fn put(&mut self, files: &RowFileSet, position: usize, row: &[u8]) {
        files.read(row, self.row(position));
    }

    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id) {
        missing.fill(id, self.row(position));
    }

    #[inline(always)]
    #[allow(clippy::inline_always)] // As `row`.
    fn float32(&mut self, position: usize) -> Option<&mut [u8]> {
        Some(bytemuck::cast_slice_mut(self.row(position)))
    }

    fn is_float32(&self) -> bool {
        true
    }
}

/// Rows as the served files store them: `[N, bytes of a row]`.
pub(super) struct StoredOutput<'a> {
    pub(super) out: &'a mut [u8],
    pub(super) precision: WeightPrecision,
    /// One row as float32.
    pub(super) row: Vec<f32>,
    /// The position of a row that the precision cannot hold.
    pub(super) unrepresentable: Option<usize>,
}

impl StoredOutput<'_> {
    /// Store the row that is in `self.row`.
    fn store(&mut self, position: usize) {
        let bytes = self.precision.row_bytes(self.row.len());
        let to = &mut self.out[position * bytes..][..bytes];
        if self.precision.store(&self.row, self.row.len(), to).is_err() {
            self.unrepresentable.get_or_insert(position);
        }
    }
}

impl RowOutput for StoredOutput<'_> {
    fn put(&mut self, _: &RowFileSet, position: usize, row: &[u8]) {
        let bytes = self.precision.row_bytes(self.row.len());
        if row.len() == bytes {
            self.out[position * bytes..][..bytes].copy_from_slice(row);
            return;
        }
        // A row of a trainer's delta, which is held against the precision before the delta is served.
        WeightPrecision::Fp32.load(row, &mut self.row);
        self.store(position);
    }

    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id) {
        missing.fill(id, &mut self.row);
        self.store(position);
    }

    fn float32(&mut self, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn is_float32(&self) -> bool {
        false
    }
}

/// The rows of a lookup, which are written one by one. `note` is told the position of each id and whether it has a row.
pub(super) struct LookupWriter<'a, O, N> {
    files: &'a RowFileSet,
    missing: &'a MissingWeights,
    ids: &'a [Id],
    out: &'a mut O,
    on_row: N,
    missing_rows: usize,
}

impl<'a, O: RowOutput, N: FnMut(usize, bool)> LookupWriter<'a, O, N> {
    pub(super) fn new(
        (files, missing): (&'a RowFileSet, &'a MissingWeights),
        ids: &'a [Id],
        out: &'a mut O,
        on_row: N,
    ) -> Self {
        Self { files, missing, ids, out, on_row, missing_rows: 0 }
    }

    /// How many ids without a row were written.
    pub(super) fn missing_rows(&self) -> usize {
        self.missing_rows
    }

    /// Whether [`Answer::copy`] may be used for files of float32.
    pub(super) fn is_float32(&self) -> bool {
        self.out.is_float32()
    }

    /// Write the row of the id at a position, from the bytes that a file has of it; `None` where the id has no row.
    pub(super) fn put(&mut self, position: usize, row: Option<&[u8]>) {
        (self.on_row)(position, row.is_some());
        if let Some(bytes) = row {
            self.out.put(self.files, position, bytes);
        } else {
            self.missing_rows += 1;
            self.out.put_missing(self.missing, position, self.ids[position]);
        }
    }

    /// Write a row whose bytes are float32, as they are.
    #[inline(always)]
    #[allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.
    pub(super) fn copy(&mut self, position: usize, row: &[u8]) {
        let Some(to) = self.out.float32(position) else { return self.put(position, Some(row)) };
        let (lines, rest) = row.as_chunks::<COPIED_BYTES>();
        let (to_lines, to_rest) = to.as_chunks_mut::<COPIED_BYTES>();
        for (to, from) in to_lines.iter_mut().zip(lines) {
            *to = *from;
        }
        if !rest.is_empty() {
            to_rest.copy_from_slice(rest);
        }
        (self.on_row)(position, true);
    }
}
