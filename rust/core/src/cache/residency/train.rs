//! The end of a batch: its rows are marked as trained, and what its plan held is given back.

use std::sync::Arc;

use super::hold::PlanPins;
use super::{Residency, SLOTS_AHEAD};
use crate::cache::rows::DeviceTensors;
use crate::error::Result;
use crate::host::NoKernelWrites;
use crate::rows::ScoreDecayTo;
use crate::slots::{RowState, SlotMap};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Rows that were trained for the first time.
#[derive(Default)]
struct NewRows {
    rows: u64,
    /// Their ids, where the table refuses some.
    ids: Vec<Id>,
}

impl Residency {
    /// Record one training step: the table's step counter advances, and the rows of the batch are dirty and born.
    ///
    /// `slots` are those of the distinct rows on the tier that kernels run on, `NO_SLOT` where a row has none or gets none: `[U]`. `starts`
    /// say where the occurrences of each row begin: `[U + 1]`. What `pins` says was refused is counted.
    pub(crate) fn train(&mut self, pins: &PlanPins, slots: &[CacheSlot], starts: &[u32]) {
        self.step += 1;
        self.record_step_time();
        self.context.bump_version();
        let born = if pins.not_admitted_positions.is_empty() {
            self.touch_rows(pins, slots, starts, 0..slots.len())
        } else {
            let with_slots = with_slots(slots);
            self.touch_rows(pins, slots, starts, with_slots.iter().map(|&position| position as usize))
        };
        self.counts.inserted(born.rows);
        if self.admitter.is_some() {
            self.traffic.admitted += born.rows;
            self.count_not_admitted(pins);
            self.record_new_rows(born.ids.into_iter());
            self.end_counting(self.step);
        }
    }

    /// Record the step in the rows of the batch at `positions`, among which are all that have a slot.
    fn touch_rows(
        &mut self,
        pins: &PlanPins,
        slots: &[CacheSlot],
        starts: &[u32],
        positions: impl Iterator<Item = usize> + Clone,
    ) -> NewRows {
        let (epoch, mut decay) = (self.epoch, ScoreDecayTo::new(self.context.decay, self.step));
        let mut born = NewRows::default();
        let mut ahead = positions.clone().skip(SLOTS_AHEAD);
        for position in positions {
            if let Some(later) = ahead.next().map(|later| slots[later])
                && later != NO_SLOT
            {
                if let Some(device) = &self.device {
                    device.prefetch_header(later);
                    device.slots.prefetch_state(later);
                } else {
                    self.host.prefetch_header(later);
                    self.host.slots.prefetch_state(later);
                }
            }
            let slot = slots[position];
            if slot == NO_SLOT {
                continue;
            }
            let occurrences = starts[position + 1] - starts[position];
            let tier: &mut SlotMap = if let Some(device) = &mut self.device {
                device.header_mut(slot).touch(occurrences, epoch, &mut decay);
                &mut device.slots
            } else {
                self.host.touch(slot, occurrences, epoch, &mut decay);
                &mut self.host.slots
            };
            let row = tier.state(slot);
            if row.has(RowState::PROVISIONAL) {
                born.rows += 1;
                if self.admitter.is_some() {
                    born.ids.push(pins.ids[position]);
                }
            }
            tier.set_state(slot, row.without(RowState::PROVISIONAL).with(RowState::DIRTY).with(RowState::MODIFIED));
        }
        born
    }

    /// Copy what a moment wants of rows that a step is about to change, in slots of the tier that kernels run on. `NO_SLOT` is no row.
    ///
    /// Errors: the one that says that rows are to be read from the device first. Nothing has changed then.
    pub(crate) fn keep_pre_images(&mut self, slots: &[CacheSlot], no_writes: NoKernelWrites<'_>) -> Result<()> {
        if self.snapshot.is_none() {
            return Ok(());
        }
        if self.device.is_some() {
            self.require_snapshot_copies(slots)?;
            self.keep_device_pre_images(slots);
        } else {
            self.keep_host_pre_images(slots.iter().map(|&slot| no_writes.read_access(slot)));
        }
        Ok(())
    }

    /// As [`Residency::keep_pre_images`], of rows of a device tier whose tensors are in RAM and have a row in each of the slots.
    pub(crate) fn keep_tensor_pre_images(&mut self, slots: &[CacheSlot], tensors: &DeviceTensors<'_>) {
        if let (Some(moment), Some(device)) = (&mut self.snapshot, &self.device) {
            moment.keep_tensors(device, slots, tensors, self.context.layout);
        }
    }

    /// Give back what a plan held. Rows that were never trained vanish with their last pin, and so do the device slots of rows that never
    /// came there.
    pub(crate) fn release(&mut self, mut pins: PlanPins) {
        self.end_admission_decision(&mut pins);
        let PlanPins { ids, host, group, group_grew, device, pledged, .. } = pins;
        self.deactivate_plan(&ids);
        self.counts.take_back_pledge(pledged);
        // Where rows of the group were not trained, each of its pins may be the last one, with which the row vanishes. So they are counted by
        // slot, as soon as the first one is given back.
        let group = group.filter(|_| !group_grew || self.host.slots.are_settled(&host));
        let together = group.and_then(|group| self.host.slots.unpin_group(&group));
        // The slots that the plan has pinned one by one beside its group.
        let is_all = together.as_ref().is_some_and(|slots| Arc::ptr_eq(slots, &host));
        let host: &[CacheSlot] = if is_all { &[] } else { &host };
        let is_single = |position: usize| together.as_ref().is_none_or(|slots| slots[position] == NO_SLOT);
        for (position, &slot) in host.iter().enumerate() {
            if let Some(&later) = host.get(position + SLOTS_AHEAD) {
                self.host.slots.prefetch(later);
            }
            if slot != NO_SLOT && is_single(position) && self.host.slots.unpin(slot) {
                if self.host.slots.state(slot).has(RowState::SHADOW) {
                    self.host.slots.remove(slot, ids[position], false);
                } else {
                    self.forget_provisional(slot, ids[position]);
                }
            }
        }
        for (at, &slot) in device.iter().enumerate() {
            let Some(tier) = &mut self.device else { break };
            if let Some(&later) = device.get(at + SLOTS_AHEAD) {
                tier.slots.prefetch(later);
            }
            let gone = RowState::PROVISIONAL.with(RowState::LOADING);
            if slot != NO_SLOT && tier.slots.unpin(slot) && tier.slots.state(slot).has(gone) {
                let unborn = tier.slots.state(slot).has(RowState::PROVISIONAL);
                let id = tier.id(slot);
                tier.slots.remove(slot, id, false);
                self.counts.vanished(u64::from(unborn));
                self.unshadow(id, unborn);
            }
        }
        self.give_back_unused();
    }

    /// A row has left the device unborn. Where another plan has pinned the slot that it came from, it is there as it was.
    fn unshadow(&mut self, id: Id, is_provisional: bool) {
        let slot = self.host.slots.get(id);
        if is_provisional && slot != NO_SLOT && self.host.slots.state(slot).has(RowState::SHADOW) {
            self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
            self.counts.became_provisional(1);
        }
    }
}

/// The positions in `slots` `[U]` that have one. There is no branch, since nobody can foresee which do.
fn with_slots(slots: &[CacheSlot]) -> Vec<u32> {
    let count = slots.iter().filter(|&&slot| slot != NO_SLOT).count();
    let mut positions = vec![0; count + 1];
    let mut found = 0;
    for (position, &slot) in slots.iter().enumerate() {
        positions[found] = position as u32;
        found += usize::from(slot != NO_SLOT);
    }
    positions.truncate(count);
    positions
}
