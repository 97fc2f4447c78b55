//! The rows of a table as of one moment, handed over while training goes on.
//!
//! At the moment every slot that holds the newest version of a row is marked. Whoever changes such a row, or takes it out of its slot,
//! copies it to the [`PreImages`] first, under the table's lock, and takes the mark back; so does the stream when it hands the row over.
//! Rows whose newest version is on SSD are the SSD tier's ([`SsdMoment`]). They come first and without the table's lock, because whoever
//! holds that may wait for their room.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::export::Chunk;
use super::lineage::Ancestor;
use super::modified::collect;
use super::place::TablePlan;
use super::place_device::{Gathered, ROWS_PER_GATHER};
use super::preimages::{Keeping, PreImages};
use super::table::{Shared, State, Table};
use crate::config::TableConfig;
use crate::error::{Error, Kind, Result};
use crate::kernels::{RowStore, TensorRows};
use crate::memory;
use crate::prefetch::prefetch_address;
use crate::rows::{RowHeader, RowRef};
use crate::slots::{RowState, SlotMap};
use crate::ssd::{KeepRow, SsdMoment};
use crate::sync::Ordering;
use crate::types::{CacheSlot, Id};

/// How many rows ahead those to be copied are asked for.
const ROWS_AHEAD: usize = 8;
const LINE_BYTES: usize = 64;

/// Slots whose rows are to be handed over as they are.
struct Marks(Vec<u64>);

impl Marks {
    /// Of none of these slots.
    fn none(slots: &SlotMap) -> Result<Self> {
        memory::zeros("mark rows to be saved", slots.high_water().div_ceil(64) as usize).map(Self)
    }

    fn set(&mut self, slot: CacheSlot) {
        self.0[slot as usize / 64] |= 1 << (slot % 64);
    }

    /// Take a mark back; whether it was there.
    fn take(&mut self, slot: CacheSlot) -> bool {
        let Some(word) = self.0.get_mut(slot as usize / 64) else { return false };
        let bit = 1 << (slot % 64);
        let marked = *word & bit != 0;
        *word &= !bit;
        marked
    }

    /// Take up to `most` marks back, from `next` on, which is moved behind them.
    fn take_next(&mut self, next: &mut CacheSlot, most: usize) -> Vec<CacheSlot> {
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(word) = self.0.get_mut(*next as usize / 64)
        {
            let ahead = *word & (u64::MAX << (*next % 64));
            if ahead == 0 {
                *next = (*next / 64 + 1) * 64;
                continue;
            }
            let bit = ahead.trailing_zeros();
            *word &= !(1 << bit);
            let slot = *next / 64 * 64 + bit;
            taken.push(slot);
            *next = slot + 1;
        }
        taken
    }
}

/// What a table's state holds of its moment.
pub(crate) struct Pending {
    host: Marks,
    device: Marks,
    images: Arc<PreImages>,
    /// Its number there.
    table: usize,
}

impl Pending {
    fn keep(&self) -> Keeping<'_> {
        self.images.keep(self.table)
    }
}

/// The rows of a table at one moment, or those modified before it since a checkpoint, with its step. Dropping it lets go of what is kept
/// for it.
pub struct TableMoment {
    shared: Arc<Shared>,
    images: Arc<PreImages>,
    table: usize,
    ssd: Option<SsdMoment>,
    rows: u64,
    step: u64,
    /// Ids that left before the moment since the checkpoint; `None` where all rows are handed over.
    left: Option<Vec<Id>>,
}

impl std::fmt::Debug for TableMoment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TableMoment").field("table", &self.shared.config.name).finish_non_exhaustive()
    }
}

impl Table {
    /// Hold the rows of now; rows trained from now on carry `next_epoch`. The rows that training changes before they are handed over are
    /// kept in `images`, which tables of one save share.
    ///
    /// `State` while another moment of the table is held.
    pub fn moment(&self, images: &Arc<PreImages>, next_epoch: u32) -> Result<TableMoment> {
        self.hold(images, next_epoch, None)
    }

    /// As [`Table::moment`], of the rows modified since `ancestor` and the ids that left; `State` where those are not known.
    pub fn moment_of_changes(
        &self,
        images: &Arc<PreImages>,
        next_epoch: u32,
        ancestor: &Ancestor,
    ) -> Result<TableMoment> {
        self.hold(images, next_epoch, Some(ancestor))
    }

    fn hold(&self, images: &Arc<PreImages>, next_epoch: u32, ancestor: Option<&Ancestor>) -> Result<TableMoment> {
        let shared = &self.shared;
        memory::check()?;
        let _rows = shared.reading_rows()?;
        let mut state = shared.lock()?;
        if state.moment.is_some() {
            return Err(Error::new(
                Kind::State,
                format!("table {:?} is being saved beside training: wait until that save is done", shared.config.name),
            ));
        }
        let left = ancestor.map(|ancestor| shared.left_since(&state, ancestor)).transpose()?;
        let since = ancestor.map_or(0, |ancestor| ancestor.next_epoch);
        let (host, device) = state.marks(since)?;
        let table = images.add(&shared.layout);
        let ssd = match &shared.ssd {
            None => None,
            Some(ssd) => {
                let kept = Arc::clone(images);
                let keep: Box<KeepRow> = Box::new(move |row: RowRef<'_>| {
                    kept.keep(table).row(row.header, |to| to.copy_from_slice(row.vector));
                });
                Some(ssd.moment(&mut state.stale_on_ssd(), since, keep)?)
            }
        };
        let moment = TableMoment {
            shared: Arc::clone(shared),
            images: Arc::clone(images),
            table,
            ssd,
            rows: state.rows,
            step: state.step,
            left,
        };
        state.begin_epoch(next_epoch);
        state.lineage.await_save(next_epoch);
        state.moment = Some(Box::new(Pending { host, device, images: Arc::clone(images), table }));
        shared.has_moment.store(true, Ordering::Release);
        Ok(moment)
    }
}

impl TableMoment {
    /// The table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.shared.config
    }

    /// Training steps at the moment.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Rows at the moment, those that did not change included.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Of a moment of changes: the ids that left, each once, in rising order; some may be back.
    pub fn left(&self) -> Option<&[Id]> {
        self.left.as_deref()
    }

    /// Hand every row of the moment to `sink` once, in chunks of about `chunk_rows`. No lock is held while `sink` runs.
    pub fn for_each_chunk(mut self, chunk_rows: usize, sink: &mut dyn FnMut(Chunk) -> Result<()>) -> Result<()> {
        let chunk_rows = chunk_rows.max(1);
        let mut rows = 0;
        let mut sink = |chunk: Chunk| {
            rows += chunk.headers.len() as u64;
            if chunk.headers.is_empty() { Ok(()) } else { sink(chunk) }
        };
        if let Some(ssd) = self.ssd.take() {
            let mut chunk = Chunk::default();
            ssd.for_each_row(&mut |row| {
                chunk.headers.push(*row.header);
                chunk.vectors.extend_from_slice(row.vector);
                if chunk.headers.len() < chunk_rows { Ok(()) } else { sink(std::mem::take(&mut chunk)) }
            })?;
            sink(chunk)?;
        }
        let mut next = 0;
        while let Some(chunk) = self.next_of_host(&mut next, chunk_rows)? {
            sink(chunk)?;
        }
        next = 0;
        while let Some(chunk) = self.next_of_device(&mut next, chunk_rows)? {
            sink(chunk)?;
        }
        while let Some(chunk) = self.images.take(self.table)? {
            sink(chunk)?;
        }
        self.images.check()?;
        if self.left.is_none() && rows != self.rows {
            return Err(Error::new(
                Kind::State,
                format!(
                    "table {:?} had {} rows when its save began and {rows} were found: a bug of torchrec-embcache to report",
                    self.shared.config.name, self.rows
                ),
            ));
        }
        Ok(())
    }

    /// The next marked rows of the host tier.
    fn next_of_host(&self, next: &mut CacheSlot, most: usize) -> Result<Option<Chunk>> {
        let floats = self.shared.layout.vector_floats();
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock_any()?;
        let state = &mut *state;
        let slots = self.pending(state)?.host.take_next(next, most);
        if slots.is_empty() {
            return Ok(None);
        }
        let mut chunk = Chunk::default();
        memory::reserve(&mut chunk.headers, "save rows", slots.len())?;
        memory::reserve(&mut chunk.vectors, "save rows", slots.len() * floats)?;
        for slot in slots {
            let row = state.host.row(slot);
            chunk.headers.push(*row.header);
            chunk.vectors.extend_from_slice(row.vector);
        }
        Ok(Some(chunk))
    }

    /// The next marked rows of the device tier.
    fn next_of_device(&self, next: &mut CacheSlot, most: usize) -> Result<Option<Chunk>> {
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock_any()?;
        let slots = self.pending(&mut state)?.device.take_next(next, most.min(ROWS_PER_GATHER));
        if slots.is_empty() {
            return Ok(None);
        }
        let Gathered { headers, vectors } = self.shared.gather_device(&mut state, &slots)?;
        Ok(Some(Chunk { headers, vectors }))
    }

    fn pending<'a>(&self, state: &'a mut State) -> Result<&'a mut Pending> {
        self.images.check()?;
        state.moment.as_deref_mut().ok_or_else(|| Error::new(Kind::State, "the moment was let go of"))
    }
}

impl Drop for TableMoment {
    fn drop(&mut self) {
        // First what others wait for with the table's lock.
        drop(self.ssd.take());
        self.shared.leave_moment();
    }
}

impl State {
    /// Marks of the host and the device tier: of the newest rows modified in epoch `since` or later.
    fn marks(&self, since: u32) -> Result<(Marks, Marks)> {
        let host = |slot| self.host.modified_epoch(slot);
        let on_host = self.marks_of(&self.host.slots, since, host)?;
        let on_device = self.device.as_ref().map_or(Ok(Marks(Vec::new())), |tier| {
            self.marks_of(&tier.slots, since, |slot| tier.header(slot).modified_epoch)
        })?;
        Ok((on_host, on_device))
    }

    fn marks_of(&self, slots: &SlotMap, since: u32, modified_epoch: impl Fn(CacheSlot) -> u32) -> Result<Marks> {
        let mut marks = Marks::none(slots)?;
        if since == 0 {
            slots.occupied_from(0).filter(|&slot| slots.state(slot).is_newest()).for_each(|slot| marks.set(slot));
        } else {
            let mut modified = Vec::new();
            let wanted = |slot| (modified_epoch(slot) >= since).then_some(slot);
            collect(&mut modified, slots, since < self.marked_since, wanted)?;
            for slot in modified {
                marks.set(slot);
            }
        }
        Ok(marks)
    }

    /// Ids of rows that are newer in RAM or on the device than on SSD.
    fn stale_on_ssd(&self) -> impl Iterator<Item = Id> + '_ {
        let is_stale = |row: RowState| row.is_current() && row.has(RowState::DIRTY) && row.has(RowState::ON_SSD);
        let (host, device) = (&self.host, self.device.as_ref());
        let on_host = host.slots.occupied_from(0).filter(move |&slot| is_stale(host.slots.state(slot)));
        let on_device = device.into_iter().flat_map(move |tier| {
            let stale = tier.slots.occupied_from(0).filter(move |&slot| is_stale(tier.slots.state(slot)));
            stale.map(|slot| tier.id(slot))
        });
        on_host.map(|slot| host.id(slot)).chain(on_device)
    }

    /// These host rows are about to change, or to leave their slots: copy what a moment wants of them. The caller keeps kernels out.
    #[inline]
    pub(crate) fn keep_host(&mut self, slots: &[CacheSlot]) {
        if let Some(mut pending) = self.moment.take() {
            pending.keep_host(&self.host, slots);
            self.moment = Some(pending);
        }
    }

    /// As `keep_host`, of device rows that were just read.
    pub(crate) fn keep_gathered(&mut self, slots: &[CacheSlot], rows: &Gathered, floats: usize) {
        let Some(mut pending) = self.moment.take() else { return };
        let wanted: Vec<usize> = (0..slots.len()).filter(|&at| pending.device.take(slots[at])).collect();
        let mut keeping = pending.keep();
        for at in wanted {
            let row = rows.row(at, floats);
            keeping.row(row.header, |to| to.copy_from_slice(row.vector));
        }
        drop(keeping);
        self.moment = Some(pending);
    }

    /// As `keep_host`, of device rows in RAM.
    fn keep_tensors(&mut self, slots: &[CacheSlot], tensors: &TensorRows) {
        let Some(tier) = &self.device else { return };
        let Some(mut pending) = self.moment.take() else { return };
        let layout = tensors.layout();
        let wanted: Vec<CacheSlot> = slots.iter().copied().filter(|&slot| pending.device.take(slot)).collect();
        let mut keeping = pending.keep();
        for slot in wanted {
            // SAFETY: the caller has the tensors for himself, they hold every slot of the plan, and the layout says which there are.
            let (weights, scalar) = unsafe {
                let scalar = if layout.scalar_slot { *tensors.scalar(slot) } else { 0.0 };
                (std::slice::from_raw_parts(tensors.weights(slot), layout.dim), scalar)
            };
            keeping.row(&RowHeader { scalar, ..*tier.header(slot) }, |to| {
                let mut parts = to.chunks_exact_mut(layout.dim);
                parts.next().into_iter().for_each(|to| to.copy_from_slice(weights));
                for (which, to) in parts.enumerate() {
                    // SAFETY: as above.
                    to.copy_from_slice(unsafe {
                        std::slice::from_raw_parts(tensors.vector_slot(which, slot), layout.dim)
                    });
                }
            });
        }
        drop(keeping);
        self.moment = Some(pending);
    }
}

impl Pending {
    #[cold]
    fn keep_host(&mut self, host: &crate::host::HostTier, slots: &[CacheSlot]) {
        let wanted: Vec<CacheSlot> = slots.iter().copied().filter(|&slot| self.host.take(slot)).collect();
        let mut keeping = self.keep();
        for (at, &slot) in wanted.iter().enumerate() {
            if let Some(&later) = wanted.get(at + ROWS_AHEAD) {
                let row = host.arena().row(later);
                prefetch_address(row.header);
                let floats = host.vector(later).len();
                (0..floats).step_by(LINE_BYTES / 4).for_each(|float| prefetch_address(row.vector.wrapping_add(float)));
            }
            let row = host.row(slot);
            keeping.row(row.header, |to| to.copy_from_slice(row.vector));
        }
    }
}

impl Shared {
    /// As [`State::keep_host`], of device rows.
    pub(crate) fn keep_device(&self, state: &mut State, slots: &[CacheSlot]) {
        let Some(mut pending) = state.moment.take() else { return };
        let wanted: Vec<CacheSlot> = slots.iter().copied().filter(|&slot| pending.device.take(slot)).collect();
        for slots in wanted.chunks(ROWS_PER_GATHER) {
            match self.gather_device(state, slots) {
                Ok(rows) => {
                    let mut keeping = pending.keep();
                    rows.headers
                        .iter()
                        .zip(rows.vectors.chunks_exact(self.layout.vector_floats()))
                        .for_each(|(header, vector)| keeping.row(header, |to| to.copy_from_slice(vector)));
                }
                Err(error) => pending.images.fail(error),
            }
        }
        state.moment = Some(pending);
    }

    /// As [`State::keep_host`], of rows in slots of the tier that kernels run on; in `tensors`, where the device tier's are in RAM.
    pub(crate) fn keep_in_use(&self, state: &mut State, slots: &[CacheSlot], tensors: Option<&TensorRows>) {
        if state.moment.is_none() {
            return;
        }
        match (state.device.is_some(), tensors) {
            (false, _) => state.keep_host(slots),
            (true, Some(tensors)) => state.keep_tensors(slots, tensors),
            (true, None) => self.keep_device(state, slots),
        }
    }
}

impl TablePlan {
    /// The batch's rows are about to be updated, by a kernel in `tensors` where the device tier's are in RAM: copy what a moment wants
    /// of them. The caller holds `rows_in_use` for writing.
    pub(crate) fn keep_rows(&self, tensors: Option<&TensorRows>) {
        if !self.shared.has_moment.load(Ordering::Acquire) {
            return;
        }
        // A table that is closed or torn has no use for it.
        if let Ok(mut state) = self.shared.lock_any() {
            self.shared.keep_in_use(&mut state, &self.index.slots, tensors);
        }
    }
}
