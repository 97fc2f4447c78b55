//! A sweep in progress: rows expire by the table's eviction rule.
//!
//! A sweep takes effect immediately: a batch placed after it reads an expired row as missing. The tiers are visited a
//! part at a time before each placed batch, or completely for calls that need all rows. An operation that meets an
//! expired row earlier removes it: see [`Residency::activate_plan`].
//!
//! Rows of plans that are active when the sweep starts are deferred until the plan ends. If the plan trains them they
//! are kept. They are matched against that sweep even if other sweeps have started since: see
//! [`Residency::defer_rest`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::Residency;
use super::find::is_in_ram;
use super::hold::PlanPins;
use super::judge::{ExpiredRow, SweepMatcher};
use super::spared::DeferredRows;
use super::under_way::SweepProgress;
use crate::cache::rows::RowChunk;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::slots::RowState;
use crate::ssd::{SsdExpiryCursor, SsdExpiryRule};
use crate::stats::EvictionStats;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Number of slots visited before the expired rows found in them are removed.
const SLOTS_PER_PART: usize = 1 << 13;

/// Amount of sweep work before other threads may have the table's lock again.
#[derive(Clone, Copy)]
struct SweepSlice {
    /// Number of slots of tiers in RAM to visit.
    slots: usize,
    /// Number of expired rows after which no more slots are visited, because removing a row takes far longer than
    /// finding it.
    expired: usize,
    /// Number of records on SSD to visit, if the time allowed by [`SweepPace`](super::pace::SweepPace) suffices.
    records: usize,
}

/// The slice before a batch is placed.
const BEFORE_BATCH: SweepSlice = SweepSlice { slots: 1 << 15, expired: 1 << 12, records: 1 << 14 };
/// Number of records on SSD that each slice visits regardless of time: a few tenths of a millisecond.
const RECORDS_PER_PART: usize = 1 << 10;
/// Deferred rows are matched once there are this many, so that each batch matches about as many rows as it has
/// deferred.
const MOST_DEFERRED: usize = 1 << 12;
/// Maximum number of records on SSD per call if the expiry reason of each row is recorded.
const MOST_REASONS: usize = 1 << 20;
/// The slice that finishes the sweep.
const TO_THE_END: SweepSlice = SweepSlice { slots: usize::MAX, expired: usize::MAX, records: usize::MAX };

impl SweepSlice {
    fn is_to_the_end(self) -> bool {
        self.records == usize::MAX
    }

    fn half(self) -> Self {
        Self { slots: self.slots / 2, expired: self.expired / 2, records: self.records / 2 }
    }
}

/// Adds the remedy to an error about a corrupted record, because nothing but the sweep needs to read that record.
fn with_sweep_remedy(error: Error) -> Error {
    if error.kind() != Kind::Corruption {
        return error;
    }
    error.context(
        "a sweep of eviction has to read a damaged record: bring back the file as it was, or load a checkpoint, which ends the sweep",
    )
}

impl Residency {
    /// True if a sweep may find rows to remove.
    pub(crate) fn has_sweep(&self) -> bool {
        self.sweep.is_some() || !self.deferred.is_empty()
    }

    /// True if expired rows that no active plan uses may be left in the tiers.
    pub(super) fn is_sweeping(&self) -> bool {
        self.sweep.as_ref().is_some_and(|under_way| !under_way.passed)
    }

    /// A failure during a batch is retried before the next batch, and by calls that need all rows, which return the
    /// error.
    pub(super) fn log_sweep_stopped(&self, error: &Error) {
        tracing::debug!("table {:?}: a sweep has stopped and will go on: {error}", self.context.config.name);
    }

    /// Logs at DEBUG level, because tables may sweep after each step. [`EvictionStats`] counts all sweeps.
    pub(super) fn log_sweep_ended(&self, sweep: &SweepProgress) {
        let (table, step, rule) = (&self.context.config.name, sweep.matcher.sweep.step, &sweep.matcher.sweep.rule);
        let rows = self.counts.expired() - sweep.expired_before;
        tracing::debug!("table {table:?}: the sweep after step {step} has ended and took {rows} rows: {rule:?}");
    }

    /// Removes all rows that the sweep in progress matches, except rows of active plans.
    ///
    /// Errors: those of the SSD tier and of reads of the device tier. The next call continues the sweep.
    pub(crate) fn finish_sweep(&mut self) -> Result<()> {
        if !self.has_sweep() {
            return Ok(());
        }
        self.finish_loads();
        while self.is_sweeping() {
            self.continue_sweep(TO_THE_END)?;
        }
        // Plans of deferred rows may have ended.
        self.continue_sweep(TO_THE_END)
    }

    /// Continues the sweep in progress by the slice of one batch. Returns true if there is more to do.
    ///
    /// Errors: as [`Residency::finish_sweep`].
    pub(crate) fn sweep_slice(&mut self) -> Result<bool> {
        if self.is_sweeping() {
            self.continue_sweep(BEFORE_BATCH)?;
            return Ok(true);
        }
        self.finish_sweep()?;
        Ok(false)
    }

    /// Cancels the sweep in progress and forgets the deferred rows, without removing the remaining expired rows.
    pub(super) fn drop_sweep(&mut self) {
        self.sweep = None;
        self.deferred = DeferredRows::default();
        self.last_sweep = None;
        self.active_plans.sweep_has_ended();
    }

    /// Records that rows were added to the table: the next sweep after the same step has to visit them.
    pub(super) fn record_added_rows(&mut self) {
        self.last_sweep = None;
        if let Some(under_way) = &mut self.sweep {
            under_way.rows_added = true;
        }
    }

    /// Continues the sweep in progress.
    fn continue_sweep(&mut self, slice: SweepSlice) -> Result<()> {
        self.expire_deferred()?;
        let swept = self.sweep_tiers(slice);
        if let Some(ended) = self.sweep.take_if(|under_way| under_way.passed && under_way.deferred.is_empty()) {
            self.log_sweep_ended(&ended);
            self.last_sweep = (!ended.rows_added).then(|| ended.matcher.sweep.clone());
        }
        if self.sweep.is_none() {
            self.end_sweep();
        }
        swept.map_err(with_sweep_remedy)
    }

    fn end_sweep(&mut self) {
        if self.deferred.is_empty() {
            self.active_plans.sweep_has_ended();
        }
    }

    /// The sweep in progress. It stays in its field while it works, so that [`Residency::record_moved`] finds it:
    /// removing rows may move others.
    ///
    /// # Panics
    /// If no sweep is in progress.
    fn sweep_progress(&mut self) -> &mut SweepProgress {
        self.sweep.as_mut().expect("a sweep is under way")
    }

    fn sweep_tiers(&mut self, slice: SweepSlice) -> Result<()> {
        let Some(under_way) = &self.sweep else { return Ok(()) };
        let (by, has_passed) = (Arc::clone(&under_way.matcher), under_way.passed);
        let is_beside = under_way.is_carried && under_way.is_in_ram() && !slice.is_to_the_end();
        if has_passed || under_way.deferred.len() > MOST_DEFERRED {
            // A row that does not match at this time never matches this sweep, so the time does not matter.
            self.expire_sweep_deferred()?;
        }
        if has_passed {
            return Ok(());
        }
        let slice = if is_beside { slice.half() } else { slice };
        let (mut seen, mut dead) = (0, 0);
        while seen < slice.slots && dead < slice.expired && self.sweep_progress().host.remaining > 0 {
            let high_water = self.host.slots.high_water();
            let part = self.sweep_progress().host.part(SLOTS_PER_PART, high_water);
            seen += part.len();
            dead += self.sweep_host(part, &by)?;
        }
        while seen < slice.slots && dead < slice.expired && self.sweep_progress().device.remaining > 0 {
            let high_water = self.device.as_ref().map_or(0, |tier| tier.slots.high_water());
            let part = self.sweep_progress().device.part(SLOTS_PER_PART, high_water);
            seen += part.len();
            dead += self.sweep_device(part, &by)?;
            if slice.is_to_the_end() {
                // Later parts need no copies of this one.
                self.forget_copies();
            } else if self.has_copies() {
                // Before a batch, one part read from the device is enough.
                break;
            }
        }
        if self.sweep_progress().is_in_ram() {
            if is_beside {
                self.sweep_ssd_early(slice)?;
            }
            return Ok(());
        }
        // Deferred rows in RAM precede the rows on SSD, because they may have been demoted to SSD since their slot was
        // visited.
        self.expire_sweep_deferred()?;
        let under_way = self.sweep_progress();
        if !under_way.ram_passed {
            under_way.ram_passed = true;
            if slice.is_to_the_end() {
                under_way.ssd = SsdExpiryCursor::default();
            } else {
                under_way.ssd.repeat_pass();
            }
        }
        self.sweep_progress().passed = self.sweep_ssd_in_time(slice)?;
        Ok(())
    }

    /// Removes the expired rows in a range of host slots and advances past it. Returns the number of rows removed.
    fn sweep_host(&mut self, slots: std::ops::Range<CacheSlot>, matcher: &SweepMatcher) -> Result<usize> {
        let (mut dead, mut later) = (Vec::new(), Vec::new());
        for slot in self.host.trained_until(matcher.sweep.latest_step(), slots.clone()) {
            self.match_in_host(slot, &matcher.sweep, &mut dead, &mut later);
        }
        let buried = dead.len();
        self.expire_in_host(&dead, matcher)?;
        let under_way = self.sweep_progress();
        under_way.deferred.append(&mut later);
        under_way.host = under_way.host.after(&slots);
        Ok(buried)
    }

    /// Removes the expired rows in a range of device slots and advances past it. Returns the number of rows removed.
    fn sweep_device(&mut self, slots: std::ops::Range<CacheSlot>, matcher: &SweepMatcher) -> Result<usize> {
        let (mut dead, mut later) = (Vec::new(), Vec::new());
        if let Some(tier) = &self.device {
            let is_occupied = |&slot: &CacheSlot| tier.slots.state(slot).has(RowState::OCCUPIED);
            let occupied: Vec<CacheSlot> = slots.clone().filter(is_occupied).collect();
            dead = self.match_on_device(&occupied, &matcher.sweep, &mut later)?;
            self.expire_on_device(&dead, matcher)?;
        }
        let under_way = self.sweep_progress();
        under_way.deferred.append(&mut later);
        under_way.device = under_way.device.after(&slots);
        Ok(dead.len())
    }

    /// Like [`Residency::sweep_ssd`], but while slots in RAM remain, so that expired rows on SSD are removed earlier.
    /// It skips rows that are also in RAM, and such a row may leave RAM before its slot is visited, so all records are
    /// visited again afterwards.
    fn sweep_ssd_early(&mut self, slice: SweepSlice) -> Result<()> {
        // A read-only tier is visited in one pass.
        if self.context.ssd.as_ref().is_some_and(|ssd| !ssd.is_read_only()) && self.sweep_ssd_in_time(slice)? {
            self.sweep_progress().ssd = SsdExpiryCursor::default();
        }
        Ok(())
    }

    /// Like [`Residency::sweep_ssd`], but part by part until the slice's records were visited or its time is used up.
    fn sweep_ssd_in_time(&mut self, slice: SweepSlice) -> Result<bool> {
        if slice.is_to_the_end() {
            return self.sweep_ssd(slice.records);
        }
        let begin = Instant::now();
        let end = begin + self.sweep_progress().pace.time_for_slice(begin);
        let mut left = slice.records;
        let swept = loop {
            let part = left.min(RECORDS_PER_PART);
            left -= part;
            let swept = self.sweep_ssd(part);
            if !matches!(swept, Ok(false)) || left == 0 || Instant::now() >= end {
                break swept;
            }
        };
        self.sweep_progress().pace.slice_ended(Instant::now());
        swept
    }

    /// Removes expired rows on SSD, visiting about `records` records. Returns true if all records were visited.
    fn sweep_ssd(&mut self, records: usize) -> Result<bool> {
        let (Some(ssd), Some(under_way)) = (&self.context.ssd, &mut self.sweep) else { return Ok(true) };
        if ssd.is_read_only() {
            return self.sweep_read_only_ssd();
        }
        let judge = Arc::clone(&under_way.matcher);
        let sweep = &judge.sweep;
        let dim = self.context.layout.dim;
        let (names, differ) = (RefCell::new(HashMap::new()), judge.reasons_differ());
        let by_row = |header: &RowHeader, vector: &[f32]| {
            let dies = sweep.matches(header, &vector[..dim]);
            if dies && differ {
                names.borrow_mut().insert(header.id, judge.reason(header, &vector[..dim]));
            }
            dies
        };
        let records = if differ { records.min(MOST_REASONS) } else { records };
        let dying = SsdExpiryRule {
            last_step: sweep.latest_step(),
            row_predicate: if sweep.is_by_last_step() { None } else { Some(&by_row) },
        };
        // A row that is also in RAM is matched there.
        let in_ram = |id: Id| is_in_ram(&self.host, self.device.as_ref(), id);
        let buried = if let Some(told) = &self.notifier {
            let mut tell = |headers, vectors| told.push_expired(RowChunk { headers, vectors }, &judge, dim);
            ssd.expire_and_notify(&mut under_way.ssd, &dying, &in_ram, records, &mut tell)
        } else {
            ssd.expire(&mut under_way.ssd, &dying, &in_ram, records)
        };
        let buried = buried.map_err(|error| self.context.in_table(error))?;
        let names = names.into_inner();
        let name = |id: Id| names.get(&id).copied().unwrap_or_default();
        let rows =
            buried.rows.into_iter().map(|(id, modified_epoch)| ExpiredRow { id, modified_epoch, reason: name(id) });
        self.record_expired(&rows.collect::<Vec<ExpiredRow>>(), RowChunk::default(), &judge);
        Ok(buried.finished)
    }

    /// Like [`Residency::sweep_ssd`], but visits all records of a read-only tier. Nothing can be written, and no state
    /// is published that would need it.
    fn sweep_read_only_ssd(&mut self) -> Result<bool> {
        let judge = Arc::clone(&self.sweep_progress().matcher);
        let Some(ssd) = &self.context.ssd else { return Ok(true) };
        let dim = self.context.layout.dim;
        let (mut dead, mut copies) = (Vec::new(), RowChunk::default());
        ssd.scan(&mut |row| {
            let weights = &row.vector[..dim];
            if !is_in_ram(&self.host, self.device.as_ref(), row.header.id) && judge.sweep.matches(row.header, weights) {
                dead.push(judge.expired_row(row.header, weights));
                if self.has_notifier() {
                    memory::reserve(&mut copies.vectors, "copy evicted rows", row.vector.len())?;
                    copies.push(row);
                }
            }
            Ok(())
        })?;
        ssd.remove_without_tombstones(&dead.iter().map(|row| row.id).collect::<Vec<Id>>());
        self.record_expired(&dead, copies, &judge);
        Ok(true)
    }

    /// Matches the deferred rows of the sweep in progress.
    fn expire_sweep_deferred(&mut self) -> Result<()> {
        let SweepProgress { matcher: judge, deferred: later, .. } = self.sweep_progress();
        let (by, ids) = (Arc::clone(judge), later.clone());
        let judged = ids.len();
        let stay = self.expire_deferred_ids(ids, &by)?;
        // Rows that moved during the call follow the matched ones.
        self.sweep_progress().deferred.splice(..judged, stay);
        Ok(())
    }

    /// Matches deferred rows against the sweep. Returns the rows that active plans use, which stay deferred.
    pub(super) fn expire_deferred_ids(&mut self, mut ids: Vec<Id>, matcher: &SweepMatcher) -> Result<Vec<Id>> {
        ids.sort_unstable();
        ids.dedup();
        let stay = self.expire_in_ram(&ids, matcher)?;
        // The pass over SSD skips records whose rows are in RAM, so rows that have left RAM since are matched on SSD.
        self.expire_on_ssd(&ids, matcher)?;
        Ok(stay)
    }

    /// Removes the expired rows of `ids` that are in RAM. Returns the rows that cannot be matched yet, because active
    /// plans use them or they are being read.
    pub(super) fn expire_in_ram(&mut self, ids: &[Id], matcher: &SweepMatcher) -> Result<Vec<Id>> {
        let (mut in_host, mut on_device, mut later) = (Vec::new(), Vec::new(), Vec::new());
        for &id in ids {
            if let Some(tier) = &self.device {
                let slot = tier.slots.get(id);
                if slot != NO_SLOT {
                    on_device.push(slot);
                }
            }
            let slot = self.host.slots.get(id);
            if slot != NO_SLOT {
                self.match_in_host(slot, &matcher.sweep, &mut in_host, &mut later);
            }
        }
        self.expire_in_host(&in_host, matcher)?;
        let dead = self.match_on_device(&on_device, &matcher.sweep, &mut later)?;
        self.expire_on_device(&dead, matcher)?;
        Ok(later)
    }

    /// Activates a plan that is about to use its rows: removes the expired ones, which the plan reads as missing rows.
    /// No row of the plan expires until the plan ends.
    ///
    /// Errors: as [`Residency::finish_sweep`]. The plan is not active then.
    pub(crate) fn activate_plan(&mut self, pins: &PlanPins) -> Result<()> {
        if self.context.config.eviction.is_none() {
            return Ok(());
        }
        // Rows kept by an evaluation expire when it ends. An export of the table with these rows would be cancelled if
        // they were removed.
        let waits = self.exports.are_contents_pinned(self.context.version()) || self.is_notifier_full();
        // Deferred rows may be expired even if the sweep does not advance.
        let stopped = waits
            || match self.continue_sweep(BEFORE_BATCH) {
                Err(error) if self.needs_device_reads() => return Err(error),
                Err(error) => {
                    self.log_sweep_stopped(&error);
                    self.retry_copies();
                    true
                }
                Ok(()) => false,
            };
        if stopped {
            self.expire_deferred_of(&pins.ids)?;
        }
        if (stopped || self.is_sweeping())
            && let Some(under_way) = &self.sweep
        {
            let (by, ids) = (Arc::clone(&under_way.matcher), under_way.may_match_in_ram(&pins.ids));
            let mut later = self.expire_in_ram(&ids, &by)?;
            self.sweep_progress().deferred.append(&mut later);
        }
        self.active_plans.add(&pins.ids);
        Ok(())
    }

    /// Deactivates a plan that has ended. Its deferred rows that it did not train are expired.
    pub(super) fn deactivate_plan(&mut self, ids: &Arc<Vec<Id>>) {
        self.active_plans.remove(ids);
    }

    /// Records rows that move to slots that a sweep may have visited already.
    pub(super) fn record_moved(&mut self, ids: impl Iterator<Item = Id>) {
        if let Some(under_way) = self.sweep.as_mut().filter(|under_way| !under_way.passed) {
            under_way.deferred.extend(ids);
        }
    }

    /// True if nothing has changed since the last sweep except by that sweep.
    pub(crate) fn is_unchanged_since_sweep(&self) -> bool {
        self.version_after_sweep == Some(self.context.version())
    }

    /// True if sweeps have deferred rows that may still expire.
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty() || self.sweep.as_ref().is_some_and(|under_way| !under_way.deferred.is_empty())
    }

    pub(super) fn eviction_stats(&self) -> Option<EvictionStats> {
        let (evicted, under_way, untold) =
            (self.counts.expired(), self.sweep.is_some() || !self.deferred.is_empty(), self.undelivered_rows());
        let is_wanted = self.context.config.eviction.is_some() || self.has_notifier();
        is_wanted.then(|| EvictionStats {
            evicted,
            evicted_by_rule: self.evicted_by_rule.clone(),
            is_sweeping: under_way,
            undelivered: untold,
        })
    }
}
