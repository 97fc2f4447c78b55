//! Host slots of a plan. Stage 1 pins rows in the host tier, and takes slots for the others, which are initialized or
//! read. At the end of a batch its rows are marked as trained, and the pins are released.

use std::sync::Arc;
use std::time::Instant;

use crate::cache::expiry::Residency;
use crate::cache::placement::{
    FetchedRows, FoundCounts, Placement, PlanMode, PlanPins, SLOTS_AHEAD, StagedRow, StagedRows, TableAdmission,
};
use crate::cache::row_blocks::DeviceTensors;
use crate::error::Result;
use crate::index::SlotIndex;
use crate::kernels::thread_pool::parallel_pipeline;
use crate::lifecycle::admission::RowAdmitter;
use crate::rows::ScoreDecayTo;
use crate::runtime::memory;
use crate::slots::{RowState, SlotMap};
use crate::ssd::FetchBatch;
use crate::tiers::NoKernelWrites;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Number of rows whose reads are submitted together. The disk serves them while space is freed for the next ones.
const ROWS_PER_SUBMISSION: usize = 4096;
/// Number of ids that one thread looks up at a time.
const IDS_PER_PIECE: usize = 8192;
/// Cost of looking up an id, in floats touched.
const COST_OF_LOOK_UP: u64 = 8;

/// Ids of a plan that are not in RAM.
#[derive(Clone, Copy)]
struct MissingIds<'a> {
    /// Positions in the plan's distinct ids: `[n]`.
    positions: &'a [u32],
    /// `[n]`
    ids: &'a [Id],
    /// True if the SSD tier may have the row: `[n]`.
    on_ssd: &'a [bool],
}

/// Receives ids with the slots in which their rows are to be initialized.
type NewRowSink<'a> = dyn FnMut(&[(Id, CacheSlot)]) + 'a;

/// Host slots taken for ids.
struct AdmittedSlots {
    /// Rows to read.
    reads: Vec<(Id, CacheSlot)>,
    /// Rows to initialize.
    new_rows: Vec<(Id, CacheSlot)>,
    /// Number of ids that need no slot, because they read zeros.
    zeros: u64,
    /// An error if not all ids got slots. The rows in the lists are processed in any case.
    outcome: Result<()>,
}

impl Residency {
    /// Starts a plan: pins rows in RAM, and adds reads of rows on SSD to `batch`. On an error the pins taken before it
    /// stay in `pins`, to be released.
    pub(crate) fn begin_plan(&mut self, pins: &mut PlanPins, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let started = Instant::now();
        self.placement.finish_ready_loads();
        pins.absent_reads_before = self.placement.absent_reads;
        if self.placement.device.is_some() {
            self.placement.begin_on_device(pins, mode, batch)?;
        } else {
            if let Err(error) = self.placement.drain_overflow()
                && mode.train
            {
                return Err(error);
            }
            self.pin_all(pins, mode, batch)?;
        }
        pins.has_begun = true;
        let left =
            if self.placement.device.is_some() { pins.ids.len() } else { pins.deferred.len() + pins.unplaced.len() };
        pins.has_space = self.placement.fits(left as u64);
        self.placement.traffic.host.time_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Takes host slots for the ids that a plan has deferred, with overflow beyond the budget and space freed by other
    /// rows, and for ids that waited for other batches to count them.
    pub(crate) fn admit_rest(&mut self, pins: &mut PlanPins, mode: PlanMode) -> Result<()> {
        let mut positions = std::mem::take(&mut pins.unplaced);
        positions.append(&mut pins.deferred);
        // Unless something was committed or imported, the prediction for the waiting ids is unchanged.
        if pins.waiting.version != self.placement.context.version() {
            positions.append(&mut std::mem::take(&mut pins.waiting).positions);
        }
        if positions.is_empty() {
            return Ok(());
        }
        let host = Arc::make_mut(&mut pins.host);
        for &position in &positions {
            host[position as usize] = self.placement.host.slots.get(pins.ids[position as usize]);
        }
        let mut batch = FetchBatch::default();
        let admitted = self.pin_found(pins, positions.iter().copied(), mode, &mut batch);
        batch.submit();
        admitted
    }

    /// Pins every id of a plan in the host tier. Takes host slots for missing ids.
    fn pin_all(&mut self, pins: &mut PlanPins, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let host = Arc::make_mut(&mut pins.host);
        look_up(self.placement.host.slots.index(), &pins.ids, host, if mode.is_prefetch { 1 } else { mode.threads });
        if self.placement.host.slots.all_settled() {
            let (missing, there) = split_found(host);
            self.placement.host.slots.accessed(if missing.is_empty() { host } else { &there });
            self.placement.traffic.host.hits += (host.len() - missing.len()) as u64;
            pins.group = Some(self.placement.host.slots.pin_group(Arc::clone(&pins.host)));
            return if missing.is_empty() { Ok(()) } else { self.admit(pins, missing, mode, batch) };
        }
        let all = 0..pins.ids.len() as u32;
        self.pin_found(pins, all, mode, batch)
    }

    /// Pins the ids at `positions`, whose host slots were just looked up. Takes slots for those without one.
    fn pin_found(
        &mut self,
        pins: &mut PlanPins,
        positions: impl Iterator<Item = u32> + Clone,
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        let mut accessed = Vec::with_capacity(pins.ids.len());
        let mut missing: Vec<u32> = Vec::new();
        let mut seen = RowState::default();
        let mut provisional = 0;
        let mut ahead = positions.clone().skip(SLOTS_AHEAD);
        let mut rest = positions;
        let host = Arc::make_mut(&mut pins.host);
        while let Some(position) = rest.next() {
            if let Some(later) = ahead.next() {
                self.placement.host.slots.prefetch(host[later as usize]);
            }
            let slot = host[position as usize];
            if slot == NO_SLOT {
                missing.push(position);
                continue;
            }
            let row = self.placement.host.slots.state(slot);
            if row.has(RowState::FAILED) {
                // `pins` may contain only pinned slots, because the release unpins all of them.
                host[position as usize] = NO_SLOT;
                rest.for_each(|unpinned| host[unpinned as usize] = NO_SLOT);
                return Err(self.placement.unread_row_error(pins.ids[position as usize]));
            }
            seen = seen.with(row);
            provisional += u64::from(row.has(RowState::PROVISIONAL));
            self.placement.host.slots.pin(slot);
            accessed.push(slot);
        }
        self.placement.host.slots.accessed(&accessed);
        self.placement.traffic.host.hits += accessed.len() as u64;
        if seen.has(RowState::LOADING) {
            self.placement.wait_for_all_loads(pins);
        }
        if mode.train && provisional > 0 {
            self.placement.pledge(pins, provisional);
            if pins.has_begun {
                self.check_capacity(0, &pins.ids)?;
            }
        }
        if missing.is_empty() { Ok(()) } else { self.admit(pins, missing, mode, batch) }
    }

    /// Checks that all rows that a training plan may insert fit. Their number has grown if reads found rows absent
    /// since the plan started. Errors: as [`Residency::check_capacity`].
    pub(crate) fn check_pledge(&mut self, pins: &mut PlanPins) -> Result<()> {
        if pins.absent_reads_before != self.placement.absent_reads {
            pins.absent_reads_before = self.placement.absent_reads;
            let provisional =
                pins.host.iter().filter(|&&slot| Placement::is_provisional(&self.placement.host.slots, slot)).count()
                    as u64;
            self.placement.counts.take_back_pledge(pins.pledged);
            pins.pledged = 0;
            self.placement.pledge(pins, provisional);
        }
        self.check_capacity(0, &pins.ids)
    }

    /// Takes host slots for ids that are not in RAM. Rows that are not on SSD are initialized immediately, the others
    /// are read.
    fn admit(
        &mut self,
        pins: &mut PlanPins,
        positions: Vec<u32>,
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        let mut on_ssd = vec![false; positions.len()];
        if let Some(ssd) = &self.placement.context.ssd {
            let ids: Vec<Id> = positions.iter().map(|&position| pins.ids[position as usize]).collect();
            ssd.maybe_contains(&ids, &mut on_ssd);
        }
        if mode.train
            && self.placement.context.config.admission.is_selective()
            && !mode.reads_initial(&self.placement.context.config)
        {
            let (positions, on_ssd) =
                self.placement.without_not_admitted(&self.lifecycle.admission, pins, positions, &on_ssd);
            return self.admit_all(pins, &positions, &on_ssd, mode, batch);
        }
        self.admit_all(pins, &positions, &on_ssd, mode, batch)
    }

    /// Takes host slots for ids that are not in RAM, all of which get one. A plan that starts defers rows that need
    /// other rows to be evicted: none is evicted before all tables are known to fit the batch.
    fn admit_all(
        &mut self,
        pins: &mut PlanPins,
        positions: &[u32],
        on_ssd: &[bool],
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        let new_row_count = on_ssd.iter().filter(|&&there| !there).count() as u64;
        if mode.train && new_row_count > 0 {
            if pins.has_begun {
                self.check_capacity(new_row_count, &pins.ids)?;
            } else if !self.placement.make_fit(new_row_count) {
                let (reads, new): (Vec<_>, Vec<_>) = positions.iter().zip(on_ssd).partition(|(_, there)| **there);
                pins.deferred.extend(new.into_iter().map(|(position, _)| position));
                let reads: Vec<u32> = reads.into_iter().map(|(&position, _)| position).collect();
                return self.admit_all(pins, &reads, &vec![true; reads.len()], mode, batch);
            }
        }
        let ids: Vec<Id> = positions.iter().map(|&position| pins.ids[position as usize]).collect();
        self.placement.initialize_in_parallel(mode.threads, new_row_count, |this, initialize| {
            let parts = positions.chunks(ROWS_PER_SUBMISSION).zip(ids.chunks(ROWS_PER_SUBMISSION));
            for ((positions, ids), on_ssd) in parts.zip(on_ssd.chunks(ROWS_PER_SUBMISSION)) {
                this.admit_part(pins, MissingIds { positions, ids, on_ssd }, mode, (batch, initialize))?;
                batch.submit_if_worthwhile(ROWS_PER_SUBMISSION);
            }
            Ok(())
        })
    }

    /// Like [`TableAdmission::decide`], but for all ids of a plan whose rows are in the host tier. Reduces the
    /// plan's pledge to the rows that it may insert.
    pub(crate) fn decide_admission_in_host(&mut self, pins: &mut PlanPins) -> Result<()> {
        let waiting = pins.waiting.positions.len() as u64;
        let mut provisional: Vec<u32> = Vec::new();
        // A plan has pledged all of its provisional rows that it is to train.
        if pins.pledged > 0 {
            let all = 0..pins.ids.len() as u32;
            provisional.extend(all.filter(|&position| {
                Placement::is_provisional(&self.placement.host.slots, pins.host[position as usize])
            }));
        }
        let new_row_count = self.lifecycle.admission.decide(pins, &provisional, self.placement.changes.step)?;
        self.placement.traffic.host.misses += waiting;
        self.placement.traffic.ssd_misses += waiting;
        self.placement.counts.take_back_pledge(pins.pledged);
        pins.pledged = 0;
        self.placement.pledge(pins, new_row_count);
        Ok(())
    }

    /// Stage 2: gives every row of the plan a slot on the device, and returns the rows to scatter into the device
    /// tensors. On an error no row of the plan has moved. If rows must be read from the device first, this is called
    /// again. The vector parts are written to `buffer` if it is large enough.
    pub(crate) fn place_on_device(
        &mut self,
        pins: &mut PlanPins,
        mode: PlanMode,
        buffer: Option<&mut [f32]>,
    ) -> Result<FetchedRows> {
        let started = Instant::now();
        let slotless = pins.slotless.take().unwrap_or_else(|| self.placement.slotless_on_device(pins));
        let missing = [slotless, self.placement.awaited(pins)].concat();
        let mut staged = self.placement.stage(pins, &missing, mode, buffer)?;
        self.expire_staged_reads(pins, &mut staged)?;
        let staged = self.decide_admission_on_device(pins, staged, mode)?;
        let not_admitted = pins.not_admitted_bits();
        let is_not_admitted = |position: u32| not_admitted.get(position as usize).copied().unwrap_or(false);
        let is_new =
            |row: &&StagedRow| row.state.has(RowState::PROVISIONAL) && !row.counted && !is_not_admitted(row.position);
        let new_row_count = staged.rows.iter().filter(is_new).count() as u64;
        if mode.train {
            let in_host = |row: &&StagedRow| {
                row.counted && pins.host[row.position as usize] != NO_SLOT && !is_not_admitted(row.position)
            };
            let on_device = self
                .placement
                .provisional_on_device(pins)
                .into_iter()
                .filter(|&position| !is_not_admitted(position))
                .count();
            let provisional = (staged.rows.iter().filter(in_host).count() + on_device) as u64;
            self.placement.counts.take_back_pledge(std::mem::take(&mut pins.pledged));
            self.placement.pledge(pins, provisional);
            self.check_capacity(new_row_count, &pins.ids)?;
        }
        let slotless = staged.rows.iter().filter(|row| pins.device[row.position as usize] == NO_SLOT).count();
        self.placement.make_device_space_if_possible(slotless as u32, mode)?;
        self.placement.device_mut().reserve(slotless)?;
        memory::reserve(&mut pins.arriving, "place a batch", staged.rows.len())?;
        // Nothing below can fail. Rows that a prefetch plan has deferred are staged too.
        pins.unplaced.clear();
        pins.found = FoundCounts {
            on_device: (pins.ids.len() - missing.len()) as u64,
            in_host: staged.from_host as u64,
            elsewhere: (missing.len() - staged.from_host) as u64,
            on_ssd: staged.ssd_hits,
            absent: staged.ssd_misses,
        };
        let fetched = self.placement.give_device_slots(pins, staged);
        if mode.train {
            self.placement.pledge(pins, new_row_count);
        }
        self.placement.traffic.device.time_ns += started.elapsed().as_nanos() as u64;
        Ok(fetched)
    }

    /// Makes the final decision which ids of a training plan are not admitted, and removes them from the staged rows if
    /// they do not read initial values. Then fills in the rows that were not read.
    fn decide_admission_on_device<'a>(
        &mut self,
        pins: &mut PlanPins,
        mut staged: StagedRows<'a>,
        mode: PlanMode,
    ) -> Result<StagedRows<'a>> {
        if mode.train && self.placement.context.config.admission.is_selective() {
            let provisional = staged.rows.iter().filter(|row| row.state.has(RowState::PROVISIONAL));
            let mut provisional: Vec<u32> = provisional.map(|row| row.position).collect();
            // Rows in transit to the device are staged too.
            let there = self.placement.provisional_on_device(pins);
            let slots = &self.placement.device_mut().slots;
            let has_arrived = |position: u32| !slots.state(pins.device[position as usize]).has(RowState::LOADING);
            provisional.extend(there.into_iter().filter(|&position| has_arrived(position)));
            self.lifecycle.admission.decide(pins, &provisional, self.placement.changes.step)?;
            if !mode.reads_initial(&self.placement.context.config) {
                staged.leave_out(&pins.not_admitted_bits(), self.placement.context.floats());
            }
        }
        self.placement.fill_staged(pins, &mut staged, mode.threads);
        Ok(staged)
    }

    /// Records one training step: advances the table's step counter, marks the rows of the batch dirty and inserts the
    /// provisional ones. Counts the ids of `pins` that were not admitted.
    ///
    /// `slots` are the slots of the distinct rows on the tier that kernels run on, `NO_SLOT` for ids without a row that
    /// are not admitted: `[U]`. `starts` is the start of the occurrences of each row: `[U + 1]`.
    pub(crate) fn train(&mut self, pins: &PlanPins, slots: &[CacheSlot], starts: &[u32]) {
        self.placement.changes.step += 1;
        let step = self.placement.changes.step;
        self.lifecycle.clock.record_step(&self.placement.context.config, step);
        self.placement.context.bump_version();
        let lists_ids = self.lifecycle.admission.admitter.is_some();
        let new_rows = if pins.not_admitted_positions.is_empty() {
            self.placement.touch_rows(pins, slots, starts, 0..slots.len(), lists_ids)
        } else {
            let with_slots = with_slots(slots);
            let positions = with_slots.iter().map(|&position| position as usize);
            self.placement.touch_rows(pins, slots, starts, positions, lists_ids)
        };
        self.placement.counts.inserted(new_rows.rows);
        if lists_ids {
            let admission = &mut self.lifecycle.admission;
            self.placement.traffic.admitted += new_rows.rows;
            self.placement.traffic.not_admitted += admission.count_not_admitted(pins, self.placement.changes.epoch);
            admission.record_new_rows(new_rows.ids.into_iter());
            admission.end_counting(step);
        }
    }

    /// Ends a committed step: releases the pins of its plan, and starts a sweep if one is due.
    pub(crate) fn end_step(&mut self, pins: PlanPins) {
        self.release(pins);
        self.sweep_after_step();
    }

    /// Releases the pins of a plan. The last pin of a row that was never trained also discards the row. Device slots of
    /// rows that never arrived are freed.
    pub(crate) fn release(&mut self, mut pins: PlanPins) {
        self.lifecycle.admission.end_decision(&mut pins);
        self.placement.release(pins);
    }
}

impl Placement {
    /// Records that a training plan holds `new_rows` more provisional rows.
    pub(super) fn pledge(&mut self, pins: &mut PlanPins, new_rows: u64) {
        self.counts.pledge(new_rows);
        pins.pledged += new_rows;
    }

    /// Makes a plan wait for every load in progress, because some of its rows are among them. Waiting for the others
    /// costs little, because loads finish in about the order in which they started.
    pub(crate) fn wait_for_all_loads(&self, pins: &mut PlanPins) {
        for load in &self.loads {
            if !pins.loads.iter().any(|other| Arc::ptr_eq(other, load)) {
                pins.loads.push(Arc::clone(load));
            }
        }
    }

    /// True if the read of some row of a plan failed.
    pub(crate) fn has_failed(&self, pins: &PlanPins) -> bool {
        pins.host.iter().any(|&slot| slot != NO_SLOT && self.host.slots.state(slot).has(RowState::FAILED))
    }

    /// Removes the ids that are not on SSD and are predicted not to be admitted. They wait without a slot.
    fn without_not_admitted(
        &self,
        admission: &TableAdmission,
        pins: &mut PlanPins,
        mut positions: Vec<u32>,
        on_ssd: &[bool],
    ) -> (Vec<u32>, Vec<bool>) {
        let missing = positions.iter().zip(on_ssd).filter(|(_, there)| !**there).map(|(&position, _)| position);
        let (mut candidates, admitted) = admission.admits(pins, missing, self.changes.step);
        let (mut kept, mut kept_on_ssd) = (Vec::new(), Vec::new());
        // Mostly all ids wait, so the list of waiting ids is filtered in place.
        let mut decided = admitted.iter();
        let mut of_position = on_ssd.iter();
        positions.retain(|&position| {
            let there = of_position.next() == Some(&true);
            let waits = !there && decided.next() == Some(&false);
            if !waits {
                kept.push(position);
                kept_on_ssd.push(there);
            }
            waits
        });
        let mut decided = admitted.iter();
        candidates.retain(|_| decided.next() == Some(&false));
        let changes = admission.admitter.as_ref().map_or(0, RowAdmitter::changes);
        pins.waiting.add(positions, candidates, self.context.version(), changes);
        (kept, kept_on_ssd)
    }

    /// Takes host slots for some ids that are not in RAM. `batch` reads their rows, or the sink receives the new rows.
    fn admit_part(
        &mut self,
        pins: &mut PlanPins,
        missing: MissingIds<'_>,
        mode: PlanMode,
        (batch, initialize): (&mut FetchBatch, &mut NewRowSink<'_>),
    ) -> Result<()> {
        let wanted = missing.ids.len();
        if let Err(error) = self.make_host_space(wanted as u32)
            && mode.train
        {
            // After a failed write, an evaluation continues to read, in the overflow.
            return Err(error);
        }
        // This precedes any change, because the work started below must be completed.
        let rows = if mode.is_prefetch { wanted.min(self.host.slots.free_slots() as usize) } else { wanted };
        self.host.reserve(rows)?;
        let AdmittedSlots { reads, new_rows, zeros, outcome } = self.take_slots(pins, missing, mode);
        // Deferred ids are counted when they are placed. Rows being read count as hits or misses after the read.
        let missing = new_rows.len() as u64 + zeros;
        self.traffic.host.misses += missing + reads.len() as u64;
        self.traffic.ssd_misses += missing;
        if mode.train {
            self.pledge(pins, new_rows.len() as u64);
        }
        initialize(&new_rows);
        if !reads.is_empty() {
            let load = self.start_load(reads, batch);
            pins.loads.push(load);
        }
        outcome
    }

    /// Takes and pins host slots for ids that are not in RAM, whose rows will be initialized or read.
    fn take_slots(&mut self, pins: &mut PlanPins, missing: MissingIds<'_>, mode: PlanMode) -> AdmittedSlots {
        let leaves_out = !mode.train && !mode.reads_initial(&self.context.config);
        let read = leaves_out.then(|| RowsToRead::of(missing));
        let wanted = read.as_ref().map_or(missing, RowsToRead::missing);
        let (slots, outcome) = self.host.admit(wanted.ids, wanted.on_ssd, !mode.is_prefetch);
        let (mut reads, mut new_rows) = (Vec::new(), Vec::with_capacity(slots.len()));
        self.pin_taken(pins, wanted.positions, &slots);
        for ((&slot, &id), &there) in slots.iter().zip(wanted.ids).zip(wanted.on_ssd) {
            if there { &mut reads } else { &mut new_rows }.push((id, slot));
        }
        self.counts.became_provisional(new_rows.len() as u64);
        // After an error, rows in state LOADING must be read nevertheless, because other plans may find them and wait
        // for them.
        if outcome.is_ok() {
            pins.unplaced.extend_from_slice(&wanted.positions[slots.len()..]);
        }
        let zeros = (missing.ids.len() - wanted.ids.len()) as u64;
        AdmittedSlots { reads, new_rows, zeros, outcome }
    }

    /// Pins slots that were just taken for the first ids at `positions`: in the plan's pin group if all of its pins are
    /// in one group, else one by one.
    fn pin_taken(&mut self, pins: &mut PlanPins, positions: &[u32], slots: &[CacheSlot]) {
        let taken = positions.iter().copied().zip(slots.iter().copied());
        if let Some(group) = &pins.group
            && self.host.slots.extend_group(group, &mut pins.host, taken.clone())
        {
            pins.group_grew = true;
            return;
        }
        let host = Arc::make_mut(&mut pins.host);
        for (position, slot) in taken {
            self.host.slots.pin(slot);
            host[position as usize] = slot;
        }
    }

    /// Records the step in the rows of the batch at `positions`, which include all rows with a slot. Lists the
    /// ids of new rows if `lists_ids`.
    fn touch_rows(
        &mut self,
        pins: &PlanPins,
        slots: &[CacheSlot],
        starts: &[u32],
        positions: impl Iterator<Item = usize> + Clone,
        lists_ids: bool,
    ) -> NewRows {
        let (epoch, mut decay) = (self.changes.epoch, ScoreDecayTo::new(self.context.decay, self.changes.step));
        let mut new_rows = NewRows::default();
        let mut ahead = positions.clone().skip(SLOTS_AHEAD);
        for position in positions {
            if let Some(later) = ahead.next().map(|later| slots[later])
                && later != NO_SLOT
            {
                if let Some(device) = &self.device {
                    device.prefetch_header(later);
                    device.slots.prefetch_state(later);
                } else {
                    self.host.prefetch_header(later);
                    self.host.slots.prefetch_state(later);
                }
            }
            let slot = slots[position];
            if slot == NO_SLOT {
                continue;
            }
            let occurrences = starts[position + 1] - starts[position];
            let tier: &mut SlotMap = if let Some(device) = &mut self.device {
                device.header_mut(slot).touch(occurrences, epoch, &mut decay);
                &mut device.slots
            } else {
                self.host.touch(slot, occurrences, epoch, &mut decay);
                &mut self.host.slots
            };
            let row = tier.state(slot);
            if row.has(RowState::PROVISIONAL) {
                new_rows.rows += 1;
                if lists_ids {
                    new_rows.ids.push(pins.ids[position]);
                }
            }
            tier.set_state(slot, row.without(RowState::PROVISIONAL).with(RowState::DIRTY).with(RowState::MODIFIED));
        }
        new_rows
    }

    /// Keeps copies, for the snapshot, of rows that a step is about to change, in slots of the tier that kernels run
    /// on. Skips `NO_SLOT`.
    ///
    /// Errors: the error that requests reads from the device. Nothing has changed then.
    pub(crate) fn keep_pre_images(&mut self, slots: &[CacheSlot], no_writes: NoKernelWrites<'_>) -> Result<()> {
        if self.changes.snapshot.is_none() {
            return Ok(());
        }
        if self.device.is_some() {
            self.require_snapshot_copies(slots)?;
            self.keep_device_pre_images(slots);
        } else {
            self.keep_host_pre_images(slots.iter().map(|&slot| no_writes.read_access(slot)));
        }
        Ok(())
    }

    /// Like [`Placement::keep_pre_images`], for rows of a device tier whose tensors are in RAM and have a row in each
    /// of the slots.
    pub(crate) fn keep_tensor_pre_images(&mut self, slots: &[CacheSlot], tensors: &DeviceTensors<'_>) {
        if let (Some(snapshot), Some(device)) = (&mut self.changes.snapshot, &self.device) {
            snapshot.keep_tensors(device, slots, tensors, self.context.layout);
        }
    }

    /// Releases the pins of a plan.
    fn release(&mut self, pins: PlanPins) {
        let PlanPins { ids, host, group, group_grew, device, pledged, .. } = pins;
        self.active_plans.remove(&ids);
        self.counts.take_back_pledge(pledged);
        // If rows of the group were not trained, each of its pins may be the last one, with which the row is discarded.
        // They are then counted by slot, as soon as the first pin is released.
        let group = group.filter(|_| !group_grew || self.host.slots.are_settled(&host));
        let together = group.and_then(|group| self.host.slots.unpin_group(&group));
        // The slots that the plan has pinned one by one in addition to its group.
        let is_all = together.as_ref().is_some_and(|slots| Arc::ptr_eq(slots, &host));
        let host: &[CacheSlot] = if is_all { &[] } else { &host };
        let is_single = |position: usize| together.as_ref().is_none_or(|slots| slots[position] == NO_SLOT);
        for (position, &slot) in host.iter().enumerate() {
            if let Some(&later) = host.get(position + SLOTS_AHEAD) {
                self.host.slots.prefetch(later);
            }
            if slot != NO_SLOT && is_single(position) && self.host.slots.unpin(slot) {
                if self.host.slots.state(slot).has(RowState::SHADOW) {
                    self.host.slots.remove(slot, ids[position], false);
                } else {
                    self.forget_provisional(slot, ids[position]);
                }
            }
        }
        for (at, &slot) in device.iter().enumerate() {
            let Some(tier) = &mut self.device else { break };
            if let Some(&later) = device.get(at + SLOTS_AHEAD) {
                tier.slots.prefetch(later);
            }
            let gone = RowState::PROVISIONAL.with(RowState::LOADING);
            if slot != NO_SLOT && tier.slots.unpin(slot) && tier.slots.state(slot).has(gone) {
                let provisional = tier.slots.state(slot).has(RowState::PROVISIONAL);
                let id = tier.id(slot);
                tier.slots.remove(slot, id, false);
                self.counts.vanished(u64::from(provisional));
                self.unshadow(id, provisional);
            }
        }
        self.give_back_unused();
    }

    /// Handles a provisional row that has left the device. If another plan has pinned the host slot that it came from,
    /// the row is restored there.
    fn unshadow(&mut self, id: Id, is_provisional: bool) {
        let slot = self.host.slots.get(id);
        if is_provisional && slot != NO_SLOT && self.host.slots.state(slot).has(RowState::SHADOW) {
            self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
            self.counts.became_provisional(1);
        }
    }
}

/// The missing ids that may be on SSD.
struct RowsToRead {
    positions: Vec<u32>,
    ids: Vec<Id>,
    on_ssd: Vec<bool>,
}

impl RowsToRead {
    fn of(missing: MissingIds<'_>) -> Self {
        let there = missing.positions.iter().zip(missing.ids).zip(missing.on_ssd).filter(|(_, there)| **there);
        let (positions, ids): (Vec<u32>, Vec<Id>) = there.map(|((&position, &id), _)| (position, id)).unzip();
        Self { on_ssd: vec![true; ids.len()], positions, ids }
    }

    fn missing(&self) -> MissingIds<'_> {
        MissingIds { positions: &self.positions, ids: &self.ids, on_ssd: &self.on_ssd }
    }
}

/// Writes the slot of each of `ids` `[U]` to `slots` `[U]`, or `NO_SLOT` if the index does not have the id, on up to
/// `threads` threads.
fn look_up(index: &SlotIndex, ids: &[Id], slots: &mut [CacheSlot], threads: usize) {
    let together = if threads > 1 { IDS_PER_PIECE } else { ids.len().max(1) };
    let pieces = ids.chunks(together).zip(slots.chunks_mut(together));
    let look = |(ids, slots): (&[Id], &mut [CacheSlot])| index.get_batch(ids, slots);
    parallel_pipeline(threads, ids.len() as u64 * COST_OF_LOOK_UP, look, |give| pieces.for_each(give));
}

/// Returns the positions in `host` `[U]` without a slot, and the slots of the others; the slots are not listed if no
/// position lacks one.
///
/// Each entry is written to both lists and kept in one: the outcome is unpredictable, so there is no branch. The
/// capacity is exact except for one entry, because the allocator may not return excess memory.
fn split_found(host: &[CacheSlot]) -> (Vec<u32>, Vec<CacheSlot>) {
    let absent = host.iter().filter(|&&slot| slot == NO_SLOT).count();
    if absent == 0 {
        return (Vec::new(), Vec::new());
    }
    let (mut missing, mut there) = (vec![0; absent + 1], vec![0; host.len() - absent + 1]);
    let mut missed = 0;
    for (position, &slot) in host.iter().enumerate() {
        missing[missed] = position as u32;
        there[position - missed] = slot;
        missed += usize::from(slot == NO_SLOT);
    }
    missing.truncate(absent);
    there.truncate(host.len() - absent);
    (missing, there)
}

/// Rows that were trained for the first time.
#[derive(Default)]
struct NewRows {
    rows: u64,
    /// Their ids, if the table has an admission rule.
    ids: Vec<Id>,
}

/// The positions in `slots` `[U]` that have a slot. Branchless, because the outcome is unpredictable.
fn with_slots(slots: &[CacheSlot]) -> Vec<u32> {
    let count = slots.iter().filter(|&&slot| slot != NO_SLOT).count();
    let mut positions = vec![0; count + 1];
    let mut found = 0;
    for (position, &slot) in slots.iter().enumerate() {
        positions[found] = position as u32;
        found += usize::from(slot != NO_SLOT);
    }
    positions.truncate(count);
    positions
}
