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
use super::hold::Hold;
use super::judge::{Dead, Judge};
use super::spared::Spared;
use super::under_way::UnderWay;
use crate::cache::rows::Chunk;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::slots::RowState;
use crate::ssd::{Burial, Dying};
use crate::stats::EvictionStats;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Slots that are looked at before what was found dead in them is buried.
const SLOTS_PER_PART: usize = 1 << 13;

/// How far a sweep goes before others may have the table's lock again.
#[derive(Clone, Copy)]
struct Slice {
    /// Slots of tiers in RAM that are looked at.
    slots: usize,
    /// No more slots are looked at once so many rows were dead, because to bury a row takes far longer than to find it.
    dead: usize,
    /// Records on SSD that are looked at, if the time allows it that [`Pace`](super::pace::Pace) gives.
    records: usize,
}

/// Before a batch is placed.
const BEFORE_BATCH: Slice = Slice { slots: 1 << 15, dead: 1 << 12, records: 1 << 14 };
/// Records on SSD that each slice looks at, however little time there is: some tenths of a millisecond.
const RECORDS_PER_PART: usize = 1 << 10;
/// Rows that are left for later are judged once there are so many of them, so that each batch judges about those that it has left.
const MOST_LATER: usize = 1 << 12;
/// So many records on SSD are looked at at once at most where it is noted by which rule each row dies.
const MOST_NAMES: usize = 1 << 20;
/// To the end.
const TO_THE_END: Slice = Slice { slots: usize::MAX, dead: usize::MAX, records: usize::MAX };

impl Slice {
    fn is_to_the_end(self) -> bool {
        self.records == usize::MAX
    }

    fn half(self) -> Self {
        Self { slots: self.slots / 2, dead: self.dead / 2, records: self.records / 2 }
    }
}

/// An error of a sweep that reads records on SSD. Of a damaged one it says what to do, because nothing else needs to read that record.
fn that_stops_a_sweep(error: Error) -> Error {
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
        self.sweeping.is_some() || !self.spared.is_empty()
    }

    /// Whether some rows may be dead that are still in the tiers and that no plan in place uses.
    pub(super) fn is_sweeping(&self) -> bool {
        self.sweeping.as_ref().is_some_and(|under_way| !under_way.passed)
    }

    /// What fails amid a batch is tried again before the next one, and by whoever needs to know all rows, who gets the error.
    pub(super) fn note_stopped(&self, error: &Error) {
        tracing::debug!("table {:?}: a sweep has stopped and will go on: {error}", self.base.config.name);
    }

    /// At DEBUG, because tables may sweep after each step. [`EvictionStats`] has the numbers of all sweeps.
    pub(super) fn note_ended(&self, ended: &UnderWay) {
        let (table, step, rule) = (&self.base.config.name, ended.judge.sweep.step, &ended.judge.sweep.rule);
        let rows = self.counts.evicted() - ended.evicted_before;
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
            self.sweep_on(TO_THE_END)?;
        }
        // What was spared may be dead by now.
        self.sweep_on(TO_THE_END)
    }

    /// Go on with the sweep under way by as much as before a batch. Returns whether there is more to do.
    ///
    /// Errors: as [`Residency::finish_sweep`].
    pub(crate) fn sweep_a_slice(&mut self) -> Result<bool> {
        if self.is_sweeping() {
            self.sweep_on(BEFORE_BATCH)?;
            return Ok(true);
        }
        self.finish_sweep()?;
        Ok(false)
    }

    /// Forget the sweep under way and what older ones have spared, and with that what was still to be buried.
    pub(super) fn drop_sweep(&mut self) {
        self.sweeping = None;
        self.spared = Spared::default();
        self.swept = None;
        self.in_place.sweep_has_ended();
    }

    /// Rows were put into the table: the next sweep after the same step has to look at them.
    pub(super) fn rows_came_in(&mut self) {
        self.swept = None;
        if let Some(under_way) = &mut self.sweeping {
            under_way.came_in = true;
        }
    }

    /// Go on with the sweep under way.
    fn sweep_on(&mut self, slice: Slice) -> Result<()> {
        self.bury_spared()?;
        let swept = self.sweep_tiers(slice);
        if let Some(ended) = self.sweeping.take_if(|under_way| under_way.passed && under_way.later.is_empty()) {
            self.note_ended(&ended);
            self.swept = (!ended.came_in).then(|| ended.judge.sweep.clone());
        }
        if self.sweeping.is_none() {
            self.sweep_has_ended();
        }
        swept.map_err(that_stops_a_sweep)
    }

    fn sweep_has_ended(&mut self) {
        if self.spared.is_empty() {
            self.in_place.sweep_has_ended();
        }
    }

    /// The sweep under way. It stays in its field while it works, where [`Residency::moved`] finds it: to bury rows may move others.
    ///
    /// # Panics
    /// When none is under way.
    fn under_way(&mut self) -> &mut UnderWay {
        self.sweeping.as_mut().expect("a sweep is under way")
    }

    fn sweep_tiers(&mut self, slice: Slice) -> Result<()> {
        let Some(under_way) = &self.sweeping else { return Ok(()) };
        let (by, has_passed) = (Arc::clone(&under_way.judge), under_way.passed);
        let is_beside = under_way.is_carried && under_way.is_in_ram() && !slice.is_to_the_end();
        if has_passed || under_way.later.len() > MOST_LATER {
            // A row that lives when it is judged is never taken by this sweep, so that it does not matter when that is.
            self.judge_left_for_later()?;
        }
        if has_passed {
            return Ok(());
        }
        let slice = if is_beside { slice.half() } else { slice };
        let (mut seen, mut dead) = (0, 0);
        while seen < slice.slots && dead < slice.dead && self.under_way().host.left > 0 {
            let high_water = self.host.slots.high_water();
            let part = self.under_way().host.part(SLOTS_PER_PART, high_water);
            seen += part.len();
            dead += self.sweep_host(part, &by)?;
        }
        while seen < slice.slots && dead < slice.dead && self.under_way().device.left > 0 {
            let high_water = self.device.as_ref().map_or(0, |tier| tier.slots.high_water());
            let part = self.under_way().device.part(SLOTS_PER_PART, high_water);
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
        if self.under_way().is_in_ram() {
            if is_beside {
                self.sweep_ssd_beside(slice)?;
            }
            return Ok(());
        }
        // Rows that wait in RAM come before those on SSD, where they may have gone since they were passed.
        self.judge_left_for_later()?;
        let under_way = self.under_way();
        if !under_way.ram_passed {
            under_way.ram_passed = true;
            if slice.is_to_the_end() {
                under_way.ssd = Burial::default();
            } else {
                under_way.ssd.once_more();
            }
        }
        self.under_way().passed = self.sweep_ssd_in_time(slice)?;
        Ok(())
    }

    /// Bury the dead rows in some slots of the host tier, which are passed then. Returns how many.
    fn sweep_host(&mut self, slots: std::ops::Range<CacheSlot>, by: &Judge) -> Result<usize> {
        let (mut dead, mut later) = (Vec::new(), Vec::new());
        for slot in self.host.trained_until(by.sweep.latest(), slots.clone()) {
            self.judge_in_host(slot, &by.sweep, &mut dead, &mut later);
        }
        let buried = dead.len();
        self.bury_in_host(&dead, by)?;
        let under_way = self.under_way();
        under_way.later.append(&mut later);
        under_way.host = under_way.host.after(&slots);
        Ok(buried)
    }

    /// Bury the dead rows in some slots of the device tier, which are passed then. Returns how many.
    fn sweep_device(&mut self, slots: std::ops::Range<CacheSlot>, by: &Judge) -> Result<usize> {
        let (mut dead, mut later) = (Vec::new(), Vec::new());
        if let Some(tier) = &self.device {
            let is_occupied = |&slot: &CacheSlot| tier.slots.state(slot).has(RowState::OCCUPIED);
            let occupied: Vec<CacheSlot> = slots.clone().filter(is_occupied).collect();
            dead = self.judge_on_device(&occupied, &by.sweep, &mut later)?;
            self.bury_on_device(&dead, by)?;
        }
        let under_way = self.under_way();
        under_way.later.append(&mut later);
        under_way.device = under_way.device.after(&slots);
        Ok(dead.len())
    }

    /// As [`Residency::sweep_ssd`], while slots in RAM are left. What it finds is buried earlier so. But a row that it passes over because
    /// it is in RAM may leave RAM before its slot is looked at, so all records are come to again afterwards.
    fn sweep_ssd_beside(&mut self, slice: Slice) -> Result<()> {
        // A tier that only reads is gone through as a whole.
        if self.base.ssd.as_ref().is_some_and(|ssd| !ssd.is_read_only()) && self.sweep_ssd_in_time(slice)? {
            self.under_way().ssd = Burial::default();
        }
        Ok(())
    }

    /// As [`Residency::sweep_ssd`], part by part, until the records of a slice were looked at or its time is over.
    fn sweep_ssd_in_time(&mut self, slice: Slice) -> Result<bool> {
        if slice.is_to_the_end() {
            return self.sweep_ssd(slice.records);
        }
        let begin = Instant::now();
        let end = begin + self.under_way().pace.time_for_slice(begin);
        let mut left = slice.records;
        let swept = loop {
            let part = left.min(RECORDS_PER_PART);
            left -= part;
            let swept = self.sweep_ssd(part);
            if !matches!(swept, Ok(false)) || left == 0 || Instant::now() >= end {
                break swept;
            }
        };
        self.under_way().pace.slice_ended(Instant::now());
        swept
    }

    /// Bury dead rows on SSD, and look at about so many records for that. Returns whether all were looked at.
    fn sweep_ssd(&mut self, records: usize) -> Result<bool> {
        let (Some(ssd), Some(under_way)) = (&self.base.ssd, &mut self.sweeping) else { return Ok(true) };
        if ssd.is_read_only() {
            return self.sweep_read_only_ssd();
        }
        let judge = Arc::clone(&under_way.judge);
        let sweep = &judge.sweep;
        let dim = self.base.layout.dim;
        let (names, differ) = (RefCell::new(HashMap::new()), judge.names_differ());
        let by_row = |header: &RowHeader, vector: &[f32]| {
            let dies = sweep.kills(header, &vector[..dim]);
            if dies && differ {
                names.borrow_mut().insert(header.id, judge.name(header, &vector[..dim]));
            }
            dies
        };
        let records = if differ { records.min(MOST_NAMES) } else { records };
        let dying =
            Dying { last_step: sweep.latest(), by_row: if sweep.is_by_last_step() { None } else { Some(&by_row) } };
        // A row that is in RAM too is judged there.
        let in_ram = |id: Id| is_in_ram(&self.host, self.device.as_ref(), id);
        let buried = if let Some(told) = &self.told {
            let mut tell = |headers, vectors| told.died(Chunk { headers, vectors }, &judge, dim);
            ssd.bury_and_tell(&mut under_way.ssd, &dying, &in_ram, records, &mut tell)
        } else {
            ssd.bury(&mut under_way.ssd, &dying, &in_ram, records)
        };
        let buried = buried.map_err(|error| self.base.in_table(error))?;
        let names = names.into_inner();
        let name = |id: Id| names.get(&id).copied().unwrap_or_default();
        let rows = buried.rows.into_iter().map(|(id, modified_epoch)| Dead { id, modified_epoch, name: name(id) });
        self.died(&rows.collect::<Vec<Dead>>(), Chunk::default(), &judge);
        Ok(buried.finished)
    }

    /// As [`Residency::sweep_ssd`], of all records of a tier that only reads: nothing can be written, and no state is published that would need
    /// to know.
    fn sweep_read_only_ssd(&mut self) -> Result<bool> {
        let judge = Arc::clone(&self.under_way().judge);
        let Some(ssd) = &self.base.ssd else { return Ok(true) };
        let dim = self.base.layout.dim;
        let (mut dead, mut copies) = (Vec::new(), Chunk::default());
        ssd.scan(&mut |row| {
            let weights = &row.vector[..dim];
            if !is_in_ram(&self.host, self.device.as_ref(), row.header.id) && judge.sweep.kills(row.header, weights) {
                dead.push(judge.dead(row.header, weights));
                if self.tells() {
                    memory::reserve(&mut copies.vectors, "copy evicted rows", row.vector.len())?;
                    copies.push(row);
                }
            }
            Ok(())
        })?;
        ssd.remove_unwritten(&dead.iter().map(|row| row.id).collect::<Vec<Id>>());
        self.died(&dead, copies, &judge);
        Ok(true)
    }

    /// Judges the rows that the sweep under way has left for later.
    fn judge_left_for_later(&mut self) -> Result<()> {
        let UnderWay { judge, later, .. } = self.under_way();
        let (by, ids) = (Arc::clone(judge), later.clone());
        let judged = ids.len();
        let stay = self.bury_later(ids, &by)?;
        // Rows that moved meanwhile follow those that were judged.
        self.under_way().later.splice(..judged, stay);
        Ok(())
    }

    /// Judge rows that a sweep has left for later. Returns those that plans in place use, which stay for later.
    pub(super) fn bury_later(&mut self, mut ids: Vec<Id>, by: &Judge) -> Result<Vec<Id>> {
        ids.sort_unstable();
        ids.dedup();
        let stay = self.bury_dead_of(&ids, by)?;
        // Records on SSD are passed over while their rows are in RAM. So rows that have left RAM since are looked at there.
        self.bury_dead_on_ssd(&ids, by)?;
        Ok(stay)
    }

    /// Bury the dead ones among these rows that are in RAM. Returns those that cannot be judged yet, because plans in place use them or they
    /// are being read.
    pub(super) fn bury_dead_of(&mut self, ids: &[Id], by: &Judge) -> Result<Vec<Id>> {
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
                self.judge_in_host(slot, &by.sweep, &mut in_host, &mut later);
            }
        }
        self.bury_in_host(&in_host, by)?;
        let dead = self.judge_on_device(&on_device, &by.sweep, &mut later)?;
        self.bury_on_device(&dead, by)?;
        Ok(later)
    }

    /// A plan is about to use its rows: bury those of them that are dead, which it reads as rows that are not there. From then on until it
    /// ends no row of it dies.
    ///
    /// Errors: as [`Residency::finish_sweep`]. The plan is not in place then.
    pub(crate) fn settle(&mut self, hold: &Hold) -> Result<()> {
        if self.base.config.eviction.is_none() {
            return Ok(());
        }
        // Rows that an evaluation has kept are dead when it ends. An export of the table with these rows would end if they left now.
        let waits = self.exports.are_contents_wanted(self.base.version()) || self.waits_to_tell();
        // Where the sweep goes no further, what it has left for later may be dead all the same.
        let stopped = waits
            || match self.sweep_on(BEFORE_BATCH) {
                Err(error) if self.owes_copies() => return Err(error),
                Err(error) => {
                    self.note_stopped(&error);
                    self.try_copies_again();
                    true
                }
                Ok(()) => false,
            };
        if stopped {
            self.bury_spared_of(&hold.ids)?;
        }
        if (stopped || self.is_sweeping())
            && let Some(under_way) = &self.sweeping
        {
            let (by, ids) = (Arc::clone(&under_way.judge), under_way.may_take_in_ram(&hold.ids));
            let mut later = self.bury_dead_of(&ids, &by)?;
            self.under_way().later.append(&mut later);
        }
        self.in_place.add(&hold.ids);
        Ok(())
    }

    /// A plan has ended. Its rows that a sweep had to spare, and that it did not train, are dead from now on.
    pub(super) fn unsettle(&mut self, ids: &Arc<Vec<Id>>) {
        self.in_place.remove(ids);
    }

    /// Rows move to slots that a sweep may have passed already.
    pub(super) fn moved(&mut self, ids: impl Iterator<Item = Id>) {
        if let Some(under_way) = self.sweeping.as_mut().filter(|under_way| !under_way.passed) {
            under_way.later.extend(ids);
        }
    }

    /// Whether nothing has changed since the last sweep but what that took.
    pub(crate) fn is_as_swept(&self) -> bool {
        self.as_swept == Some(self.base.version())
    }

    /// Whether sweeps have spared rows of plans that are in place, which may still die.
    pub(super) fn has_spared(&self) -> bool {
        !self.spared.is_empty() || self.sweeping.as_ref().is_some_and(|under_way| !under_way.later.is_empty())
    }

    pub(super) fn eviction_stats(&self) -> Option<EvictionStats> {
        let (evicted, under_way, untold) =
            (self.counts.evicted(), self.sweeping.is_some() || !self.spared.is_empty(), self.untold());
        let is_wanted = self.base.config.eviction.is_some() || self.tells();
        is_wanted.then(|| EvictionStats { evicted, evicted_by_rule: self.evicted_by_rule.clone(), under_way, untold })
    }
}
