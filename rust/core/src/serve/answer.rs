//! What a lookup writes: the row of each id, and whether there is one.

use super::files::Files;
use super::missing::Missing;
use crate::types::Id;

/// Bytes that are copied by one instruction where the processor has one for so many.
const COPIED_BYTES: usize = 64;

/// The rows of a lookup, which are written one by one. `note` is told the position of each id and whether it has a row.
pub(super) struct Answer<'a, N> {
    files: &'a Files,
    missing: &'a Missing,
    ids: &'a [Id],
    /// `[N, D]`.
    out: &'a mut [f32],
    dim: usize,
    note: N,
    without: usize,
}

impl<'a, N: FnMut(usize, bool)> Answer<'a, N> {
    pub(super) fn new(
        (files, missing): (&'a Files, &'a Missing),
        ids: &'a [Id],
        (out, dim): (&'a mut [f32], usize),
        note: N,
    ) -> Self {
        Self { files, missing, ids, out, dim, note, without: 0 }
    }

    /// How many ids without a row were written.
    pub(super) fn without(&self) -> usize {
        self.without
    }

    /// Write the row of the id at a position, from the bytes that a file has of it; `None` where the id has no row.
    pub(super) fn put(&mut self, position: usize, row: Option<&[u8]>) {
        let to = &mut self.out[position * self.dim..][..self.dim];
        (self.note)(position, row.is_some());
        if let Some(bytes) = row {
            self.files.read(bytes, to);
        } else {
            self.without += 1;
            self.missing.fill(self.ids[position], to);
        }
    }

    /// Write a row whose bytes are float32, as they are.
    #[inline(always)]
    #[allow(clippy::inline_always)] // Compiled for every instruction set; see `simd`.
    pub(super) fn copy(&mut self, position: usize, row: &[u8]) {
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut self.out[position * self.dim..][..self.dim]);
        let (lines, rest) = row.as_chunks::<COPIED_BYTES>();
        let (to_lines, to_rest) = to.as_chunks_mut::<COPIED_BYTES>();
        for (to, from) in to_lines.iter_mut().zip(lines) {
            *to = *from;
        }
        if !rest.is_empty() {
            to_rest.copy_from_slice(rest);
        }
        (self.note)(position, true);
    }
}
