//! End of a batch: its rows are marked as trained, and the pins of its plan are released.

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
    /// Their ids, if the table has an admission rule.
    ids: Vec<Id>,
}

impl Residency {
    /// Records one training step: advances the table's step counter, marks the rows of the batch dirty and inserts the
    /// provisional ones. Counts the ids of `pins` that were not admitted.
    ///
    /// `slots` are the slots of the distinct rows on the tier that kernels run on, `NO_SLOT` for ids without a row that
    /// are not admitted: `[U]`. `starts` is the start of the occurrences of each row: `[U + 1]`.
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

    /// Records the step in the rows of the batch at `positions`, which include all rows with a slot.
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

    /// Keeps copies, for the snapshot, of rows that a step is about to change, in slots of the tier that kernels run
    /// on. Skips `NO_SLOT`.
    ///
    /// Errors: the error that requests reads from the device. Nothing has changed then.
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

    /// Like [`Residency::keep_pre_images`], for rows of a device tier whose tensors are in RAM and have a row in each
    /// of the slots.
    pub(crate) fn keep_tensor_pre_images(&mut self, slots: &[CacheSlot], tensors: &DeviceTensors<'_>) {
        if let (Some(moment), Some(device)) = (&mut self.snapshot, &self.device) {
            moment.keep_tensors(device, slots, tensors, self.context.layout);
        }
    }

    /// Releases the pins of a plan. The last pin of a row that was never trained also discards the row. Device
    /// slots of rows that never arrived are freed.
    pub(crate) fn release(&mut self, mut pins: PlanPins) {
        self.end_admission_decision(&mut pins);
        let PlanPins { ids, host, group, group_grew, device, pledged, .. } = pins;
        self.deactivate_plan(&ids);
        self.counts.take_back_pledge(pledged);
        // If rows of the group were not trained, each of its pins may be the last one, with which the row is discarded.
        // They are then counted by slot, as soon as the first pin is released.
        let group = group.filter(|_| !group_grew || self.host.slots.are_settled(&host));
        let together = group.and_then(|group| self.host.slots.unpin_group(&group));
        // The slots that the plan has pinned one by one in addition to its group.
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

    /// Handles a provisional row that has left the device. If another plan has pinned the host slot that it came from,
    /// the row is restored there.
    fn unshadow(&mut self, id: Id, is_provisional: bool) {
        let slot = self.host.slots.get(id);
        if is_provisional && slot != NO_SLOT && self.host.slots.state(slot).has(RowState::SHADOW) {
            self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
            self.counts.became_provisional(1);
        }
    }
}

/// The positions in `slots` `[U]` that have a slot. Branchless, because the outcome is unpredictable.
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
