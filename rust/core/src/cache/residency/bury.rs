//! Rows that a sweep takes: whether a row is dead, and how it leaves the tiers.
//!
//! A row that no plan has pinned leaves its slot. One that a plan has pinned and does not use yet becomes, where it is, the row that its id
//! would be born with, so that the plan finds what it would find if the row had never been there.
#![allow(unsafe_code)]

use super::Residency;
use super::find::is_in_ram;
use super::judge::{ExpiredRow, SweepMatcher};
use crate::cache::rows::RowChunk;
use crate::error::Result;
use crate::host::WriteAccess;
use crate::lifecycle::ExpirySweep;
use crate::memory;
use crate::rows::{RowHeader, RowRef};
use crate::slots::RowState;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// The newest copy of the row is on SSD still, or in a tier below.
const UNREAD: RowState = RowState::LOADING.with(RowState::FAILED);

impl Residency {
    /// Judge the row in a slot of the host tier: if it is dead, add it to `expired`. Where that cannot be said yet, or a plan in place uses
    /// the row, add it to `deferred`. A slot whose row is not born, or is newer on the device, has nothing to judge.
    pub(super) fn match_in_host(
        &mut self,
        slot: CacheSlot,
        sweep: &ExpirySweep,
        expired: &mut Vec<WriteAccess>,
        deferred: &mut Vec<Id>,
    ) {
        let state = self.host.slots.state(slot);
        if !state.is_current() {
            if state.has(UNREAD) {
                deferred.push(self.host.id(slot));
            }
            return;
        }
        let header = self.host.metadata(slot);
        let by_weights = sweep.needs_weights();
        if header.last_step > sweep.latest_step() || !by_weights && !sweep.matches(&header, &[]) {
            return;
        }
        match self.unused_slot(slot, header.id) {
            None => deferred.push(header.id),
            Some(idle) => {
                let weights = &self.host.row(idle.read_access()).vector[..self.context.layout.dim];
                if !by_weights || sweep.matches(&header, weights) {
                    expired.push(idle);
                }
            }
        }
    }

    /// A slot of the host tier, where no plan that is in place uses its row.
    fn unused_slot(&mut self, slot: CacheSlot, id: Id) -> Option<WriteAccess> {
        if let Some(idle) = self.host.unpinned(slot) {
            return Some(idle);
        }
        // SAFETY: kernels use only the rows of plans that are in place, and this id is in none of them. A plan comes in place under the
        // table's lock, which whoever uses the slot holds until then.
        (!self.active_plans.has(id)).then(|| unsafe { self.host.pinned_unused(slot) })
    }

    /// The dead ones among the rows in some slots of the device tier. Those that plans in place use, or are about to bring there, are added
    /// to `deferred`.
    ///
    /// Errors: those of reads from the device.
    pub(super) fn match_on_device(
        &mut self,
        slots: &[CacheSlot],
        sweep: &ExpirySweep,
        deferred: &mut Vec<Id>,
    ) -> Result<Vec<CacheSlot>> {
        let by_weights = sweep.needs_weights();
        let mut dead = Vec::new();
        for &slot in slots {
            let tier = self.device_mut();
            let (header, state) = (*tier.header(slot), tier.slots.state(slot));
            if !state.is_current() {
                if state.has(UNREAD) && !state.has(RowState::PROVISIONAL) {
                    deferred.push(header.id);
                }
                continue;
            }
            if header.last_step > sweep.latest_step() || !by_weights && !sweep.matches(&header, &[]) {
                continue;
            }
            if tier.slots.is_pinned(slot) && self.active_plans.has(header.id) {
                deferred.push(header.id);
            } else {
                dead.push(slot);
            }
        }
        if !by_weights {
            return Ok(dead);
        }
        let rows = self.copies_of(&dead)?;
        let (dim, floats) = (self.context.layout.dim, self.context.floats());
        let mut dies = (0..dead.len()).map(|at| {
            let row = rows.row(at, floats);
            sweep.matches(row.header, &row.vector[..dim])
        });
        dead.retain(|_| dies.next().unwrap_or(false));
        Ok(dead)
    }

    /// Bury rows of the host tier, which `matcher` takes. On an error none is buried.
    pub(super) fn expire_in_host(&mut self, expired: &[WriteAccess], matcher: &SweepMatcher) -> Result<()> {
        if expired.is_empty() {
            return Ok(());
        }
        let dim = self.context.layout.dim;
        let of_slot = |idle: &WriteAccess| {
            matcher.expired_row(&self.host.metadata(idle.slot()), &self.host.row(idle.read_access()).vector[..dim])
        };
        let rows: Vec<ExpiredRow> = expired.iter().map(of_slot).collect();
        let on_ssd =
            expired.iter().zip(&rows).filter(|(idle, _)| self.host.slots.state(idle.slot()).has(RowState::ON_SSD));
        let copies = self.copies_of_host(expired)?;
        self.remove_expired_copies(&on_ssd.map(|(_, row)| row.id).collect::<Vec<Id>>())?;
        self.keep_host_pre_images(expired.iter().map(WriteAccess::read_access));
        let (mut unborn, mut leaving, mut ids) = (Vec::new(), Vec::with_capacity(expired.len()), Vec::new());
        for (idle, row) in expired.iter().zip(&rows) {
            if self.host.slots.is_pinned(idle.slot()) {
                unborn.push((row.id, idle.slot()));
            } else {
                leaving.push(idle.slot());
                ids.push(row.id);
            }
        }
        self.host.remove_batch(&leaving, &ids);
        self.reinitialize_in_host(&unborn);
        self.record_expired(&rows, copies, matcher);
        Ok(())
    }

    /// Bury rows of the device tier, which `matcher` takes. On an error none is buried.
    pub(super) fn expire_on_device(&mut self, expired: &[CacheSlot], matcher: &SweepMatcher) -> Result<()> {
        if expired.is_empty() {
            return Ok(());
        }
        let copies = self.copies_of_device(expired, matcher.reason_needs_weights())?;
        self.require_snapshot_copies(expired)?;
        let Some(tier) = &self.device else { return Ok(()) };
        let (dim, floats) = (self.context.layout.dim, self.context.floats());
        let weights = |at: usize| copies.vectors.get(at * floats..at * floats + dim).unwrap_or_default();
        let of_slot = |(at, &slot): (usize, &CacheSlot)| matcher.expired_row(tier.header(slot), weights(at));
        let rows: Vec<ExpiredRow> = expired.iter().enumerate().map(of_slot).collect();
        let on_ssd = expired.iter().zip(&rows).filter(|(slot, _)| tier.slots.state(**slot).has(RowState::ON_SSD));
        self.remove_expired_copies(&on_ssd.map(|(_, row)| row.id).collect::<Vec<Id>>())?;
        self.keep_device_pre_images(expired);
        let mut shadows = Vec::new();
        for (&slot, &ExpiredRow { id, .. }) in expired.iter().zip(&rows) {
            let shadow = self.host.slots.get(id);
            if shadow != NO_SLOT {
                shadows.push((id, shadow));
            }
            let tier = self.device_mut();
            if tier.slots.is_pinned(slot) {
                // The next plan that wants the row brings it to the device, as it does with a row that another plan was to bring.
                tier.slots.set_state(slot, RowState::OCCUPIED.with(RowState::LOADING).with(RowState::PROVISIONAL));
                *tier.header_mut(slot) = RowHeader { id, ..RowHeader::default() };
                self.counts.became_provisional(1);
                self.absent_reads += 1;
            } else {
                tier.remove(slot, id);
            }
        }
        // Plans that pinned a row's slot in the host tier while it was on the device may still come for it.
        self.reinitialize_in_host(&shadows);
        self.record_expired(&rows, copies, matcher);
        Ok(())
    }

    /// Give pinned rows of the host tier their initial values again: they are not born. Plans that are to train them count them anew.
    fn reinitialize_in_host(&mut self, rows: &[(Id, CacheSlot)]) {
        if rows.is_empty() {
            return;
        }
        self.initialize_in_host(rows);
        for &(_, slot) in rows {
            self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
        }
        self.counts.became_provisional(rows.len() as u64);
        self.absent_reads += rows.len() as u64;
    }

    /// Bury rows that were read from SSD and are in no other tier, and which `matcher` takes. On an error none is buried.
    pub(super) fn expire_read_rows(&mut self, expired: &[RowRef<'_>], matcher: &SweepMatcher) -> Result<()> {
        if expired.is_empty() {
            return Ok(());
        }
        let copies = self.copies_of_read(expired.iter().copied())?;
        self.remove_expired_copies(&expired.iter().map(|row| row.header.id).collect::<Vec<Id>>())?;
        let dim = self.context.layout.dim;
        let rows: Vec<ExpiredRow> =
            expired.iter().map(|row| matcher.expired_row(row.header, &row.vector[..dim])).collect();
        self.record_expired(&rows, copies, matcher);
        Ok(())
    }

    /// Bury the dead ones among these rows that are on SSD alone.
    pub(super) fn expire_on_ssd(&mut self, ids: &[Id], matcher: &SweepMatcher) -> Result<()> {
        let Some(ssd) = &self.context.ssd else { return Ok(()) };
        let in_ram = |id: Id| is_in_ram(&self.host, self.device.as_ref(), id);
        let elsewhere: Vec<Id> = ids.iter().copied().filter(|&id| !in_ram(id)).collect();
        let mut there = vec![false; elsewhere.len()];
        ssd.maybe_contains(&elsewhere, &mut there);
        let there = elsewhere.into_iter().zip(there).filter(|(_, there)| *there);
        let wanted: Vec<(Id, usize)> = there.enumerate().map(|(row, (id, _))| (id, row)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let (dim, floats) = (self.context.layout.dim, self.context.floats());
        let mut headers = memory::zeros("judge rows on SSD", wanted.len())?;
        let mut vectors = memory::zeros("judge rows on SSD", wanted.len() * floats)?;
        let absent = self.context.read_from_ssd(ssd, &wanted, &mut headers, &mut vectors);
        let absent = absent.map_err(|error| self.context.in_table(error))?;
        let dead_row = |&(_, at): &(Id, usize)| {
            let row = RowRef { header: &headers[at], vector: &vectors[at * floats..][..floats] };
            let dead =
                absent.binary_search(&(at as u32)).is_err() && matcher.sweep.matches(row.header, &row.vector[..dim]);
            dead.then_some(row)
        };
        let dead: Vec<RowRef<'_>> = wanted.iter().filter_map(dead_row).collect();
        self.expire_read_rows(&dead, matcher)
    }

    /// Remove the copies on SSD of rows that are about to be buried. A tier that only reads forgets them without a word on disk, since it
    /// publishes no state any more.
    fn remove_expired_copies(&mut self, ids: &[Id]) -> Result<()> {
        let Some(ssd) = &self.context.ssd else { return Ok(()) };
        match self.context.remove_on_ssd(ssd, ids) {
            Err(_) if ssd.is_read_only() => {
                ssd.remove_without_tombstones(ids);
                Ok(())
            }
            removed => removed,
        }
    }

    /// These rows, which `matcher` takes, are in no tier any more, and `copies` are to be told of. A delta says the sweep that took them. The ids
    /// of those are noted too that the checkpoints on which deltas build may have with other columns, and of those that died after such a
    /// checkpoint was saved.
    pub(super) fn record_expired(&mut self, rows: &[ExpiredRow], copies: RowChunk, matcher: &SweepMatcher) {
        if rows.is_empty() {
            return;
        }
        self.notify_expired(copies, matcher);
        let as_swept = self.is_unchanged_since_sweep();
        // An export that could meet some of them and not others ends.
        self.context.bump_version();
        if as_swept {
            self.version_after_sweep = Some(self.context.version());
        }
        self.counts.expired_by_rule(rows.len() as u64);
        matcher.count(rows, &mut self.evicted_by_rule);
        let is_late = self.epoch != matcher.epoch;
        let noted = rows.iter().filter(|row| is_late || self.history.needs_tombstone(row.modified_epoch));
        let noted: Vec<Id> = noted.map(|row| row.id).collect();
        self.history.record_expired(self.epoch, (rows.len() - noted.len()) as u64);
        self.record_tombstones(&noted);
    }
}
