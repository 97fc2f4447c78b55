//! The memory layout of a row.

use super::score_decay::ScoreDecayTo;
use crate::types::Id;

/// The values of a row. Its vector part is `[D × (1 + vector_slots)]` float32 with `D` = `dim`, weights first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowLayout {
    /// The number of weights of a row.
    pub dim: usize,
    /// The number of optimizer slots of width `dim`: 0, 1 or 2.
    pub vector_slots: usize,
    /// If true, each row has one scalar optimizer slot (rowwise Adagrad's `sum`), stored in the header.
    pub scalar_slot: bool,
}

impl RowLayout {
    /// The number of floats of the vector part.
    pub fn vector_floats(&self) -> usize {
        self.dim * (1 + self.vector_slots)
    }

    /// The number of floats of the vector part and the scalar slot, which a record stores.
    pub fn floats(&self) -> usize {
        self.vector_floats() + usize::from(self.scalar_slot)
    }

    /// Bytes between the vector parts of two adjacent rows in an arena, a multiple of 16.
    pub fn stride_bytes(&self) -> usize {
        (self.vector_floats() * 4).next_multiple_of(16)
    }
}

/// The part of a row in memory that has the same size in every table: 32 bytes. Its metadata (all but the id and the
/// scalar) changes when a training step commits, and moves together with the row.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowHeader {
    /// The row's id.
    pub id: Id,
    /// The table's step counter at the last training step that used the row.
    pub last_step: u64,
    /// The number of occurrences in training batches. It stops at the largest `u32`.
    pub count: u32,
    /// The usage of the row: the sum of its occurrences, which halves over every [`TableConfig::score_half_life_steps`]
    /// steps (see [`ScoreDecay`](super::ScoreDecay)). This is the value at `last_step`.
    ///
    /// [`TableConfig::score_half_life_steps`]: crate::config::TableConfig::score_half_life_steps
    pub score: f32,
    /// The scalar optimizer slot, or 0 if the layout has none.
    pub scalar: f32,
    /// The table's checkpoint epoch at the last training step that used the row.
    pub modified_epoch: u32,
}

impl RowHeader {
    /// Records the training step of `decay`, which used the row `occurrences` times. The decayed score of the row's
    /// last step increases by `occurrences`. A step that is not after the last one, as after a reset of the step
    /// counter, decays nothing.
    #[inline]
    pub fn touch(&mut self, occurrences: u32, epoch: u32, decay: &mut ScoreDecayTo) {
        let decayed = decay.of(self.score, self.last_step);
        self.score = decayed + occurrences as f32;
        self.count = self.count.saturating_add(occurrences);
        self.last_step = decay.step();
        self.modified_epoch = epoch;
    }
}

/// A row for reading.
#[derive(Clone, Copy, Debug)]
pub struct RowRef<'a> {
    /// The id, the metadata and the scalar slot.
    pub header: &'a RowHeader,
    /// The vector part: weights, then vector slots. Its length is `layout.vector_floats()`.
    pub vector: &'a [f32],
}

/// The address of a row. It guarantees nothing: the code that reads or writes there must justify the access.
#[derive(Clone, Copy, Debug)]
pub struct RowAddress {
    /// The header.
    pub header: *mut RowHeader,
    /// The vector part: `layout.vector_floats()` floats.
    pub vector: *mut f32,
}

/// Permission to write a row later, from any thread: to a slot of an arena, or to a row of a staging buffer.
#[derive(Clone, Copy, Debug)]
pub struct RowMut(RowAddress);

#[allow(unsafe_code)]
impl RowMut {
    /// Creates the permission to write the row at `address`.
    ///
    /// # Safety
    /// `address` points to a header and a vector part of the layout with which it is written. Until the write is
    /// reported as complete, both stay valid and no other code reads or writes them.
    pub unsafe fn new(address: RowAddress) -> Self {
        Self(address)
    }

    /// The address of the row.
    #[inline]
    pub fn address(self) -> RowAddress {
        self.0
    }
}

// SAFETY: it is two addresses, and their valid uses do not depend on the thread: `RowMut::new` guarantees them for
// every thread.
#[allow(unsafe_code)]
unsafe impl Send for RowMut {}
// SAFETY: a shared RowMut returns a copy of two addresses and changes nothing.
#[allow(unsafe_code)]
unsafe impl Sync for RowMut {}

#[cfg(test)]
mod tests;
