//! Births of a batch's rows: initial values, written by several threads.
#![allow(unsafe_code)]

use super::table::{Shared, State};
use crate::kernels::deal;
use crate::rows::{RowAddress, RowHeader};
use crate::types::{CacheSlot, Id};

impl Shared {
    /// Give host slots the initial values of ids. The slots are taken, distinct, and seen by nobody until the table's lock goes.
    pub(crate) fn bear(&self, state: &mut State, born: &[(Id, CacheSlot)], threads: usize) {
        let arena = state.host.arena();
        // SAFETY: the slots are valid in the arena, and the caller holds the table's lock, without which nobody finds them.
        unsafe { self.bear_at(born.len(), |row| (born[row].0, arena.row(born[row].1)), threads) };
    }

    /// Write the initial values of `count` rows, each to its place. Bits do not depend on `threads`.
    ///
    /// # Safety
    /// The places are valid, distinct, and used by nobody else during the call.
    pub(crate) unsafe fn bear_at(&self, count: usize, row: impl Fn(usize) -> (Id, RowAddress) + Sync, threads: usize) {
        let (dim, floats) = (self.layout.dim, self.layout.vector_floats());
        let cost_before = |row: usize| (row * floats) as u64;
        deal(threads, count, cost_before, |range| {
            for (id, place) in range.map(&row) {
                // SAFETY: the caller's promise; each row is the work of one thread.
                let vector = unsafe {
                    place.header.write(RowHeader { id, ..RowHeader::default() });
                    place.vector.write_bytes(0, floats);
                    std::slice::from_raw_parts_mut(place.vector, dim)
                };
                self.birth.fill(id, vector);
            }
        });
    }
}
