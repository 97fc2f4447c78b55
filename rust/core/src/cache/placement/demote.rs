//! Free space in the tiers: rows are demoted from the device to the host tier, from the host tier to SSD, moved within
//! the host tier, or written back in place.

use super::{Placement, ROWS_PER_GATHER};
use crate::cache::row_blocks::RowChunk;
use crate::error::Result;
use crate::rows::RowRef;
use crate::slots::RowState;
use crate::tiers::{DeviceTier, NoKernelWrites, ReadAccess, WriteAccess};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Maximum number of rows per append to the SSD tier. Bounds the free space that the tier must find in one call.
const ROWS_PER_APPEND: usize = 4096;
/// Granularity of shrinking the host tier when the SSD tier's index has grown, because shrinking moves rows.
const INDEX_GROWTH_BYTES: u64 = 64 * 1024;

impl Placement {
    /// Demotes unpinned rows by policy until `requested` slots are free or no row is left to demote. Dirty rows are
    /// first written to the SSD tier. If that fails, nothing has changed.
    pub(crate) fn make_host_space(&mut self, requested: u32) -> Result<()> {
        if self.context.ssd.is_none() {
            return Ok(());
        }
        while self.host.slots.free_slots() < requested {
            let missing = (requested - self.host.slots.free_slots()) as usize;
            if self.demote_from_host(missing.min(ROWS_PER_APPEND))? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Demotes up to `rows` unpinned rows by policy. Returns the number demoted.
    fn demote_from_host(&mut self, rows: usize) -> Result<usize> {
        let victims = self.host.victims(rows);
        self.keep_host_pre_images(victims.iter().map(WriteAccess::read_access));
        if let Err(error) = self.write_back(victims.iter().map(WriteAccess::read_access)) {
            for victim in &victims {
                self.host.keep_victim(victim);
            }
            return Err(error);
        }
        self.host.remove_victims(&victims);
        self.traffic.host.evictions += victims.len() as u64;
        self.host.shrink_overflow();
        self.fit_host_to_index();
        Ok(victims.len())
    }

    /// Writes the dirty rows among these current host rows to the SSD tier in parts, and marks each written part clean.
    /// On an error the rows of previous parts are clean and the others are unchanged.
    fn write_back<'a>(&mut self, slots: impl Iterator<Item = ReadAccess<'a>>) -> Result<()> {
        if self.context.ssd.is_none() {
            return Ok(());
        }
        let mut dirty: Vec<ReadAccess<'a>> = Vec::new();
        for (number, slot) in slots.enumerate() {
            if number > 0 && number % ROWS_PER_APPEND == 0 {
                self.write_back_part(&dirty)?;
                dirty.clear();
            }
            if self.host.slots.state(slot.slot()).has(RowState::DIRTY) {
                dirty.push(slot);
            }
        }
        self.write_back_part(&dirty)
    }

    fn write_back_part(&mut self, dirty: &[ReadAccess<'_>]) -> Result<()> {
        let (Some(ssd), false) = (&self.context.ssd, dirty.is_empty()) else { return Ok(()) };
        let rows: Vec<RowRef<'_>> = dirty.iter().map(|&slot| self.host.row(slot)).collect();
        let is_on_ssd = |slot: &ReadAccess<'_>| self.host.slots.state(slot.slot()).has(RowState::ON_SSD);
        let known: Vec<bool> = dirty.iter().map(is_on_ssd).collect();
        let slots = dirty.iter().map(|slot| slot.slot());
        self.changes.exports.record_written_back(self.context.version(), &slots, |slot| self.host.id(slot));
        self.context.append(ssd, &rows, &known)?;
        for slot in dirty {
            mark_written_back(&mut self.host.slots, slot.slot());
        }
        Ok(())
    }

    /// Writes every dirty row of the host and device tiers to the SSD tier. `next` is the first device slot that has
    /// not been visited, if an earlier call had to request rows from the device; no kernel has written rows since.
    pub(crate) fn write_back_all(&mut self, no_writes: NoKernelWrites<'_>, next: &mut CacheSlot) -> Result<()> {
        // Device rows come first, because the lock is released while they are read.
        self.write_back_device(next)?;
        let slots = &self.host.slots;
        let current: Vec<CacheSlot> = slots.occupied_from(0).filter(|&slot| slots.state(slot).is_current()).collect();
        self.write_back(current.into_iter().map(|slot| no_writes.read_access(slot)))
    }

    /// Adjusts the host tier to the size of the SSD tier's index, which uses space of rows in RAM. Infallible, because
    /// it follows a completed change: a row that cannot be written back keeps its slot, and the next call that writes
    /// returns the error.
    pub(crate) fn fit_host_to_index(&mut self) {
        if self.context.ssd.is_none() {
            return;
        }
        let fits = self.host_rows_after_index().max(1) as u32;
        let limit = self.host.slots.limit();
        let ahead = ((INDEX_GROWTH_BYTES / self.host.row_bytes()) as u32).clamp(1, fits / 8 + 1);
        let target = if fits == self.host.slots.capacity() { fits } else { (fits - ahead.min(fits)).max(1) };
        if fits < limit || target > limit {
            self.host.slots.set_limit(target);
        }
        if fits < limit {
            self.move_below_limit();
        }
    }

    /// Moves unpinned rows from slots above the limit into free slots below it. If there are none, demotes rows by
    /// policy.
    pub(super) fn move_below_limit(&mut self) {
        let limit = self.host.slots.limit();
        let capacity = self.host.slots.capacity();
        let above: Vec<CacheSlot> = self.host.slots.occupied_from(limit).filter(|&slot| slot < capacity).collect();
        for slot in above {
            if !self.host.slots.state(slot).is_current() {
                continue;
            }
            let Some(access) = self.host.unpinned(slot) else { continue };
            self.keep_host_pre_images(std::iter::once(access.read_access()));
            if self.move_or_demote(&access).is_err() {
                return;
            }
        }
        if self.host.slots.occupied_from(limit).all(|slot| slot >= capacity) {
            self.host.arena().discard(limit..capacity);
        }
    }

    /// Moves unpinned rows out of the overflow: into the budget if it has free slots, else to the SSD tier. On an error
    /// the rows that could not be written keep their slots.
    pub(crate) fn drain_overflow(&mut self) -> Result<()> {
        if self.host.slots.overflow_used() == 0 {
            return Ok(());
        }
        let slots = &self.host.slots;
        let current: Vec<CacheSlot> =
            slots.occupied_from(slots.capacity()).filter(|&slot| slots.state(slot).is_current()).collect();
        let accesses: Vec<WriteAccess> = current.into_iter().filter_map(|slot| self.host.unpinned(slot)).collect();
        self.keep_host_pre_images(accesses.iter().map(WriteAccess::read_access));
        let mut drained = Ok(());
        for access in accesses {
            if let Err(error) = self.move_or_demote(&access) {
                drained = Err(error);
            }
        }
        self.host.shrink_overflow();
        drained
    }

    /// Moves a row whose snapshot copy was kept into a free slot of the budget. If there is none, or an export requires
    /// rows to keep their slots, demotes it; without an SSD tier it keeps its slot.
    fn move_or_demote(&mut self, row: &WriteAccess) -> Result<()> {
        if let Some(to) = self.free_slot_to_move_to()? {
            let id = self.host.id(row.slot());
            self.host.relocate(row, &to);
            self.changes.moved.record(std::iter::once(id));
        } else if self.context.ssd.is_some() {
            self.write_back(std::iter::once(row.read_access()))?;
            self.host.remove(row.slot(), true);
            self.traffic.host.evictions += 1;
        }
        Ok(())
    }

    /// Takes a free slot for a row to move to; `None` if there is none or an export of these contents, which iterates
    /// by slot, is in progress.
    fn free_slot_to_move_to(&mut self) -> Result<Option<WriteAccess>> {
        if self.changes.exports.keeps_rows_in_slots(self.context.version()) { Ok(None) } else { self.host.take(false) }
    }

    /// Keeps copies, for the snapshot, of host rows that are about to change or leave their slots.
    #[inline]
    pub(crate) fn keep_host_pre_images<'a>(&mut self, slots: impl Iterator<Item = ReadAccess<'a>>) {
        if let Some(snapshot) = &mut self.changes.snapshot {
            snapshot.keep_host(&self.host, slots);
        }
    }

    /// The device tier of a table that has one.
    ///
    /// # Panics
    /// If the table has no device tier.
    pub(crate) fn device_mut(&mut self) -> &mut DeviceTier {
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
            if let Some(snapshot) = &mut self.changes.snapshot {
                snapshot.keep_read(&victims, &rows, self.context.floats());
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
        let needs_reads = self.needs_device_reads();
        if needs_reads {
            self.mark_victims();
        }
        let tier = self.device_mut();
        if needs_reads {
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
            tier.take_leaving().into_iter().for_each(|slot| tier.keep_victim(slot));
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
        self.changes.moved.record(ids.into_iter());
        for (position, row, shadow) in shadowed {
            let access =
                self.host.unused_by_kernels(shadow).expect("kernels run on the device tier that the row leaves");
            self.host.overwrite(&access, rows.row(position, floats));
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
    fn write_back_device(&mut self, next: &mut CacheSlot) -> Result<()> {
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
    /// passed them to [`Placement::require_snapshot_copies`] before any change. Rows that cannot be read fail the
    /// snapshot, never the caller.
    pub(crate) fn keep_device_pre_images(&mut self, slots: &[CacheSlot]) {
        let wanted =
            self.changes.snapshot.as_mut().map(|snapshot| snapshot.take_pending_on_device(slots)).unwrap_or_default();
        for wanted in wanted.chunks(ROWS_PER_GATHER) {
            let rows = self.copies_of(wanted);
            let Some(snapshot) = &mut self.changes.snapshot else { return };
            match rows {
                Ok(rows) => snapshot.keep_all(&rows, self.context.floats()),
                Err(error) => {
                    snapshot.fail(error);
                    self.retry_copies();
                }
            }
        }
    }
}

/// Marks the row in a slot as identical to its copy on SSD.
fn mark_written_back(slots: &mut crate::slots::SlotMap, slot: CacheSlot) {
    slots.set_state(slot, slots.state(slot).without(RowState::DIRTY).with(RowState::ON_SSD));
}

/// A row that leaves the device tier: its position among the leaving rows, and its state.
type LeavingRow = (usize, RowState);
