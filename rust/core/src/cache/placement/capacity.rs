//! Capacity of a table in rows, its row counts, and the choice of rows to drop when it is full.

use std::collections::HashSet;

use super::Placement;
use super::find::is_in_ram;
use crate::cache::row_blocks::RowChunk;
use crate::config::OnFull;
use crate::error::{Error, Kind, Result};
use crate::slots::{RowState, SlotMap};
use crate::ssd::SsdTier;
use crate::tiers::{HostTier, WriteAccess};
use crate::types::{CacheSlot, Id, NO_SLOT};

impl Placement {
    /// Capacity of the lowest tier in rows.
    pub(crate) fn capacity_rows(&self) -> u64 {
        self.context.ssd.as_ref().map_or(u64::from(self.host.budget_rows()), SsdTier::capacity_rows)
    }

    /// Number of rows that fit the host budget next to the index of the rows on SSD and the tombstones.
    pub(super) fn host_rows_after_index(&self) -> u64 {
        let Some(ssd) = &self.context.ssd else { return self.host.rows_after_index(0, 0) };
        let history_rows = self.changes.charged_history_bytes().div_ceil(self.host.row_bytes());
        self.host.rows_after_index(ssd.index_bytes(), ssd.rows()).saturating_sub(history_rows)
    }

    /// The error for rows whose index would use all the space of rows in RAM.
    pub(crate) fn index_full_error(&self) -> Error {
        let other_bytes = self.changes.charged_history_bytes() + self.host.row_bytes();
        let needed = |rows: u64| HostTier::charged_bytes(u64::MAX, rows) + other_bytes;
        let (capacity, rows, config) = (self.capacity_rows(), self.counts.rows(), &self.context.config);
        Kind::Capacity.error(format!(
            "table {:?}: the index of its {rows} rows on SSD fills host_bytes={} and leaves no room for a row in RAM: {} bytes are \
             needed at least, and {} for the index of all {capacity} rows that ssd_bytes holds; set host_bytes to that, and more \
             for the rows of a batch",
            config.name,
            config.host_bytes,
            needed(rows + 1).max(config.host_bytes + 1),
            needed(capacity.max(rows + 1)).max(config.host_bytes + 1),
        ))
    }

    /// True if `more` rows, the current rows and the rows that batches in flight may add all fit.
    pub(crate) fn fits(&self, more: u64) -> bool {
        self.rows_with(more) <= self.capacity_rows() && !self.is_index_full(more)
    }

    /// Like [`Placement::fits`], but first takes missing bytes from the budget shared by tables.
    pub(crate) fn make_fit(&mut self, more: u64) -> bool {
        self.fits(more) || self.host.grow_to(self.rows_with(more))
    }

    /// Returns shared bytes that the rows of the table do not need, and closes the slots beyond the budget that a batch
    /// has used.
    pub(crate) fn give_back_unused(&mut self) {
        if self.host.budget().shared().is_some() && self.host.shrink_to(self.rows_with(0)) {
            self.move_below_limit();
        }
    }

    /// Returns all shared bytes and frees the memory of the rows, because the table is closed. Rows that a batch in
    /// flight uses and rows of a poisoned table stay in memory until the table is dropped.
    pub(crate) fn give_back_budget(&mut self, is_torn: bool) {
        if self.host.budget().shared().is_none() {
            return;
        }
        if !is_torn && self.host.slots.pinned() == 0 {
            self.host.clear(self.context.config.policy);
        }
        self.host.shrink_to(0);
    }

    /// The number of rows of the table, plus the rows that batches in flight may add, plus `more`.
    fn rows_with(&self, more: u64) -> u64 {
        self.counts.rows() + self.counts.max_new_rows() + more
    }

    pub(crate) fn is_index_full(&self, more: u64) -> bool {
        more > 0 && self.context.ssd.is_some() && self.host_rows_after_index() == 0
    }

    /// Returns the last tier with its budget, and the way to fit `rows` rows there, for messages.
    fn last_tier(&self, rows: u64) -> (String, String) {
        if let Some(ssd) = &self.context.config.ssd {
            return (format!("its SSD tier (ssd_bytes={})", ssd.bytes), "raise ssd_bytes".into());
        }
        let (budget, wanted) = (self.host.budget(), rows * self.host.row_bytes());
        let (ram, raise) = match budget.shared() {
            None => (format!("RAM (host_bytes={})", budget.bytes()), format!("raise host_bytes to {wanted} or more")),
            Some(shared) => (
                "the RAM that the other tables of its module leave".into(),
                format!(
                    "raise host_bytes of the module (TierBudgets(host_bytes={}), shared by its {} tables) to {} or more",
                    shared.host_bytes(),
                    shared.tables(),
                    shared.host_bytes_with(wanted.saturating_sub(budget.within_reach())),
                ),
            ),
        };
        let cure = format!("add an SSD tier with TierBudgets(ssd_bytes=..., ssd_dir=...), {raise}");
        (format!("it has no SSD tier, and {ram}"), cure)
    }

    pub(crate) fn table_full_error(&self, more: u64) -> Error {
        let ((tier, cure), rows) = (self.last_tier(self.rows_with(more)), self.counts.rows());
        let capacity = match self.context.ssd {
            Some(_) => self.capacity_rows(),
            None => self.host.budget().within_reach() / self.host.row_bytes(),
        };
        Kind::Capacity.error(format!(
            "table {:?} is full: {tier} holds {capacity} rows, {rows} are there and {more} new ones are to be added; {cure}, or \
             set on_full=\"evict\" to drop rows by policy",
            self.context.config.name,
        ))
    }

    /// Checks that `stay` rows, `more` new rows and the rows that batches in flight may add fit together.
    fn check_together(&self, stay: u64, more: u64) -> Result<()> {
        let (capacity, new) = (self.capacity_rows(), self.counts.max_new_rows() + more);
        if stay + new <= capacity {
            return Ok(());
        }
        let (tier, cure) = self.last_tier(stay + new);
        Err(Kind::Capacity.error(format!(
            "table {:?}: {tier} holds {capacity} rows, and there is no space for {new} new ones, because this batch and others in \
             flight use {stay} of its rows; {cure}, or use smaller batches",
            self.context.config.name,
        )))
    }

    /// Checks that `more` rows fit once all droppable rows are dropped.
    pub(crate) fn check_droppable(&mut self, more: u64, needed: &[Id]) -> Result<()> {
        let device = self.device.as_ref().map_or(0, |tier| tier.slots.most_pinned());
        let most = self.host.slots.most_pinned() + device + needed.len() as u64;
        if self.check_together(most, more).is_ok() {
            return Ok(());
        }
        let stay = self.rows_that_stay(needed);
        self.check_together(stay, more)
    }

    /// Returns the number of rows that cannot be dropped: rows of `needed`, rows that plans use, and rows in transit
    /// between tiers.
    fn rows_that_stay(&mut self, needed: &[Id]) -> u64 {
        let in_ram = |id: Id| is_in_ram(&self.host, self.device.as_ref(), id);
        let elsewhere: Vec<Id> = needed.iter().copied().filter(|&id| !in_ram(id)).collect();
        let mut there = vec![false; elsewhere.len()];
        if let Some(ssd) = &self.context.ssd {
            ssd.maybe_contains(&elsewhere, &mut there);
        }
        let mut stay = there.into_iter().filter(|there| *there).count();
        let needed: HashSet<Id> = needed.iter().copied().collect();
        let occupied: Vec<CacheSlot> = self.host.slots.occupied_from(0).collect();
        for slot in occupied {
            let state = self.host.slots.state(slot);
            // A row whose current copy is on the device is counted there.
            let is_row = !state.has(RowState::PROVISIONAL.with(RowState::SHADOW));
            let stays = |host: &mut HostTier| {
                !state.is_current() || host.slots.is_pinned(slot) || needed.contains(&host.id(slot))
            };
            stay += usize::from(is_row && stays(&mut self.host));
        }
        let (host, Some(device)) = (&self.host, &mut self.device) else { return stay as u64 };
        let occupied: Vec<CacheSlot> = device.slots.occupied_from(0).collect();
        for slot in occupied {
            let (state, id) = (device.slots.state(slot), device.id(slot));
            let is_in_host = host.slots.get(id) != NO_SLOT;
            // A row in transit from the host tier is counted there until it has arrived.
            let counts_there = state.has(RowState::LOADING) && is_in_host;
            let is_row = !state.has(RowState::PROVISIONAL) && !counts_there;
            let stays = is_in_host || !state.is_current() || device.slots.is_pinned(slot) || needed.contains(&id);
            stay += usize::from(is_row && stays);
        }
        stay as u64
    }

    /// Returns the error of a call that has dropped rows in vain. `before` is the number of dropped rows at its start.
    pub(crate) fn after_drops(&self, before: u64, error: Error) -> Error {
        match self.counts.dropped() - before {
            0 => error,
            dropped => error.context(format!(
                "table {:?}: {dropped} rows were dropped to make room, and the rows that need it did not come",
                self.context.config.name
            )),
        }
    }

    /// Drops rows until `more` fit, or until no more can be dropped. Without an SSD tier, excess rows stay in the
    /// overflow until others are dropped. With one, rows beyond its capacity could not be written back.
    pub(crate) fn drop_until_fits(&mut self, more: u64, needed: &[Id]) -> Result<()> {
        loop {
            let rows = self.counts.rows();
            let wanted = self.rows_with(more);
            self.drop_rows(wanted.saturating_sub(self.capacity_rows()).max(1), needed)?;
            let checked =
                if self.context.ssd.is_some() { self.check_together(self.counts.rows(), more) } else { Ok(()) };
            // If the disk failed after some rows were dropped, the next round returns the error.
            if checked.is_ok() || self.counts.rows() == rows {
                return checked;
            }
        }
    }

    /// Drops up to `rows` rows by policy: first rows that are only on SSD, oldest first, then rows in RAM. Keeps rows
    /// that plans use, and rows of `needed`, which the caller may have located already.
    fn drop_rows(&mut self, rows: u64, needed: &[Id]) -> Result<()> {
        debug_assert_eq!(self.context.config.on_full, OnFull::Evict);
        let needed: HashSet<Id> = needed.iter().copied().collect();
        // Cancels exports that could miss some of the rows.
        self.context.bump_version();
        let mut left = rows;
        left -= self.drop_from_ssd(left, &needed)?;
        left -= self.drop_from_host(left, &needed)?;
        self.drop_from_device(left, &needed)
    }

    /// Drops up to `rows` rows that are only on SSD. Returns the number dropped.
    fn drop_from_ssd(&mut self, rows: u64, needed: &HashSet<Id>) -> Result<u64> {
        let Some(ssd) = &self.context.ssd else { return Ok(0) };
        let in_ram = self.host.row_count() + self.device.as_ref().map_or(0, crate::tiers::DeviceTier::row_count);
        // If all rows are in RAM, the SSD tier would search all of its segments in vain.
        let new_in_ram = in_ram.saturating_sub(self.counts.provisional());
        let rows = rows.min(self.counts.rows().saturating_sub(new_in_ram));
        if rows == 0 {
            return Ok(0);
        }
        let keep = |id: Id| needed.contains(&id) || is_in_ram(&self.host, self.device.as_ref(), id);
        let mut notify = |headers, vectors| self.notify_dropped(RowChunk { headers, vectors });
        let dropped = ssd.evict(rows, &keep, if self.has_notifier() { Some(&mut notify) } else { None })?;
        self.record_dropped(&dropped, RowChunk::default());
        Ok(dropped.len() as u64)
    }

    /// Drops up to `rows` rows of the host tier and their copies on SSD. Returns the number dropped. On an error none
    /// is dropped.
    fn drop_from_host(&mut self, rows: u64, needed: &HashSet<Id>) -> Result<u64> {
        let (mut victims, mut kept): (Vec<WriteAccess>, Vec<WriteAccess>) = (Vec::new(), Vec::new());
        while (victims.len() as u64) < rows {
            let chosen = self.host.victims(rows as usize - victims.len());
            if chosen.is_empty() {
                break;
            }
            for victim in chosen {
                let stays = needed.contains(&self.host.id(victim.slot()));
                if stays { kept.push(victim) } else { victims.push(victim) }
            }
        }
        let ids: Vec<Id> = victims.iter().map(|victim| self.host.id(victim.slot())).collect();
        let removed = self.copies_of_host(&victims).and_then(|copies| {
            self.remove_copies(&self.host.slots, victims.iter().map(WriteAccess::slot).zip(ids.iter().copied()))?;
            Ok(copies)
        });
        if removed.is_err() {
            kept.append(&mut victims);
        }
        for victim in &kept {
            self.host.keep_victim(victim);
        }
        let copies = removed?;
        self.keep_host_pre_images(victims.iter().map(WriteAccess::read_access));
        self.host.remove_victims(&victims);
        self.host.shrink_overflow();
        self.traffic.host.evictions += ids.len() as u64;
        self.record_dropped(&ids, copies);
        Ok(ids.len() as u64)
    }

    /// Drops up to `rows` rows of the device tier and their copies on SSD. On an error none is dropped.
    fn drop_from_device(&mut self, rows: u64, needed: &HashSet<Id>) -> Result<()> {
        let (host, Some(device)) = (&self.host, &mut self.device) else { return Ok(()) };
        let (mut victims, mut kept): (Vec<CacheSlot>, Vec<CacheSlot>) = (Vec::new(), Vec::new());
        let mut chosen = device.take_leaving().into_iter();
        while (victims.len() as u64) < rows {
            let Some(victim) = chosen.next().or_else(|| device.victims(1).pop()) else { break };
            let id = device.id(victim);
            // A plan that has pinned the row's host slot may still promote it.
            let stays = needed.contains(&id) || host.slots.get(id) != NO_SLOT;
            if stays { kept.push(victim) } else { victims.push(victim) }
        }
        let ids: Vec<Id> = victims.iter().map(|&victim| device.id(victim)).collect();
        chosen.for_each(|slot| device.keep_victim(slot));
        let copied = self.copies_of_device(&victims, false);
        let removed =
            copied.and_then(|copies| self.require_snapshot_copies(&victims).map(|()| copies)).and_then(|copies| {
                if let Some(device) = &self.device {
                    self.remove_copies(&device.slots, victims.iter().copied().zip(ids.iter().copied()))?;
                }
                Ok(copies)
            });
        if removed.is_err() {
            self.keep_on_device(&victims);
        }
        if let Some(device) = &mut self.device {
            for slot in kept {
                device.keep_victim(slot);
            }
        }
        let copies = removed?;
        self.keep_device_pre_images(&victims);
        self.remove_device_victims(&victims);
        self.traffic.device.evictions += ids.len() as u64;
        self.record_dropped(&ids, copies);
        Ok(())
    }

    /// Removes the SSD copies of rows that are about to be dropped from these slots.
    fn remove_copies(&self, slots: &SlotMap, victims: impl Iterator<Item = (CacheSlot, Id)>) -> Result<()> {
        let Some(ssd) = &self.context.ssd else { return Ok(()) };
        let there = victims.filter(|&(slot, _)| slots.state(slot).has(RowState::ON_SSD));
        self.context.remove_on_ssd(ssd, &there.map(|(_, id)| id).collect::<Vec<Id>>())
    }

    fn record_dropped(&mut self, ids: &[Id], copies: RowChunk) {
        self.notify_dropped(copies);
        self.counts.dropped_when_full(ids.len() as u64);
        self.record_tombstones(ids);
    }

    /// Records tombstones for later deltas.
    pub(crate) fn record_tombstones(&mut self, ids: &[Id]) {
        let before = self.changes.history.bytes();
        self.changes.history.record_tombstones(self.changes.epoch, ids);
        // With an SSD tier, tombstones use space of rows in RAM. Without one, their memory is outside of the budget.
        if self.context.ssd.is_some() && self.changes.history.bytes() > before {
            self.fit_host_to_index();
        }
    }
}

/// Row counts of one table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowCounts {
    /// Rows in all tiers: inserted and not removed.
    rows: u64,
    /// Rows that are planned and not inserted yet.
    provisional: u64,
    /// Provisional rows held by training plans in flight, summed over the plans: a row held by two plans counts twice.
    /// Evaluations pledge nothing, because they insert no rows.
    pledged: u64,
    /// Rows dropped because the table was full.
    dropped: u64,
    /// Rows expired by the table's eviction rule.
    expired: u64,
}

impl RowCounts {
    /// The counts of a table opened with `rows` rows.
    pub(crate) fn of(rows: u64) -> Self {
        Self { rows, ..Self::default() }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn provisional(&self) -> u64 {
        self.provisional
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// Maximum number of provisional rows that may be inserted.
    fn max_new_rows(&self) -> u64 {
        self.provisional.min(self.pledged)
    }

    /// Counts rows that became provisional.
    pub(crate) fn became_provisional(&mut self, rows: u64) {
        self.provisional += rows;
    }

    /// Counts provisional rows that were discarded without training.
    pub(crate) fn vanished(&mut self, rows: u64) {
        self.provisional -= rows;
    }

    /// Counts provisional rows that were trained for the first time.
    pub(crate) fn inserted(&mut self, rows: u64) {
        self.provisional -= rows;
        self.rows += rows;
    }

    /// Counts provisional rows that a training plan acquires.
    pub(crate) fn pledge(&mut self, rows: u64) {
        self.pledged += rows;
    }

    /// Counts provisional rows that a training plan releases.
    pub(crate) fn take_back_pledge(&mut self, rows: u64) {
        self.pledged -= rows;
    }

    /// Counts imported rows that were missing before.
    pub(crate) fn added(&mut self, rows: u64) {
        self.rows += rows;
    }

    /// Counts removed rows.
    pub(crate) fn removed(&mut self, rows: u64) {
        self.rows -= rows;
    }

    /// Counts rows expired by the table's eviction rule.
    pub(crate) fn expired_by_rule(&mut self, rows: u64) {
        self.rows -= rows;
        self.expired += rows;
    }

    /// Counts rows dropped because the table was full.
    fn dropped_when_full(&mut self, rows: u64) {
        self.rows -= rows;
        self.dropped += rows;
    }

    /// Resets the counts after all rows were removed. No plan holds any.
    pub(crate) fn cleared(&mut self) {
        self.rows = 0;
        self.provisional = 0;
    }
}
