//! Staging of rows for the device: copies from the host tier, rows read from SSD, and initial values of new rows.

use std::time::Instant;

use super::hold::{PlanMode, PlanPins};
use super::{Residency, SLOTS_AHEAD};
use crate::error::Result;
use crate::host::ROWS_AHEAD;
use crate::memory;
use crate::rows::{RowHeader, RowRef};
use crate::slots::RowState;
use crate::types::{Id, NO_SLOT};

/// A row of a plan in transit to the device.
pub(super) struct StagedRow {
    /// Position in the plan's distinct ids.
    pub(super) position: u32,
    /// State of the row on the device.
    pub(super) state: RowState,
    /// True if the table counts it as provisional already.
    pub(super) counted: bool,
}

/// Vector parts of rows in transit to the device.
pub(super) enum StagedVectors<'a> {
    /// Owned memory.
    Own(Vec<f32>),
    /// A buffer supplied by the caller, from which the device may copy asynchronously.
    Lent(&'a mut [f32]),
}

impl<'a> StagedVectors<'a> {
    /// Memory for this many floats: the caller's buffer if it is large enough.
    ///
    /// Errors: `Memory`.
    fn of(lent: Option<&'a mut [f32]>, floats: usize) -> Result<Self> {
        match lent.and_then(|lent| lent.get_mut(..floats)) {
            Some(lent) => Ok(Self::Lent(lent)),
            None => Ok(Self::Own(memory::zeros("stage a batch", floats)?)),
        }
    }

    /// Keeps only the first `floats` floats.
    fn truncate(&mut self, floats: usize) {
        match self {
            Self::Own(vectors) => vectors.truncate(floats),
            Self::Lent(lent) => *lent = &mut std::mem::take(lent)[..floats],
        }
    }

    /// The owned memory; `None` if the vectors are in the caller's buffer.
    pub(super) fn into_own(self) -> Option<Vec<f32>> {
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
            Self::Lent(lent) => lent,
        }
    }
}

impl std::ops::DerefMut for StagedVectors<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Own(vectors) => vectors,
            Self::Lent(lent) => lent,
        }
    }
}

/// Copies of rows from all tiers.
pub(super) struct StagedRows<'a> {
    /// `[M]`
    pub(super) rows: Vec<StagedRow>,
    /// `[M]`
    pub(super) headers: Vec<RowHeader>,
    /// `[M, V]`
    pub(super) vectors: StagedVectors<'a>,
    /// Number of rows from the host tier. They come first.
    pub(super) from_host: usize,
    /// Numbers of the other rows that were read from SSD and that are missing.
    pub(super) ssd_hits: u64,
    pub(super) ssd_misses: u64,
}

impl StagedRows<'_> {
    /// Removes the rows at these positions of the plan: bits `[U]`, or empty for none.
    pub(super) fn leave_out(&mut self, positions: &[bool], floats: usize) {
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

impl Residency {
    /// Stages the rows at `positions`: pins rows in the host tier, and reads rows on SSD, into `lent` if it is large
    /// enough for all.
    pub(super) fn stage<'a>(
        &mut self,
        pins: &mut PlanPins,
        positions: &[u32],
        mode: PlanMode,
        lent: Option<&'a mut [f32]>,
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
        let vectors = StagedVectors::of(lent, rows.len() * self.context.floats())?;
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
            let dead = self.expire_staged_reads(&wanted, staged)?;
            missing += absent.len() + dead;
            staged.ssd_hits = (wanted.len() - absent.len() - dead) as u64;
            self.traffic.ssd_time_ns += started.elapsed().as_nanos() as u64;
        }
        staged.ssd_misses = missing as u64;
        Ok(())
    }

    /// Removes rows that were just read from SSD and that sweeps match: they become provisional, like absent rows.
    /// Returns the number removed.
    fn expire_staged_reads(&mut self, requests: &[(Id, usize)], staged: &mut StagedRows<'_>) -> Result<usize> {
        let (dim, floats) = (self.context.layout.dim, self.context.floats());
        let mut buried = 0;
        for (by, only) in self.matchers_of_arrivals() {
            let is_dead = |&(id, index): &(Id, usize)| {
                !staged.rows[index].state.has(RowState::PROVISIONAL)
                    && only.as_ref().is_none_or(|only| only.contains(&id))
                    && by.sweep.matches(&staged.headers[index], &staged.vectors[index * floats..][..dim])
            };
            let mut dead: Vec<(Id, usize)> = requests.iter().copied().filter(is_dead).collect();
            // Another active plan may be about to load the row too.
            dead.retain(|(id, _)| self.active_plans.plans_with(*id) <= 1);
            let row = |&(_, at): &(Id, usize)| RowRef {
                header: &staged.headers[at],
                vector: &staged.vectors[at * floats..][..floats],
            };
            self.expire_read_rows(&dead.iter().map(row).collect::<Vec<RowRef<'_>>>(), &by)?;
            for &(_, index) in &dead {
                staged.rows[index].state = RowState::PROVISIONAL;
            }
            buried += dead.len();
        }
        Ok(buried)
    }

    /// Copies the staged rows that are in the host tier, and initializes rows that were never trained.
    pub(super) fn fill_staged(&self, pins: &PlanPins, staged: &mut StagedRows<'_>, threads: usize) {
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
        let born: Vec<(Id, usize)> = others
            .filter(|(_, row)| row.state.has(RowState::PROVISIONAL))
            .map(|(index, row)| (pins.ids[row.position as usize], index))
            .collect();
        self.context.initialize_rows_into(&born, &mut staged.headers, &mut staged.vectors, threads);
    }
}
