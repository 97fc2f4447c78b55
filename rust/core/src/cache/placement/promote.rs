//! Promotion of rows to the device tier, in three stages.
//!
//! 1. A plan pins its rows on the device and in the host tier, and rows on SSD are prefetched into the host tier.
//! 2. Victims are chosen, and read without the table's lock. Then they are demoted, the plan's rows get slots on the
//!    device, and they are copied into a buffer that Python scatters. Until Python reports the scatter, a row's device
//!    slot is LOADING and its current copy is where it was: a lookup of the row finds it there.
//! 3. The copies on the device become the current ones. This cannot fail.
//!
//! In stages 2 and 3 the plan has `rows_in_use` for writing, so that no thread reads rows of the device while others
//! arrive there.

use std::sync::Arc;
use std::time::Instant;

use super::admission::TableAdmission;
use super::plan_pins::{ArrivingRow, FetchedRows, FoundCounts, PlanMode, PlanPins};
use super::{Placement, PlanTraffic, SLOTS_AHEAD};
use crate::error::Result;
use crate::rows::RowHeader;
use crate::runtime::memory;
use crate::slots::RowState;
use crate::ssd::FetchBatch;
use crate::tiers::ROWS_AHEAD;
use crate::types::{CacheSlot, Id, NO_SLOT};

impl Placement {
    /// Stage 1 of a plan for a table with a device tier.
    pub(crate) fn begin_on_device(
        &mut self,
        pins: &mut PlanPins,
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        pins.device = vec![NO_SLOT; pins.ids.len()];
        let all: Vec<u32> = (0..pins.ids.len() as u32).collect();
        let missing = self.pin_on_device(pins, &all);
        let mut reads: Vec<(u32, Id)> = Vec::new();
        let mut waits = false;
        let (ids, slots) = self.host_slots(pins, &missing);
        for (at, (&position, (&id, &slot))) in missing.iter().zip(ids.iter().zip(&slots)).enumerate() {
            if let Some(&later) = slots.get(at + SLOTS_AHEAD) {
                self.host.slots.prefetch(later);
            }
            if slot == NO_SLOT {
                reads.push((position, id));
                continue;
            }
            waits |= self.host.slots.state(slot).has(RowState::LOADING);
            self.pin_in_host(pins, position, slot);
        }
        if waits {
            self.wait_for_all_loads(pins);
        }
        let Some(ssd) = &self.context.ssd else { return Ok(()) };
        let ids: Vec<Id> = reads.iter().map(|&(_, id)| id).collect();
        let mut there = vec![false; ids.len()];
        ssd.maybe_contains(&ids, &mut there);
        let mut there = there.into_iter();
        reads.retain(|_| there.next().unwrap_or(false));
        if reads.is_empty() || !mode.is_prefetch {
            return Ok(());
        }
        self.read_ahead(pins, reads, mode, batch)
    }

    /// Prefetches rows from SSD into the host tier, as far as its budget allows.
    fn read_ahead(
        &mut self,
        pins: &mut PlanPins,
        reads: Vec<(u32, Id)>,
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        if let Err(error) = self.make_host_space(reads.len() as u32)
            && mode.train
        {
            return Err(error);
        }
        // This precedes any change, because the work started below must be completed.
        self.host.reserve(reads.len().min(self.host.slots.free_slots() as usize))?;
        let mut rows = Vec::new();
        for (position, id) in reads {
            let Some(taken) = self.host.take(false)? else {
                pins.unplaced.push(position);
                continue;
            };
            let slot = self.host.insert_loading(&taken, id);
            self.pin_in_host(pins, position, slot);
            rows.push((id, slot));
        }
        if !rows.is_empty() {
            let load = self.start_load(rows, batch);
            pins.loads.push(load);
        }
        Ok(())
    }

    fn pin_in_host(&mut self, pins: &mut PlanPins, position: u32, slot: CacheSlot) {
        self.host.slots.pin(slot);
        Arc::make_mut(&mut pins.host)[position as usize] = slot;
    }

    /// Returns the ids at `positions` of a plan and the host slot of each, `NO_SLOT` if it has none.
    pub(crate) fn host_slots(&self, pins: &PlanPins, positions: &[u32]) -> (Vec<Id>, Vec<CacheSlot>) {
        let ids: Vec<Id> = positions.iter().map(|&position| pins.ids[position as usize]).collect();
        let mut slots = vec![NO_SLOT; ids.len()];
        self.host.slots.index().get_batch(&ids, &mut slots);
        (ids, slots)
    }

    /// Pins the rows at `positions` that have slots on the device. Returns the other positions.
    fn pin_on_device(&mut self, pins: &mut PlanPins, positions: &[u32]) -> Vec<u32> {
        let tier = self.device_mut();
        let ids: Vec<Id> = positions.iter().map(|&position| pins.ids[position as usize]).collect();
        let mut slots = vec![NO_SLOT; ids.len()];
        tier.slots.index().get_batch(&ids, &mut slots);
        let mut missing = Vec::new();
        let mut accessed = Vec::new();
        for (at, (&position, &slot)) in positions.iter().zip(&slots).enumerate() {
            if let Some(&later) = slots.get(at + SLOTS_AHEAD) {
                tier.slots.prefetch(later);
            }
            if slot == NO_SLOT {
                missing.push(position);
            } else {
                tier.keep_leaving(slot);
                tier.slots.pin(slot);
                pins.device[position as usize] = slot;
                accessed.push(slot);
            }
        }
        tier.slots.accessed(&accessed);
        missing
    }

    /// Starts stage 2 of an [active](crate::cache::expiry::Residency::activate_plan) plan: frees device space for its rows before any of them
    /// is read. Victims must be read from the device first, and then this is called again.
    pub(crate) fn make_space_on_device(
        &mut self,
        admission: &TableAdmission,
        pins: &mut PlanPins,
        mode: PlanMode,
    ) -> Result<()> {
        let slotless = pins.slotless.take().unwrap_or_else(|| self.slotless_on_device(pins));
        let made = self.make_device_space_for(admission, pins, &slotless, mode);
        // No row arrives on the device until this plan is placed.
        pins.slotless = Some(slotless);
        made
    }

    /// Pins the rows with a slot on the device. Returns the positions of the others.
    pub(crate) fn slotless_on_device(&mut self, pins: &mut PlanPins) -> Vec<u32> {
        let all = 0..pins.ids.len() as u32;
        let absent: Vec<u32> = all.filter(|&position| pins.device[position as usize] == NO_SLOT).collect();
        self.pin_on_device(pins, &absent)
    }

    /// Frees device space for about the number of rows at `slotless` that will arrive there.
    fn make_device_space_for(
        &mut self,
        admission: &TableAdmission,
        pins: &PlanPins,
        slotless: &[u32],
        mode: PlanMode,
    ) -> Result<()> {
        let all_come =
            mode.reads_initial(&self.context.config) || mode.train && !self.context.config.admission.is_selective();
        if all_come || self.device_mut().slots.free_slots() as usize >= slotless.len() {
            return self.make_device_space_if_possible(slotless.len() as u32, mode);
        }
        let (absent, new_row_count) = self.new_rows_among(admission, pins, slotless, mode.train);
        self.make_device_space_if_possible((slotless.len() - absent + new_row_count) as u32, mode)
    }

    /// Returns the number of ids at `slotless`, which have no slot on the tier of the kernels, without a row, and the
    /// number of those that are admitted by the present prediction. An evaluation inserts none.
    pub(crate) fn new_rows_among(
        &self,
        admission: &TableAdmission,
        pins: &PlanPins,
        slotless: &[u32],
        train: bool,
    ) -> (usize, usize) {
        let (ids, slots) = self.host_slots(pins, slotless);
        let elsewhere = slotless.iter().zip(&ids).zip(&slots).filter(|(_, slot)| **slot == NO_SLOT);
        let (elsewhere, ids): (Vec<u32>, Vec<Id>) = elsewhere.map(|((&position, &id), _)| (position, id)).unzip();
        let mut there = vec![false; elsewhere.len()];
        if let Some(ssd) = &self.context.ssd {
            ssd.maybe_contains(&ids, &mut there);
        }
        let absent = elsewhere.iter().zip(&there).filter(|(_, there)| !**there).map(|(&position, _)| position);
        let absent = absent.collect::<Vec<u32>>();
        if !train || !self.context.config.admission.is_selective() {
            return (absent.len(), if train { absent.len() } else { 0 });
        }
        let new_row_count = admission
            .admits(pins, absent.iter().copied(), self.changes.step)
            .1
            .into_iter()
            .filter(|admitted| *admitted)
            .count();
        (absent.len(), new_row_count)
    }

    /// Like [`Placement::make_device_space`]. After a failed write, an evaluation continues to read, in the overflow.
    pub(crate) fn make_device_space_if_possible(&mut self, requested: u32, mode: PlanMode) -> Result<()> {
        match self.make_device_space(requested) {
            Err(error) if mode.train || self.needs_device_reads() => Err(error),
            _ => Ok(()),
        }
    }

    /// Approximate number of rows to promote to the device for a started plan, rarely exceeded. Includes ids that will
    /// not be admitted.
    pub(crate) fn max_arriving_rows(&self, pins: &PlanPins) -> usize {
        let Some(tier) = &self.device else { return 0 };
        let others_come = !tier.slots.all_settled();
        let comes = |slot: CacheSlot| others_come && tier.slots.state(slot).has(RowState::LOADING);
        let arrives = |slot: CacheSlot| slot == NO_SLOT || comes(slot);
        pins.device.iter().filter(|&&slot| arrives(slot)).count()
    }

    /// Positions of rows that have a device slot from another plan and have not arrived. That plan may never load them,
    /// so this one does.
    pub(crate) fn awaited(&mut self, pins: &PlanPins) -> Vec<u32> {
        let slots = &self.device_mut().slots;
        if slots.all_settled() {
            return Vec::new();
        }
        let is_awaited = |slot: CacheSlot| slot != NO_SLOT && slots.state(slot).has(RowState::LOADING);
        (0..pins.ids.len() as u32).filter(|&position| is_awaited(pins.device[position as usize])).collect()
    }

    /// The positions of the plan's provisional rows on the device or in transit to it.
    pub(crate) fn provisional_on_device(&mut self, pins: &PlanPins) -> Vec<u32> {
        if self.device_mut().slots.all_settled() {
            return Vec::new();
        }
        (0..pins.ids.len() as u32).filter(|&position| self.is_provisional_on_device(pins, position)).collect()
    }

    fn is_provisional_on_device(&mut self, pins: &PlanPins, position: u32) -> bool {
        Self::is_provisional(&self.device_mut().slots, pins.device[position as usize])
    }

    /// Gives the staged rows device slots, which are LOADING until the rows are promoted.
    pub(crate) fn give_device_slots(&mut self, pins: &mut PlanPins, staged: StagedRows<'_>) -> FetchedRows {
        let taken_slots = self.take_device_slots(pins, &staged);
        let mut taken_slots = taken_slots.iter();
        let bytes = staged.vectors.len() as u64 * 4;
        let mut fetched = FetchedRows { vectors: staged.vectors.into_own(), ..FetchedRows::default() };
        for (row, header) in staged.rows.iter().zip(&staged.headers) {
            let from_host = pins.host[row.position as usize] != NO_SLOT;
            // The host tier has the state of its own provisional rows.
            let provisional = !from_host && row.state.has(RowState::PROVISIONAL);
            let before = self.is_provisional_on_device(pins, row.position);
            self.counts.became_provisional(u64::from(provisional));
            self.counts.vanished(u64::from(before));
            let there = if from_host { RowState::default() } else { row.state };
            let there = there.with(RowState::OCCUPIED).with(RowState::LOADING);
            let tier = self.device_mut();
            let mut slot = pins.device[row.position as usize];
            if slot == NO_SLOT {
                if let Some(&later) = taken_slots.as_slice().get(SLOTS_AHEAD) {
                    tier.prefetch_header(later);
                }
                slot = *taken_slots.next().expect("each row without a slot was given one");
                tier.slots.pin(slot);
                pins.device[row.position as usize] = slot;
            }
            tier.slots.set_state(slot, there);
            // Needed too if another plan was to load the row, because a sweep may have removed it since.
            *tier.header_mut(slot) = *header;
            fetched.slots.push(slot);
            fetched.scalars.push(header.scalar);
            pins.arriving.push(ArrivingRow { position: row.position, state: row.state.without(RowState::LOADING) });
        }
        self.traffic.device.written_bytes += bytes;
        self.traffic.host.read_bytes += bytes;
        fetched
    }

    /// Takes device slots for the staged rows without one, in the order of the rows, and adds their ids to the index.
    fn take_device_slots(&mut self, pins: &PlanPins, staged: &StagedRows<'_>) -> Vec<CacheSlot> {
        let slotless = staged.rows.iter().zip(&staged.headers);
        let slotless = slotless.filter(|(row, _)| pins.device[row.position as usize] == NO_SLOT);
        let ids: Vec<Id> = slotless.map(|(_, header)| header.id).collect();
        let tier = self.device_mut();
        let slots = tier.slots.take_with_overflow(ids.len());
        let put = tier.slots.insert_all_new(&slots, &ids, RowState::LOADING);
        assert_eq!(put, slots.len(), "the rows are new to the device");
        slots
    }

    /// Removes rows from `fetched` that another plan has loaded to the device since: they may have been trained.
    /// `buffer` is the caller's buffer for the rows.
    pub(crate) fn drop_arrived(&self, fetched: &mut FetchedRows, buffer: &mut [f32]) {
        let Some(tier) = &self.device else { return };
        let floats = self.context.floats();
        let vectors = fetched.vectors.as_deref_mut().unwrap_or(buffer);
        let mut kept = 0;
        for at in 0..fetched.slots.len() {
            if tier.slots.state(fetched.slots[at]).has(RowState::LOADING) {
                if kept < at {
                    fetched.slots[kept] = fetched.slots[at];
                    fetched.scalars[kept] = fetched.scalars[at];
                    vectors.copy_within(at * floats..(at + 1) * floats, kept * floats);
                }
                kept += 1;
            }
        }
        fetched.slots.truncate(kept);
        fetched.scalars.truncate(kept);
        if let Some(vectors) = &mut fetched.vectors {
            vectors.truncate(kept * floats);
        }
    }

    /// Stage 3: the rows were scattered, and the device has their current copies. Their host slots are freed, or kept
    /// as shadows while other plans have pinned them. Infallible.
    pub(crate) fn promote(&mut self, pins: &mut PlanPins) {
        self.traffic.count_found(std::mem::take(&mut pins.found));
        let Some(tier) = &self.device else { return };
        let mut arriving = std::mem::take(&mut pins.arriving);
        arriving.retain(|row| tier.slots.state(pins.device[row.position as usize]).has(RowState::LOADING));
        if let Some(no_writes) = self.host.no_kernel_writes() {
            let slots = arriving.iter().map(|row| pins.host[row.position as usize]).filter(|&slot| slot != NO_SLOT);
            self.keep_host_pre_images(slots.map(|slot| no_writes.read_access(slot)));
        }
        self.changes.moved.record(arriving.iter().map(|row| pins.ids[row.position as usize]));
        let host = Arc::make_mut(&mut pins.host);
        let (mut left, mut ids) = (Vec::with_capacity(arriving.len()), Vec::with_capacity(arriving.len()));
        for (at, &ArrivingRow { position, state: staged }) in arriving.iter().enumerate() {
            if let Some(later) = arriving.get(at + SLOTS_AHEAD) {
                self.host.slots.prefetch(host[later.position as usize]);
            }
            let host_slot = std::mem::replace(&mut host[position as usize], NO_SLOT);
            let row = if host_slot == NO_SLOT { staged } else { self.host.slots.state(host_slot) };
            self.device_mut().slots.set_state(pins.device[position as usize], row.with(RowState::OCCUPIED));
            if host_slot != NO_SLOT {
                if self.host.slots.unpin(host_slot) {
                    left.push(host_slot);
                    ids.push(pins.ids[position as usize]);
                } else {
                    self.host.slots.set_state(host_slot, RowState::OCCUPIED.with(RowState::SHADOW));
                }
            }
        }
        self.host.remove_batch(&left, &ids);
    }

    /// Stages the rows at `positions`: pins rows in the host tier, and reads rows on SSD, into `buffer` if it is large
    /// enough for all.
    pub(crate) fn stage<'a>(
        &mut self,
        pins: &mut PlanPins,
        positions: &[u32],
        mode: PlanMode,
        buffer: Option<&'a mut [f32]>,
    ) -> Result<StagedRows<'a>> {
        let (mut rows, reads) = self.stage_from_host(pins, positions)?;
        let from_host = rows.len();
        let mut there = vec![false; reads.len()];
        let ids: Vec<Id> = reads.iter().map(|&position| pins.ids[position as usize]).collect();
        if let Some(ssd) = &self.context.ssd {
            ssd.maybe_contains(&ids, &mut there);
        }
        for (&position, &there) in reads.iter().zip(&there) {
            // Another plan may have started to load the row to the device.
            let counted = self.is_provisional_on_device(pins, position);
            if there {
                rows.push(StagedRow { position, state: RowState::ON_SSD, counted });
            } else if mode.train || mode.reads_initial(&self.context.config) {
                rows.push(StagedRow { position, state: RowState::PROVISIONAL, counted });
            }
        }
        let vectors = StagedVectors::of(buffer, rows.len() * self.context.floats())?;
        let headers = memory::zeros("stage a batch", rows.len())?;
        let mut staged = StagedRows { rows, headers, vectors, from_host, ssd_hits: 0, ssd_misses: 0 };
        self.read_staged(pins, &mut staged)?;
        Ok(staged)
    }

    /// Pins the rows at `positions` that are in the host tier. Returns their staged rows, to be filled, and the other
    /// positions.
    fn stage_from_host(&mut self, pins: &mut PlanPins, positions: &[u32]) -> Result<(Vec<StagedRow>, Vec<u32>)> {
        let mut reads: Vec<u32> = Vec::new();
        let mut rows: Vec<StagedRow> = Vec::with_capacity(positions.len());
        let (ids, mut slots) = self.host_slots(pins, positions);
        for (at, (&position, &id)) in positions.iter().zip(&ids).enumerate() {
            if let Some(&later) = slots.get(at + SLOTS_AHEAD) {
                self.host.slots.prefetch(later);
            }
            let slot = slots[at];
            if slot == NO_SLOT {
                reads.push(position);
                continue;
            }
            if pins.host[position as usize] == NO_SLOT {
                self.pin_in_host(pins, position, slot);
            }
            if self.host.slots.state(slot).has(RowState::LOADING) {
                self.finish_loads();
                // Rows that no plan has pinned may have left.
                self.host.slots.index().get_batch(&ids[at..], &mut slots[at..]);
            }
            let row = self.host.slots.state(slot);
            if row.has(RowState::FAILED) {
                return Err(self.unread_row_error(id));
            }
            rows.push(StagedRow { position, state: row, counted: row.has(RowState::PROVISIONAL) });
        }
        Ok((rows, reads))
    }

    /// Reads the staged rows that are on SSD. Rows that turn out to be absent become provisional.
    fn read_staged(&mut self, pins: &PlanPins, staged: &mut StagedRows<'_>) -> Result<()> {
        let Some(ssd) = &self.context.ssd else { return Ok(()) };
        let (mut wanted, mut missing) = (Vec::new(), 0);
        for (index, row) in staged.rows.iter().enumerate().skip(staged.from_host) {
            if row.state.has(RowState::ON_SSD) {
                wanted.push((pins.ids[row.position as usize], index));
            } else {
                missing += 1;
            }
        }
        if !wanted.is_empty() {
            let started = Instant::now();
            let absent = self.context.read_from_ssd(ssd, &wanted, &mut staged.headers, &mut staged.vectors)?;
            for &number in &absent {
                staged.rows[wanted[number as usize].1].state = RowState::PROVISIONAL;
            }
            missing += absent.len();
            staged.ssd_hits = (wanted.len() - absent.len()) as u64;
            self.traffic.ssd_time_ns += started.elapsed().as_nanos() as u64;
        }
        staged.ssd_misses = missing as u64;
        Ok(())
    }

    /// Copies the staged rows that are in the host tier, and initializes rows that were never trained.
    pub(crate) fn fill_staged(&self, pins: &PlanPins, staged: &mut StagedRows<'_>, threads: usize) {
        let floats = self.context.floats();
        let no_writes = self.host.no_kernel_writes().expect("the rows go to a device tier, on which kernels run");
        let from_host = &staged.rows[..staged.from_host];
        for (index, row) in from_host.iter().enumerate() {
            if let Some(later) = from_host.get(index + ROWS_AHEAD) {
                self.host.prefetch_row(pins.host[later.position as usize]);
            }
            let source = self.host.row(no_writes.read_access(pins.host[row.position as usize]));
            staged.headers[index] = *source.header;
            staged.vectors[index * floats..][..floats].copy_from_slice(source.vector);
        }
        let others = staged.rows.iter().enumerate().skip(staged.from_host);
        let new_rows: Vec<(Id, usize)> = others
            .filter(|(_, row)| row.state.has(RowState::PROVISIONAL))
            .map(|(index, row)| (pins.ids[row.position as usize], index))
            .collect();
        self.context.initialize_rows_into(&new_rows, &mut staged.headers, &mut staged.vectors, threads);
    }
}

impl PlanTraffic {
    /// Counts the tiers in which the rows of a promoted plan were found.
    fn count_found(&mut self, found: FoundCounts) {
        self.device.hits += found.on_device;
        self.device.misses += found.in_host + found.elsewhere;
        self.host.hits += found.in_host;
        self.host.misses += found.elsewhere;
        self.ssd_hits += found.on_ssd;
        self.ssd_misses += found.absent;
    }
}

/// A row of a plan in transit to the device.
pub(crate) struct StagedRow {
    /// Position in the plan's distinct ids.
    pub(crate) position: u32,
    /// State of the row on the device.
    pub(crate) state: RowState,
    /// True if the table counts it as provisional already.
    pub(crate) counted: bool,
}

/// Vector parts of rows in transit to the device.
pub(crate) enum StagedVectors<'a> {
    /// Owned memory.
    Own(Vec<f32>),
    /// A buffer supplied by the caller, from which the device may copy asynchronously.
    Lent(&'a mut [f32]),
}

impl<'a> StagedVectors<'a> {
    /// Memory for this many floats: the caller's buffer if it is large enough.
    ///
    /// Errors: `Memory`.
    fn of(buffer: Option<&'a mut [f32]>, floats: usize) -> Result<Self> {
        match buffer.and_then(|buffer| buffer.get_mut(..floats)) {
            Some(buffer) => Ok(Self::Lent(buffer)),
            None => Ok(Self::Own(memory::zeros("stage a batch", floats)?)),
        }
    }

    /// Keeps only the first `floats` floats.
    fn truncate(&mut self, floats: usize) {
        match self {
            Self::Own(vectors) => vectors.truncate(floats),
            Self::Lent(buffer) => *buffer = &mut std::mem::take(buffer)[..floats],
        }
    }

    /// The owned memory; `None` if the vectors are in the caller's buffer.
    fn into_own(self) -> Option<Vec<f32>> {
        match self {
            Self::Own(vectors) => Some(vectors),
            Self::Lent(_) => None,
        }
    }
}

impl std::ops::Deref for StagedVectors<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match self {
            Self::Own(vectors) => vectors,
            Self::Lent(buffer) => buffer,
        }
    }
}

impl std::ops::DerefMut for StagedVectors<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Own(vectors) => vectors,
            Self::Lent(buffer) => buffer,
        }
    }
}

/// Copies of rows from all tiers.
pub(crate) struct StagedRows<'a> {
    /// `[M]`
    pub(crate) rows: Vec<StagedRow>,
    /// `[M]`
    pub(crate) headers: Vec<RowHeader>,
    /// `[M, V]`
    pub(crate) vectors: StagedVectors<'a>,
    /// Number of rows from the host tier. They come first.
    pub(crate) from_host: usize,
    /// Numbers of the other rows that were read from SSD and that are missing.
    pub(crate) ssd_hits: u64,
    pub(crate) ssd_misses: u64,
}

impl StagedRows<'_> {
    /// Removes the rows at these positions of the plan: bits `[U]`, or empty for none.
    pub(crate) fn leave_out(&mut self, positions: &[bool], floats: usize) {
        let (mut kept, mut from_host) = (0, 0);
        for at in 0..self.rows.len() {
            if positions.get(self.rows[at].position as usize).is_some_and(|left_out| *left_out) {
                continue;
            }
            if kept < at {
                self.rows.swap(kept, at);
                self.headers[kept] = self.headers[at];
                self.vectors.copy_within(at * floats..(at + 1) * floats, kept * floats);
            }
            kept += 1;
            from_host += usize::from(at < self.from_host);
        }
        self.from_host = from_host;
        self.rows.truncate(kept);
        self.headers.truncate(kept);
        self.vectors.truncate(kept * floats);
    }
}
