//! Room in the host tier: rows leave it for the SSD tier, move within it, or are written down where they are.

use super::Residency;
use crate::error::Result;
use crate::host::{Idle, NoKernelWrites, Quiet};
use crate::rows::RowRef;
use crate::slots::RowState;
use crate::types::CacheSlot;

/// Rows that are handed to the SSD tier in one call at most. It bounds how much room that tier must find at once.
const ROWS_PER_APPEND: usize = 4096;
/// When the host tier shrinks because the index of the SSD tier has grown, it makes room for this many bytes of index at once, since
/// shrinking moves rows.
const INDEX_GROWTH_BYTES: u64 = 64 * 1024;

impl Residency {
    /// Evict unpinned rows by policy until `wanted` slots are free, or no row is left to evict. Dirty rows are handed to the SSD tier
    /// first. On its error nothing has changed.
    pub(super) fn make_room(&mut self, wanted: u32) -> Result<()> {
        if self.base.ssd.is_none() {
            return Ok(());
        }
        while self.host.slots.free_slots() < wanted {
            let missing = (wanted - self.host.slots.free_slots()) as usize;
            if self.evict(missing.min(ROWS_PER_APPEND))? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Evict up to `rows` unpinned rows by policy. Returns how many.
    fn evict(&mut self, rows: usize) -> Result<usize> {
        let victims = self.host.victims(rows);
        self.keep_host(victims.iter().map(Idle::quiet));
        if let Err(error) = self.write_down(victims.iter().map(Idle::quiet)) {
            for victim in &victims {
                self.host.spare(victim);
            }
            return Err(error);
        }
        self.host.evict_all(&victims);
        self.traffic.host.evictions += victims.len() as u64;
        self.host.shrink_overflow();
        self.fit_host_to_index();
        Ok(victims.len())
    }

    /// Hand the dirty ones among these current host rows to the SSD tier, in parts, and mark those of each part clean. On an error the rows
    /// of the parts before are clean, and the others are as they were.
    pub(super) fn write_down<'a>(&mut self, slots: impl Iterator<Item = Quiet<'a>>) -> Result<()> {
        if self.base.ssd.is_none() {
            return Ok(());
        }
        let mut dirty: Vec<Quiet<'a>> = Vec::new();
        for (number, slot) in slots.enumerate() {
            if number > 0 && number % ROWS_PER_APPEND == 0 {
                self.write_down_part(&dirty)?;
                dirty.clear();
            }
            if self.host.slots.state(slot.slot()).has(RowState::DIRTY) {
                dirty.push(slot);
            }
        }
        self.write_down_part(&dirty)
    }

    fn write_down_part(&mut self, dirty: &[Quiet<'_>]) -> Result<()> {
        let (Some(ssd), false) = (&self.base.ssd, dirty.is_empty()) else { return Ok(()) };
        let rows: Vec<RowRef<'_>> = dirty.iter().map(|&slot| self.host.row(slot)).collect();
        let is_on_ssd = |slot: &Quiet<'_>| self.host.slots.state(slot.slot()).has(RowState::ON_SSD);
        let known: Vec<bool> = dirty.iter().map(is_on_ssd).collect();
        let slots = dirty.iter().map(|slot| slot.slot());
        self.exports.note_written_down(self.base.version(), &slots, |slot| self.host.id(slot));
        self.base.append(ssd, &rows, &known)?;
        for slot in dirty {
            mark_written_down(&mut self.host.slots, slot.slot());
        }
        Ok(())
    }

    /// Hand every dirty row of the host and the device tier to the SSD tier. `next` is the first device slot that this has not come to, where it
    /// was called before and had rows read from the device; no kernel has written rows since.
    pub(crate) fn write_down_all(&mut self, no_writes: NoKernelWrites<'_>, next: &mut CacheSlot) -> Result<()> {
        // Rows of the device come first, because the lock is given back while they are read.
        self.write_down_device(next)?;
        let slots = &self.host.slots;
        let current: Vec<CacheSlot> = slots.occupied_from(0).filter(|&slot| slots.state(slot).is_current()).collect();
        self.write_down(current.into_iter().map(|slot| no_writes.slot(slot)))
    }

    /// Follow the growth of the SSD tier's index, which takes room of rows in RAM. This comes after a change that is done, so it does not
    /// fail: a row that cannot be written down stays where it is, and the next call that writes says what is wrong.
    pub(crate) fn fit_host_to_index(&mut self) {
        if self.base.ssd.is_none() {
            return;
        }
        let fits = self.host_rows_beside_index().max(1) as u32;
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
            self.keep_host(std::iter::once(idle.quiet()));
            if self.move_or_evict(&idle).is_err() {
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
        let idle: Vec<Idle> = current.into_iter().filter_map(|slot| self.host.unpinned(slot)).collect();
        self.keep_host(idle.iter().map(Idle::quiet));
        let mut drained = Ok(());
        for idle in idle {
            if let Err(error) = self.move_or_evict(&idle) {
                drained = Err(error);
            }
        }
        self.host.shrink_overflow();
        drained
    }

    /// Move a row, of which a moment has what it wants, into a free slot of the budget. Where there is none, or an export holds rows in
    /// their slots, evict it. Without an SSD tier it stays then.
    fn move_or_evict(&mut self, idle: &Idle) -> Result<()> {
        if let Some(to) = self.free_slot_to_move_to()? {
            let id = self.host.id(idle.slot());
            self.host.relocate(idle, &to);
            self.moved(std::iter::once(id));
        } else if self.base.ssd.is_some() {
            self.write_down(std::iter::once(idle.quiet()))?;
            self.host.remove(idle.slot(), true);
            self.traffic.host.evictions += 1;
        }
        Ok(())
    }

    /// A free slot for a row to move to; `None` also while an export of these contents is under way, which goes by slot.
    fn free_slot_to_move_to(&mut self) -> Result<Option<Idle>> {
        if self.exports.hold_rows_in_place(self.base.version()) { Ok(None) } else { self.host.take(false) }
    }

    /// Copy what a moment wants of host rows that are about to change or to leave their slots.
    #[inline]
    pub(super) fn keep_host<'a>(&mut self, slots: impl Iterator<Item = Quiet<'a>>) {
        if let Some(moment) = &mut self.moment {
            moment.keep_host(&self.host, slots);
        }
    }
}

/// The row in a slot is on SSD as it is here.
pub(super) fn mark_written_down(slots: &mut crate::slots::SlotMap, slot: CacheSlot) {
    slots.set_state(slot, slots.state(slot).without(RowState::DIRTY).with(RowState::ON_SSD));
}
