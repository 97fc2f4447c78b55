//! A list of rows that are read together.
#![allow(unsafe_code)]

use std::ops::Range;

use super::arena::RowArena;
use super::layout::{RowHeader, RowRef};
use crate::types::CacheSlot;

/// Rows, by index. They are in slots of an arena, or contiguous. A list is two slices, for any size of rows.
#[derive(Clone, Copy, Debug)]
pub struct RowList<'a> {
    rows: ListedRows<'a>,
    floats: usize,
}

#[derive(Clone, Copy, Debug)]
enum ListedRows<'a> {
    Slots(&'a RowArena, &'a [CacheSlot]),
    Block(&'a [RowHeader], &'a [f32]),
}

impl<'a> RowList<'a> {
    /// Creates a list of rows with headers `[n]` and vector parts `[n, floats]`.
    ///
    /// # Panics
    /// Panics if `vectors` has another length.
    pub fn block(headers: &'a [RowHeader], vectors: &'a [f32], floats: usize) -> Self {
        assert_eq!(vectors.len(), headers.len() * floats, "vectors must have floats for each header");
        Self { rows: ListedRows::Block(headers, vectors), floats }
    }

    /// Creates a list of rows in the slots of an arena, with vector parts of `floats` floats.
    ///
    /// # Safety
    /// The slots are valid in the arena, whose rows have vector parts of `floats` floats, and no thread writes these
    /// rows during `'a`.
    pub(crate) unsafe fn in_slots(arena: &'a RowArena, slots: &'a [CacheSlot], floats: usize) -> Self {
        Self { rows: ListedRows::Slots(arena, slots), floats }
    }

    /// The number of rows.
    #[inline]
    pub fn len(&self) -> usize {
        match self.rows {
            ListedRows::Slots(_, slots) => slots.len(),
            ListedRows::Block(headers, _) => headers.len(),
        }
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of floats of a row's vector part.
    #[inline]
    pub fn floats(&self) -> usize {
        self.floats
    }

    /// The row at an index.
    ///
    /// # Panics
    /// Panics if there is no such row.
    #[allow(clippy::inline_always)] // Called for each row.
    #[inline(always)]
    pub fn get(&self, row: usize) -> RowRef<'a> {
        match self.rows {
            ListedRows::Slots(arena, slots) => {
                let row = arena.row(slots[row]);
                // SAFETY: the caller of `in_slots` guaranteed that the slot is valid and that no thread writes the row
                // during `'a`.
                unsafe { RowRef { header: &*row.header, vector: std::slice::from_raw_parts(row.vector, self.floats) } }
            }
            ListedRows::Block(headers, vectors) => {
                RowRef { header: &headers[row], vector: &vectors[row * self.floats..][..self.floats] }
            }
        }
    }

    /// The rows of a range of indexes.
    ///
    /// # Panics
    /// Panics if some of them do not exist.
    #[must_use]
    pub fn range(&self, rows: Range<usize>) -> Self {
        let rows = match self.rows {
            ListedRows::Slots(arena, slots) => ListedRows::Slots(arena, &slots[rows]),
            ListedRows::Block(headers, vectors) => {
                let floats = rows.start * self.floats..rows.end * self.floats;
                ListedRows::Block(&headers[rows], &vectors[floats])
            }
        };
        Self { rows, ..*self }
    }

    /// All rows, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RowRef<'a>> + use<'a> {
        let all = *self;
        (0..all.len()).map(move |row| all.get(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::RowLayout;

    #[test]
    fn rows_in_slots_and_one_behind_the_other_are_the_same_rows() {
        let layout = RowLayout { dim: 3, vector_slots: 0, scalar_slot: true };
        let arena = RowArena::new(layout, 8).unwrap();
        arena.reserve_overflow(2).unwrap();
        let slots = [7, 0, 9, 3];
        let headers: Vec<RowHeader> = (0..4).map(|id| RowHeader { id, ..RowHeader::default() }).collect();
        let vectors: Vec<f32> = (0..12_u8).map(f32::from).collect();
        for (n, &slot) in slots.iter().enumerate() {
            let row = arena.row(slot);
            // SAFETY: the slot is valid, and no other code uses the arena.
            unsafe {
                row.header.write(headers[n]);
                row.vector.copy_from_nonoverlapping(vectors[n * 3..].as_ptr(), 3);
            }
        }
        // SAFETY: the slots are valid, and no code writes to the arena from here.
        let in_slots = unsafe { RowList::in_slots(&arena, &slots, 3) };
        let block = RowList::block(&headers, &vectors, 3);
        for (one, other) in [(in_slots, block), (in_slots.range(1..3), block.range(1..3))] {
            assert_eq!((one.len(), one.floats()), (other.len(), 3));
            assert!(one.iter().zip(other.iter()).all(|(a, b)| a.header == b.header && a.vector == b.vector));
        }
        assert!(block.range(2..2).is_empty());
    }
}
