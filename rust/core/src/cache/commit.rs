//! The end of a batch: rows marked as trained, pins taken back.

use std::sync::Arc;

use super::load::Loading;
use super::place::{SLOTS_AHEAD, TablePlan};
use super::table::State;
use crate::error::Result;
use crate::kernels::{Hyperparameters, OptimizerStep};
use crate::slots::{PinGroup, RowState, SlotMap};
use crate::sync::RwLockWriteGuard;
use crate::types::{CacheSlot, Id, NO_SLOT};

impl TablePlan {
    /// One training step: the table's counter advances, the batch's rows are dirty and born.
    pub(crate) fn commit(&self, state: &mut State) {
        state.step += 1;
        self.shared.contents_changed();
        let (step, epoch) = (state.step, state.epoch);
        let mut born = 0;
        for (position, &slot) in self.index.slots.iter().enumerate() {
            if let Some(&later) = self.index.slots.get(position + SLOTS_AHEAD)
                && later != NO_SLOT
            {
                if let Some(device) = &state.device {
                    device.prefetch_header(later);
                    device.slots.prefetch_state(later);
                } else {
                    state.host.prefetch_header(later);
                    state.host.slots.prefetch_state(later);
                }
            }
            if slot == NO_SLOT {
                continue;
            }
            let occurrences = self.index.starts[position + 1] - self.index.starts[position];
            let slots: &mut SlotMap = if let Some(device) = &mut state.device {
                device.header_mut(slot).touch(occurrences, step, epoch);
                &mut device.slots
            } else {
                state.host.touch(slot, occurrences, step, epoch);
                &mut state.host.slots
            };
            let row = slots.state(slot);
            born += u64::from(row.has(RowState::PROVISIONAL));
            slots.set_state(slot, row.without(RowState::PROVISIONAL).with(RowState::DIRTY).with(RowState::MODIFIED));
        }
        state.provisional -= born;
        state.rows += born;
    }

    /// The plan's pins, to give them back: it holds none from here on.
    pub(crate) fn take_pins(&mut self) -> Pins {
        self.arriving.clear();
        Pins {
            unique: std::mem::take(&mut self.unique),
            host: std::mem::take(&mut self.host),
            host_group: self.host_group.take(),
            device: std::mem::take(&mut self.device),
            pledged: std::mem::take(&mut self.pledged),
            _loads: std::mem::take(&mut self.loads),
        }
    }

    /// Commit a step whose rows were updated outside of the core, and take back the pins.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_any()?;
        shared.keep_in_use(&mut state, &self.index.slots, None);
        self.commit(&mut state);
        self.take_pins().release(&mut state);
        Ok(())
    }

    /// Commit a step of the core's kernels, and take back the pins. Whoever copies rows is kept out by `writing` from the first update
    /// until the rows' metadata and the table's step say so too; `None` where the caller keeps them out.
    pub(crate) fn end_kernels_step(&mut self, writing: Option<RwLockWriteGuard<'_, ()>>) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_any()?;
        self.commit(&mut state);
        drop(writing);
        self.take_pins().release(&mut state);
        Ok(())
    }

    pub(crate) fn next_step(&self, hyperparameters: Hyperparameters) -> Result<OptimizerStep> {
        let step = self.shared.lock_any()?.step + 1;
        Ok(OptimizerStep { kind: self.shared.config.optimizer, hyperparameters, step })
    }
}

/// The pins of one table's part of a plan. Without the table: where nobody takes the table's lock any more they go with it.
pub(crate) struct Pins {
    unique: Vec<Id>,
    host: Arc<Vec<CacheSlot>>,
    host_group: Option<PinGroup>,
    device: Vec<CacheSlot>,
    /// Of `State::pledged`.
    pledged: u64,
    _loads: Vec<Arc<Loading>>,
}

impl Pins {
    /// Give them back. Rows that were never trained vanish with their last pin, and so do the device slots of rows that never came.
    pub(crate) fn release(self, state: &mut State) {
        let Self { unique, host, host_group, device, pledged, _loads } = self;
        state.pledged -= pledged;
        let together = host_group.is_some_and(|group| state.host.slots.unpin_group(&group));
        let host: &[CacheSlot] = if together { &[] } else { &host };
        for (position, &slot) in host.iter().enumerate() {
            if let Some(&later) = host.get(position + SLOTS_AHEAD) {
                state.host.slots.prefetch(later);
            }
            if slot != NO_SLOT && state.host.slots.unpin(slot) {
                if state.host.slots.state(slot).has(RowState::SHADOW) {
                    state.host.slots.remove(slot, unique[position], false);
                } else {
                    state.drop_unborn(slot, unique[position]);
                }
            }
        }
        for slot in device {
            let Some(tier) = &mut state.device else { break };
            let gone = RowState::PROVISIONAL.with(RowState::LOADING);
            if slot != NO_SLOT && tier.slots.unpin(slot) && tier.slots.state(slot).has(gone) {
                let born = !tier.slots.state(slot).has(RowState::PROVISIONAL);
                let id = tier.id(slot);
                tier.slots.remove(slot, id, false);
                state.provisional -= u64::from(!born);
            }
        }
    }
}
