//! Stage 1 of a plan: pins its rows in the host tier, and takes host slots for the others, which are initialized or
//! read.

use std::sync::Arc;
use std::time::Instant;

use super::hold::{PlanMode, PlanPins};
use super::{Residency, SLOTS_AHEAD};
use crate::error::Result;
use crate::index::SlotIndex;
use crate::kernels::threads::parallel_pipeline;
use crate::lifecycle::admission::RowAdmitter;
use crate::slots::RowState;
use crate::ssd::FetchBatch;
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
        self.finish_ready_loads();
        pins.absent_reads_before = self.absent_reads;
        if self.device.is_some() {
            self.begin_on_device(pins, mode, batch)?;
        } else {
            if let Err(error) = self.drain_overflow()
                && mode.train
            {
                return Err(error);
            }
            self.pin_all(pins, mode, batch)?;
        }
        pins.has_begun = true;
        let left = if self.device.is_some() { pins.ids.len() } else { pins.deferred.len() + pins.unplaced.len() };
        pins.has_space = self.fits(left as u64);
        self.traffic.host.time_ns += started.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Takes host slots for the ids that a plan has deferred, with overflow beyond the budget and space freed by other
    /// rows, and for ids that waited for other batches to count them.
    pub(crate) fn admit_rest(&mut self, pins: &mut PlanPins, mode: PlanMode) -> Result<()> {
        let mut positions = std::mem::take(&mut pins.unplaced);
        positions.append(&mut pins.deferred);
        // Unless something was committed or imported, the prediction for the waiting ids is unchanged.
        if pins.waiting.version != self.context.version() {
            positions.append(&mut std::mem::take(&mut pins.waiting).positions);
        }
        if positions.is_empty() {
            return Ok(());
        }
        let host = Arc::make_mut(&mut pins.host);
        for &position in &positions {
            host[position as usize] = self.host.slots.get(pins.ids[position as usize]);
        }
        let mut batch = FetchBatch::default();
        let admitted = self.pin_found(pins, positions.iter().copied(), mode, &mut batch);
        batch.submit();
        admitted
    }

    /// Pins every id of a plan in the host tier. Takes host slots for missing ids.
    fn pin_all(&mut self, pins: &mut PlanPins, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        let host = Arc::make_mut(&mut pins.host);
        look_up(self.host.slots.index(), &pins.ids, host, if mode.is_prefetch { 1 } else { mode.threads });
        if self.host.slots.all_settled() {
            let (missing, there) = split_found(host);
            self.host.slots.accessed(if missing.is_empty() { host } else { &there });
            self.traffic.host.hits += (host.len() - missing.len()) as u64;
            pins.group = Some(self.host.slots.pin_group(Arc::clone(&pins.host)));
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
        let mut unborn = 0;
        let mut ahead = positions.clone().skip(SLOTS_AHEAD);
        let mut rest = positions;
        let host = Arc::make_mut(&mut pins.host);
        while let Some(position) = rest.next() {
            if let Some(later) = ahead.next() {
                self.host.slots.prefetch(host[later as usize]);
            }
            let slot = host[position as usize];
            if slot == NO_SLOT {
                missing.push(position);
                continue;
            }
            let row = self.host.slots.state(slot);
            if row.has(RowState::FAILED) {
                // `pins` may contain only pinned slots, because the release unpins all of them.
                host[position as usize] = NO_SLOT;
                rest.for_each(|unpinned| host[unpinned as usize] = NO_SLOT);
                return Err(self.unread_row_error(pins.ids[position as usize]));
            }
            seen = seen.with(row);
            unborn += u64::from(row.has(RowState::PROVISIONAL));
            self.host.slots.pin(slot);
            accessed.push(slot);
        }
        self.host.slots.accessed(&accessed);
        self.traffic.host.hits += accessed.len() as u64;
        if seen.has(RowState::LOADING) {
            self.wait_for_all_loads(pins);
        }
        if mode.train && unborn > 0 {
            self.pledge(pins, unborn);
            if pins.has_begun {
                self.check_capacity(0, &pins.ids)?;
            }
        }
        if missing.is_empty() { Ok(()) } else { self.admit(pins, missing, mode, batch) }
    }

    /// Records that a training plan holds `new_rows` more provisional rows.
    pub(super) fn pledge(&mut self, pins: &mut PlanPins, new_rows: u64) {
        self.counts.pledge(new_rows);
        pins.pledged += new_rows;
    }

    /// Checks that all rows that a training plan may insert fit. Their number has grown if reads found rows absent
    /// since the plan started. Errors: as [`Residency::check_capacity`].
    pub(crate) fn check_pledge(&mut self, pins: &mut PlanPins) -> Result<()> {
        if pins.absent_reads_before != self.absent_reads {
            pins.absent_reads_before = self.absent_reads;
            let unborn = pins.host.iter().filter(|&&slot| Self::is_provisional(&self.host.slots, slot)).count() as u64;
            self.counts.take_back_pledge(pins.pledged);
            pins.pledged = 0;
            self.pledge(pins, unborn);
        }
        self.check_capacity(0, &pins.ids)
    }

    /// Makes a plan wait for every load in progress, because some of its rows are among them. Waiting for the others
    /// costs little, because loads finish in about the order in which they started.
    pub(super) fn wait_for_all_loads(&self, pins: &mut PlanPins) {
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
        if let Some(ssd) = &self.context.ssd {
            let ids: Vec<Id> = positions.iter().map(|&position| pins.ids[position as usize]).collect();
            ssd.maybe_contains(&ids, &mut on_ssd);
        }
        if mode.train && self.context.config.admission.is_selective() && !mode.reads_initial(&self.context.config) {
            let (positions, on_ssd) = self.without_not_admitted(pins, positions, &on_ssd);
            return self.admit_all(pins, &positions, &on_ssd, mode, batch);
        }
        self.admit_all(pins, &positions, &on_ssd, mode, batch)
    }

    /// Removes the ids that are not on SSD and are predicted not to be admitted. They wait without a slot.
    fn without_not_admitted(
        &self,
        pins: &mut PlanPins,
        mut positions: Vec<u32>,
        on_ssd: &[bool],
    ) -> (Vec<u32>, Vec<bool>) {
        let missing = positions.iter().zip(on_ssd).filter(|(_, there)| !**there).map(|(&position, _)| position);
        let (mut candidates, admitted) = self.admits(pins, missing);
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
        let changes = self.admitter.as_ref().map_or(0, RowAdmitter::changes);
        pins.waiting.add(positions, candidates, self.context.version(), changes);
        (kept, kept_on_ssd)
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
        let births = on_ssd.iter().filter(|&&there| !there).count() as u64;
        if mode.train && births > 0 {
            if pins.has_begun {
                self.check_capacity(births, &pins.ids)?;
            } else if !self.make_fit(births) {
                let (reads, new): (Vec<_>, Vec<_>) = positions.iter().zip(on_ssd).partition(|(_, there)| **there);
                pins.deferred.extend(new.into_iter().map(|(position, _)| position));
                let reads: Vec<u32> = reads.into_iter().map(|(&position, _)| position).collect();
                return self.admit_all(pins, &reads, &vec![true; reads.len()], mode, batch);
            }
        }
        let ids: Vec<Id> = positions.iter().map(|&position| pins.ids[position as usize]).collect();
        self.initialize_in_parallel(mode.threads, births, |this, bear| {
            let parts = positions.chunks(ROWS_PER_SUBMISSION).zip(ids.chunks(ROWS_PER_SUBMISSION));
            for ((positions, ids), on_ssd) in parts.zip(on_ssd.chunks(ROWS_PER_SUBMISSION)) {
                this.admit_part(pins, MissingIds { positions, ids, on_ssd }, mode, (batch, bear))?;
                batch.submit_if_worthwhile(ROWS_PER_SUBMISSION);
            }
            Ok(())
        })
    }

    /// Takes host slots for some ids that are not in RAM. `batch` reads their rows, or the sink receives the new rows.
    fn admit_part(
        &mut self,
        pins: &mut PlanPins,
        missing: MissingIds<'_>,
        mode: PlanMode,
        (batch, bear): (&mut FetchBatch, &mut NewRowSink<'_>),
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
        let AdmittedSlots { reads, new_rows: born, zeros, outcome: refused } = self.take_slots(pins, missing, mode);
        // Deferred ids are counted when they are placed. Rows being read count as hits or misses after the read.
        let missing = born.len() as u64 + zeros;
        self.traffic.host.misses += missing + reads.len() as u64;
        self.traffic.ssd_misses += missing;
        if mode.train {
            self.pledge(pins, born.len() as u64);
        }
        bear(&born);
        if !reads.is_empty() {
            let load = self.start_load(reads, batch);
            pins.loads.push(load);
        }
        refused
    }

    /// Takes and pins host slots for ids that are not in RAM, whose rows will be initialized or read.
    fn take_slots(&mut self, pins: &mut PlanPins, missing: MissingIds<'_>, mode: PlanMode) -> AdmittedSlots {
        let leaves_out = !mode.train && !mode.reads_initial(&self.context.config);
        let read = leaves_out.then(|| RowsToRead::of(missing));
        let wanted = read.as_ref().map_or(missing, RowsToRead::missing);
        let (slots, refused) = self.host.admit(wanted.ids, wanted.on_ssd, !mode.is_prefetch);
        let (mut reads, mut born) = (Vec::new(), Vec::with_capacity(slots.len()));
        self.pin_taken(pins, wanted.positions, &slots);
        for ((&slot, &id), &there) in slots.iter().zip(wanted.ids).zip(wanted.on_ssd) {
            if there { &mut reads } else { &mut born }.push((id, slot));
        }
        self.counts.became_provisional(born.len() as u64);
        // After an error, rows in state LOADING must be read nevertheless, because other plans may find them and wait
        // for them.
        if refused.is_ok() {
            pins.unplaced.extend_from_slice(&wanted.positions[slots.len()..]);
        }
        let zeros = (missing.ids.len() - wanted.ids.len()) as u64;
        AdmittedSlots { reads, new_rows: born, zeros, outcome: refused }
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
