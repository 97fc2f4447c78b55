//! How many rows a table may have, and which are dropped when there are too many.

use std::collections::HashSet;

use super::Residency;
use super::find::is_in_ram;
use super::hold::PlanPins;
use crate::cache::rows::RowChunk;
use crate::config::OnFull;
use crate::error::{Error, Kind, Result};
use crate::host::{HostTier, WriteAccess};
use crate::slots::{RowState, SlotMap};
use crate::ssd::SsdTier;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Bytes of ids that left a table (see [`CheckpointHistory`](crate::cache::watch::Lineage)) that the host budget does not count: they are part of a
/// table's fixed overhead.
pub(super) const FREE_HISTORY_BYTES: u64 = 64 << 10;

impl Residency {
    /// How many rows the lowest tier can hold.
    pub(crate) fn capacity_rows(&self) -> u64 {
        self.context.ssd.as_ref().map_or(u64::from(self.host.budget_rows()), SsdTier::capacity_rows)
    }

    /// How many rows the host budget holds beside the index of the rows on SSD and the ids that left the table.
    pub(super) fn host_rows_after_index(&self) -> u64 {
        let Some(ssd) = &self.context.ssd else { return self.host.rows_after_index(0, 0) };
        let lineage = self.charged_history_bytes().div_ceil(self.host.row_bytes());
        self.host.rows_after_index(ssd.index_bytes(), ssd.rows()).saturating_sub(lineage)
    }

    /// Bytes of the host budget that the ids that left the table take. Only rows in RAM of a table with an SSD tier can make room for them.
    pub(super) fn charged_history_bytes(&self) -> u64 {
        self.history.bytes().saturating_sub(FREE_HISTORY_BYTES)
    }

    /// The error of rows whose index would take all the room of rows in RAM.
    pub(super) fn index_full_error(&self) -> Error {
        let beside = self.charged_history_bytes() + self.host.row_bytes();
        let needed = |rows: u64| HostTier::charged_bytes(u64::MAX, rows) + beside;
        let (capacity, rows, config) = (self.capacity_rows(), self.counts.rows(), &self.context.config);
        Error::new(
            Kind::Capacity,
            format!(
                "table {:?}: the index of its {rows} rows on SSD fills host_bytes={} and leaves no room for a row in RAM: {} bytes are \
                 needed at least, and {} for the index of all {capacity} rows that ssd_bytes holds; set host_bytes to that, and more \
                 for the rows of a batch",
                config.name,
                config.host_bytes,
                needed(rows + 1).max(config.host_bytes + 1),
                needed(capacity.max(rows + 1)).max(config.host_bytes + 1),
            ),
        )
    }

    /// Returns whether there is room for `more` rows and for those that batches in flight may add, while all others stay.
    pub(super) fn fits(&self, more: u64) -> bool {
        self.rows_with(more) <= self.capacity_rows() && !self.is_index_full(more)
    }

    /// As [`Residency::fits`], once the table has taken the bytes that it lacks from those that tables share.
    pub(super) fn make_fit(&mut self, more: u64) -> bool {
        self.fits(more) || self.host.grow_to(self.rows_with(more))
    }

    /// Give back shared bytes that the rows of the table do not need, and close the slots past the budget that a batch has used.
    pub(crate) fn give_back_unused(&mut self) {
        if self.host.budget().shared().is_some() && self.host.shrink_to(self.rows_with(0)) {
            self.move_below_limit();
        }
    }

    /// Give back all shared bytes with the memory of the rows, because the table is closed. Rows that a batch in flight uses, and those of a
    /// torn table, stay in memory until the table is dropped.
    pub(crate) fn give_back_budget(&mut self, is_torn: bool) {
        if self.host.budget().shared().is_none() {
            return;
        }
        if !is_torn && self.host.slots.pinned() == 0 {
            self.host.clear(self.context.config.policy);
        }
        self.host.shrink_to(0);
    }

    /// The rows of the table with those that batches in flight may add, and `more`.
    fn rows_with(&self, more: u64) -> u64 {
        self.counts.rows() + self.counts.max_new_rows() + more
    }

    fn is_index_full(&self, more: u64) -> bool {
        more > 0 && self.context.ssd.is_some() && self.host_rows_after_index() == 0
    }

    /// Checks that there is room for a training batch that has begun. Where rows may be dropped for it, none is dropped yet.
    ///
    /// Errors: `Capacity`; those of [`Residency::finish_sweep`].
    pub(crate) fn check_space(&mut self, pins: &PlanPins) -> Result<()> {
        let homeless: Vec<u32> = match &self.device {
            None => pins.deferred.iter().chain(&pins.unplaced).copied().collect(),
            Some(_) => (0..).zip(&pins.device).filter(|(_, slot)| **slot == NO_SLOT).map(|(at, _)| at).collect(),
        };
        let more = self.new_rows_among(pins, &homeless, true).1 as u64;
        if self.make_fit(more) {
            return Ok(());
        }
        match self.context.config.on_full {
            OnFull::Evict => self.check_droppable(more, &pins.ids),
            // To end the sweep, rows may have to be read from the device. That is done when the batch is placed.
            OnFull::Error if self.device.is_some() && self.has_sweep() => Ok(()),
            OnFull::Error => self.check_capacity(more, &pins.ids),
        }
    }

    /// Check that `more` rows can be born beside those that may be. Where the table may drop rows, others than `needed` are dropped by
    /// policy to make room. None is dropped where there would be too little room without all of them.
    ///
    /// Errors: `Capacity`; those of the SSD tier when rows are dropped; those of [`Residency::finish_sweep`].
    pub(super) fn check_capacity(&mut self, more: u64, needed: &[Id]) -> Result<()> {
        if self.make_fit(more) {
            return Ok(());
        }
        // Rows that are to go anyway make room first.
        self.finish_sweep()?;
        if self.make_fit(more) {
            return Ok(());
        }
        match self.context.config.on_full {
            OnFull::Error if self.is_index_full(more) => Err(self.index_full_error()),
            OnFull::Error => Err(self.table_full_error(more)),
            OnFull::Evict => {
                self.check_droppable(more, needed)?;
                let before = self.counts.dropped();
                self.drop_until_fits(more, needed).map_err(|error| self.after_drops(before, error))
            }
        }
    }

    /// The last tier with its budget, and how to have room for `rows` rows there, for messages.
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

    fn table_full_error(&self, more: u64) -> Error {
        let ((tier, cure), rows) = (self.last_tier(self.rows_with(more)), self.counts.rows());
        let capacity = match self.context.ssd {
            Some(_) => self.capacity_rows(),
            None => self.host.budget().within_reach() / self.host.row_bytes(),
        };
        Error::new(
            Kind::Capacity,
            format!(
                "table {:?} is full: {tier} holds {capacity} rows, {rows} are there and {more} new ones are to be added; {cure}, or \
                 set on_full=\"evict\" to drop rows by policy",
                self.context.config.name,
            ),
        )
    }

    /// Checks that there is room for `more` rows and for those that batches in flight may add, together with `stay` others.
    fn check_together(&self, stay: u64, more: u64) -> Result<()> {
        let (capacity, new) = (self.capacity_rows(), self.counts.max_new_rows() + more);
        if stay + new <= capacity {
            return Ok(());
        }
        let (tier, cure) = self.last_tier(stay + new);
        Err(Error::new(
            Kind::Capacity,
            format!(
                "table {:?}: {tier} holds {capacity} rows, and there is no room for {new} new ones, because this batch and others in \
                 flight use {stay} of its rows; {cure}, or use smaller batches",
                self.context.config.name,
            ),
        ))
    }

    /// Checks that there is room for `more` rows once all rows are dropped that may be.
    fn check_droppable(&mut self, more: u64, needed: &[Id]) -> Result<()> {
        let device = self.device.as_ref().map_or(0, |tier| tier.slots.most_pinned());
        let most = self.host.slots.most_pinned() + device + needed.len() as u64;
        if self.check_together(most, more).is_ok() {
            return Ok(());
        }
        let stay = self.rows_that_stay(needed);
        self.check_together(stay, more)
    }

    /// Returns how many rows cannot be dropped: those of `needed`, those that plans use, and those that are on their way from one tier to another.
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
            // A row whose newest copy is on the device counts there.
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
            // A row that comes from the host tier counts there until it has arrived.
            let counts_there = state.has(RowState::LOADING) && is_in_host;
            let is_row = !state.has(RowState::PROVISIONAL) && !counts_there;
            let stays = is_in_host || !state.is_current() || device.slots.is_pinned(slot) || needed.contains(&id);
            stay += usize::from(is_row && stays);
        }
        stay as u64
    }

    /// Returns the error of a call that has dropped rows in vain, where `before` rows had been dropped when it began.
    pub(super) fn after_drops(&self, before: u64, error: Error) -> Error {
        match self.counts.dropped() - before {
            0 => error,
            dropped => error.context(format!(
                "table {:?}: {dropped} rows were dropped to make room, and the rows that need it did not come",
                self.context.config.name
            )),
        }
    }

    /// Drop rows until `more` fit, or until no more can be dropped. Without an SSD tier, rows past the budget are in the overflow until others
    /// go. With one, rows past its capacity could not be written down.
    fn drop_until_fits(&mut self, more: u64, needed: &[Id]) -> Result<()> {
        loop {
            let rows = self.counts.rows();
            let wanted = self.rows_with(more);
            self.drop_rows(wanted.saturating_sub(self.capacity_rows()).max(1), needed)?;
            let checked =
                if self.context.ssd.is_some() { self.check_together(self.counts.rows(), more) } else { Ok(()) };
            // Where the disk failed after some rows were dropped already, the next round says so.
            if checked.is_ok() || self.counts.rows() == rows {
                return checked;
            }
        }
    }

    /// Drop up to `rows` rows from the table by policy: first those that are on SSD alone, the oldest first, then those in RAM. Rows that
    /// plans use stay, and those of `needed`, which the caller may have found already.
    fn drop_rows(&mut self, rows: u64, needed: &[Id]) -> Result<()> {
        debug_assert_eq!(self.context.config.on_full, OnFull::Evict);
        let needed: HashSet<Id> = needed.iter().copied().collect();
        // An export that could miss some of them ends.
        self.context.bump_version();
        let mut left = rows;
        left -= self.drop_from_ssd(left, &needed)?;
        left -= self.drop_from_host(left, &needed)?;
        self.drop_from_device(left, &needed)
    }

    /// Drop up to `rows` rows that are on SSD alone. Returns how many.
    fn drop_from_ssd(&mut self, rows: u64, needed: &HashSet<Id>) -> Result<u64> {
        let Some(ssd) = &self.context.ssd else { return Ok(0) };
        let in_ram = self.host.row_count() + self.device.as_ref().map_or(0, crate::device::DeviceTier::row_count);
        // Where all rows are in RAM, the SSD tier would look through each of its segments in vain.
        let born_in_ram = in_ram.saturating_sub(self.counts.provisional());
        let rows = rows.min(self.counts.rows().saturating_sub(born_in_ram));
        if rows == 0 {
            return Ok(0);
        }
        let keep = |id: Id| needed.contains(&id) || is_in_ram(&self.host, self.device.as_ref(), id);
        let dropped = if self.has_notifier() {
            let mut tell = |headers, vectors| self.notify_dropped(RowChunk { headers, vectors });
            ssd.evict_and_notify(rows, &keep, &mut tell)?
        } else {
            ssd.evict(rows, &keep)?
        };
        self.record_dropped(&dropped, RowChunk::default());
        Ok(dropped.len() as u64)
    }

    /// Drop up to `rows` rows of the host tier, and their copies on SSD. Returns how many. On an error none is dropped.
    fn drop_from_host(&mut self, rows: u64, needed: &HashSet<Id>) -> Result<u64> {
        let (mut victims, mut spared): (Vec<WriteAccess>, Vec<WriteAccess>) = (Vec::new(), Vec::new());
        while (victims.len() as u64) < rows {
            let chosen = self.host.victims(rows as usize - victims.len());
            if chosen.is_empty() {
                break;
            }
            for victim in chosen {
                let stays = needed.contains(&self.host.id(victim.slot()));
                if stays { spared.push(victim) } else { victims.push(victim) }
            }
        }
        let ids: Vec<Id> = victims.iter().map(|victim| self.host.id(victim.slot())).collect();
        let removed = self.copies_of_host(&victims).and_then(|copies| {
            self.remove_copies(&self.host.slots, victims.iter().map(WriteAccess::slot).zip(ids.iter().copied()))?;
            Ok(copies)
        });
        if removed.is_err() {
            spared.append(&mut victims);
        }
        for victim in &spared {
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

    /// Drop up to `rows` rows of the device tier, and their copies on SSD. On an error none is dropped.
    fn drop_from_device(&mut self, rows: u64, needed: &HashSet<Id>) -> Result<()> {
        let (host, Some(device)) = (&self.host, &mut self.device) else { return Ok(()) };
        let (mut victims, mut spared): (Vec<CacheSlot>, Vec<CacheSlot>) = (Vec::new(), Vec::new());
        let mut chosen = device.take_leaving().into_iter();
        while (victims.len() as u64) < rows {
            let Some(victim) = chosen.next().or_else(|| device.victims(1).pop()) else { break };
            let id = device.id(victim);
            // A plan that has pinned the row's slot in the host tier may still come for it.
            let stays = needed.contains(&id) || host.slots.get(id) != NO_SLOT;
            if stays { spared.push(victim) } else { victims.push(victim) }
        }
        let ids: Vec<Id> = victims.iter().map(|&victim| device.id(victim)).collect();
        chosen.for_each(|slot| device.keep_victim(slot));
        let asked = self.copies_of_device(&victims, false);
        let removed =
            asked.and_then(|copies| self.require_snapshot_copies(&victims).map(|()| copies)).and_then(|copies| {
                if let Some(device) = &self.device {
                    self.remove_copies(&device.slots, victims.iter().copied().zip(ids.iter().copied()))?;
                }
                Ok(copies)
            });
        if removed.is_err() {
            self.keep_on_device(&victims);
        }
        if let Some(device) = &mut self.device {
            for slot in spared {
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

    /// Remove the copies on SSD of rows that are about to be dropped from these slots.
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

    /// Note for later deltas that ids left the table.
    pub(super) fn record_tombstones(&mut self, ids: &[Id]) {
        let before = self.history.bytes();
        self.history.record_tombstones(self.epoch, ids);
        // With an SSD tier these ids take room of rows in RAM. Without one they have memory beside the budget.
        if self.context.ssd.is_some() && self.history.bytes() > before {
            self.fit_host_to_index();
        }
    }
}
