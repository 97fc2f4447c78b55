//! Bringing a batch's rows into the host tier: the first stage of every plan, and the second of tables without a device tier.

use std::sync::Arc;
use std::time::Instant;

use super::load::Loading;
use super::table::{Shared, State};
use crate::error::Result;
use crate::kernels::TransposedIndex;
use crate::slots::{PinGroup, RowState};
use crate::ssd::FetchBatch;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// How many slots ahead their state is fetched into the processor's cache.
pub(crate) const SLOTS_AHEAD: usize = 24;
/// How many inserts ahead what an insert touches is.
const INSERTS_AHEAD: usize = 12;
/// Rows whose reads are submitted at once: the disk works on the first ones while room is made for the next.
const ROWS_PER_SUBMISSION: usize = 4096;

/// How a plan treats ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanMode {
    /// A backward will follow: unseen ids may be born.
    pub(crate) train: bool,
    /// Fetch as far as the budget goes, never overflow.
    pub(crate) ahead: bool,
    /// Unseen ids of an evaluation read zeros.
    pub(crate) unseen_zeros: bool,
    /// Threads that may work for it.
    pub(crate) threads: usize,
}

/// One table's part of a plan.
pub(crate) struct TablePlan {
    pub(crate) shared: Arc<Shared>,
    /// Distinct ids: `[U]`.
    pub(crate) unique: Vec<Id>,
    /// Occurrences of each distinct id; `index.slots` is filled when the rows are in place.
    pub(crate) index: TransposedIndex,
    /// For each occurrence the position of its id in `unique`: `[N]`.
    pub(crate) inverse: Vec<u32>,
    /// For each occurrence its slot in the tier that kernels run on: `[N]`, filled when the rows are in place.
    pub(crate) occurrence_slots: Vec<CacheSlot>,
    /// Host slots pinned, by position in `unique`; `NO_SLOT` where none.
    pub(crate) host: Arc<Vec<CacheSlot>>,
    /// Where they were all pinned together.
    pub(crate) host_group: Option<PinGroup>,
    /// Device slots pinned, by position in `unique`; `NO_SLOT` where none.
    pub(crate) device: Vec<CacheSlot>,
    /// Reads that rows of this plan wait for.
    pub(crate) loads: Vec<Arc<Loading>>,
    /// Positions in `unique` that an `ahead` plan left for later.
    pub(crate) unplaced: Vec<u32>,
    /// What this plan adds to `State::pledged`: its rows that are not born yet, where it trains them.
    pub(crate) pledged: u64,
    /// `State::absent_reads` when it was planned.
    pub(crate) absent_before: u64,
    /// Rows that did not fit the budget of the tier that kernels run on.
    pub(crate) overflow_rows: u32,
    /// Rows to scatter into the device tensors.
    pub(crate) fetched: super::place_device::Fetched,
    /// The same rows, which move to the device once they were scattered.
    pub(crate) arriving: Vec<super::place_device::Arriving>,
    pub(crate) placed: bool,
}

impl TablePlan {
    /// The transposed index is made only where a backward will ask for it.
    pub(crate) fn new(shared: Arc<Shared>, unique: Vec<Id>, inverse: Vec<u32>, train: bool) -> Self {
        let index =
            if train { TransposedIndex::from_inverse(&inverse, unique.len()) } else { TransposedIndex::default() };
        let count = unique.len();
        Self {
            shared,
            unique,
            index,
            inverse,
            occurrence_slots: Vec::new(),
            host: Arc::new(vec![NO_SLOT; count]),
            host_group: None,
            device: Vec::new(),
            loads: Vec::new(),
            unplaced: Vec::new(),
            pledged: 0,
            absent_before: 0,
            overflow_rows: 0,
            fetched: super::place_device::Fetched::default(),
            arriving: Vec::new(),
            placed: false,
        }
    }

    /// Stage one: pin what is in RAM and let `batch` read what is on SSD. On an error the pins taken so far stay recorded, for release.
    pub(crate) fn start(&mut self, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let started = Instant::now();
        let mut state = shared.lock()?;
        shared.sweep_loads(&mut state);
        self.absent_before = state.absent_reads;
        if state.device.is_some() {
            self.start_device(&mut state, mode, batch)?;
        } else {
            if let Err(error) = shared.drain_overflow(&mut state)
                && mode.train
            {
                return Err(error);
            }
            self.place_all_in_host(&mut state, mode, batch)?;
        }
        state.host_stats.time_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Pin or bring into host slots every id of the plan.
    fn place_all_in_host(&mut self, state: &mut State, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let host = Arc::make_mut(&mut self.host);
        state.host.slots.get_batch(&self.unique, host);
        if state.host.slots.all_settled() && !host.contains(&NO_SLOT) {
            state.host.slots.accessed(host);
            state.host_stats.hits += host.len() as u64;
            self.host_group = Some(state.host.slots.pin_group(Arc::clone(&self.host)));
            return Ok(());
        }
        let all = 0..self.unique.len() as u32;
        self.pin_found(state, all, mode, batch)
    }

    /// Pin or bring into host slots the ids at `positions`.
    fn place_in_host(&mut self, state: &mut State, positions: &[u32], mode: PlanMode) -> Result<()> {
        let host = Arc::make_mut(&mut self.host);
        for &position in positions {
            host[position as usize] = state.host.slots.get(self.unique[position as usize]);
        }
        let mut batch = FetchBatch::default();
        let placed = self.pin_found(state, positions.iter().copied(), mode, &mut batch);
        batch.submit();
        placed
    }

    /// Pin the ids at `positions` whose host slots were just looked up, and bring in the others.
    fn pin_found(
        &mut self,
        state: &mut State,
        positions: impl Iterator<Item = u32> + Clone,
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut accessed = Vec::with_capacity(self.unique.len());
        let mut missing: Vec<u32> = Vec::new();
        let mut seen = RowState::default();
        let mut unborn = 0;
        let mut ahead = positions.clone().skip(SLOTS_AHEAD);
        let mut rest = positions;
        let host = Arc::make_mut(&mut self.host);
        while let Some(position) = rest.next() {
            if let Some(later) = ahead.next() {
                state.host.slots.prefetch(host[later as usize]);
            }
            let slot = host[position as usize];
            if slot == NO_SLOT {
                missing.push(position);
                continue;
            }
            let row = state.host.slots.state(slot);
            if row.has(RowState::FAILED) {
                // Slots not pinned must not stand in the plan: its release would unpin them.
                host[position as usize] = NO_SLOT;
                rest.for_each(|unpinned| host[unpinned as usize] = NO_SLOT);
                return Err(shared.unread_row(self.unique[position as usize]));
            }
            seen = seen.with(row);
            unborn += u64::from(row.has(RowState::PROVISIONAL));
            state.host.slots.pin(slot);
            accessed.push(slot);
        }
        state.host.slots.accessed(&accessed);
        state.host_stats.hits += accessed.len() as u64;
        state.host_stats.misses += missing.len() as u64;
        if seen.has(RowState::LOADING) {
            self.wait_for_all(state);
        }
        if mode.train && unborn > 0 {
            self.pledge(state, unborn);
            if !mode.ahead {
                shared.check_capacity(state, 0, &self.unique)?;
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        self.bring_in(state, &missing, mode, batch)
    }

    /// So many more rows of this plan, which trains them, are not born yet.
    pub(crate) fn pledge(&mut self, state: &mut State, unborn: u64) {
        state.pledged += unborn;
        self.pledged += unborn;
    }

    /// Count anew which rows in the host tier are not born yet, where reads have found rows absent since they were counted.
    fn pledge_absent(&mut self, state: &mut State) {
        if self.absent_before == state.absent_reads {
            return;
        }
        self.absent_before = state.absent_reads;
        let unborn = |slot: &&CacheSlot| **slot != NO_SLOT && state.host.slots.state(**slot).has(RowState::PROVISIONAL);
        let unborn = self.host.iter().filter(unborn).count() as u64;
        state.pledged -= self.pledged;
        self.pledged = 0;
        self.pledge(state, unborn);
    }

    /// Depend on every read under way: some of this plan's rows are among them. A wait for more than necessary is harmless, loads
    /// finish in about the order they were started.
    pub(crate) fn wait_for_all(&mut self, state: &State) {
        for load in &state.loading {
            if !self.loads.iter().any(|other| Arc::ptr_eq(other, load)) {
                self.loads.push(Arc::clone(load));
            }
        }
    }

    /// Give host slots to ids that are not in RAM: born at once, or read from SSD.
    fn bring_in(&mut self, state: &mut State, missing: &[u32], mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let ids: Vec<Id> = missing.iter().map(|&p| self.unique[p as usize]).collect();
        let mut on_ssd = vec![false; ids.len()];
        if let Some(ssd) = &shared.ssd {
            ssd.maybe_contains(&ids, &mut on_ssd);
        }
        let births = on_ssd.iter().filter(|&&there| !there).count() as u64;
        state.ssd_hits += ids.len() as u64 - births;
        state.ssd_misses += births;
        if mode.train
            && births > 0
            && let Err(error) = shared.check_capacity(state, births, &self.unique)
        {
            if !mode.ahead {
                return Err(error);
            }
            // The forward of this batch says it, if it is still true then.
            self.unplaced.extend_from_slice(missing);
            return Ok(());
        }
        let parts = missing.chunks(ROWS_PER_SUBMISSION).zip(ids.chunks(ROWS_PER_SUBMISSION));
        for ((missing, ids), on_ssd) in parts.zip(on_ssd.chunks(ROWS_PER_SUBMISSION)) {
            self.bring_in_some(state, (missing, ids, on_ssd), mode, batch)?;
            batch.submit_if_worthwhile(ROWS_PER_SUBMISSION);
        }
        Ok(())
    }

    /// Give host slots to some ids that are not in RAM: their positions in `unique`, themselves, and whether each may be on SSD.
    fn bring_in_some(
        &mut self,
        state: &mut State,
        (missing, ids, on_ssd): (&[u32], &[Id], &[bool]),
        mode: PlanMode,
        batch: &mut FetchBatch,
    ) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        if let Err(error) = shared.make_room(state, missing.len() as u32)
            && mode.train
        {
            // An evaluation reads on after a failed write, in the overflow.
            return Err(error);
        }
        // Before anything changes: what is begun below is carried through.
        let rows = if mode.ahead { missing.len().min(state.host.slots.free_slots() as usize) } else { missing.len() };
        state.host.reserve(rows)?;
        let mut reads = Vec::new();
        let mut refused = Ok(());
        let mut born = Vec::new();
        let host = Arc::make_mut(&mut self.host);
        for (number, ((&position, &id), &there)) in missing.iter().zip(ids).zip(on_ssd).enumerate() {
            if let Some(&later) = ids.get(number + INSERTS_AHEAD) {
                state.host.slots.prefetch_insert(later);
            }
            if mode.unseen_zeros && !mode.train && !there {
                continue;
            }
            let slot = match state.host.take(!mode.ahead) {
                Ok(Some(slot)) => slot,
                Ok(None) => {
                    self.unplaced.push(position);
                    continue;
                }
                Err(error) => {
                    // Rows that are LOADING by now must be read: other plans may find and wait for them.
                    refused = Err(error);
                    break;
                }
            };
            if there {
                state.host.header_mut(slot).id = id;
                state.host.slots.insert(slot, id, RowState::LOADING.with(RowState::ON_SSD));
                reads.push((id, slot));
            } else {
                born.push((id, slot));
                state.host.slots.insert(slot, id, RowState::PROVISIONAL);
                state.provisional += 1;
            }
            state.host.slots.pin(slot);
            host[position as usize] = slot;
        }
        if mode.train {
            self.pledge(state, born.len() as u64);
        }
        shared.bear(state, &born, mode.threads);
        if !reads.is_empty() {
            let load = shared.start_load(state, reads, batch);
            self.loads.push(load);
        }
        refused
    }

    /// Wait for every read this plan depends on, and take notice of it. Not under the table's lock.
    pub(crate) fn wait_for_loads(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let started = Instant::now();
        let mut first_error = None;
        for load in self.loads.drain(..) {
            // The error, if any, is taken from the finished load below.
            let _ = load.fetch.wait();
            let mut state = shared.lock_any()?;
            if let Err(error) = shared.finish_load(&mut state, &load) {
                // A load that only others wait for may fail without touching this plan's rows.
                let mine =
                    self.host.iter().any(|&slot| slot != NO_SLOT && state.host.slots.state(slot).has(RowState::FAILED));
                if mine {
                    first_error.get_or_insert(error);
                }
            }
            state.ssd_time_ns += started.elapsed().as_nanos() as u64;
        }
        first_error.map_or(Ok(()), |error| Err(error.context(format!("table {:?}", shared.config.name))))
    }

    /// Count the rows that are past the budget of the tier that kernels run on.
    fn note_overflow(&mut self, state: &mut State, capacity: u32) {
        let slots: &[CacheSlot] = if state.device.is_some() { &self.device } else { &self.host };
        self.overflow_rows = slots.iter().filter(|&&slot| slot != NO_SLOT && slot >= capacity).count() as u32;
        state.overflow_plans += u64::from(self.overflow_rows > 0);
    }

    /// Stage two: every row in its slot of the tier that kernels run on.
    pub(crate) fn finish(&mut self, mode: PlanMode) -> Result<()> {
        if self.placed {
            return Ok(());
        }
        self.wait_for_loads()?;
        let shared = Arc::clone(&self.shared);
        let mode = PlanMode { ahead: false, ..mode };
        if shared.config.device_rows.is_some() {
            let mut state = shared.lock()?;
            self.place_device(&mut state, mode)?;
            let capacity = state.device.as_ref().map_or(0, |device| device.slots.capacity());
            self.note_overflow(&mut state, capacity);
        } else {
            let late = std::mem::take(&mut self.unplaced);
            let mut state = shared.lock()?;
            if mode.train {
                // Unborn rows that an evaluation or an id's false trace brought in count once training uses them.
                self.pledge_absent(&mut state);
                shared.check_capacity(&mut state, 0, &self.unique)?;
            }
            if !late.is_empty() {
                self.place_in_host(&mut state, &late, mode)?;
            }
            let capacity = state.host.slots.capacity();
            self.note_overflow(&mut state, capacity);
            drop(state);
            if !self.loads.is_empty() {
                self.wait_for_loads()?;
                if mode.train {
                    // Ids that the index took for others' turned out to be new.
                    let mut state = shared.lock()?;
                    self.pledge_absent(&mut state);
                    shared.check_capacity(&mut state, 0, &self.unique)?;
                }
            }
            self.index.slots.clone_from(&self.host);
            if mode.unseen_zeros && !mode.train {
                let state = shared.lock()?;
                for slot in &mut self.index.slots {
                    if *slot != NO_SLOT && state.host.slots.state(*slot).has(RowState::PROVISIONAL) {
                        *slot = NO_SLOT;
                    }
                }
            }
        }
        self.occurrence_slots = self.inverse.iter().map(|&u| self.index.slots[u as usize]).collect();
        self.placed = true;
        Ok(())
    }
}
