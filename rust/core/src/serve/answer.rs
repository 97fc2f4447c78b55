//! Output of a lookup: the row of each id, and a flag per id that has a row.

use super::files::RowFileSet;
use super::missing::MissingWeights;
use crate::rows::WeightPrecision;
use crate::types::Id;

/// Bytes copied per instruction, if the CPU has registers of this size.
const COPIED_BYTES: usize = 64;

/// Destination of a lookup's rows, in one of the supported formats.
pub(super) trait RowOutput {
    /// Writes the row at a position, from its bytes in a file.
    fn put(&mut self, files: &RowFileSet, position: usize, row: &[u8]);

    /// Writes the value of a missing id.
    fn put_missing(&mut self, missing: &MissingWeights, position: usize, id: Id);

    /// Destination of the row at a position, as the bytes of a float32 file; `None` for other formats.
    fn float32(&mut self, position: usize) -> Option<&mut [u8]>;

    /// True if [`Self::float32`] returns destinations.
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
    /// Position of a row that the precision cannot represent.
    pub(super) unrepresentable: Option<usize>,
}

impl StoredOutput<'_> {
    /// Stores the row in `self.row`.
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
        // A row of a trainer's delta, which is checked against the precision before the delta is served.
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

/// Writes the rows of a lookup one by one. `on_row` receives the position of each id, and true if it has a row.
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

    /// Number of missing ids written.
    pub(super) fn missing_rows(&self) -> usize {
        self.missing_rows
    }

    /// True if [`Self::copy`] may be used for float32 files.
    pub(super) fn is_float32(&self) -> bool {
        self.out.is_float32()
    }

    /// Writes the row of the id at a position, from its bytes in a file; `None` if the id is missing.
    pub(super) fn put(&mut self, position: usize, row: Option<&[u8]>) {
        (self.on_row)(position, row.is_some());
        if let Some(bytes) = row {
            self.out.put(self.files, position, bytes);
        } else {
            self.missing_rows += 1;
            self.out.put_missing(self.missing, position, self.ids[position]);
        }
    }

    /// Copies a row whose bytes are float32.
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
