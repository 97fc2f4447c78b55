//! Bringing a batch's rows into the device tier. Stage one pins and reads ahead into the host tier; stage two, under the table's lock,
//! moves victims down, gives the batch's rows slots on the device and copies them into a staging buffer that Python scatters. Only when
//! Python says that it did, stage three makes the device's copies the newest, which cannot fail. Until then a row's device slot is
//! LOADING, its newest copy is where it was, and whoever looks for the row finds it there.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::place::{PlanMode, TablePlan};
use super::table::{Shared, State};
use crate::device::DeviceTier;
use crate::error::Result;
use crate::memory;
use crate::rows::{RowAddress, RowHeader, RowMut, RowRef};
use crate::slots::{RowState, SlotMap};
use crate::ssd::{FetchBatch, SsdTier};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Rows read from the device in one call at most.
pub(crate) const ROWS_PER_GATHER: usize = 4096;

/// Rows to scatter into the device tensors before the forward.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fetched {
    /// Device slots: `[M]`.
    pub(crate) slots: Vec<CacheSlot>,
    /// Vector parts: `[M, V]`.
    pub(crate) vectors: Vec<f32>,
    /// Scalar slots: `[M]`, zeros where the layout has none.
    pub(crate) scalars: Vec<f32>,
}

/// A row that has a slot on the device and is not there yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arriving {
    /// Its position in the plan's distinct ids.
    position: u32,
    /// Its state once it is there, unless it comes from a host slot, which has its state.
    state: RowState,
}

/// Rows read from the device: headers (scalar slot included) and vector parts.
pub(crate) struct Gathered {
    pub(crate) headers: Vec<RowHeader>,
    pub(crate) vectors: Vec<f32>,
}

impl Gathered {
    pub(crate) fn row(&self, position: usize, floats: usize) -> RowRef<'_> {
        RowRef { header: &self.headers[position], vector: &self.vectors[position * floats..][..floats] }
    }
}

fn device(state: &mut State) -> &mut DeviceTier {
    state.device.as_mut().expect("called only for tables with a device tier")
}

impl TablePlan {
    /// Stage one.
    pub(crate) fn start_device(&mut self, state: &mut State, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        self.device = vec![NO_SLOT; self.unique.len()];
        let all: Vec<u32> = (0..self.unique.len() as u32).collect();
        let missing = self.pin_device(state, &all);
        // What is in the host tier is pinned there; what is on SSD is read into it as far as the budget goes.
        let mut reads: Vec<(u32, Id)> = Vec::new();
        let mut waits = false;
        for position in missing {
            let id = self.unique[position as usize];
            let slot = state.host.slots.get(id);
            if slot == NO_SLOT {
                reads.push((position, id));
                continue;
            }
            waits |= state.host.slots.state(slot).has(RowState::LOADING);
            state.host.slots.pin(slot);
            Arc::make_mut(&mut self.host)[position as usize] = slot;
        }
        if waits {
            self.wait_for_all(state);
        }
        let Some(ssd) = &shared.ssd else { return Ok(()) };
        let ids: Vec<Id> = reads.iter().map(|&(_, id)| id).collect();
        let mut there = vec![false; ids.len()];
        ssd.maybe_contains(&ids, &mut there);
        let mut there = there.into_iter();
        reads.retain(|_| there.next().unwrap_or(false));
        if reads.is_empty() || !mode.ahead {
            return Ok(());
        }
        if let Err(error) = shared.make_room(state, reads.len() as u32)
            && mode.train
        {
            return Err(error);
        }
        // Before anything changes: what is begun below is carried through.
        state.host.reserve(reads.len().min(state.host.slots.free_slots() as usize))?;
        let mut rows = Vec::new();
        for (position, id) in reads {
            let Some(slot) = state.host.take(false)? else {
                self.unplaced.push(position);
                continue;
            };
            state.host.header_mut(slot).id = id;
            state.host.slots.insert(slot, id, RowState::LOADING.with(RowState::ON_SSD));
            state.host.slots.pin(slot);
            Arc::make_mut(&mut self.host)[position as usize] = slot;
            rows.push((id, slot));
        }
        if !rows.is_empty() {
            let load = shared.start_load(state, rows, batch);
            self.loads.push(load);
        }
        Ok(())
    }

    /// Pin those of `positions` that are on the device; the others are returned.
    fn pin_device(&mut self, state: &mut State, positions: &[u32]) -> Vec<u32> {
        let tier = device(state);
        let ids: Vec<Id> = positions.iter().map(|&p| self.unique[p as usize]).collect();
        let mut slots = vec![NO_SLOT; ids.len()];
        tier.slots.get_batch(&ids, &mut slots);
        let mut missing = Vec::new();
        let mut accessed = Vec::new();
        for (&position, &slot) in positions.iter().zip(&slots) {
            if slot == NO_SLOT {
                missing.push(position);
            } else {
                tier.slots.pin(slot);
                self.device[position as usize] = slot;
                accessed.push(slot);
            }
        }
        tier.slots.accessed(&accessed);
        missing
    }

    /// Stage two. On an error nothing has moved.
    pub(crate) fn place_device(&mut self, state: &mut State, mode: PlanMode) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let started = Instant::now();
        let absent: Vec<u32> = (0..self.unique.len() as u32).filter(|&p| self.device[p as usize] == NO_SLOT).collect();
        let homeless = self.pin_device(state, &absent);
        let missing = [homeless, self.awaited(state)].concat();
        state.device_stats.hits += (self.unique.len() - missing.len()) as u64;
        state.device_stats.misses += missing.len() as u64;

        let staged = self.stage(state, &missing, mode)?;
        let births =
            staged.rows.iter().filter(|row| row.state.has(RowState::PROVISIONAL) && !row.counted).count() as u64;
        if mode.train {
            let in_host = |row: &&StagedRow| row.counted && self.host[row.position as usize] != NO_SLOT;
            let unborn = staged.rows.iter().filter(in_host).count() as u64 + self.unborn_on_device(state);
            self.pledge(state, unborn);
            shared.check_capacity(state, births, &self.unique)?;
        }
        let homeless = staged.rows.iter().filter(|row| self.device[row.position as usize] == NO_SLOT).count();
        if let Err(error) = shared.make_device_room(state, homeless as u32)
            && mode.train
        {
            // An evaluation reads on after a failed write, in the overflow.
            return Err(error);
        }
        device(state).reserve(homeless)?;
        memory::reserve(&mut self.arriving, "place a batch", staged.rows.len())?;
        self.place_staged(state, staged);
        if mode.train {
            self.pledge(state, births);
        }

        self.index.slots.clone_from(&self.device);
        if mode.unseen_zeros && !mode.train {
            for (slot, &host) in self.index.slots.iter_mut().zip(&*self.host) {
                let unborn = |slots: &SlotMap, slot| slot != NO_SLOT && slots.state(slot).has(RowState::PROVISIONAL);
                if unborn(&device(state).slots, *slot) || unborn(&state.host.slots, host) {
                    *slot = NO_SLOT;
                }
            }
        }
        state.device_stats.time_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Positions of rows that have a slot on the device, from another plan, and are not there yet. That plan may never bring them, so
    /// this one does.
    fn awaited(&self, state: &mut State) -> Vec<u32> {
        let slots = &device(state).slots;
        if slots.all_settled() {
            return Vec::new();
        }
        let is_awaited = |slot: CacheSlot| slot != NO_SLOT && slots.state(slot).has(RowState::LOADING);
        (0..self.unique.len() as u32).filter(|&position| is_awaited(self.device[position as usize])).collect()
    }

    /// Copy the rows at `positions` from wherever they are into a staging buffer.
    fn stage(&mut self, state: &mut State, positions: &[u32], mode: PlanMode) -> Result<Staged> {
        let shared = Arc::clone(&self.shared);
        let floats = shared.layout.vector_floats();
        let mut reads: Vec<u32> = Vec::new();
        let mut rows: Vec<StagedRow> = Vec::with_capacity(positions.len());
        for &position in positions {
            let id = self.unique[position as usize];
            let slot = state.host.slots.get(id);
            if slot != NO_SLOT && self.host[position as usize] == NO_SLOT {
                state.host.slots.pin(slot);
                Arc::make_mut(&mut self.host)[position as usize] = slot;
            }
            if slot == NO_SLOT {
                reads.push(position);
            } else {
                if state.host.slots.state(slot).has(RowState::LOADING) {
                    shared.finish_loads(state);
                }
                let row = state.host.slots.state(slot);
                if row.has(RowState::FAILED) {
                    return Err(shared.unread_row(id));
                }
                rows.push(StagedRow { position, state: row, counted: row.has(RowState::PROVISIONAL) });
            }
        }
        let from_host = rows.len();
        let mut there = vec![false; reads.len()];
        let ids: Vec<Id> = reads.iter().map(|&p| self.unique[p as usize]).collect();
        if let Some(ssd) = &shared.ssd {
            ssd.maybe_contains(&ids, &mut there);
        }
        for (&position, &there) in reads.iter().zip(&there) {
            // Another plan may have begun to bring the row there.
            let counted = self.is_unborn_on_device(state, position);
            if there {
                rows.push(StagedRow { position, state: RowState::ON_SSD, counted });
            } else if mode.train || !mode.unseen_zeros {
                rows.push(StagedRow { position, state: RowState::PROVISIONAL, counted });
            }
        }
        let mut vectors = memory::zeros("stage a batch", rows.len() * floats)?;
        let mut headers = memory::zeros("stage a batch", rows.len())?;
        self.read_staged(state, &mut rows, from_host, &mut headers, &mut vectors)?;
        state.host_stats.hits += from_host as u64;
        state.host_stats.misses += (positions.len() - from_host) as u64;
        let mut born = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let id = self.unique[row.position as usize];
            let vector = &mut vectors[index * floats..][..floats];
            if index < from_host {
                let source = state.host.row(self.host[row.position as usize]);
                headers[index] = *source.header;
                vector.copy_from_slice(source.vector);
            } else if row.state.has(RowState::PROVISIONAL) {
                let to = RowAddress { header: &raw mut headers[index], vector: vector.as_mut_ptr() };
                // SAFETY: it is a row of the buffers above, which are not touched before it is born.
                born.push((id, unsafe { RowMut::new(to) }));
            }
        }
        // SAFETY: the places are rows of the buffers above, which are not touched meanwhile.
        unsafe { shared.bear_at(born.len(), |row| (born[row].0, born[row].1.address()), mode.threads) };
        Ok(Staged { rows, headers, vectors })
    }

    /// Read the staged rows that are on SSD; those that turn out not to be there become provisional.
    fn read_staged(
        &self,
        state: &mut State,
        rows: &mut [StagedRow],
        from: usize,
        headers: &mut [RowHeader],
        vectors: &mut [f32],
    ) -> Result<()> {
        let Some(ssd) = &self.shared.ssd else { return Ok(()) };
        let floats = self.shared.layout.vector_floats();
        let mut wanted = Vec::new();
        let mut targets = Vec::new();
        for (index, row) in rows.iter().enumerate().skip(from) {
            if row.state.has(RowState::ON_SSD) {
                let target = RowAddress {
                    header: &raw mut headers[index],
                    vector: vectors[index * floats..][..floats].as_mut_ptr(),
                };
                // SAFETY: it is a row of buffers that are not touched before the fetch below is done.
                let target = unsafe { RowMut::new(target) };
                wanted.push((self.unique[row.position as usize], target));
                targets.push(index);
            } else {
                state.ssd_misses += 1;
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        state.ssd_hits += wanted.len() as u64;
        let absent = ssd.fetch(wanted).wait()?;
        for position in absent {
            rows[targets[position as usize]].state = RowState::PROVISIONAL;
            state.ssd_hits -= 1;
            state.ssd_misses += 1;
        }
        state.ssd_time_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// How many of this plan's rows are on the device, or on their way, and not born yet.
    fn unborn_on_device(&self, state: &mut State) -> u64 {
        if device(state).slots.all_settled() {
            return 0;
        }
        (0..self.unique.len() as u32).filter(|&position| self.is_unborn_on_device(state, position)).count() as u64
    }

    fn is_unborn_on_device(&self, state: &mut State, position: u32) -> bool {
        let slot = self.device[position as usize];
        slot != NO_SLOT && device(state).slots.state(slot).has(RowState::PROVISIONAL)
    }

    /// Give the staged rows device slots, to be filled.
    fn place_staged(&mut self, state: &mut State, staged: Staged) {
        let mut fetched = Fetched { vectors: staged.vectors, ..Fetched::default() };
        for (row, header) in staged.rows.iter().zip(&staged.headers) {
            let from_host = self.host[row.position as usize] != NO_SLOT;
            // The host tier says itself which of its rows are not born yet.
            let unborn = !from_host && row.state.has(RowState::PROVISIONAL);
            let before = self.is_unborn_on_device(state, row.position);
            state.provisional = state.provisional + u64::from(unborn) - u64::from(before);
            let there = if from_host { RowState::default() } else { row.state };
            let there = there.with(RowState::OCCUPIED).with(RowState::LOADING);
            let tier = device(state);
            let mut slot = self.device[row.position as usize];
            if slot == NO_SLOT {
                slot = tier.slots.take().unwrap_or_else(|| tier.slots.take_overflow());
                *tier.header_mut(slot) = *header;
                tier.slots.insert(slot, header.id, there);
                tier.slots.pin(slot);
                self.device[row.position as usize] = slot;
            } else {
                tier.slots.set_state(slot, there);
            }
            fetched.slots.push(slot);
            fetched.scalars.push(header.scalar);
            self.arriving.push(Arriving { position: row.position, state: row.state.without(RowState::LOADING) });
        }
        state.device_stats.written_bytes += fetched.vectors.len() as u64 * 4;
        state.host_stats.read_bytes += fetched.vectors.len() as u64 * 4;
        self.fetched = fetched;
    }

    /// What is to be scattered: handed out once. Rows that another plan brought to the device meanwhile are left out: they may have been
    /// trained since.
    pub(crate) fn take_fetched(&mut self) -> Result<Fetched> {
        let mut fetched = std::mem::take(&mut self.fetched);
        let floats = self.shared.layout.vector_floats();
        let mut state = self.shared.lock_any()?;
        let Some(tier) = &mut state.device else { return Ok(fetched) };
        let mut kept = 0;
        for at in 0..fetched.slots.len() {
            if tier.slots.state(fetched.slots[at]).has(RowState::LOADING) {
                if kept < at {
                    fetched.slots[kept] = fetched.slots[at];
                    fetched.scalars[kept] = fetched.scalars[at];
                    fetched.vectors.copy_within(at * floats..(at + 1) * floats, kept * floats);
                }
                kept += 1;
            }
        }
        fetched.slots.truncate(kept);
        fetched.scalars.truncate(kept);
        fetched.vectors.truncate(kept * floats);
        Ok(fetched)
    }

    /// Stage three: the rows were scattered, and from now on their newest copies are on the device. Their host slots are freed, or kept as
    /// shadows while other plans hold them.
    pub(crate) fn take_over(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock_any()?;
        let state = &mut *state;
        if state.device.is_none() {
            return Ok(());
        }
        let mut arriving = std::mem::take(&mut self.arriving);
        let slots = &device(state).slots;
        arriving.retain(|row| slots.state(self.device[row.position as usize]).has(RowState::LOADING));
        let leaving: Vec<CacheSlot> =
            arriving.iter().map(|row| self.host[row.position as usize]).filter(|&slot| slot != NO_SLOT).collect();
        state.keep_host(&leaving);
        let host = Arc::make_mut(&mut self.host);
        for Arriving { position, state: staged } in arriving {
            let host_slot = std::mem::replace(&mut host[position as usize], NO_SLOT);
            let row = if host_slot == NO_SLOT { staged } else { state.host.slots.state(host_slot) };
            let slot = self.device[position as usize];
            device(state).slots.set_state(slot, row.with(RowState::OCCUPIED));
            if host_slot != NO_SLOT {
                if state.host.slots.unpin(host_slot) {
                    state.host.remove(host_slot, false);
                } else {
                    state.host.slots.set_state(host_slot, RowState::OCCUPIED.with(RowState::SHADOW));
                }
            }
        }
        Ok(())
    }
}

struct StagedRow {
    position: u32,
    state: RowState,
    /// Whether the table already counts it as provisional.
    counted: bool,
}

struct Staged {
    rows: Vec<StagedRow>,
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl Shared {
    /// Read device rows into RAM, by code that is not the core's and runs under the table's lock.
    pub(crate) fn gather_device(&self, state: &mut State, slots: &[CacheSlot]) -> Result<Gathered> {
        let floats = self.layout.vector_floats();
        let mut vectors = memory::zeros("read rows from the device", slots.len() * floats)?;
        let mut scalars = memory::zeros("read rows from the device", slots.len())?;
        let reader = self.device_rows.as_ref().expect("a device tier comes with a way to read it");
        let foreign = self.reading_device.begin();
        reader.gather(slots, &mut vectors, &mut scalars)?;
        drop(foreign);
        let tier = device(state);
        let headers =
            slots.iter().zip(&scalars).map(|(&slot, &scalar)| RowHeader { scalar, ..*tier.header(slot) }).collect();
        state.device_stats.read_bytes += vectors.len() as u64 * 4;
        Ok(Gathered { headers, vectors })
    }

    /// Evict device rows until `wanted` slots are free, idle overflow rows first. On an error nothing has changed.
    pub(crate) fn make_device_room(&self, state: &mut State, wanted: u32) -> Result<()> {
        let tier = device(state);
        let capacity = tier.slots.capacity();
        let mut idle: Vec<CacheSlot> =
            tier.slots.occupied_from(capacity).filter(|&slot| tier.slots.state(slot).is_current()).collect();
        idle.retain(|&slot| !tier.slots.is_pinned(slot));
        for &slot in &idle {
            // Out of the policy's lists like every victim.
            let id = tier.id(slot);
            tier.slots.unlist(slot, id);
        }
        let mut victims = idle;
        let missing = wanted.saturating_sub(tier.slots.free_slots()) as usize;
        let in_budget = victims.len();
        while victims.len() - in_budget < missing {
            let Some(slot) = tier.victim() else { break };
            victims.push(slot);
        }
        if victims.is_empty() {
            return Ok(());
        }
        let moved = self.gather_device(state, &victims).and_then(|rows| {
            state.keep_gathered(&victims, &rows, self.layout.vector_floats());
            self.demote(state, &victims, &rows)
        });
        let tier = device(state);
        for &slot in &victims {
            let id = tier.id(slot);
            if moved.is_ok() {
                tier.slots.evict(slot, id);
            } else {
                tier.slots.spare(slot, id);
            }
        }
        moved?;
        state.device_stats.evictions += victims.len() as u64;
        Ok(())
    }

    /// Put rows that leave the device into the host tier, or past it where all of it is in use. On an error nothing has changed.
    fn demote(&self, state: &mut State, slots: &[CacheSlot], rows: &Gathered) -> Result<()> {
        let floats = self.layout.vector_floats();
        let mut shadowed = Vec::new();
        let mut moving = Vec::new();
        for (position, &slot) in slots.iter().enumerate() {
            let tier = device(state);
            let (id, row) = (tier.id(slot), tier.slots.state(slot));
            let shadow = state.host.slots.get(id);
            if shadow == NO_SLOT {
                moving.push((position, row));
            } else {
                shadowed.push((position, row, shadow));
            }
        }
        self.make_room(state, moving.len() as u32)?;
        let fit =
            if self.ssd.is_some() { (state.host.slots.free_slots() as usize).min(moving.len()) } else { moving.len() };
        state.host.reserve(fit)?;
        if let Some(ssd) = &self.ssd {
            // In one call: where there is no room for all, either none is taken or the tier only reads from then on.
            let past: Vec<_> = moving[fit..].iter().filter(|(_, row)| row.has(RowState::DIRTY)).collect();
            if !past.is_empty() {
                let refs: Vec<RowRef<'_>> = past.iter().map(|(position, _)| rows.row(*position, floats)).collect();
                let known: Vec<bool> = past.iter().map(|(_, row)| row.has(RowState::ON_SSD)).collect();
                self.append(ssd, &refs, &known)?;
            }
        }
        for &(position, row) in &moving[..fit] {
            let slot = state.host.take(true)?.expect("overflow always has a slot");
            state.host.insert_row(slot, rows.row(position, floats), row);
        }
        for (position, row, shadow) in shadowed {
            let row_ref = rows.row(position, floats);
            *state.host.header_mut(shadow) = *row_ref.header;
            state.host.vector_mut(shadow).copy_from_slice(row_ref.vector);
            state.host.slots.set_state(shadow, row);
        }
        state.host_stats.written_bytes += (slots.len() * floats * 4) as u64;
        Ok(())
    }

    /// Hand every dirty device row to the SSD tier and mark it clean.
    pub(crate) fn write_down_device(&self, state: &mut State) -> Result<()> {
        let Some(tier) = &state.device else { return Ok(()) };
        let Some(ssd): Option<&SsdTier> = self.ssd.as_ref() else { return Ok(()) };
        let floats = self.layout.vector_floats();
        let dirty: Vec<CacheSlot> = tier
            .slots
            .occupied_from(0)
            .filter(|&slot| tier.slots.state(slot).is_current() && tier.slots.state(slot).has(RowState::DIRTY))
            .collect();
        for slots in dirty.chunks(ROWS_PER_GATHER) {
            let rows = self.gather_device(state, slots)?;
            let refs: Vec<RowRef<'_>> = (0..slots.len()).map(|position| rows.row(position, floats)).collect();
            let tier = device(state);
            let known: Vec<bool> = slots.iter().map(|&slot| tier.slots.state(slot).has(RowState::ON_SSD)).collect();
            self.append(ssd, &refs, &known)?;
            for &slot in slots {
                let row = tier.slots.state(slot).without(RowState::DIRTY).with(RowState::ON_SSD);
                tier.slots.set_state(slot, row);
            }
        }
        Ok(())
    }
}
