//! Listing of the rows with their newest copy in a given tier, for walks over a table's rows and for snapshots. A copy
//! is the newest if it is current and no tier below has the same one ([`RowState::is_newest`]).

use super::{Placement, ROWS_PER_GATHER};
use crate::cache::changes::{BaseCheckpoint, SlotMarks, SnapshotRows, WrittenBackIds};
use crate::cache::row_blocks::RowChunk;
use crate::error::{Kind, Result};
use crate::lifecycle::ExpirySweep;
use crate::rows::{RowHeader, RowList};
use crate::runtime::memory;
use crate::slots::{RowState, SlotMap};
use crate::tiers::NoKernelWrites;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Distance, in rows, at which a pass over row epochs prefetches headers into the CPU cache.
const HEADERS_AHEAD: usize = 16;

/// The start of an export.
pub(crate) struct ExportStart {
    pub(crate) number: u64,
    pub(crate) written_back: WrittenBackIds,
    /// Number of rows of the table.
    pub(crate) rows: u64,
}

impl Placement {
    /// Starts an export by slot of the contents of this version.
    pub(crate) fn begin_export(&mut self, version: u64) -> ExportStart {
        let (number, written_down) = self.changes.exports.begin(version);
        ExportStart { number, written_back: written_down, rows: self.counts.rows() }
    }

    /// Passes the next rows of an export with their newest copy in the host tier to `take`, at most `most`, and adds
    /// the ids of those with an outdated copy on SSD to `outdated`. Returns the number of rows; 0 if none remain.
    pub(crate) fn lend_next(
        &mut self,
        export: u64,
        most: usize,
        no_writes: NoKernelWrites<'_>,
        outdated: &mut Vec<Id>,
        take: &mut dyn FnMut(RowList<'_>) -> Result<()>,
    ) -> Result<usize> {
        let cursor = self.changes.exports.cursor(export);
        let slots = &self.host.slots;
        let mut found = Vec::new();
        let left = (slots.high_water() - cursor.min(slots.high_water())) as usize;
        memory::reserve(&mut found, "list rows", most.min(left))?;
        if self.context.ssd.is_some() {
            memory::reserve(outdated, "list rows", found.capacity())?;
        }
        let after = slots.newest_from(cursor, most, &mut found);
        if self.context.ssd.is_some() {
            let on_ssd = found.iter().filter(|&&slot| slots.state(slot).has(RowState::ON_SSD));
            outdated.extend(on_ssd.map(|&slot| self.host.id(slot)));
        }
        if !found.is_empty() {
            take(self.host.rows(&found, no_writes))?;
        }
        self.changes.exports.move_cursor(export, after);
        Ok(found.len())
    }

    /// Passes the rows in `slots` that were modified in epoch `since` or later to `take`, if their newest copy is still
    /// there: other rows were written to SSD since the slots were listed. The slots are above all slots that the export
    /// has visited. `outdated` as in [`Placement::lend_next`].
    pub(crate) fn lend_modified(
        &mut self,
        export: u64,
        slots: &[CacheSlot],
        since: u32,
        no_writes: NoKernelWrites<'_>,
        outdated: &mut Vec<Id>,
        take: &mut dyn FnMut(RowList<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut modified = Vec::new();
        memory::reserve(&mut modified, "list the rows that were modified", slots.len())?;
        if self.context.ssd.is_some() {
            memory::reserve(outdated, "list the rows that were modified", slots.len())?;
        }
        let host = &self.host;
        for (at, &slot) in slots.iter().enumerate() {
            if let Some(&later) = slots.get(at + HEADERS_AHEAD)
                && host.slots.state(later).is_newest()
            {
                host.prefetch_header(later);
            }
            let found = host.slots.state(slot);
            if !found.is_newest() || host.modified_epoch(slot) < since {
                continue;
            }
            if found.has(RowState::ON_SSD) {
                outdated.push(host.id(slot));
            }
            modified.push(slot);
        }
        if !modified.is_empty() {
            take(host.rows(&modified, no_writes))?;
        }
        self.changes.exports.move_cursor(export, slots.last().map_or(0, |&slot| slot + 1));
        Ok(())
    }

    /// The ids of rows with their newest copy in RAM or on the device, and the number of all rows: the others are
    /// current on SSD.
    pub(crate) fn newest_in_ram(&mut self) -> Result<(Vec<Id>, u64)> {
        self.finish_loads();
        let (host, device) = (&self.host, self.device.as_ref());
        let most = host.row_count() + device.map_or(0, crate::tiers::DeviceTier::row_count);
        let mut ids: Vec<Id> = Vec::new();
        memory::reserve(&mut ids, "list the rows in RAM", most as usize)?;
        let newest = |slots: &SlotMap, slot: &CacheSlot| slots.state(*slot).is_newest();
        let in_host = host.slots.occupied_from(0).filter(|slot| newest(&host.slots, slot));
        ids.extend(in_host.map(|slot| host.id(slot)));
        if let Some(tier) = device {
            let on_device = tier.slots.occupied_from(0).filter(|slot| newest(&tier.slots, slot));
            ids.extend(on_device.map(|slot| tier.id(slot)));
        }
        Ok((ids, self.counts.rows()))
    }

    /// The ids of rows that were modified in epoch `since` or later, with their newest copy in RAM or on the device.
    pub(crate) fn modified_in_ram(&mut self, since: u32) -> Result<Vec<Id>> {
        self.finish_loads();
        let all = since < self.changes.marked_since;
        let host = &self.host;
        let mut ids: Vec<Id> = Vec::new();
        let in_host = |slot| (host.modified_epoch(slot) >= since).then(|| host.id(slot));
        collect_newest(&mut ids, &host.slots, all, in_host)?;
        if let Some(tier) = &self.device {
            let on_device = |slot| (tier.header(slot).modified_epoch >= since).then(|| tier.id(slot));
            collect_newest(&mut ids, &tier.slots, all, on_device)?;
        }
        Ok(ids)
    }

    /// Slots of the host tier with the newest copy of a row, in ascending order: those of all rows that were modified
    /// in epoch `since` or later, and possibly of others.
    pub(crate) fn modified_slots(&mut self, since: u32) -> Result<Vec<CacheSlot>> {
        self.finish_loads();
        let mut slots: Vec<CacheSlot> = Vec::new();
        collect_newest(&mut slots, &self.host.slots, since < self.changes.marked_since, Some)?;
        Ok(slots)
    }

    /// True if RAM or the device has a newer copy of the row than SSD.
    pub(crate) fn is_newer_than_on_ssd(&self, id: Id) -> bool {
        let newer = |slots: &SlotMap| {
            let slot = slots.get(id);
            slot != NO_SLOT && slots.state(slot).is_newest()
        };
        newer(&self.host.slots) || self.device.as_ref().is_some_and(|device| newer(&device.slots))
    }

    /// Starts another epoch. Rows trained afterwards belong to it.
    pub(crate) fn begin_epoch(&mut self, epoch: u32) {
        if epoch == self.changes.epoch {
            return;
        }
        if epoch < self.changes.epoch {
            self.changes.history.forget();
        }
        self.changes.epoch = epoch;
        self.changes.marked_since = epoch;
        self.host.slots.clear_marks();
        if let Some(device) = &mut self.device {
            device.slots.clear_marks();
        }
    }

    /// Marks of the rows of the host and the device tier that belong to a snapshot: rows with their newest copy there
    /// that were modified in epoch `since` or later.
    pub(crate) fn snapshot_marks(&self, since: u32) -> Result<(SlotMarks, SlotMarks)> {
        let host = self.marks_of(&self.host.slots, since, |slot| self.host.modified_epoch(slot))?;
        let device = self.device.as_ref().map_or(Ok(SlotMarks::default()), |tier| {
            self.marks_of(&tier.slots, since, |slot| tier.header(slot).modified_epoch)
        })?;
        Ok((host, device))
    }

    fn marks_of(&self, slots: &SlotMap, since: u32, modified_epoch: impl Fn(CacheSlot) -> u32) -> Result<SlotMarks> {
        let mut marks = SlotMarks::none_of(slots)?;
        if since == 0 {
            slots.occupied_from(0).filter(|&slot| slots.state(slot).is_newest()).for_each(|slot| marks.set(slot));
        } else {
            let mut modified = Vec::new();
            let wanted = |slot| (modified_epoch(slot) >= since).then_some(slot);
            collect_newest(&mut modified, slots, since < self.changes.marked_since, wanted)?;
            for slot in modified {
                marks.set(slot);
            }
        }
        Ok(marks)
    }

    /// The ids of rows that are newer in RAM or on the device than their copy on SSD.
    pub(crate) fn stale_on_ssd(&self) -> impl Iterator<Item = Id> + '_ {
        let is_stale = |row: RowState| row.is_current() && row.has(RowState::DIRTY) && row.has(RowState::ON_SSD);
        let (host, device) = (&self.host, self.device.as_ref());
        let in_host = host.slots.occupied_from(0).filter(move |&slot| is_stale(host.slots.state(slot)));
        let on_device = device.into_iter().flat_map(move |tier| {
            let stale = tier.slots.occupied_from(0).filter(move |&slot| is_stale(tier.slots.state(slot)));
            stale.map(|slot| tier.id(slot))
        });
        in_host.map(|slot| host.id(slot)).chain(on_device)
    }

    /// Passes the next pending rows of the snapshot in the host tier to `take`, at most `most`, from slot `next`, and
    /// advances `next` past them. Returns the number of rows; 0 if none remain.
    pub(crate) fn lend_pending(
        &mut self,
        next: &mut CacheSlot,
        most: usize,
        no_writes: NoKernelWrites<'_>,
        take: &mut dyn FnMut(RowList<'_>) -> Result<()>,
    ) -> Result<usize> {
        let slots = self.snapshot_mut()?.take_next_of_host(next, most);
        if !slots.is_empty() {
            take(self.host.rows(&slots, no_writes))?;
        }
        Ok(slots.len())
    }

    /// Like [`Placement::lend_pending`], but returns copies of rows of the device tier.
    pub(crate) fn read_pending_on_device(&mut self, next: &mut CacheSlot, most: usize) -> Result<RowChunk> {
        let before = *next;
        let slots = self.snapshot_mut()?.take_next_of_device(next, most.min(ROWS_PER_GATHER));
        let copied = self.copies_of(&slots);
        if copied.is_err() {
            *next = before;
            self.snapshot_mut()?.put_back_on_device(&slots);
        }
        copied
    }

    fn snapshot_mut(&mut self) -> Result<&mut SnapshotRows> {
        self.changes.snapshot.as_deref_mut().ok_or_else(|| Kind::State.error("the snapshot was dropped"))
    }

    pub(crate) fn count_expiring(&mut self, base: &BaseCheckpoint) -> u64 {
        let mut sweeps = self.changes.history.sweeps_since(base);
        sweeps.retain(|sweep| !sweep.needs_weights());
        if sweeps.is_empty() {
            return 0;
        }
        self.finish_loads();
        let is_doomed = |header: &RowHeader| {
            header.modified_epoch < base.next_epoch
                && sweeps.iter().any(|sweep: &ExpirySweep| sweep.matches(header, &[]))
        };
        let host = &self.host;
        let in_host = host.slots.occupied_from(0).filter(|&slot| host.slots.state(slot).is_current());
        let in_host = in_host.filter(|&slot| is_doomed(&host.metadata(slot))).count();
        let on_device = self.device.as_ref().map_or(0, |tier| {
            let current = tier.slots.occupied_from(0).filter(|&slot| tier.slots.state(slot).is_current());
            current.filter(|&slot| is_doomed(tier.header(slot))).count()
        });
        (in_host + on_device) as u64
    }
}

/// Adds the values of `of` for the slots of one tier with newest copies that are marked as modified. With `all`,
/// ignores the marks, because they cover too short a period.
fn collect_newest<T>(
    found: &mut Vec<T>,
    slots: &SlotMap,
    all: bool,
    of: impl Fn(CacheSlot) -> Option<T>,
) -> Result<()> {
    let mut add = |slot: CacheSlot| {
        if slots.state(slot).is_newest()
            && let Some(one) = of(slot)
        {
            if found.len() == found.capacity() {
                memory::reserve(found, "list the rows that were modified", found.len().max(1024))?;
            }
            found.push(one);
        }
        Ok(())
    };
    if all { slots.occupied_from(0).try_for_each(&mut add) } else { slots.modified().try_for_each(&mut add) }
}

/// Counts of changes in a table since a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeCounts {
    /// Number of rows of the table.
    pub rows: u64,
    /// Number of removed ids for which a delta has tombstones.
    pub tombstones: u64,
    /// Number of rows expired by sweeps for which a delta has no tombstones.
    pub expired: u64,
    /// Number of unmodified rows in RAM or on the device that a load would drop because one of the sweeps matches them.
    /// It is 0 unless a sweep has skipped a row. Rules that read weights are not counted.
    pub expiring: u64,
}
