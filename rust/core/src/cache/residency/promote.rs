//! Rows reach the device tier, in three stages.
//!
//! 1. A plan pins what is on the device and in the host tier, and what is on SSD is read ahead into the host tier.
//! 2. Victims are chosen, and read without the table's lock. Then they are demoted, the plan's rows get slots on the device, and they are copied
//!    into a buffer that Python scatters. Until Python says that it did, a row's device slot is LOADING and its newest copy is where it was:
//!    whoever looks for the row finds it there.
//! 3. The copies on the device become the newest ones. This cannot fail.
//!
//! In the second and the third stage the plan has `rows_in_use` for writing, so that nobody reads rows of the device while others arrive there.

use std::sync::Arc;
use std::time::Instant;

use super::hold::{Arriving, FetchedRows, Found, Hold, PlanMode};
use super::stage::{Staged, StagedRow};
use super::{Residency, SLOTS_AHEAD, Traffic};
use crate::error::Result;
use crate::memory;
use crate::slots::RowState;
use crate::ssd::FetchBatch;
use crate::types::{CacheSlot, Id, NO_SLOT};

impl Residency {
    /// The first stage of a plan for a table with a device tier.
    pub(super) fn begin_on_device(&mut self, hold: &mut Hold, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        hold.device = vec![NO_SLOT; hold.ids.len()];
        let all: Vec<u32> = (0..hold.ids.len() as u32).collect();
        let missing = self.pin_on_device(hold, &all);
        let mut reads: Vec<(u32, Id)> = Vec::new();
        let mut waits = false;
        let (ids, slots) = self.host_slots(hold, &missing);
        for (at, (&position, (&id, &slot))) in missing.iter().zip(ids.iter().zip(&slots)).enumerate() {
            if let Some(&later) = slots.get(at + SLOTS_AHEAD) {
                self.host.slots.prefetch(later);
            }
            if slot == NO_SLOT {
                reads.push((position, id));
                continue;
            }
            waits |= self.host.slots.state(slot).has(RowState::LOADING);
            self.pin_in_host(hold, position, slot);
        }
        if waits {
            self.wait_for_all_loads(hold);
        }
        let Some(ssd) = &self.base.ssd else { return Ok(()) };
        let ids: Vec<Id> = reads.iter().map(|&(_, id)| id).collect();
        let mut there = vec![false; ids.len()];
        ssd.maybe_contains(&ids, &mut there);
        let mut there = there.into_iter();
        reads.retain(|_| there.next().unwrap_or(false));
        if reads.is_empty() || !mode.ahead {
            return Ok(());
        }
        self.read_ahead(hold, reads, mode, batch)
    }

    /// Read rows from SSD into the host tier, as far as its budget goes.
    fn read_ahead(
        &mut self,
        hold: &mut Hold,
        reads: Vec<(u32, Id)>,
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        if let Err(error) = self.make_room(reads.len() as u32)
            && mode.train
        {
            return Err(error);
        }
        // This comes before anything changes, because what is begun below is carried through.
        self.host.reserve(reads.len().min(self.host.slots.free_slots() as usize))?;
        let mut rows = Vec::new();
        for (position, id) in reads {
            let Some(taken) = self.host.take(false)? else {
                hold.unplaced.push(position);
                continue;
            };
            let slot = self.host.insert_loading(&taken, id);
            self.pin_in_host(hold, position, slot);
            rows.push((id, slot));
        }
        if !rows.is_empty() {
            let load = self.start_load(rows, batch);
            hold.loads.push(load);
        }
        Ok(())
    }

    pub(super) fn pin_in_host(&mut self, hold: &mut Hold, position: u32, slot: CacheSlot) {
        self.host.slots.pin(slot);
        Arc::make_mut(&mut hold.host)[position as usize] = slot;
    }

    /// The ids at `positions` of a plan, and the host slot of each, `NO_SLOT` where it has none.
    pub(super) fn host_slots(&self, hold: &Hold, positions: &[u32]) -> (Vec<Id>, Vec<CacheSlot>) {
        let ids: Vec<Id> = positions.iter().map(|&position| hold.ids[position as usize]).collect();
        let mut slots = vec![NO_SLOT; ids.len()];
        self.host.slots.index().get_batch(&ids, &mut slots);
        (ids, slots)
    }

    /// Pin those of `positions` that have slots on the device. Returns the others.
    fn pin_on_device(&mut self, hold: &mut Hold, positions: &[u32]) -> Vec<u32> {
        let tier = self.device_mut();
        let ids: Vec<Id> = positions.iter().map(|&position| hold.ids[position as usize]).collect();
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
                tier.let_stay(slot);
                tier.slots.pin(slot);
                hold.device[position as usize] = slot;
                accessed.push(slot);
            }
        }
        tier.slots.accessed(&accessed);
        missing
    }

    /// The second stage begins, of a plan that is [settled](Residency::settle): make room for its rows, before any of them is read. Victims are to
    /// be read from the device first, and then this is called again.
    pub(crate) fn make_room_on_device(&mut self, hold: &mut Hold, mode: PlanMode) -> Result<()> {
        let homeless = hold.homeless.take().unwrap_or_else(|| self.homeless_on_device(hold));
        let made = self.make_device_room_for(hold, &homeless, mode);
        // Nothing arrives on the device until this plan is placed.
        hold.homeless = Some(homeless);
        made
    }

    /// Pin what has a slot on the device. Returns the positions of the others.
    fn homeless_on_device(&mut self, hold: &mut Hold) -> Vec<u32> {
        let all = 0..hold.ids.len() as u32;
        let absent: Vec<u32> = all.filter(|&position| hold.device[position as usize] == NO_SLOT).collect();
        self.pin_on_device(hold, &absent)
    }

    /// The second stage: give every row of the plan a slot on the device, and return what is to be scattered into the device tensors. On an
    /// error no row of the plan has moved. Where rows are to be read from the device first, this is called again. The vector parts go to
    /// `lent`, if that is enough for them.
    pub(crate) fn place_on_device(
        &mut self,
        hold: &mut Hold,
        mode: PlanMode,
        lent: Option<&mut [f32]>,
    ) -> Result<FetchedRows> {
        let started = Instant::now();
        let homeless = hold.homeless.take().unwrap_or_else(|| self.homeless_on_device(hold));
        let missing = [homeless, self.awaited(hold)].concat();
        let staged = self.stage(hold, &missing, mode, lent)?;
        let staged = self.refuse_on_device(hold, staged, mode)?;
        let refused = hold.refused_bits();
        let is_refused = |position: u32| refused.get(position as usize).copied().unwrap_or(false);
        let is_birth =
            |row: &&StagedRow| row.state.has(RowState::PROVISIONAL) && !row.counted && !is_refused(row.position);
        let births = staged.rows.iter().filter(is_birth).count() as u64;
        if mode.train {
            let in_host = |row: &&StagedRow| {
                row.counted && hold.host[row.position as usize] != NO_SLOT && !is_refused(row.position)
            };
            let on_device = self.unborn_on_device(hold).into_iter().filter(|&position| !is_refused(position)).count();
            let unborn = (staged.rows.iter().filter(in_host).count() + on_device) as u64;
            self.counts.take_back_pledge(std::mem::take(&mut hold.pledged));
            self.pledge(hold, unborn);
            self.check_capacity(births, &hold.ids)?;
        }
        let homeless = staged.rows.iter().filter(|row| hold.device[row.position as usize] == NO_SLOT).count();
        self.make_device_room_if_possible(homeless as u32, mode)?;
        self.device_mut().reserve(homeless)?;
        memory::reserve(&mut hold.arriving, "place a batch", staged.rows.len())?;
        // Nothing can fail from here on. Rows that an `ahead` plan has left for later are staged, too.
        hold.unplaced.clear();
        hold.found = Found {
            on_device: (hold.ids.len() - missing.len()) as u64,
            in_host: staged.from_host as u64,
            elsewhere: (missing.len() - staged.from_host) as u64,
            on_ssd: staged.ssd_hits,
            nowhere: staged.ssd_misses,
        };
        let fetched = self.give_device_slots(hold, staged);
        if mode.train {
            self.pledge(hold, births);
        }
        self.traffic.device.time_ns += started.elapsed().as_nanos() as u64;
        Ok(fetched)
    }

    /// Make room on the device for about as many rows as are to come there of those at `homeless`.
    fn make_device_room_for(&mut self, hold: &Hold, homeless: &[u32], mode: PlanMode) -> Result<()> {
        let all_come = mode.reads_births(&self.base.config) || mode.train && !self.base.config.admission.refuses();
        if all_come || self.device_mut().slots.free_slots() as usize >= homeless.len() {
            return self.make_device_room_if_possible(homeless.len() as u32, mode);
        }
        let (absent, births) = self.new_rows_among(hold, homeless, mode.train);
        self.make_device_room_if_possible((homeless.len() - absent + births) as u32, mode)
    }

    /// Returns how many of the ids at `homeless`, which have no slot where kernels run, have no row, and how many of these get one as far as is
    /// known. An evaluation adds none.
    pub(super) fn new_rows_among(&self, hold: &Hold, homeless: &[u32], train: bool) -> (usize, usize) {
        let (ids, slots) = self.host_slots(hold, homeless);
        let elsewhere = homeless.iter().zip(&ids).zip(&slots).filter(|(_, slot)| **slot == NO_SLOT);
        let (elsewhere, ids): (Vec<u32>, Vec<Id>) = elsewhere.map(|((&position, &id), _)| (position, id)).unzip();
        let mut there = vec![false; elsewhere.len()];
        if let Some(ssd) = &self.base.ssd {
            ssd.maybe_contains(&ids, &mut there);
        }
        let absent = elsewhere.iter().zip(&there).filter(|(_, there)| !**there).map(|(&position, _)| position);
        let absent = absent.collect::<Vec<u32>>();
        if !train || !self.base.config.admission.refuses() {
            return (absent.len(), if train { absent.len() } else { 0 });
        }
        let births = self.admits(hold, absent.iter().copied()).1.into_iter().filter(|admitted| *admitted).count();
        (absent.len(), births)
    }

    /// As [`Residency::make_device_room`]. An evaluation reads on after a failed write, in the overflow.
    fn make_device_room_if_possible(&mut self, wanted: u32, mode: PlanMode) -> Result<()> {
        match self.make_device_room(wanted) {
            Err(error) if mode.train || self.owes_copies() => Err(error),
            _ => Ok(()),
        }
    }

    /// About how many rows are to be brought to the device, for a plan that has begun: mostly no more than this. Ids that will get no row count
    /// too.
    pub(crate) fn most_arriving(&self, hold: &Hold) -> usize {
        let Some(tier) = &self.device else { return 0 };
        let others_come = !tier.slots.all_settled();
        let comes = |slot: CacheSlot| others_come && tier.slots.state(slot).has(RowState::LOADING);
        let arrives = |slot: CacheSlot| slot == NO_SLOT || comes(slot);
        hold.device.iter().filter(|&&slot| arrives(slot)).count()
    }

    /// Positions of rows that have a slot on the device from another plan and are not there yet. That plan may never bring them, so this
    /// one does.
    fn awaited(&mut self, hold: &Hold) -> Vec<u32> {
        let slots = &self.device_mut().slots;
        if slots.all_settled() {
            return Vec::new();
        }
        let is_awaited = |slot: CacheSlot| slot != NO_SLOT && slots.state(slot).has(RowState::LOADING);
        (0..hold.ids.len() as u32).filter(|&position| is_awaited(hold.device[position as usize])).collect()
    }

    /// Decide for good which of a training plan's ids get no row, and leave them out of what is staged where they read something else
    /// than a row. Then fill in what was not read.
    fn refuse_on_device<'a>(&mut self, hold: &mut Hold, mut staged: Staged<'a>, mode: PlanMode) -> Result<Staged<'a>> {
        if mode.train && self.base.config.admission.refuses() {
            let unborn = staged.rows.iter().filter(|row| row.state.has(RowState::PROVISIONAL));
            let mut unborn: Vec<u32> = unborn.map(|row| row.position).collect();
            // Those that are on their way there are staged too.
            let there = self.unborn_on_device(hold);
            let slots = &self.device_mut().slots;
            let has_arrived = |position: u32| !slots.state(hold.device[position as usize]).has(RowState::LOADING);
            unborn.extend(there.into_iter().filter(|&position| has_arrived(position)));
            self.refuse(hold, &unborn)?;
            if !mode.reads_births(&self.base.config) {
                staged.leave_out(&hold.refused_bits(), self.base.floats());
            }
        }
        self.fill_staged(hold, &mut staged, mode.threads);
        Ok(staged)
    }

    /// The positions of the plan's rows that are on the device, or on their way there, and are not born yet.
    fn unborn_on_device(&mut self, hold: &Hold) -> Vec<u32> {
        if self.device_mut().slots.all_settled() {
            return Vec::new();
        }
        (0..hold.ids.len() as u32).filter(|&position| self.is_unborn_on_device(hold, position)).collect()
    }

    pub(super) fn is_unborn_on_device(&mut self, hold: &Hold, position: u32) -> bool {
        Self::is_unborn(&self.device_mut().slots, hold.device[position as usize])
    }

    /// Give the staged rows device slots, which are LOADING until the rows are promoted.
    fn give_device_slots(&mut self, hold: &mut Hold, staged: Staged<'_>) -> FetchedRows {
        let homes = self.take_homes(hold, &staged);
        let mut homes = homes.iter();
        let bytes = staged.vectors.len() as u64 * 4;
        let mut fetched = FetchedRows { vectors: staged.vectors.into_own(), ..FetchedRows::default() };
        for (row, header) in staged.rows.iter().zip(&staged.headers) {
            let from_host = hold.host[row.position as usize] != NO_SLOT;
            // The host tier says itself which of its rows are not born yet.
            let unborn = !from_host && row.state.has(RowState::PROVISIONAL);
            let before = self.is_unborn_on_device(hold, row.position);
            self.counts.became_provisional(u64::from(unborn));
            self.counts.vanished(u64::from(before));
            let there = if from_host { RowState::default() } else { row.state };
            let there = there.with(RowState::OCCUPIED).with(RowState::LOADING);
            let tier = self.device_mut();
            let mut slot = hold.device[row.position as usize];
            if slot == NO_SLOT {
                if let Some(&later) = homes.as_slice().get(SLOTS_AHEAD) {
                    tier.prefetch_header(later);
                }
                slot = *homes.next().expect("each row without a slot was given one");
                tier.slots.pin(slot);
                hold.device[row.position as usize] = slot;
            }
            tier.slots.set_state(slot, there);
            // Also where another plan was to bring the row, which a sweep may have taken since.
            *tier.header_mut(slot) = *header;
            fetched.slots.push(slot);
            fetched.scalars.push(header.scalar);
            hold.arriving.push(Arriving { position: row.position, state: row.state.without(RowState::LOADING) });
        }
        self.traffic.device.written_bytes += bytes;
        self.traffic.host.read_bytes += bytes;
        fetched
    }

    /// Take slots on the device for the staged rows that have none, where ids find them from now on. They are in the order of the rows.
    fn take_homes(&mut self, hold: &Hold, staged: &Staged<'_>) -> Vec<CacheSlot> {
        let homeless = staged.rows.iter().zip(&staged.headers);
        let homeless = homeless.filter(|(row, _)| hold.device[row.position as usize] == NO_SLOT);
        let ids: Vec<Id> = homeless.map(|(_, header)| header.id).collect();
        let tier = self.device_mut();
        let slots = tier.slots.take_with_overflow(ids.len());
        let put = tier.slots.insert_all_new(&slots, &ids, RowState::LOADING);
        assert_eq!(put, slots.len(), "the rows are new to the device");
        slots
    }

    /// Leave those rows out of what is to be scattered that another plan has brought to the device meanwhile: they may have been trained
    /// since. `lent` is the memory that was lent for the rows.
    pub(crate) fn drop_arrived(&self, fetched: &mut FetchedRows, lent: &mut [f32]) {
        let Some(tier) = &self.device else { return };
        let floats = self.base.floats();
        let vectors = fetched.vectors.as_deref_mut().unwrap_or(lent);
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

    /// The third stage: the rows were scattered, and from now on their newest copies are on the device. Their host slots are freed, or kept
    /// as shadows while other plans have pinned them. This cannot fail.
    pub(crate) fn promote(&mut self, hold: &mut Hold) {
        self.traffic.found_for_device(std::mem::take(&mut hold.found));
        let Some(tier) = &self.device else { return };
        let mut arriving = std::mem::take(&mut hold.arriving);
        arriving.retain(|row| tier.slots.state(hold.device[row.position as usize]).has(RowState::LOADING));
        if let Some(no_writes) = self.host.no_kernel_writes() {
            let slots = arriving.iter().map(|row| hold.host[row.position as usize]).filter(|&slot| slot != NO_SLOT);
            self.keep_host(slots.map(|slot| no_writes.slot(slot)));
        }
        self.moved(arriving.iter().map(|row| hold.ids[row.position as usize]));
        let host = Arc::make_mut(&mut hold.host);
        let (mut left, mut ids) = (Vec::with_capacity(arriving.len()), Vec::with_capacity(arriving.len()));
        for (at, &Arriving { position, state: staged }) in arriving.iter().enumerate() {
            if let Some(later) = arriving.get(at + SLOTS_AHEAD) {
                self.host.slots.prefetch(host[later.position as usize]);
            }
            let host_slot = std::mem::replace(&mut host[position as usize], NO_SLOT);
            let row = if host_slot == NO_SLOT { staged } else { self.host.slots.state(host_slot) };
            self.device_mut().slots.set_state(hold.device[position as usize], row.with(RowState::OCCUPIED));
            if host_slot != NO_SLOT {
                if self.host.slots.unpin(host_slot) {
                    left.push(host_slot);
                    ids.push(hold.ids[position as usize]);
                } else {
                    self.host.slots.set_state(host_slot, RowState::OCCUPIED.with(RowState::SHADOW));
                }
            }
        }
        self.host.remove_batch(&left, &ids);
    }
}

impl Traffic {
    /// Count where the rows of a plan were found, now that they are on the device.
    fn found_for_device(&mut self, found: Found) {
        self.device.hits += found.on_device;
        self.device.misses += found.in_host + found.elsewhere;
        self.host.hits += found.in_host;
        self.host.misses += found.elsewhere;
        self.ssd_hits += found.on_ssd;
        self.ssd_misses += found.nowhere;
    }
}
