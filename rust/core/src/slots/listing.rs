//! Lists of a tier's slots: occupied ones, modified ones, those with the newest copies of rows.

use super::{RowState, SlotMap};
use crate::types::CacheSlot;

/// Number of slots that [`SlotMap::modified`] checks together.
const MARKS_AT_ONCE: usize = 16;
/// Number of slots that [`SlotMap::newest_from`] checks together.
const LISTED_AT_ONCE: usize = 1024;

impl SlotMap {
    /// Returns the occupied slots whose rows are marked [`RowState::MODIFIED`], in ascending order.
    pub fn modified(&self) -> impl Iterator<Item = CacheSlot> + '_ {
        let marked = |state: &RowState| state.has(RowState::MODIFIED) && state.has(RowState::OCCUPIED);
        let any = |block: &[RowState; MARKS_AT_ONCE]| block.iter().fold(0, |bits, state| bits | state.0);
        let blocks = self.states.chunks_exact(MARKS_AT_ONCE);
        let rest = (self.states.len() - blocks.remainder().len()) as CacheSlot..self.states.len() as CacheSlot;
        (0..)
            .step_by(MARKS_AT_ONCE)
            .zip(blocks)
            .filter(move |(_, block)| {
                block.first_chunk().is_some_and(|block| RowState(any(block)).has(RowState::MODIFIED))
            })
            .flat_map(|(first, block)| (first..).zip(block).map(|(slot, _)| slot))
            .chain(rest)
            .filter(move |&slot| marked(&self.states[slot as usize]))
    }

    /// Appends to `found` the slots with the newest copies of rows, in ascending order from slot `from` on, until
    /// `found` has `most`. Returns the slot after the last checked one.
    pub fn newest_from(&self, from: CacheSlot, most: usize, found: &mut Vec<CacheSlot>) -> CacheSlot {
        let mut next = from;
        while let Some(states) = self.states.get(next as usize..).filter(|states| !states.is_empty())
            && found.len() < most
        {
            // Every slot is stored, and the end advances only if it counts: so there is no unpredictable branch.
            let states = &states[..states.len().min(most - found.len()).min(LISTED_AT_ONCE)];
            let mut end = found.len();
            found.resize(end + states.len(), 0);
            for (slot, state) in (next..).zip(states) {
                found[end] = slot;
                end += usize::from(state.is_newest());
            }
            found.truncate(end);
            next += states.len() as CacheSlot;
        }
        next
    }

    /// Returns the occupied slots from slot `from` on, in ascending order.
    pub fn occupied_from(&self, from: CacheSlot) -> impl Iterator<Item = CacheSlot> + '_ {
        let states = self.states.get(from as usize..).unwrap_or_default();
        (from..).zip(states).filter(|(_, state)| state.has(RowState::OCCUPIED)).map(|(slot, _)| slot)
    }
}
