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
use super::deferred::DeferredRows;
use super::progress::SweepProgress;
use crate::cache::changes::{MOST_SWEEPS, MovedRows};
use crate::cache::placement::{ExpiredRow, Placement, PlanPins, SweepMatcher, is_in_ram};
use crate::cache::row_blocks::RowChunk;
use crate::config::EvictionRule;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::ExpirySweep;
use crate::rows::RowHeader;
use crate::runtime::memory;
use crate::slots::{RowState, SlotMap};
use crate::ssd::{EvictedRowsSink, SsdExpiryCursor, SsdExpiryRule};
use crate::stats::EvictionStats;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Number of slots visited before the expired rows found in them are removed.
const SLOTS_PER_PART: usize = 1 << 13;
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

/// Amount of sweep work before other threads may have the table's lock again.
#[derive(Clone, Copy)]
struct SweepSlice {
    /// Number of slots of tiers in RAM to visit.
    slots: usize,
    /// Number of expired rows after which no more slots are visited, because removing a row takes far longer than
    /// finding it.
    expired: usize,
    /// Number of records on SSD to visit, if the time allowed by [`SweepPace`](super::progress::SweepPace) suffices.
    records: usize,
}

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
        self.lifecycle.sweep.is_some() || !self.lifecycle.deferred.is_empty()
    }

    /// True if expired rows that no active plan uses may be left in the tiers.
    pub(super) fn is_sweeping(&self) -> bool {
        self.lifecycle.sweep.as_ref().is_some_and(|progress| !progress.passed)
    }

    /// Removes all rows that the sweep in progress matches, except rows of active plans.
    ///
    /// Errors: those of the SSD tier and of reads of the device tier. The next call continues the sweep.
    pub(crate) fn finish_sweep(&mut self) -> Result<()> {
        if !self.has_sweep() {
            return Ok(());
        }
        self.placement.finish_loads();
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
    pub(crate) fn drop_sweep(&mut self) {
        self.lifecycle.sweep = None;
        self.lifecycle.deferred = DeferredRows::default();
        self.lifecycle.last_sweep = None;
        self.placement.changes.moved = MovedRows::default();
        self.placement.active_plans.sweep_has_ended();
    }

    /// Records that rows were added to the table: the next sweep after the same step has to visit them.
    pub(crate) fn record_added_rows(&mut self) {
        self.lifecycle.last_sweep = None;
        if let Some(progress) = &mut self.lifecycle.sweep {
            progress.rows_added = true;
        }
    }

    /// Continues the sweep in progress.
    fn continue_sweep(&mut self, slice: SweepSlice) -> Result<()> {
        self.expire_deferred()?;
        self.collect_moved();
        let swept = self.sweep_tiers(slice);
        self.collect_moved();
        if let Some(ended) = self.lifecycle.sweep.take_if(|progress| progress.passed && progress.deferred.is_empty()) {
            self.placement.log_sweep_ended(&ended);
            self.lifecycle.last_sweep = (!ended.rows_added).then(|| ended.matcher.sweep.clone());
        }
        if self.lifecycle.sweep.is_none() {
            self.end_sweep();
        }
        swept.map_err(with_sweep_remedy)
    }

    /// Defers the rows that have moved to slots that the sweep in progress may have visited already.
    pub(super) fn collect_moved(&mut self) {
        if let Some(progress) = &mut self.lifecycle.sweep {
            self.placement.changes.moved.append_to(&mut progress.deferred);
        }
    }

    fn end_sweep(&mut self) {
        if self.lifecycle.deferred.is_empty() {
            self.placement.active_plans.sweep_has_ended();
        }
    }

    /// The sweep in progress.
    ///
    /// # Panics
    /// If no sweep is in progress.
    fn sweep_progress(&mut self) -> &mut SweepProgress {
        self.lifecycle.sweep.as_mut().expect("a sweep is under way")
    }

    fn sweep_tiers(&mut self, slice: SweepSlice) -> Result<()> {
        let Some(progress) = &self.lifecycle.sweep else { return Ok(()) };
        let (by, has_passed) = (Arc::clone(&progress.matcher), progress.passed);
        let is_early = progress.is_carried && progress.is_in_ram() && !slice.is_to_the_end();
        if has_passed || progress.deferred.len() > MOST_DEFERRED {
            // A row that does not match at this time never matches this sweep, so the time does not matter.
            self.expire_sweep_deferred()?;
        }
        if has_passed {
            return Ok(());
        }
        let slice = if is_early { slice.half() } else { slice };
        let (mut seen, mut expired) = (0, 0);
        while seen < slice.slots && expired < slice.expired && self.sweep_progress().host.remaining > 0 {
            let high_water = self.placement.host.slots.high_water();
            let part = self.sweep_progress().host.part(SLOTS_PER_PART, high_water);
            seen += part.len();
            expired += self.sweep_host(part, &by)?;
        }
        while seen < slice.slots && expired < slice.expired && self.sweep_progress().device.remaining > 0 {
            let high_water = self.placement.device.as_ref().map_or(0, |tier| tier.slots.high_water());
            let part = self.sweep_progress().device.part(SLOTS_PER_PART, high_water);
            seen += part.len();
            expired += self.sweep_device(part, &by)?;
            if slice.is_to_the_end() {
                // Later parts need no copies of this one.
                self.placement.forget_copies();
            } else if self.placement.has_copies() {
                // Before a batch, one part read from the device is enough.
                break;
            }
        }
        if self.sweep_progress().is_in_ram() {
            if is_early {
                self.sweep_ssd_early(slice)?;
            }
            return Ok(());
        }
        // Deferred rows in RAM precede the rows on SSD, because they may have been demoted to SSD since their slot was
        // visited.
        self.expire_sweep_deferred()?;
        let progress = self.sweep_progress();
        if !progress.ram_passed {
            progress.ram_passed = true;
            if slice.is_to_the_end() {
                progress.ssd = SsdExpiryCursor::default();
            } else {
                progress.ssd.repeat_pass();
            }
        }
        if self.sweep_ssd_in_time(slice)? {
            self.sweep_progress().passed = true;
            self.placement.changes.moved.stop();
        }
        Ok(())
    }

    /// Removes the expired rows in a range of host slots and advances past it. Returns the number of rows removed.
    fn sweep_host(&mut self, slots: std::ops::Range<CacheSlot>, matcher: &SweepMatcher) -> Result<usize> {
        let (mut expired, mut deferred) = (Vec::new(), Vec::new());
        for slot in self.placement.host.trained_until(matcher.sweep.latest_step(), slots.clone()) {
            self.placement.match_in_host(slot, &matcher.sweep, &mut expired, &mut deferred);
        }
        let count = expired.len();
        self.expire_in_host(&expired, matcher)?;
        let progress = self.sweep_progress();
        progress.deferred.append(&mut deferred);
        progress.host = progress.host.after(&slots);
        Ok(count)
    }

    /// Removes the expired rows in a range of device slots and advances past it. Returns the number of rows removed.
    fn sweep_device(&mut self, slots: std::ops::Range<CacheSlot>, matcher: &SweepMatcher) -> Result<usize> {
        let (mut expired, mut deferred) = (Vec::new(), Vec::new());
        if let Some(tier) = &self.placement.device {
            let is_occupied = |&slot: &CacheSlot| tier.slots.state(slot).has(RowState::OCCUPIED);
            let occupied: Vec<CacheSlot> = slots.clone().filter(is_occupied).collect();
            expired = self.placement.match_on_device(&occupied, &matcher.sweep, &mut deferred)?;
            self.expire_on_device(&expired, matcher)?;
        }
        let progress = self.sweep_progress();
        progress.deferred.append(&mut deferred);
        progress.device = progress.device.after(&slots);
        Ok(expired.len())
    }

    /// Like [`Residency::sweep_ssd`], but while slots in RAM remain, so that expired rows on SSD are removed earlier.
    /// It skips rows that are also in RAM, and such a row may leave RAM before its slot is visited, so all records are
    /// visited again afterwards.
    fn sweep_ssd_early(&mut self, slice: SweepSlice) -> Result<()> {
        // A read-only tier is visited in one pass.
        if self.placement.context.ssd.as_ref().is_some_and(|ssd| !ssd.is_read_only())
            && self.sweep_ssd_in_time(slice)?
        {
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
        let (Some(ssd), Some(progress)) = (&self.placement.context.ssd, &mut self.lifecycle.sweep) else {
            return Ok(true);
        };
        if ssd.is_read_only() {
            return self.sweep_read_only_ssd();
        }
        let matcher = Arc::clone(&progress.matcher);
        let sweep = &matcher.sweep;
        let dim = self.placement.context.layout.dim;
        let (names, differ) = (RefCell::new(HashMap::new()), matcher.reasons_differ());
        let by_row = |header: &RowHeader, vector: &[f32]| {
            let is_expired = sweep.matches(header, &vector[..dim]);
            if is_expired && differ {
                names.borrow_mut().insert(header.id, matcher.reason(header, &vector[..dim]));
            }
            is_expired
        };
        let records = if differ { records.min(MOST_REASONS) } else { records };
        let rule = SsdExpiryRule {
            last_step: sweep.latest_step(),
            row_predicate: if sweep.is_by_last_step() { None } else { Some(&by_row) },
        };
        // A row that is also in RAM is matched there.
        let in_ram = |id: Id| is_in_ram(&self.placement.host, self.placement.device.as_ref(), id);
        let row_matcher = &matcher;
        let mut notify = self.placement.notifier.as_ref().map(|notifier| {
            move |headers, vectors| notifier.push_expired(RowChunk { headers, vectors }, row_matcher, dim)
        });
        let on_evicted = notify.as_mut().map(|notify| notify as &mut EvictedRowsSink<'_>);
        let expired = ssd.expire(&mut progress.ssd, &rule, &in_ram, records, on_evicted);
        let expired = expired.map_err(|error| self.placement.context.in_table(error))?;
        let names = names.into_inner();
        let name = |id: Id| names.get(&id).copied().unwrap_or_default();
        let rows =
            expired.rows.into_iter().map(|(id, modified_epoch)| ExpiredRow { id, modified_epoch, reason: name(id) });
        self.record_expired(&rows.collect::<Vec<ExpiredRow>>(), RowChunk::default(), &matcher);
        Ok(expired.finished)
    }

    /// Like [`Residency::sweep_ssd`], but visits all records of a read-only tier. Nothing can be written, and no state
    /// is published that would need it.
    fn sweep_read_only_ssd(&mut self) -> Result<bool> {
        let matcher = Arc::clone(&self.sweep_progress().matcher);
        let Some(ssd) = &self.placement.context.ssd else { return Ok(true) };
        let dim = self.placement.context.layout.dim;
        let (mut expired, mut copies) = (Vec::new(), RowChunk::default());
        ssd.scan(&mut |row| {
            let weights = &row.vector[..dim];
            if !is_in_ram(&self.placement.host, self.placement.device.as_ref(), row.header.id)
                && matcher.sweep.matches(row.header, weights)
            {
                expired.push(matcher.expired_row(row.header, weights));
                if self.placement.has_notifier() {
                    memory::reserve(&mut copies.vectors, "copy evicted rows", row.vector.len())?;
                    copies.push(row);
                }
            }
            Ok(())
        })?;
        // The scan skips rows that are also in RAM, which are matched there. Rows that move meanwhile are in
        // `changes.moved`.
        ssd.remove_without_tombstones(&expired.iter().map(|row| row.id).collect::<Vec<Id>>());
        self.record_expired(&expired, copies, &matcher);
        Ok(true)
    }

    /// Matches the deferred rows of the sweep in progress.
    fn expire_sweep_deferred(&mut self) -> Result<()> {
        self.collect_moved();
        let SweepProgress { matcher, deferred, .. } = self.sweep_progress();
        let (matcher, ids) = (Arc::clone(matcher), deferred.clone());
        self.sweep_progress().deferred = self.expire_deferred_ids(ids, &matcher)?;
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
        let (mut in_host, mut on_device, mut deferred) = (Vec::new(), Vec::new(), Vec::new());
        for &id in ids {
            if let Some(tier) = &self.placement.device {
                let slot = tier.slots.get(id);
                if slot != NO_SLOT {
                    on_device.push(slot);
                }
            }
            let slot = self.placement.host.slots.get(id);
            if slot != NO_SLOT {
                self.placement.match_in_host(slot, &matcher.sweep, &mut in_host, &mut deferred);
            }
        }
        self.expire_in_host(&in_host, matcher)?;
        let expired = self.placement.match_on_device(&on_device, &matcher.sweep, &mut deferred)?;
        self.expire_on_device(&expired, matcher)?;
        Ok(deferred)
    }

    /// Activates a plan that is about to use its rows: removes the expired ones, which the plan reads as missing rows.
    /// No row of the plan expires until the plan ends.
    ///
    /// Errors: as [`Residency::finish_sweep`]. The plan is not active then.
    pub(crate) fn activate_plan(&mut self, pins: &PlanPins) -> Result<()> {
        if self.placement.context.config.eviction.is_none() {
            return Ok(());
        }
        // Rows kept by an evaluation expire when it ends. An export of the table with these rows would be cancelled if
        // they were removed.
        let waits = self.placement.changes.exports.are_contents_pinned(self.placement.context.version())
            || self.placement.is_notifier_full();
        // Deferred rows may be expired even if the sweep does not advance.
        let stopped = waits
            || match self.continue_sweep(BEFORE_BATCH) {
                Err(error) if self.placement.needs_device_reads() => return Err(error),
                Err(error) => {
                    self.placement.log_sweep_stopped(&error);
                    self.placement.retry_copies();
                    true
                }
                Ok(()) => false,
            };
        if stopped {
            self.expire_deferred_of(&pins.ids)?;
            self.collect_moved();
        }
        if (stopped || self.is_sweeping())
            && let Some(progress) = &self.lifecycle.sweep
        {
            let (by, ids) = (Arc::clone(&progress.matcher), progress.may_match_in_ram(&pins.ids));
            let mut deferred = self.expire_in_ram(&ids, &by)?;
            self.sweep_progress().deferred.append(&mut deferred);
        }
        self.placement.active_plans.add(&pins.ids);
        Ok(())
    }

    /// True if nothing has changed since the last sweep except by that sweep.
    pub(crate) fn is_unchanged_since_sweep(&self) -> bool {
        self.lifecycle.version_after_sweep == Some(self.placement.context.version())
    }

    /// True if sweeps have deferred rows that may still expire.
    pub(crate) fn has_deferred(&self) -> bool {
        let defers =
            |progress: &SweepProgress| !progress.deferred.is_empty() || !self.placement.changes.moved.is_empty();
        !self.lifecycle.deferred.is_empty() || self.lifecycle.sweep.as_ref().is_some_and(defers)
    }

    pub(crate) fn eviction_stats(&self) -> Option<EvictionStats> {
        let (evicted, progress, undelivered) = (
            self.placement.counts.expired(),
            self.lifecycle.sweep.is_some() || !self.lifecycle.deferred.is_empty(),
            self.placement.notifier.as_ref().map_or(0, |notifier| notifier.queue.rows() as u64),
        );
        let is_wanted = self.placement.context.config.eviction.is_some() || self.placement.has_notifier();
        is_wanted.then(|| EvictionStats {
            evicted,
            evicted_by_rule: self.lifecycle.evicted_by_rule.clone(),
            is_sweeping: progress,
            undelivered,
        })
    }

    /// Does the fallible part of [`Residency::begin_sweep`] with this rule, which then cannot fail before the next
    /// step. Removes no row by the new sweep.
    ///
    /// Errors: those of [`Residency::begin_sweep`]. The sweep in progress is kept, and may have advanced.
    pub(crate) fn prepare_sweep(&mut self, rule: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.placement.current_sweep(rule)? else { return Ok(()) };
        self.finish_previous_sweep(&sweep)
    }

    /// Finishes the sweep in progress, unless `sweep` can continue in its place. Its deferred rows are kept separately.
    fn finish_previous_sweep(&mut self, sweep: &ExpirySweep) -> Result<()> {
        // For rows added since the start, a replacing sweep could not distinguish which of the two sweeps expires them.
        let goes_on = |before: &SweepProgress| !before.rows_added && sweep.covers(&before.matcher.sweep);
        if self.lifecycle.sweep.as_ref().is_none_or(goes_on) {
            return Ok(());
        }
        if self.is_sweeping() {
            self.finish_sweep()?;
        }
        self.defer_rest();
        Ok(())
    }

    /// Applies the table's rule to the current rows, or `rule` if the table takes a rule per sweep. Does nothing if the
    /// table has no rule.
    ///
    /// Errors: `State` or `Config` if a rule is passed or missing and should not be; those of
    /// [`Residency::finish_sweep`], for a sweep in progress that matches other rows and must finish first.
    pub(crate) fn begin_sweep(&mut self, rule: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.placement.current_sweep(rule)? else { return Ok(()) };
        let found_all = |before: &ExpirySweep| before.step == sweep.step && before.covers(&sweep);
        if self.lifecycle.last_sweep.as_ref().is_some_and(found_all) {
            // It would match only rows that the previous sweep has deferred. It is recorded nevertheless, as on ranks
            // whose rows have changed since.
            self.placement.record_sweep(&sweep);
            return Ok(());
        }
        self.finish_previous_sweep(&sweep)?;
        self.placement.context.bump_version();
        self.placement.record_sweep(&sweep);
        self.lifecycle.version_after_sweep = Some(self.placement.context.version());
        let (host, device) = (&self.placement.host.slots, self.placement.device.as_ref().map(|tier| &tier.slots));
        let slots = (host.high_water(), device.map_or(0, SlotMap::high_water));
        // A sweep that covers the previous one continues from its position, so that every slot and record is visited.
        let mut before = self.lifecycle.sweep.take();
        let matcher = match &mut before {
            Some(before) => SweepMatcher::replacing(
                &mut before.matcher,
                sweep,
                self.placement.changes.epoch,
                self.placement.has_notifier(),
            ),
            None => SweepMatcher::new(sweep, self.placement.changes.epoch),
        };
        self.placement.changes.moved.start();
        self.lifecycle.sweep = Some(SweepProgress::after(before, matcher, slots, self.placement.counts.expired()));
        Ok(())
    }

    /// Called before a step is committed. If a sweep is due after the step and the previous one must finish first,
    /// finishes it as far as it reads rows from the device, because nothing is read from the device after the commit.
    /// Other failures are retried after the step.
    ///
    /// Errors: the error that requests reads from the device.
    pub(crate) fn prepare_sweep_after_step(&mut self) -> Result<()> {
        let next = self.placement.changes.step + 1;
        if self.placement.device.is_none() || !self.has_sweep() || !self.placement.is_sweep_due_at(next) {
            return Ok(());
        }
        let ended = self
            .placement
            .sweep_after(next, None)
            .and_then(|sweep| sweep.map_or(Ok(()), |sweep| self.finish_previous_sweep(&sweep)));
        match ended {
            Err(error) if self.placement.needs_device_reads() => Err(error),
            Err(_) => {
                self.placement.retry_copies();
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Called after a step was committed: starts a sweep if one is due. Only finishing the previous sweep, to which
    /// rows were added, can fail. That sweep then continues, and the next one starts when it is due.
    pub(crate) fn sweep_after_step(&mut self) {
        if self.placement.is_sweep_due_at(self.placement.changes.step)
            && let Err(error) = self.begin_sweep(None)
        {
            self.placement.log_sweep_stopped(&error);
        }
    }
}

impl Placement {
    /// A failure during a batch is retried before the next batch, and by calls that need all rows, which return the
    /// error.
    fn log_sweep_stopped(&self, error: &Error) {
        tracing::debug!("table {:?}: a sweep has stopped and will continue: {error}", self.context.config.name);
    }

    /// Logs at DEBUG level, because tables may sweep after each step. [`EvictionStats`] counts all sweeps.
    pub(super) fn log_sweep_ended(&self, sweep: &SweepProgress) {
        let (table, step, rule) = (&self.context.config.name, sweep.matcher.sweep.step, &sweep.matcher.sweep.rule);
        let rows = self.counts.expired() - sweep.expired_before;
        tracing::debug!("table {table:?}: the sweep after step {step} has ended and took {rows} rows: {rule:?}");
    }

    fn is_sweep_due_at(&self, step: u64) -> bool {
        let every = self.context.config.eviction.as_ref().and_then(|eviction| eviction.every_steps);
        every.is_some_and(|every| step.is_multiple_of(every.get()))
    }

    /// Returns the sweep for the current step by the table's rule, or by `rule` if it is passed. `None` if the table
    /// has no rule.
    ///
    /// Errors: `State` if a per-sweep rule is missing, or a rule is passed to a table that does not take one; `Config`
    /// if the rule is out of range.
    fn current_sweep(&self, rule: Option<&EvictionRule>) -> Result<Option<ExpirySweep>> {
        self.sweep_after(self.changes.step, rule)
    }

    /// Like [`Placement::current_sweep`], but after `step`.
    fn sweep_after(&self, step: u64, sweep_rule: Option<&EvictionRule>) -> Result<Option<ExpirySweep>> {
        let config = &self.context.config;
        let own = config.eviction.as_ref().map(|eviction| &eviction.rule);
        let refuse = |message: &str| Err(Kind::State.error(format!("table {:?}: {message}", config.name)));
        let rule = match (own, sweep_rule) {
            (None, None) => return Ok(None),
            (Some(own), None) if own.is_per_sweep() => {
                return refuse(
                    "its ranks agree on what a sweep takes: call torchrec_embcache.evict(model) on all of them",
                );
            }
            (Some(own), Some(given)) if own.is_per_sweep() && !given.is_per_sweep() => {
                given.check()?;
                given
            }
            (Some(own), None) => own,
            (_, Some(_)) => {
                return refuse("a sweep was given a rule that the table's eviction does not ask for");
            }
        };
        Ok(Some(ExpirySweep::after(step, rule, config.score_half_life_steps)))
    }

    /// Records a sweep for later deltas.
    fn record_sweep(&mut self, sweep: &ExpirySweep) {
        if let Some(forgotten) = self.changes.history.record_sweep(self.changes.epoch, sweep) {
            tracing::info!(
                "table {:?}: what sweeps have taken since the checkpoint {forgotten} is not remembered any more, because there were more \
                 than {MOST_SWEEPS} of which none takes all that another one takes: the next save on it is a full one",
                self.context.config.name
            );
        }
    }
}
