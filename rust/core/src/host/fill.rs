//! Many rows that come into the host tier at once.

use super::HostTier;
use crate::error::Result;
use crate::host::Idle;
use crate::slots::RowState;
use crate::types::{CacheSlot, Id};

impl HostTier {
    /// Take slots for rows, where ids find them from now on: slots of the budget, and where these end slots of the overflow if `overflow`
    /// allows that. Rows that are on SSD are LOADING, and are to be read. The others are PROVISIONAL, and are to be born. `ids` and `on_ssd` are
    /// `[n]`, and the tier has none of the ids. Memory for as many rows as get slots was reserved.
    ///
    /// The slots are those of the first ids; the others get none. The result says why, where they should have.
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
            self.row_mut(&Idle::new(slot)).0.id = id;
            self.slots.set_state(slot, RowState::LOADING.with(RowState::ON_SSD).with(RowState::OCCUPIED));
        }
        (slots, refused)
    }
}
