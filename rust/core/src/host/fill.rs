//! Insertion and removal of many rows of the host tier.

use super::{HostTier, ROWS_AHEAD};
use crate::error::Result;
use crate::host::WriteAccess;
use crate::rows::RowRef;
use crate::slots::RowState;
use crate::types::{CacheSlot, Id};

impl HostTier {
    /// Takes slots for rows and adds the ids to the index: slots of the budget, then of the overflow if `overflow` is
    /// true. Rows that are on SSD are LOADING, and are to be read. The others are PROVISIONAL, and are to be
    /// initialized. `ids` and `on_ssd` are `[n]`, and the tier has none of the ids. Memory for the rows that get slots
    /// must be reserved.
    ///
    /// The slots belong to the first ids; the others get none. The result is an error if an overflow slot could not be
    /// allocated.
    pub(crate) fn admit(&mut self, ids: &[Id], on_ssd: &[bool], overflow: bool) -> (Vec<CacheSlot>, Result<()>) {
        let mut slots = Vec::with_capacity(ids.len());
        self.slots.take_many(ids.len(), &mut slots);
        let mut refused = Ok(());
        while overflow && slots.len() < ids.len() {
            match self.arena.reserve_overflow(self.slots.overflow_used() + 1) {
                Ok(()) => slots.push(self.slots.take_overflow()),
                Err(error) => {
                    refused = Err(error);
                    break;
                }
            }
        }
        let put = self.slots.insert_all_new(&slots, &ids[..slots.len()], RowState::PROVISIONAL);
        assert_eq!(put, slots.len(), "the ids are new to the tier");
        for ((&slot, &id), _) in slots.iter().zip(ids).zip(on_ssd).filter(|(_, there)| **there) {
            self.row_mut(&WriteAccess::new(slot)).0.id = id;
            self.slots.set_state(slot, RowState::LOADING.with(RowState::ON_SSD).with(RowState::OCCUPIED));
        }
        (slots, refused)
    }

    /// Copies rows into slots of the tier and adds the ids to the index: slots of the budget, then of the overflow. The
    /// tier has none of the ids, and memory for all of the rows was [reserved](HostTier::reserve).
    pub(crate) fn insert_rows(&mut self, rows: &[(RowRef<'_>, RowState)]) {
        let slots = self.slots.take_with_overflow(rows.len());
        for (at, (&slot, (row, _))) in slots.iter().zip(rows).enumerate() {
            if let Some(&later) = slots.get(at + ROWS_AHEAD) {
                self.prefetch_row(later);
            }
            self.overwrite(&WriteAccess::new(slot), *row);
        }
        let ids: Vec<Id> = rows.iter().map(|(row, _)| row.header.id).collect();
        let put = self.slots.insert_all_new(&slots, &ids, RowState::default());
        assert_eq!(put, slots.len(), "the ids are new to the tier");
        for (&slot, (_, state)) in slots.iter().zip(rows) {
            self.slots.set_state(slot, state.with(RowState::OCCUPIED));
        }
    }

    /// Removes rows without eviction, and frees their slots. `slots` and `ids` are `[n]`.
    pub(crate) fn remove_batch(&mut self, slots: &[CacheSlot], ids: &[Id]) {
        self.slots.remove_batch(slots, ids);
        self.shrink_overflow();
    }

    /// Removes victims.
    pub(crate) fn remove_victims(&mut self, victims: &[WriteAccess]) {
        let slots: Vec<CacheSlot> = victims.iter().map(WriteAccess::slot).collect();
        let ids: Vec<Id> = slots.iter().map(|&slot| self.id(slot)).collect();
        self.slots.remove_victims(&slots, &ids);
    }
}
