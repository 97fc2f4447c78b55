//! Demotion of rows from the device tier to the host tier, and their write-back to SSD.

use super::room::mark_written_back;
use super::{ROWS_PER_GATHER, Residency};
use crate::cache::rows::RowChunk;
use crate::device::DeviceTier;
use crate::error::Result;
use crate::rows::RowRef;
use crate::slots::RowState;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// A row that leaves the device tier: its position among the leaving rows, and its state.
type LeavingRow = (usize, RowState);

impl Residency {
    /// The device tier of a table that has one.
    ///
    /// # Panics
    /// If the table has no device tier.
    pub(super) fn device_mut(&mut self) -> &mut DeviceTier {
        self.device.as_mut().expect("only a table with a device tier moves rows to it")
    }

    /// Frees `requested` device slots, as far as rows can leave: first unpinned rows in the overflow, then others by
    /// policy. They are demoted. On an error nothing has changed, except that victims whose rows must be read first
    /// stay chosen.
    pub(super) fn make_device_space(&mut self, requested: u32) -> Result<()> {
        let victims = self.device_victims(requested);
        if victims.is_empty() {
            return Ok(());
        }
        let demoted = self.last_copies_of(&victims).and_then(|rows| {
            if let Some(moment) = &mut self.snapshot {
                moment.keep_read(&victims, &rows, self.context.floats());
            }
            self.demote(&victims, &rows)
        });
        if let Err(error) = demoted {
            self.keep_on_device(&victims);
            return Err(error);
        }
        self.remove_device_victims(&victims);
        self.traffic.device.evictions += victims.len() as u64;
        Ok(())
    }

    /// Chooses the rows that leave so that `requested` device slots are free: rows that were chosen before and not
    /// requested since, all other unpinned rows of the overflow, and as many of the budget as needed.
    fn device_victims(&mut self, requested: u32) -> Vec<CacheSlot> {
        let tier = self.device_mut();
        let capacity = tier.slots.capacity();
        let mut victims = tier.take_leaving();
        let freed = victims.iter().filter(|&&slot| slot < capacity).count() as u32;
        let is_chosen = |slot: &CacheSlot| victims.binary_search(slot).is_ok();
        let overflow = tier.slots.occupied_from(capacity).filter(|slot| !is_chosen(slot));
        let overflow: Vec<CacheSlot> = overflow.filter(|&slot| tier.slots.state(slot).is_current()).collect();
        for slot in overflow {
            if !tier.slots.is_pinned(slot) {
                tier.slots.claim_victim(slot, tier.id(slot));
                victims.push(slot);
            }
        }
        let missing = requested.saturating_sub(tier.slots.free_slots()).saturating_sub(freed) as usize;
        victims.extend(tier.victims(missing));
        // The rows are read in this order, including those chosen before.
        victims.sort_unstable();
        victims
    }

    /// Keeps victims of the device tier. If their rows must be read first, they are chosen again afterwards.
    pub(super) fn keep_on_device(&mut self, victims: &[CacheSlot]) {
        let owes = self.needs_device_reads();
        if owes {
            self.mark_victims();
        }
        let tier = self.device_mut();
        if owes {
            tier.mark_leaving(victims);
        } else {
            for &slot in victims {
                tier.keep_victim(slot);
            }
        }
    }

    /// Keeps the victims of the device tier that were to leave once they are read.
    pub(crate) fn keep_leaving_on_device(&mut self) {
        if let Some(tier) = &mut self.device {
            tier.keep_all_leaving();
        }
    }

    /// Removes victims from the device tier.
    pub(super) fn remove_device_victims(&mut self, victims: &[CacheSlot]) {
        let tier = self.device_mut();
        let ids: Vec<Id> = victims.iter().map(|&slot| tier.id(slot)).collect();
        tier.slots.remove_victims(victims, &ids);
    }

    /// Copies rows that leave the device into the host tier. Rows that do not fit are appended to the SSD tier. On an
    /// error nothing has changed.
    fn demote(&mut self, slots: &[CacheSlot], rows: &RowChunk) -> Result<()> {
        let floats = self.context.floats();
        let mut shadowed = Vec::new();
        let mut moving: Vec<LeavingRow> = Vec::new();
        let ids: Vec<Id> = rows.headers.iter().map(|header| header.id).collect();
        let mut shadows = vec![NO_SLOT; ids.len()];
        self.host.slots.index().get_batch(&ids, &mut shadows);
        for (position, (&slot, shadow)) in slots.iter().zip(shadows).enumerate() {
            let row = self.device_mut().slots.state(slot);
            if shadow == NO_SLOT {
                moving.push((position, row));
            } else {
                shadowed.push((position, row, shadow));
            }
        }
        self.make_host_space(moving.len() as u32)?;
        let free = self.host.slots.free_slots() as usize;
        let fit = if self.context.ssd.is_some() { free.min(moving.len()) } else { moving.len() };
        self.host.reserve(fit)?;
        self.append_demoted(&moving[fit..], rows)?;
        let fitting: Vec<(RowRef<'_>, RowState)> =
            moving[..fit].iter().map(|&(position, row)| (rows.row(position, floats), row)).collect();
        self.host.insert_rows(&fitting);
        self.record_moved(ids.into_iter());
        for (position, row, shadow) in shadowed {
            let idle = self.host.unused_by_kernels(shadow).expect("kernels run on the device tier that the row leaves");
            self.host.overwrite(&idle, rows.row(position, floats));
            self.host.slots.set_state(shadow, row);
        }
        self.traffic.host.written_bytes += (slots.len() * floats * 4) as u64;
        Ok(())
    }

    /// Appends the dirty rows that leave the device and do not fit the host tier to the SSD tier, in one call: if they
    /// do not all fit, either none is appended or the tier becomes read-only.
    fn append_demoted(&self, leaving: &[LeavingRow], rows: &RowChunk) -> Result<()> {
        let Some(ssd) = &self.context.ssd else { return Ok(()) };
        let dirty: Vec<LeavingRow> = leaving.iter().copied().filter(|(_, row)| row.has(RowState::DIRTY)).collect();
        if dirty.is_empty() {
            return Ok(());
        }
        let refs: Vec<RowRef<'_>> =
            dirty.iter().map(|&(position, _)| rows.row(position, self.context.floats())).collect();
        let known: Vec<bool> = dirty.iter().map(|(_, row)| row.has(RowState::ON_SSD)).collect();
        self.context.append(ssd, &refs, &known)
    }

    /// Writes every dirty row of the device slots from `next` on to the SSD tier, marks it clean, and advances `next`
    /// past it. On an error the rows written before stay written.
    pub(super) fn write_back_device(&mut self, next: &mut CacheSlot) -> Result<()> {
        loop {
            if self.device.is_none() || self.context.ssd.is_none() {
                return Ok(());
            }
            let slots = &self.device_mut().slots;
            let is_dirty = |slot: &CacheSlot| {
                let row = slots.state(*slot);
                row.is_current() && row.has(RowState::DIRTY)
            };
            let dirty: Vec<CacheSlot> = slots.occupied_from(*next).filter(is_dirty).take(ROWS_PER_GATHER).collect();
            let Some(last) = dirty.last() else { return Ok(()) };
            let after = last + 1;
            let rows = self.last_copies_of(&dirty)?;
            self.forget_copies();
            let slots = &dirty[..];
            let (Some(ssd), Some(tier)) = (&self.context.ssd, &mut self.device) else { return Ok(()) };
            let refs: Vec<RowRef<'_>> =
                (0..slots.len()).map(|position| rows.row(position, self.context.floats())).collect();
            let known: Vec<bool> = slots.iter().map(|&slot| tier.slots.state(slot).has(RowState::ON_SSD)).collect();
            self.context.append(ssd, &refs, &known)?;
            for &slot in slots {
                mark_written_back(&mut tier.slots, slot);
            }
            *next = after;
        }
    }

    /// Keeps copies, for the snapshot, of device rows that are about to change or leave their slots. The caller has
    /// passed them to [`Residency::require_snapshot_copies`] before any change. Rows that cannot be read fail the
    /// snapshot, never the caller.
    pub(super) fn keep_device_pre_images(&mut self, slots: &[CacheSlot]) {
        let wanted = self.snapshot.as_mut().map(|moment| moment.take_pending_on_device(slots)).unwrap_or_default();
        for wanted in wanted.chunks(ROWS_PER_GATHER) {
            let rows = self.copies_of(wanted);
            let Some(moment) = &mut self.snapshot else { return };
            match rows {
                Ok(rows) => moment.keep_all(&rows, self.context.floats()),
                Err(error) => {
                    moment.fail(error);
                    self.retry_copies();
                }
            }
        }
    }
}
