//! Rows that a snapshot or an export by slot still has to pass on.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use super::pre_images::{PreImageWriter, PreImages};
use crate::cache::row_blocks::{DeviceTensors, RowChunk};
use crate::error::{Error, Result};
use crate::rows::{RowHeader, RowLayout};
use crate::runtime::memory;
use crate::runtime::sync::{Mutex, lock};
use crate::slots::SlotMap;
use crate::tiers::{DeviceTier, HostTier, ReadAccess};
use crate::types::{CacheSlot, Id};

/// Distance, in rows, at which a copy of rows prefetches into the CPU cache.
const ROWS_AHEAD: usize = 8;

/// One bit per slot of a tier.
#[derive(Debug, Default)]
pub(crate) struct SlotMarks(Vec<u64>);

impl SlotMarks {
    /// Marks no slot of the tier.
    ///
    /// Errors: `Memory`.
    pub(crate) fn none_of(slots: &SlotMap) -> Result<Self> {
        memory::zeros("mark rows to be saved", slots.high_water().div_ceil(64) as usize).map(Self)
    }

    /// Marks a slot.
    pub(crate) fn set(&mut self, slot: CacheSlot) {
        self.0[slot as usize / 64] |= 1 << (slot % 64);
    }

    /// True if the slot is marked.
    fn has(&self, slot: CacheSlot) -> bool {
        self.0.get(slot as usize / 64).is_some_and(|word| word & 1 << (slot % 64) != 0)
    }

    /// Clears a mark. Returns true if it was set.
    fn take(&mut self, slot: CacheSlot) -> bool {
        let Some(word) = self.0.get_mut(slot as usize / 64) else { return false };
        let bit = 1 << (slot % 64);
        let marked = *word & bit != 0;
        *word &= !bit;
        marked
    }

    /// Clears up to `most` marks from slot `next` on, and advances `next` past them. Returns their slots in ascending
    /// order.
    fn take_next(&mut self, next: &mut CacheSlot, most: usize) -> Vec<CacheSlot> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(word) = self.0.get_mut(*next as usize / 64)
        {
            let ahead = *word & (u64::MAX << (*next % 64));
            if ahead == 0 {
                *next = (*next / 64 + 1) * 64;
                continue;
            }
            let bit = ahead.trailing_zeros();
            *word &= !(1 << bit);
            let slot = *next / 64 * 64 + bit;
            taken.push(slot);
            *next = slot + 1;
        }
        taken
    }
}

/// The slots whose rows a snapshot has not copied yet and which still have the snapshot's values. An operation that is
/// about to change such a row, or to move it out of its slot, copies it here first, which clears its mark.
#[derive(Debug)]
pub(crate) struct SnapshotRows {
    host: SlotMarks,
    device: SlotMarks,
    images: Arc<PreImages>,
    /// The table's number in `images`.
    table: usize,
}

impl SnapshotRows {
    pub(crate) fn new(host: SlotMarks, device: SlotMarks, images: Arc<PreImages>, table: usize) -> Self {
        Self { host, device, images, table }
    }

    fn writer(&self) -> PreImageWriter<'_> {
        self.images.writer(self.table)
    }

    /// Copies the pending rows among these host rows.
    #[cold]
    pub(crate) fn keep_host<'a>(&mut self, host: &HostTier, slots: impl Iterator<Item = ReadAccess<'a>>) {
        let wanted: Vec<ReadAccess<'a>> = slots.filter(|access| self.host.take(access.slot())).collect();
        if wanted.is_empty() {
            return;
        }
        let mut keeping = self.writer();
        for (at, &access) in wanted.iter().enumerate() {
            if let Some(&later) = wanted.get(at + ROWS_AHEAD) {
                host.prefetch_row(later.slot());
            }
            let row = host.row(access);
            keeping.copy_row(row.header, |to| to.copy_from_slice(row.vector));
        }
    }

    /// Copies the pending rows among these device rows. `rows` contains all of them, just read.
    pub(crate) fn keep_read(&mut self, slots: &[CacheSlot], rows: &RowChunk, floats: usize) {
        let wanted: Vec<usize> = (0..slots.len()).filter(|&at| self.device.take(slots[at])).collect();
        if wanted.is_empty() {
            return;
        }
        let mut keeping = self.writer();
        for at in wanted {
            let row = rows.row(at, floats);
            keeping.copy_row(row.header, |to| to.copy_from_slice(row.vector));
        }
    }

    /// Copies the pending rows among these device rows, from tensors in RAM that have a row of `layout` in each slot.
    pub(crate) fn keep_tensors(
        &mut self,
        device: &DeviceTier,
        slots: &[CacheSlot],
        tensors: &DeviceTensors<'_>,
        layout: RowLayout,
    ) {
        let wanted: Vec<CacheSlot> = slots.iter().copied().filter(|&slot| self.device.take(slot)).collect();
        if wanted.is_empty() {
            return;
        }
        let mut keeping = self.writer();
        for slot in wanted {
            let at = slot as usize;
            let scalar = tensors.scalars.as_ref().map_or(0.0, |scalars| scalars[at]);
            keeping.copy_row(&RowHeader { scalar, ..*device.header(slot) }, |to| {
                let (weights, rest) = to.split_at_mut(layout.dim);
                weights.copy_from_slice(&tensors.weights[at * layout.dim..][..layout.dim]);
                for (from, to) in tensors.vector_slots.iter().zip(rest.chunks_exact_mut(layout.dim)) {
                    to.copy_from_slice(&from[at * layout.dim..][..layout.dim]);
                }
            });
        }
    }

    /// Returns the pending slots among these device slots.
    pub(crate) fn pending_on_device(&self, slots: &[CacheSlot]) -> Vec<CacheSlot> {
        slots.iter().copied().filter(|&slot| self.device.has(slot)).collect()
    }

    /// Returns the pending slots among these device slots and clears their marks: the caller reads the rows and passes
    /// them to [`SnapshotRows::keep_all`], or reports a failure.
    pub(crate) fn take_pending_on_device(&mut self, slots: &[CacheSlot]) -> Vec<CacheSlot> {
        slots.iter().copied().filter(|&slot| self.device.take(slot)).collect()
    }

    /// Copies all these rows, whose vector parts have `floats` floats.
    pub(crate) fn keep_all(&mut self, rows: &RowChunk, floats: usize) {
        let mut keeping = self.writer();
        for (header, vector) in rows.headers.iter().zip(rows.vectors.chunks_exact(floats)) {
            keeping.copy_row(header, |to| to.copy_from_slice(vector));
        }
    }

    /// Records that pending rows could not be read, so that the save fails.
    pub(crate) fn fail(&self, error: Error) {
        self.images.fail(error);
    }

    /// Takes the next pending rows of the host tier: at most `most`, from slot `next` on, and advances `next` past
    /// them.
    pub(crate) fn take_next_of_host(&mut self, next: &mut CacheSlot, most: usize) -> Vec<CacheSlot> {
        self.host.take_next(next, most)
    }

    /// Takes the next pending rows of the device tier, like [`SnapshotRows::take_next_of_host`].
    pub(crate) fn take_next_of_device(&mut self, next: &mut CacheSlot, most: usize) -> Vec<CacheSlot> {
        self.device.take_next(next, most)
    }

    /// Marks device rows again that were taken and not saved.
    pub(crate) fn put_back_on_device(&mut self, slots: &[CacheSlot]) {
        for &slot in slots {
            self.device.set(slot);
        }
    }
}

/// The exports of one table. Its rows may be read, planned and evicted during an export, so code that moves rows
/// consults it first: no row moves from slot to slot, and for rows that are written back it records whether they were
/// passed on.
#[derive(Debug, Default)]
pub(crate) struct ExportSet {
    in_progress: Vec<ExportState>,
    next: u64,
    /// Versions of the contents that consumers take chunk by chunk, each pinned until its token is dropped.
    pinned_contents: Vec<(u64, Weak<()>)>,
}

#[derive(Debug)]
struct ExportState {
    number: u64,
    /// The version of the exported contents. Once the table has another, the export will end with an error.
    version: u64,
    /// Rows in slots below this one were passed on.
    cursor: CacheSlot,
    written_back: WrittenBackIds,
}

/// Ids of rows that an export has passed on from RAM and that were written to SSD afterwards, where the export must
/// skip them.
///
/// Its lock may be taken with or without the table's. No thread waits for the table's lock during a scan of the SSD
/// tier, because the holder of that lock may wait for free space there, and so for the end of the scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenBackIds(Arc<Mutex<HashSet<Id>>>);

impl WrittenBackIds {
    pub(crate) fn contains(&self, id: Id) -> bool {
        lock(&self.0).contains(&id)
    }
}

impl ExportSet {
    /// Starts an export of the contents of this version. Returns the number of the export.
    pub(crate) fn begin(&mut self, version: u64) -> (u64, WrittenBackIds) {
        self.next += 1;
        let written_down = WrittenBackIds::default();
        self.in_progress.push(ExportState {
            number: self.next,
            version,
            cursor: 0,
            written_back: written_down.clone(),
        });
        (self.next, written_down)
    }

    pub(crate) fn end(&mut self, number: u64) {
        self.in_progress.retain(|export| export.number != number);
    }

    /// The first slot that an export has not passed on yet.
    pub(crate) fn cursor(&self, number: u64) -> CacheSlot {
        self.in_progress.iter().find(|export| export.number == number).map_or(0, |export| export.cursor)
    }

    /// Records that an export has passed on the rows in slots below `cursor`.
    pub(crate) fn move_cursor(&mut self, number: u64, cursor: CacheSlot) {
        if let Some(export) = self.in_progress.iter_mut().find(|export| export.number == number) {
            export.cursor = cursor;
        }
    }

    /// True if rows must stay in their slots, because an export of these contents is in progress.
    pub(crate) fn keeps_rows_in_slots(&self, version: u64) -> bool {
        self.in_progress.iter().any(|export| export.version == version)
    }

    /// Pins the contents of this version, as far as background work could change them, until the returned token is
    /// dropped. Dropping it needs no table lock, because Python must not wait for that lock.
    pub(crate) fn pin_contents(&mut self, version: u64) -> Arc<()> {
        self.pinned_contents.retain(|(_, token)| token.strong_count() > 0);
        let token = Arc::new(());
        self.pinned_contents.push((version, Arc::downgrade(&token)));
        token
    }

    /// True if an export of these contents is in progress, or they are pinned.
    pub(crate) fn are_contents_pinned(&self, version: u64) -> bool {
        let is_pinned = |(pinned, token): &(u64, Weak<()>)| *pinned == version && token.strong_count() > 0;
        self.keeps_rows_in_slots(version) || self.pinned_contents.iter().any(is_pinned)
    }

    /// Records that the rows in these slots are about to be written to SSD. Must precede any scan of the SSD tier that
    /// can find them.
    pub(crate) fn record_written_back(
        &self,
        version: u64,
        slots: &(impl Iterator<Item = CacheSlot> + Clone),
        id: impl Fn(CacheSlot) -> Id,
    ) {
        for export in self.in_progress.iter().filter(|export| export.version == version) {
            let handed_over = slots.clone().filter(|&slot| slot < export.cursor);
            lock(&export.written_back.0).extend(handed_over.map(&id));
        }
    }
}

#[cfg(test)]
mod tests;
