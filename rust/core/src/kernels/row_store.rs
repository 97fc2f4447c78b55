//! The locations of the parts of a row: in an arena, or in tensors of a device tier on the CPU.
#![allow(unsafe_code)]
#![allow(clippy::inline_always)] // Otherwise the kernels' inner loops would call code that is compiled for the baseline instruction set.

use crate::rows::{RowArena, RowHeader, RowLayout};
use crate::types::CacheSlot;

/// The addresses of the parts of a row. Implementations only compute addresses, and are inlined into the kernels.
pub trait RowStore: Sync {
    /// The layout of the rows.
    fn layout(&self) -> RowLayout;
    /// The address of the weights (`[D]` float32) of the row in `slot`.
    fn weights(&self, slot: CacheSlot) -> *mut f32;
    /// The address of vector slot `index` (0 or 1; `[D]` float32) of the row in `slot`.
    fn vector_slot(&self, index: usize, slot: CacheSlot) -> *mut f32;
    /// The address of the scalar slot (one float32) of the row in `slot`.
    fn scalar(&self, slot: CacheSlot) -> *mut f32;
}

/// Rows in an arena.
#[derive(Debug)]
pub struct ArenaRows<'a> {
    /// The arena.
    pub arena: &'a RowArena,
    /// The layout of its rows.
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
    #[allow(clippy::cast_ptr_alignment)] // A header and its fields are aligned.
    #[inline(always)]
    fn scalar(&self, slot: CacheSlot) -> *mut f32 {
        let header: *mut u8 = self.arena.row(slot).header.cast();
        header.wrapping_add(std::mem::offset_of!(RowHeader, scalar)).cast()
    }
}

/// Contiguous float32 tensors of a device tier in RAM: `weights` `[S, D]`, each vector slot `[S, D]`, the scalar slot
/// `[S]`. The caller that passes them to a kernel guarantees that every slot of the call is below `S`, and that no
/// other thread writes the tensors during the call.
#[derive(Clone, Copy, Debug)]
pub struct TensorRows {
    /// The layout of the rows.
    pub layout: RowLayout,
    /// The start of the weights, `[S, D]`.
    pub weights: *mut f32,
    /// The starts of the vector slots, `[S, D]` each; null if the layout has none.
    pub vector_slots: [*mut f32; 2],
    /// The start of the scalar slots, `[S]`; null if the layout has none.
    pub scalars: *mut f32,
}

// SAFETY: these are only addresses. Kernels that dereference them rely on the caller's guarantee of exclusive use.
unsafe impl Sync for TensorRows {}
// SAFETY: the tensors belong to no thread, and only kernels dereference the addresses, by their callers' guarantee.
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
