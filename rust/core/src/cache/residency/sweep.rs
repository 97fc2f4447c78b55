//! A sweep under way: rows die by the table's rule of eviction.
//!
//! A sweep takes effect at once: a batch that is placed after it reads a dead row as one that was never there. The tiers are gone through
//! a part at a time, before each batch that is placed, or as a whole where somebody needs to know all rows. Whatever finds a dead row before that
//! buries it: see [`Residency::settle`].
//!
//! Rows of plans that are in place when the sweep comes are spared until the plan ends. If it trains them they live on. They are judged by
//! that sweep also where other sweeps have begun by then: see [`Residency::set_aside`].

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

/// Slots that are looked at before what was found dead in them is buried.
const SLOTS_PER_PART: usize = 1 << 13;

/// How far a sweep goes before others may have the table's lock again.
#[derive(Clone, Copy)]
struct SweepSlice {
    /// Slots of tiers in RAM that are looked at.
    slots: usize,
    /// No more slots are looked at once so many rows were dead, because to bury a row takes far longer than to find it.
    expired: usize,
    /// Records on SSD that are looked at, if the time allows it that [`Pace`](super::pace::Pace) gives.
    records: usize,
}

/// Before a batch is placed.
const BEFORE_BATCH: SweepSlice = SweepSlice { slots: 1 << 15, expired: 1 << 12, records: 1 << 14 };
/// Records on SSD that each slice looks at, however little time there is: some tenths of a millisecond.
const RECORDS_PER_PART: usize = 1 << 10;
/// Rows that are left for later are judged once there are so many of them, so that each batch judges about those that it has left.
const MOST_DEFERRED: usize = 1 << 12;
/// So many records on SSD are looked at at once at most where it is noted by which rule each row dies.
const MOST_REASONS: usize = 1 << 20;
/// To the end.
const TO_THE_END: SweepSlice = SweepSlice { slots: usize::MAX, expired: usize::MAX, records: usize::MAX };

impl SweepSlice {
    fn is_to_the_end(self) -> bool {
        self.records == usize::MAX
    }

    fn half(self) -> Self {
        Self { slots: self.slots / 2, expired: self.expired / 2, records: self.records / 2 }
    }
}

/// An error of a sweep that reads records on SSD. Of a damaged one it says what to do, because nothing else needs to read that record.
fn with_sweep_remedy(error: Error) -> Error {
    if error.kind() != Kind::Corruption {
        return error;
    }
    error.context(
        "a sweep of eviction has to read a damaged record: bring back the file as it was, or load a checkpoint, which ends the sweep",
    )
}

impl Residency {
    /// Whether a sweep may find rows that are to be buried.
    pub(crate) fn has_sweep(&self) -> bool {
        self.sweep.is_some() || !self.deferred.is_empty()
    }

    /// Whether some rows may be dead that are still in the tiers and that no plan in place uses.
    pub(super) fn is_sweeping(&self) -> bool {
        self.sweep.as_ref().is_some_and(|under_way| !under_way.passed)
    }

    /// What fails amid a batch is tried again before the next one, and by whoever needs to know all rows, who gets the error.
    pub(super) fn log_sweep_stopped(&self, error: &Error) {
        tracing::debug!("table {:?}: a sweep has stopped and will go on: {error}", self.context.config.name);
    }

    /// At DEBUG, because tables may sweep after each step. [`EvictionStats`] has the numbers of all sweeps.
    pub(super) fn log_sweep_ended(&self, sweep: &SweepProgress) {
        let (table, step, rule) = (&self.context.config.name, sweep.matcher.sweep.step, &sweep.matcher.sweep.rule);
        let rows = self.counts.expired() - sweep.expired_before;
        tracing::debug!("table {table:?}: the sweep after step {step} has ended and took {rows} rows: {rule:?}");
    }

    /// Bury all rows that the sweep under way takes, but those of plans that are in place.
    ///
    /// Errors: those of the SSD tier and of reads of the device tier. The sweep goes on with the next call.
    pub(crate) fn finish_sweep(&mut self) -> Result<()> {
        if !self.has_sweep() {
            return Ok(());
        }
        self.finish_loads();
        while self.is_sweeping() {
            self.continue_sweep(TO_THE_END)?;
        }
        // What was spared may be dead by now.
        self.continue_sweep(TO_THE_END)
    }

    /// Go on with the sweep under way by as much as before a batch. Returns whether there is more to do.
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

    /// Forget the sweep under way and what older ones have spared, and with that what was still to be buried.
    pub(super) fn drop_sweep(&mut self) {
        self.sweep = None;
        self.deferred = DeferredRows::default();
        self.last_sweep = None;
        self.active_plans.sweep_has_ended();
    }

    /// Rows were put into the table: the next sweep after the same step has to look at them.
    pub(super) fn record_added_rows(&mut self) {
        self.last_sweep = None;
        if let Some(under_way) = &mut self.sweep {
            under_way.rows_added = true;
        }
    }

    /// Go on with the sweep under way.
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

    /// The sweep under way. It stays in its field while it works, where [`Residency::moved`] finds it: to bury rows may move others.
    ///
    /// # Panics
    /// When none is under way.
    fn sweep_progress(&mut self) -> &mut SweepProgress {
        self.sweep.as_mut().expect("a sweep is under way")
    }

    fn sweep_tiers(&mut self, slice: SweepSlice) -> Result<()> {
        let Some(under_way) = &self.sweep else { return Ok(()) };
        let (by, has_passed) = (Arc::clone(&under_way.matcher), under_way.passed);
        let is_beside = under_way.is_carried && under_way.is_in_ram() && !slice.is_to_the_end();
        if has_passed || under_way.deferred.len() > MOST_DEFERRED {
            // A row that lives when it is judged is never taken by this sweep, so that it does not matter when that is.
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
                // One part that is read from the device is enough before a batch.
                break;
            }
        }
        if self.sweep_progress().is_in_ram() {
            if is_beside {
                self.sweep_ssd_early(slice)?;
            }
            return Ok(());
        }
        // Rows that wait in RAM come before those on SSD, where they may have gone since they were passed.
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

    /// Bury the dead rows in some slots of the host tier, which are passed then. Returns how many.
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

    /// Bury the dead rows in some slots of the device tier, which are passed then. Returns how many.
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

    /// As [`Residency::sweep_ssd`], while slots in RAM are left. What it finds is buried earlier so. But a row that it passes over because
    /// it is in RAM may leave RAM before its slot is looked at, so all records are come to again afterwards.
    fn sweep_ssd_early(&mut self, slice: SweepSlice) -> Result<()> {
        // A tier that only reads is gone through as a whole.
        if self.context.ssd.as_ref().is_some_and(|ssd| !ssd.is_read_only()) && self.sweep_ssd_in_time(slice)? {
            self.sweep_progress().ssd = SsdExpiryCursor::default();
        }
        Ok(())
    }

    /// As [`Residency::sweep_ssd`], part by part, until the records of a slice were looked at or its time is over.
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

    /// Bury dead rows on SSD, and look at about so many records for that. Returns whether all were looked at.
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
        // A row that is in RAM too is judged there.
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

    /// As [`Residency::sweep_ssd`], of all records of a tier that only reads: nothing can be written, and no state is published that would need
    /// to know.
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

    /// Judges the rows that the sweep under way has left for later.
    fn expire_sweep_deferred(&mut self) -> Result<()> {
        let SweepProgress { matcher: judge, deferred: later, .. } = self.sweep_progress();
        let (by, ids) = (Arc::clone(judge), later.clone());
        let judged = ids.len();
        let stay = self.expire_deferred_ids(ids, &by)?;
        // Rows that moved meanwhile follow those that were judged.
        self.sweep_progress().deferred.splice(..judged, stay);
        Ok(())
    }

    /// Judge rows that a sweep has left for later. Returns those that plans in place use, which stay for later.
    pub(super) fn expire_deferred_ids(&mut self, mut ids: Vec<Id>, matcher: &SweepMatcher) -> Result<Vec<Id>> {
        ids.sort_unstable();
        ids.dedup();
        let stay = self.expire_in_ram(&ids, matcher)?;
        // Records on SSD are passed over while their rows are in RAM. So rows that have left RAM since are looked at there.
        self.expire_on_ssd(&ids, matcher)?;
        Ok(stay)
    }

    /// Bury the dead ones among these rows that are in RAM. Returns those that cannot be judged yet, because plans in place use them or they
    /// are being read.
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

    /// A plan is about to use its rows: bury those of them that are dead, which it reads as rows that are not there. From then on until it
    /// ends no row of it dies.
    ///
    /// Errors: as [`Residency::finish_sweep`]. The plan is not in place then.
    pub(crate) fn activate_plan(&mut self, pins: &PlanPins) -> Result<()> {
        if self.context.config.eviction.is_none() {
            return Ok(());
        }
        // Rows that an evaluation has kept are dead when it ends. An export of the table with these rows would end if they left now.
        let waits = self.exports.are_contents_pinned(self.context.version()) || self.is_notifier_full();
        // Where the sweep goes no further, what it has left for later may be dead all the same.
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

    /// A plan has ended. Its rows that a sweep had to spare, and that it did not train, are dead from now on.
    pub(super) fn deactivate_plan(&mut self, ids: &Arc<Vec<Id>>) {
        self.active_plans.remove(ids);
    }

    /// Rows move to slots that a sweep may have passed already.
    pub(super) fn record_moved(&mut self, ids: impl Iterator<Item = Id>) {
        if let Some(under_way) = self.sweep.as_mut().filter(|under_way| !under_way.passed) {
            under_way.deferred.extend(ids);
        }
    }

    /// Whether nothing has changed since the last sweep but what that took.
    pub(crate) fn is_unchanged_since_sweep(&self) -> bool {
        self.version_after_sweep == Some(self.context.version())
    }

    /// Whether sweeps have spared rows of plans that are in place, which may still die.
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
