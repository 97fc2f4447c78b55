//! Room in the host tier: rows leave it for the SSD tier, move within it, or are written down where they are.

use super::Residency;
use crate::error::Result;
use crate::host::{NoKernelWrites, ReadAccess, WriteAccess};
use crate::rows::RowRef;
use crate::slots::RowState;
use crate::types::CacheSlot;

/// Rows that are handed to the SSD tier in one call at most. It bounds how much room that tier must find at once.
const ROWS_PER_APPEND: usize = 4096;
/// When the host tier shrinks because the index of the SSD tier has grown, it makes room for this many bytes of index at once, since
/// shrinking moves rows.
const INDEX_GROWTH_BYTES: u64 = 64 * 1024;

impl Residency {
    /// Evict unpinned rows by policy until `requested` slots are free, or no row is left to evict. Dirty rows are handed to the SSD tier
    /// first. On its error nothing has changed.
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

    /// Evict up to `rows` unpinned rows by policy. Returns how many.
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

    /// Hand the dirty ones among these current host rows to the SSD tier, in parts, and mark those of each part clean. On an error the rows
    /// of the parts before are clean, and the others are as they were.
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

    /// Hand every dirty row of the host and the device tier to the SSD tier. `next` is the first device slot that this has not come to, where it
    /// was called before and had rows read from the device; no kernel has written rows since.
    pub(crate) fn write_back_all(&mut self, no_writes: NoKernelWrites<'_>, next: &mut CacheSlot) -> Result<()> {
        // Rows of the device come first, because the lock is given back while they are read.
        self.write_back_device(next)?;
        let slots = &self.host.slots;
        let current: Vec<CacheSlot> = slots.occupied_from(0).filter(|&slot| slots.state(slot).is_current()).collect();
        self.write_back(current.into_iter().map(|slot| no_writes.read_access(slot)))
    }

    /// Follow the growth of the SSD tier's index, which takes room of rows in RAM. This comes after a change that is done, so it does not
    /// fail: a row that cannot be written down stays where it is, and the next call that writes says what is wrong.
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

    /// Move unpinned rows from slots above the limit into free ones below it. Where there are none, evict by policy.
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

    /// Move unpinned rows out of the overflow: into the budget where it has room, else to the SSD tier. On an error those rows stay that
    /// could not be written.
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

    /// Move a row, of which a moment has what it wants, into a free slot of the budget. Where there is none, or an export holds rows in
    /// their slots, evict it. Without an SSD tier it stays then.
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

    /// A free slot for a row to move to; `None` also while an export of these contents is under way, which goes by slot.
    fn free_slot_to_move_to(&mut self) -> Result<Option<WriteAccess>> {
        if self.exports.keeps_rows_in_slots(self.context.version()) { Ok(None) } else { self.host.take(false) }
    }

    /// Copy what a moment wants of host rows that are about to change or to leave their slots.
    #[inline]
    pub(super) fn keep_host_pre_images<'a>(&mut self, slots: impl Iterator<Item = ReadAccess<'a>>) {
        if let Some(moment) = &mut self.snapshot {
            moment.keep_host(&self.host, slots);
        }
    }
}

/// The row in a slot is on SSD as it is here.
pub(super) fn mark_written_back(slots: &mut crate::slots::SlotMap, slot: CacheSlot) {
    slots.set_state(slot, slots.state(slot).without(RowState::DIRTY).with(RowState::ON_SSD));
}
