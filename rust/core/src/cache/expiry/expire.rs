//! Removal of expired rows: matching rows against a sweep's rule, and taking the matched rows out of the tiers.
//!
//! An unpinned row leaves its slot. A row that is pinned by a plan which does not use it yet gets its initial value in
//! place, so that the plan finds the same value as if the row had never existed.
#![allow(unsafe_code)]

use super::Residency;
use crate::cache::placement::{ExpiredRow, Placement, SweepMatcher, is_in_ram};
use crate::cache::row_blocks::RowChunk;
use crate::error::Result;
use crate::lifecycle::ExpirySweep;
use crate::rows::{RowHeader, RowRef};
use crate::runtime::memory;
use crate::slots::RowState;
use crate::tiers::WriteAccess;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// The current copy of the row is still on SSD or in a tier below.
const UNREAD: RowState = RowState::LOADING.with(RowState::FAILED);

impl Residency {
    /// Removes rows of the host tier that `matcher` matches. On an error none is removed.
    pub(super) fn expire_in_host(&mut self, expired: &[WriteAccess], matcher: &SweepMatcher) -> Result<()> {
        if expired.is_empty() {
            return Ok(());
        }
        let dim = self.placement.context.layout.dim;
        let of_slot = |access: &WriteAccess| {
            matcher.expired_row(
                &self.placement.host.metadata(access.slot()),
                &self.placement.host.row(access.read_access()).vector[..dim],
            )
        };
        let rows: Vec<ExpiredRow> = expired.iter().map(of_slot).collect();
        let on_ssd = expired
            .iter()
            .zip(&rows)
            .filter(|(access, _)| self.placement.host.slots.state(access.slot()).has(RowState::ON_SSD));
        let copies = self.placement.copies_of_host(expired)?;
        self.placement.remove_expired_copies(&on_ssd.map(|(_, row)| row.id).collect::<Vec<Id>>())?;
        self.placement.keep_host_pre_images(expired.iter().map(WriteAccess::read_access));
        let (mut provisional, mut leaving, mut ids) = (Vec::new(), Vec::with_capacity(expired.len()), Vec::new());
        for (access, row) in expired.iter().zip(&rows) {
            if self.placement.host.slots.is_pinned(access.slot()) {
                provisional.push((row.id, access.slot()));
            } else {
                leaving.push(access.slot());
                ids.push(row.id);
            }
        }
        self.placement.host.remove_batch(&leaving, &ids);
        self.placement.reinitialize_in_host(&provisional);
        self.record_expired(&rows, copies, matcher);
        Ok(())
    }

    /// Removes rows of the device tier that `matcher` matches. On an error none is removed.
    pub(super) fn expire_on_device(&mut self, expired: &[CacheSlot], matcher: &SweepMatcher) -> Result<()> {
        if expired.is_empty() {
            return Ok(());
        }
        let copies = self.placement.copies_of_device(expired, matcher.reason_needs_weights())?;
        self.placement.require_snapshot_copies(expired)?;
        let Some(tier) = &self.placement.device else { return Ok(()) };
        let (dim, floats) = (self.placement.context.layout.dim, self.placement.context.floats());
        let weights = |at: usize| copies.vectors.get(at * floats..at * floats + dim).unwrap_or_default();
        let of_slot = |(at, &slot): (usize, &CacheSlot)| matcher.expired_row(tier.header(slot), weights(at));
        let rows: Vec<ExpiredRow> = expired.iter().enumerate().map(of_slot).collect();
        let on_ssd = expired.iter().zip(&rows).filter(|(slot, _)| tier.slots.state(**slot).has(RowState::ON_SSD));
        self.placement.remove_expired_copies(&on_ssd.map(|(_, row)| row.id).collect::<Vec<Id>>())?;
        self.placement.keep_device_pre_images(expired);
        let mut shadows = Vec::new();
        for (&slot, &ExpiredRow { id, .. }) in expired.iter().zip(&rows) {
            let shadow = self.placement.host.slots.get(id);
            if shadow != NO_SLOT {
                shadows.push((id, shadow));
            }
            let tier = self.placement.device_mut();
            if tier.slots.is_pinned(slot) {
                // The next plan that requires the row loads it to the device, like a row that another plan was to load.
                tier.slots.set_state(slot, RowState::OCCUPIED.with(RowState::LOADING).with(RowState::PROVISIONAL));
                *tier.header_mut(slot) = RowHeader { id, ..RowHeader::default() };
                self.placement.counts.became_provisional(1);
                self.placement.absent_reads += 1;
            } else {
                tier.remove(slot, id);
            }
        }
        // Plans that pinned the row's host slot while the row was on the device may still promote it.
        self.placement.reinitialize_in_host(&shadows);
        self.record_expired(&rows, copies, matcher);
        Ok(())
    }

    /// Removes rows that were read from SSD, are in no other tier, and match `matcher`. On an error none is removed.
    pub(crate) fn expire_read_rows(&mut self, expired: &[RowRef<'_>], matcher: &SweepMatcher) -> Result<()> {
        if expired.is_empty() {
            return Ok(());
        }
        let copies = self.placement.copies_of_read(expired.iter().copied())?;
        self.placement.remove_expired_copies(&expired.iter().map(|row| row.header.id).collect::<Vec<Id>>())?;
        let dim = self.placement.context.layout.dim;
        let rows: Vec<ExpiredRow> =
            expired.iter().map(|row| matcher.expired_row(row.header, &row.vector[..dim])).collect();
        self.record_expired(&rows, copies, matcher);
        Ok(())
    }

    /// Removes the expired rows of `ids` that are only on SSD.
    pub(super) fn expire_on_ssd(&mut self, ids: &[Id], matcher: &SweepMatcher) -> Result<()> {
        let Some(ssd) = &self.placement.context.ssd else { return Ok(()) };
        let in_ram = |id: Id| is_in_ram(&self.placement.host, self.placement.device.as_ref(), id);
        let elsewhere: Vec<Id> = ids.iter().copied().filter(|&id| !in_ram(id)).collect();
        let mut there = vec![false; elsewhere.len()];
        ssd.maybe_contains(&elsewhere, &mut there);
        let there = elsewhere.into_iter().zip(there).filter(|(_, there)| *there);
        let wanted: Vec<(Id, usize)> = there.enumerate().map(|(row, (id, _))| (id, row)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let (dim, floats) = (self.placement.context.layout.dim, self.placement.context.floats());
        let mut headers = memory::zeros("match rows on SSD", wanted.len())?;
        let mut vectors = memory::zeros("match rows on SSD", wanted.len() * floats)?;
        let absent = self.placement.context.read_from_ssd(ssd, &wanted, &mut headers, &mut vectors);
        let absent = absent.map_err(|error| self.placement.context.in_table(error))?;
        let expired_row = |&(_, at): &(Id, usize)| {
            let row = RowRef { header: &headers[at], vector: &vectors[at * floats..][..floats] };
            let expired =
                absent.binary_search(&(at as u32)).is_err() && matcher.sweep.matches(row.header, &row.vector[..dim]);
            expired.then_some(row)
        };
        let expired: Vec<RowRef<'_>> = wanted.iter().filter_map(expired_row).collect();
        self.expire_read_rows(&expired, matcher)
    }

    /// Records rows that `matcher` matched and that are in no tier, and delivers `copies` to the eviction queue. A
    /// delta contains the sweep that removed them. Ids are recorded as tombstones in addition if base checkpoints may
    /// have the row with other columns, or if it expired after such a checkpoint was saved.
    pub(super) fn record_expired(&mut self, rows: &[ExpiredRow], copies: RowChunk, matcher: &SweepMatcher) {
        if rows.is_empty() {
            return;
        }
        self.placement.notify_expired(copies, matcher);
        let as_swept = self.is_unchanged_since_sweep();
        // Cancels exports that could contain some of the rows and miss others.
        self.placement.context.bump_version();
        if as_swept {
            self.lifecycle.version_after_sweep = Some(self.placement.context.version());
        }
        self.placement.counts.expired_by_rule(rows.len() as u64);
        matcher.count(rows, &mut self.lifecycle.evicted_by_rule);
        let is_late = self.placement.changes.epoch != matcher.epoch;
        let tombstones =
            rows.iter().filter(|row| is_late || self.placement.changes.history.needs_tombstone(row.modified_epoch));
        let tombstones: Vec<Id> = tombstones.map(|row| row.id).collect();
        self.placement
            .changes
            .history
            .record_expired(self.placement.changes.epoch, (rows.len() - tombstones.len()) as u64);
        self.placement.record_tombstones(&tombstones);
    }
}

impl Placement {
    /// Matches the row in a host slot: adds it to `expired` if it matches, or to `deferred` if it cannot be matched yet
    /// or an active plan uses it. Skips slots whose row is provisional or has its current copy on the device.
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
            Some(access) => {
                let weights = &self.host.row(access.read_access()).vector[..self.context.layout.dim];
                if !by_weights || sweep.matches(&header, weights) {
                    expired.push(access);
                }
            }
        }
    }

    /// Returns write access to a host slot, unless an active plan uses its row.
    fn unused_slot(&mut self, slot: CacheSlot, id: Id) -> Option<WriteAccess> {
        if let Some(access) = self.host.unpinned(slot) {
            return Some(access);
        }
        // SAFETY: kernels use only rows of active plans, and this id is in none of them. A plan becomes active under
        // the table's lock, which the user of the slot holds until then.
        (!self.active_plans.has(id)).then(|| unsafe { self.host.pinned_unused(slot) })
    }

    /// Returns the matching rows among some device slots. Rows that active plans use or are about to load are added to
    /// `deferred`.
    ///
    /// Errors: those of reads from the device.
    pub(super) fn match_on_device(
        &mut self,
        slots: &[CacheSlot],
        sweep: &ExpirySweep,
        deferred: &mut Vec<Id>,
    ) -> Result<Vec<CacheSlot>> {
        let by_weights = sweep.needs_weights();
        let mut expired = Vec::new();
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
                expired.push(slot);
            }
        }
        if !by_weights {
            return Ok(expired);
        }
        let rows = self.copies_of(&expired)?;
        let (dim, floats) = (self.context.layout.dim, self.context.floats());
        let mut is_expired = (0..expired.len()).map(|at| {
            let row = rows.row(at, floats);
            sweep.matches(row.header, &row.vector[..dim])
        });
        expired.retain(|_| is_expired.next().unwrap_or(false));
        Ok(expired)
    }

    /// Resets pinned rows of the host tier to their initial values: they become provisional. Plans that are to train
    /// them count them again.
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

    /// Removes the SSD copies of rows that are about to expire. A read-only tier forgets them without writing
    /// tombstones, because it does not publish state.
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
}
