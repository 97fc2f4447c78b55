//! Import and removal of rows by id, outside of batches. A call is complete or without effect, or its error reports the
//! number of processed rows.
//!
//! If a write to SSD fails during a call, some of its rows may be on SSD already, and nothing can be written to undo
//! that. The call then continues to its end in RAM, beyond the budget, and the next call that writes is rejected. All
//! other fallible work precedes the first change.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::cache::expiry::Residency;
use crate::cache::placement::{Placement, RowLocation};
use crate::cache::row_blocks::{PickedRows, RowBlock};
use crate::config::OnFull;
use crate::error::{Error, Result};
use crate::kernels::thread_pool::for_each_alongside;
use crate::rows::{RowHeader, RowRef};
use crate::runtime::memory;
use crate::slots::RowState;
use crate::ssd::SsdTier;
use crate::tiers::NoKernelWrites;
use crate::types::{CacheSlot, Id};

/// Number of rows that are imported or removed together.
const ROWS_PER_PART: usize = 4096;
/// Number of rows of columns that one thread copies at a time.
const ROWS_PER_TASK: usize = 2048;

/// Rows that are imported together, and their present locations.
#[derive(Clone, Copy)]
struct ImportChunk<'a> {
    headers: &'a [RowHeader],
    /// `[n, V]`
    vectors: &'a [f32],
    ids: &'a [Id],
    found: &'a [RowLocation],
    /// True if rows of the same call are in the table already.
    has_begun: bool,
}

impl Residency {
    /// Imports new and existing rows. `ids` are the distinct ids of the block. Requires that no plan uses any of the
    /// rows.
    ///
    /// `done` is the number of rows that are in the table already, if an earlier call with the same rows had to request
    /// rows from the device.
    ///
    /// Errors: `Capacity`, `Memory`, and those of the SSD tier. Nothing has changed then, unless the error states how
    /// many rows were imported.
    pub(crate) fn import(
        &mut self,
        block: RowBlock<'_>,
        ids: &[Id],
        no_writes: NoKernelWrites<'_>,
        done: &mut usize,
    ) -> Result<()> {
        // A sweep in progress matches rows that are present already, and none of these.
        self.finish_sweep().map_err(|error| self.placement.partial_error(error, *done, ids.len(), "imported"))?;
        self.record_added_rows();
        match self.placement.context.config.on_full {
            OnFull::Error => self.import_all(block, ids, no_writes),
            OnFull::Evict => self.import_in_parts(block, ids, no_writes, done),
        }
    }

    /// Imports rows after checking that all of them fit.
    fn import_all(&mut self, block: RowBlock<'_>, ids: &[Id], no_writes: NoKernelWrites<'_>) -> Result<()> {
        let mut found = self.placement.find_all(ids)?;
        self.placement.require_found_copies(&found)?;
        self.check_import(ids, &found)?;
        let floats = self.placement.context.floats();
        let mut done = 0;
        let parts = block.headers.chunks(ROWS_PER_PART).zip(block.vectors.chunks(ROWS_PER_PART * floats));
        let parts_found = ids.chunks(ROWS_PER_PART).zip(found.chunks_mut(ROWS_PER_PART));
        for ((headers, vectors), (some, found)) in parts.zip(parts_found) {
            self.placement.find_again(some, found);
            let part = ImportChunk { headers, vectors, ids: some, found, has_begun: done > 0 };
            self.put_chunk(part, no_writes)
                .map_err(|error| self.placement.partial_error(error, done, ids.len(), "imported"))?;
            done += some.len();
        }
        Ok(())
    }

    /// Imports rows in parts. Each part may drop other rows to free space, including rows of previous parts.
    fn import_in_parts(
        &mut self,
        block: RowBlock<'_>,
        ids: &[Id],
        no_writes: NoKernelWrites<'_>,
        done: &mut usize,
    ) -> Result<()> {
        let at_once = (self.placement.capacity_rows() / 2).clamp(1, ROWS_PER_PART as u64) as usize;
        let floats = self.placement.context.floats();
        let (headers, vectors) = (&block.headers[*done..], &block.vectors[*done * floats..]);
        let parts = headers.chunks(at_once).zip(vectors.chunks(at_once * floats));
        for ((headers, vectors), some) in parts.zip(ids[*done..].chunks(at_once)) {
            let (begun, dropped) = (*done > 0, self.placement.counts.dropped());
            let imported = self
                .find_with_space(some, begun)
                .and_then(|found| self.placement.require_found_copies(&found).map(|()| found))
                .and_then(|found| {
                    let put = self.put_chunk(
                        ImportChunk { headers, vectors, ids: some, found: &found, has_begun: begun },
                        no_writes,
                    );
                    put.map_err(|error| self.placement.after_drops(dropped, error))
                });
            imported.map_err(|error| self.placement.partial_error(error, *done, ids.len(), "imported"))?;
            *done += some.len();
        }
        Ok(())
    }

    /// Returns the locations of the rows of a part, after dropping other rows so that the new ones fit.
    fn find_with_space(&mut self, ids: &[Id], has_begun: bool) -> Result<Vec<RowLocation>> {
        let mut found = self.placement.find(ids)?;
        let new = count_new(&found);
        if new > 0 {
            let fits = self.check_capacity(new, ids);
            if fits.is_err() && !(has_begun && self.placement.context.ssd.as_ref().is_some_and(SsdTier::is_read_only)) {
                fits?;
            }
            self.placement.find_again(ids, &mut found);
        }
        Ok(found)
    }

    /// Checks that all rows fit. Errors: `Capacity`, `Memory`.
    fn check_import(&mut self, ids: &[Id], found: &[RowLocation]) -> Result<()> {
        let new = count_new(found);
        if new > 0 {
            self.check_capacity(new, ids)?;
        }
        let indexed = self.placement.context.ssd.as_ref().map_or(0, SsdTier::rows);
        // Upper bound of the index with the new rows. Existing rows do not enlarge it.
        if new > 0
            && ids.len() > ROWS_PER_PART
            && self.placement.context.ssd.is_some()
            && self.placement.host.rows_after_index(u64::MAX, indexed + new) == 0
        {
            return Err(self.placement.index_full_error());
        }
        let slotless = found.iter().filter(|found| !matches!(found, RowLocation::Host(_))).count();
        let free = self.placement.host.slots.free_slots() as usize;
        self.placement.host.reserve(if self.placement.context.ssd.is_some() { slotless.min(free) } else { slotless })
    }

    /// Puts the rows of a part into the table. On an error none is added.
    fn put_chunk(&mut self, part: ImportChunk<'_>, no_writes: NoKernelWrites<'_>) -> Result<()> {
        let floats = self.placement.context.floats();
        // If a delta may be based on an earlier checkpoint, which does not have these rows, they count as modified in
        // this epoch.
        let stamped = self.placement.changes.history.is_needed().then(|| {
            let now = |header: &RowHeader| RowHeader { modified_epoch: self.placement.changes.epoch, ..*header };
            part.headers.iter().map(now).collect::<Vec<RowHeader>>()
        });
        let headers = stamped.as_deref().unwrap_or(part.headers);
        let row = |position: usize| RowRef {
            header: &headers[position],
            vector: &part.vectors[position * floats..][..floats],
        };
        let slotless: Vec<usize> =
            (0..part.found.len()).filter(|&position| !matches!(part.found[position], RowLocation::Host(_))).collect();
        let known: Vec<bool> =
            slotless.iter().map(|&position| self.placement.is_on_ssd(part.found[position])).collect();
        let fit = self.placement.append_slotless(&part, &slotless, &known, &row, no_writes)?;
        for (index, (&position, &known)) in slotless.iter().zip(&known).enumerate() {
            if let (RowLocation::Device(slot), Some(device)) = (part.found[position], &mut self.placement.device) {
                device.remove(slot, part.ids[position]);
            }
            if index < fit {
                let on_ssd = if known { RowState::ON_SSD } else { RowState::default() };
                let taken = self.placement.host.take(true)?.expect("overflow always has a slot");
                self.placement.host.insert_row(
                    &taken,
                    row(position),
                    RowState::DIRTY.with(RowState::MODIFIED).with(on_ssd),
                );
            }
        }
        for (position, found) in part.found.iter().enumerate() {
            if let RowLocation::Host(slot) = *found {
                let access = self.placement.host.unpinned(slot).expect("no plan uses a row that is imported");
                self.placement.host.overwrite(&access, row(position));
                self.placement.host.slots.mark(slot, RowState::DIRTY.with(RowState::MODIFIED));
            }
        }
        self.placement.counts.added(count_new(part.found));
        self.lifecycle.admission.record_new_rows(part.ids.iter().copied());
        self.placement.fit_host_to_index();
        Ok(())
    }

    /// Removes rows. Returns the number of rows removed. `ids` must be distinct, and no plan may use any of the rows.
    ///
    /// Errors: those of the SSD tier. Nothing has changed then, unless the error states how many rows were removed.
    pub(crate) fn forget(&mut self, ids: &[Id], no_writes: NoKernelWrites<'_>) -> Result<u64> {
        self.finish_sweep()?;
        let mut found = self.placement.find_all(ids)?;
        self.placement.require_found_copies(&found)?;
        let (mut done, mut removed) = (0, 0);
        for (some, found) in ids.chunks(ROWS_PER_PART).zip(found.chunks_mut(ROWS_PER_PART)) {
            self.placement.find_again(some, found);
            removed += self
                .placement
                .forget_chunk(some, found, removed > 0, no_writes)
                .map_err(|error| self.placement.partial_error(error, done, ids.len(), "removed"))?;
            done += some.len();
        }
        Ok(removed)
    }

    /// Puts rows that are new to the table into free slots of the host tier: out of `rows[begin..begin + ids.len()]`,
    /// which have these ids, the longest prefix that is new and fits. Returns its length.
    pub(crate) fn put_new(&mut self, rows: PickedRows<'_>, begin: usize, ids: &[Id]) -> Result<usize> {
        self.finish_sweep()?;
        self.record_added_rows();
        let fit = self.placement.new_rows_that_fit(ids);
        self.placement.host.reserve(fit)?;
        let mut slots: Vec<CacheSlot> = Vec::new();
        memory::reserve(&mut slots, "place rows", fit)?;
        self.placement.host.slots.take_many(fit, &mut slots);
        let floats = self.placement.context.floats();
        let arena = Arc::clone(self.placement.host.arena());
        let copy = |(task, slots): (usize, &[CacheSlot])| {
            for (at, &slot) in slots.iter().enumerate() {
                let (row, to) = (begin + task * ROWS_PER_TASK + at, arena.row(slot));
                // SAFETY: the slot was taken above for this row only, so it is valid in the arena and of this layout.
                // No kernel uses it, and no other thread reads it before this call releases the table's lock.
                unsafe {
                    *to.header = rows.header(row);
                    rows.copy_vector(row, std::slice::from_raw_parts_mut(to.vector, floats));
                }
            }
        };
        let placed = for_each_alongside(slots.chunks(ROWS_PER_TASK).enumerate(), copy, || {
            let ids = &ids[..slots.len()];
            self.placement.host.slots.insert_all_new(&slots, ids, RowState::DIRTY.with(RowState::MODIFIED))
        });
        for &slot in &slots[placed..] {
            self.placement.host.slots.give_back(slot);
        }
        self.placement.counts.added(placed as u64);
        self.placement.context.bump_version();
        self.lifecycle.admission.record_new_rows(ids[..placed].iter().copied());
        self.placement.fit_host_to_index();
        Ok(placed)
    }
}

impl Placement {
    /// Returns the error of a call that has processed `done` of `all` rows.
    pub(crate) fn partial_error(&self, error: Error, done: usize, all: usize, verb: &str) -> Error {
        if done == 0 {
            return error;
        }
        error.context(format!(
            "table {:?}: the first {done} of the {all} rows were {verb} and the others were not",
            self.context.config.name
        ))
    }

    /// Returns the exact location of each row. Requires that no plan uses any of them.
    fn find_all(&self, ids: &[Id]) -> Result<Vec<RowLocation>> {
        let mut found = Vec::new();
        memory::reserve(&mut found, "find rows", ids.len())?;
        for ids in ids.chunks(ROWS_PER_PART) {
            found.append(&mut self.find(ids)?);
        }
        Ok(found)
    }

    /// Makes space for the rows of a part without a host slot, which is all of the fallible work: they are to take free
    /// slots, and the excess rows are appended to SSD here. Returns the number of rows that are to take slots.
    fn append_slotless<'a>(
        &mut self,
        part: &ImportChunk<'_>,
        slotless: &[usize],
        known: &[bool],
        row: &dyn Fn(usize) -> RowRef<'a>,
        no_writes: NoKernelWrites<'_>,
    ) -> Result<usize> {
        let mut fit = slotless.len();
        if self.context.ssd.is_some() {
            fit = fit.min(self.host.slots.free_slots() as usize);
        }
        self.host.reserve(fit)?;
        // Cancels exports that could contain some of these rows and miss others.
        self.context.bump_version();
        self.keep_found_pre_images(part.found, no_writes);
        let Some(ssd) = self.context.ssd.as_ref().filter(|_| fit < slotless.len()) else { return Ok(fit) };
        let rows: Vec<RowRef<'_>> = slotless[fit..].iter().map(|&position| row(position)).collect();
        if let Err(error) = self.context.append(ssd, &rows, &known[fit..]) {
            let unchanged = !ssd.is_read_only() || !known[fit..].contains(&true);
            if unchanged && !part.has_begun {
                return Err(error);
            }
            fit = slotless.len();
            self.host.reserve(fit).map_err(|refused| {
                refused.context(format!(
                    "after {error}: of the rows that the SSD tier did not take, those that were there before may have their old \
                     values or the new ones, and the others are not there"
                ))
            })?;
        }
        Ok(fit)
    }

    /// Removes the rows of a part, all of them or, on an error, none. If rows of the same call are removed already
    /// (`has_begun`), also removes them when the SSD tier has become read-only. Returns the number of rows removed.
    fn forget_chunk(
        &mut self,
        ids: &[Id],
        found: &[RowLocation],
        has_begun: bool,
        no_writes: NoKernelWrites<'_>,
    ) -> Result<u64> {
        // Cancels exports that could contain some of these rows and miss others.
        self.context.bump_version();
        if let Some(ssd) = &self.context.ssd {
            let there = ids.iter().zip(found).filter(|(_, found)| self.is_on_ssd(**found));
            let on_ssd: Vec<Id> = there.map(|(&id, _)| id).collect();
            if let Err(error) = self.context.remove_on_ssd(ssd, &on_ssd) {
                if !(has_begun && ssd.is_read_only()) {
                    return Err(error);
                }
                ssd.remove_without_tombstones(&on_ssd);
            }
        }
        self.keep_found_pre_images(found, no_writes);
        let mut removed = Vec::new();
        for (&id, found) in ids.iter().zip(found) {
            match (*found, &mut self.device) {
                (RowLocation::Device(slot), Some(device)) => device.remove(slot, id),
                (RowLocation::Host(slot), _) => self.host.remove(slot, false),
                (RowLocation::Ssd, _) => {}
                _ => continue,
            }
            removed.push(id);
        }
        self.counts.removed(removed.len() as u64);
        self.record_tombstones(&removed);
        Ok(removed.len() as u64)
    }

    /// Length of the longest prefix of `ids` that are new to the table, belong to its shard, and fit free slots of the
    /// host tier.
    fn new_rows_that_fit(&mut self, ids: &[Id]) -> usize {
        let fits = |all: &Self| all.capacity_rows().saturating_sub(all.counts.rows() + all.counts.provisional());
        let on_device = self.device.as_ref().map_or(0, crate::tiers::DeviceTier::row_count);
        // Rows of a table with a base checkpoint must be marked as modified, which `import` does.
        let descends = self.changes.history.is_needed();
        if descends || on_device > 0 || self.context.config.on_full == OnFull::Evict && fits(self) < ids.len() as u64 {
            return 0;
        }
        self.make_fit(ids.len() as u64);
        let config = &self.context.config;
        let fit = (ids.len() as u64).min(fits(self)).min(u64::from(self.host.slots.free_slots())) as usize;
        let mut new = fit;
        let (buckets, bucketing) = (&config.buckets, config.bucketing());
        if let Some(foreign) = ids[..new].iter().position(|&id| !buckets.contains(&bucketing.of(id))) {
            new = foreign;
        }
        if let Some(ssd) = &self.context.ssd
            && ssd.rows() > 0
        {
            let mut known = vec![false; new];
            ssd.maybe_contains(&ids[..new], &mut known);
            new = known.iter().position(|&known| known).unwrap_or(new);
        }
        new
    }
}

/// Number of rows that the table does not have.
fn count_new(found: &[RowLocation]) -> u64 {
    found.iter().filter(|found| matches!(found, RowLocation::Absent)).count() as u64
}
