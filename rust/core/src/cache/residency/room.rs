//! Free space in the host tier: rows are demoted to the SSD tier, moved within the host tier, or written back in place.

use super::Residency;
use crate::error::Result;
use crate::host::{NoKernelWrites, ReadAccess, WriteAccess};
use crate::rows::RowRef;
use crate::slots::RowState;
use crate::types::CacheSlot;

/// Maximum number of rows per append to the SSD tier. Bounds the free space that the tier must find in one call.
const ROWS_PER_APPEND: usize = 4096;
/// Granularity of shrinking the host tier when the SSD tier's index has grown, because shrinking moves rows.
const INDEX_GROWTH_BYTES: u64 = 64 * 1024;

impl Residency {
    /// Demotes unpinned rows by policy until `requested` slots are free or no row is left to demote. Dirty rows are
    /// first written to the SSD tier. If that fails, nothing has changed.
    pub(super) fn make_host_space(&mut self, requested: u32) -> Result<()> {
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
    pub(super) fn write_back<'a>(&mut self, slots: impl Iterator<Item = ReadAccess<'a>>) -> Result<()> {
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
        self.exports.record_written_back(self.context.version(), &slots, |slot| self.host.id(slot));
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
            let Some(idle) = self.host.unpinned(slot) else { continue };
            self.keep_host_pre_images(std::iter::once(idle.read_access()));
            if self.move_or_demote(&idle).is_err() {
                return;
            }
        }
        if self.host.slots.occupied_from(limit).all(|slot| slot >= capacity) {
            self.host.arena().discard(limit..capacity);
        }
    }

    /// Moves unpinned rows out of the overflow: into the budget if it has free slots, else to the SSD tier. On an error
    /// the rows that could not be written keep their slots.
    pub(super) fn drain_overflow(&mut self) -> Result<()> {
        if self.host.slots.overflow_used() == 0 {
            return Ok(());
        }
        let slots = &self.host.slots;
        let current: Vec<CacheSlot> =
            slots.occupied_from(slots.capacity()).filter(|&slot| slots.state(slot).is_current()).collect();
        let idle: Vec<WriteAccess> = current.into_iter().filter_map(|slot| self.host.unpinned(slot)).collect();
        self.keep_host_pre_images(idle.iter().map(WriteAccess::read_access));
        let mut drained = Ok(());
        for idle in idle {
            if let Err(error) = self.move_or_demote(&idle) {
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
            self.record_moved(std::iter::once(id));
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
        if self.exports.keeps_rows_in_slots(self.context.version()) { Ok(None) } else { self.host.take(false) }
    }

    /// Keeps copies, for the snapshot, of host rows that are about to change or leave their slots.
    #[inline]
    pub(super) fn keep_host_pre_images<'a>(&mut self, slots: impl Iterator<Item = ReadAccess<'a>>) {
        if let Some(moment) = &mut self.snapshot {
            moment.keep_host(&self.host, slots);
        }
    }
}

/// Marks the row in a slot as identical to its copy on SSD.
pub(super) fn mark_written_back(slots: &mut crate::slots::SlotMap, slot: CacheSlot) {
    slots.set_state(slot, slots.state(slot).without(RowState::DIRTY).with(RowState::ON_SSD));
}
