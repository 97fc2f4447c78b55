//! Where kernels find rows: an arena, or tensors of a device tier on the CPU.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // A call in the kernels' inner loops would be one to code compiled for the baseline.

use crate::rows::{Arena, RowLayout};
use crate::types::CacheSlot;

/// Addresses of the parts of a row. Implementations are plain address arithmetic, inlined into the kernels.
pub trait RowStore: Sync {
    /// The layout of the rows.
    fn layout(&self) -> RowLayout;
    /// `[D]` weights of the row in `slot`.
    fn weights(&self, slot: CacheSlot) -> *mut f32;
    /// `[D]` of vector slot `which` (0 or 1).
    fn vector_slot(&self, which: usize, slot: CacheSlot) -> *mut f32;
    /// The scalar slot.
    fn scalar(&self, slot: CacheSlot) -> *mut f32;
}

/// Rows of an arena, in place.
#[derive(Debug)]
pub struct ArenaRows<'a> {
    /// The arena.
    pub arena: &'a Arena,
    /// Its rows' layout.
    pub layout: RowLayout,
}

impl RowStore for ArenaRows<'_> {
    fn layout(&self) -> RowLayout {
        self.layout
    }
    #[inline(always)]
    fn weights(&self, slot: CacheSlot) -> *mut f32 {
        self.arena.row(slot).vector
    }
    #[inline(always)]
    fn vector_slot(&self, which: usize, slot: CacheSlot) -> *mut f32 {
        self.arena.row(slot).vector.wrapping_add(self.layout.dim * (1 + which))
    }
    #[inline(always)]
    fn scalar(&self, slot: CacheSlot) -> *mut f32 {
        let header = self.arena.row(slot).header;
        // SAFETY: only an address within the header is formed; nothing is read.
        unsafe { &raw mut (*header).scalar }
    }
}

/// Contiguous tensors of a device tier in RAM: `weights` `[S, D]`, each vector slot `[S, D]`, the scalar slot `[S]`.
/// The tensors must hold every slot that the kernels are given, and nothing else may write them meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct TensorRows {
    /// Layout of the rows.
    pub layout: RowLayout,
    /// Start of `[S, D]` weights.
    pub weights: *mut f32,
    /// Starts of the vector slots, null where the layout has none.
    pub vector_slots: [*mut f32; 2],
    /// Start of the scalar slots, null where the layout has none.
    pub scalars: *mut f32,
}

// SAFETY: addresses only; the owner of the tensors promises exclusive use for the time of the call.
unsafe impl Sync for TensorRows {}
// SAFETY: as above.
unsafe impl Send for TensorRows {}

impl RowStore for TensorRows {
    fn layout(&self) -> RowLayout {
        self.layout
    }
    #[inline(always)]
    fn weights(&self, slot: CacheSlot) -> *mut f32 {
        self.weights.wrapping_add(slot as usize * self.layout.dim)
    }
    #[inline(always)]
    fn vector_slot(&self, which: usize, slot: CacheSlot) -> *mut f32 {
        self.vector_slots[which].wrapping_add(slot as usize * self.layout.dim)
    }
    #[inline(always)]
    fn scalar(&self, slot: CacheSlot) -> *mut f32 {
        self.scalars.wrapping_add(slot as usize)
    }
}
