//! Rows that a sweep takes: whether a row is dead, and how it leaves the tiers.
//!
//! A row that no plan has pinned leaves its slot. One that a plan has pinned and does not use yet becomes, where it is, the row that its id
//! would be born with, so that the plan finds what it would find if the row had never been there.
#![allow(unsafe_code)]

use super::Residency;
use super::find::is_in_ram;
use super::judge::{Dead, Judge};
use crate::cache::rows::Chunk;
use crate::error::Result;
use crate::host::Idle;
use crate::lifecycle::Sweep;
use crate::memory;
use crate::rows::{RowHeader, RowRef};
use crate::slots::RowState;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// The newest copy of the row is on SSD still, or in a tier below.
const UNREAD: RowState = RowState::LOADING.with(RowState::FAILED);

impl Residency {
    /// Judge the row in a slot of the host tier: if it is dead, add it to `dead`. Where that cannot be said yet, or a plan in place uses
    /// the row, add it to `later`. A slot whose row is not born, or is newer on the device, has nothing to judge.
    pub(super) fn judge_in_host(&mut self, slot: CacheSlot, sweep: &Sweep, dead: &mut Vec<Idle>, later: &mut Vec<Id>) {
        let state = self.host.slots.state(slot);
        if !state.is_current() {
            if state.has(UNREAD) {
                later.push(self.host.id(slot));
            }
            return;
        }
        let header = self.host.metadata(slot);
        let by_weights = sweep.needs_weights();
        if header.last_step > sweep.latest() || !by_weights && !sweep.kills(&header, &[]) {
            return;
        }
        match self.at_rest(slot, header.id) {
            None => later.push(header.id),
            Some(idle) => {
                let weights = &self.host.row(idle.quiet()).vector[..self.base.layout.dim];
                if !by_weights || sweep.kills(&header, weights) {
                    dead.push(idle);
                }
            }
        }
    }

    /// A slot of the host tier, where no plan that is in place uses its row.
    fn at_rest(&mut self, slot: CacheSlot, id: Id) -> Option<Idle> {
        if let Some(idle) = self.host.unpinned(slot) {
            return Some(idle);
        }
        // SAFETY: kernels use only the rows of plans that are in place, and this id is in none of them. A plan comes in place under the
        // table's lock, which whoever uses the slot holds until then.
        (!self.in_place.has(id)).then(|| unsafe { self.host.pinned_ahead(slot) })
    }

    /// The dead ones among the rows in some slots of the device tier. Those that plans in place use, or are about to bring there, are added
    /// to `later`.
    ///
    /// Errors: those of reads from the device.
    pub(super) fn judge_on_device(
        &mut self,
        slots: &[CacheSlot],
        sweep: &Sweep,
        later: &mut Vec<Id>,
    ) -> Result<Vec<CacheSlot>> {
        let by_weights = sweep.needs_weights();
        let mut dead = Vec::new();
        for &slot in slots {
            let tier = self.device_mut();
            let (header, state) = (*tier.header(slot), tier.slots.state(slot));
            if !state.is_current() {
                if state.has(UNREAD) && !state.has(RowState::PROVISIONAL) {
                    later.push(header.id);
                }
                continue;
            }
            if header.last_step > sweep.latest() || !by_weights && !sweep.kills(&header, &[]) {
                continue;
            }
            if tier.slots.is_pinned(slot) && self.in_place.has(header.id) {
                later.push(header.id);
            } else {
                dead.push(slot);
            }
        }
        if !by_weights {
            return Ok(dead);
        }
        let rows = self.copies_of(&dead)?;
        let (dim, floats) = (self.base.layout.dim, self.base.floats());
        let mut dies = (0..dead.len()).map(|at| {
            let row = rows.row(at, floats);
            sweep.kills(row.header, &row.vector[..dim])
        });
        dead.retain(|_| dies.next().unwrap_or(false));
        Ok(dead)
    }

    /// Bury rows of the host tier, which `by` takes. On an error none is buried.
    pub(super) fn bury_in_host(&mut self, dead: &[Idle], by: &Judge) -> Result<()> {
        if dead.is_empty() {
            return Ok(());
        }
        let dim = self.base.layout.dim;
        let of_slot =
            |idle: &Idle| by.dead(&self.host.metadata(idle.slot()), &self.host.row(idle.quiet()).vector[..dim]);
        let rows: Vec<Dead> = dead.iter().map(of_slot).collect();
        let on_ssd =
            dead.iter().zip(&rows).filter(|(idle, _)| self.host.slots.state(idle.slot()).has(RowState::ON_SSD));
        let copies = self.copies_of_host(dead)?;
        self.bury_copies(&on_ssd.map(|(_, row)| row.id).collect::<Vec<Id>>())?;
        self.keep_host(dead.iter().map(Idle::quiet));
        let (mut unborn, mut leaving, mut ids) = (Vec::new(), Vec::with_capacity(dead.len()), Vec::new());
        for (idle, row) in dead.iter().zip(&rows) {
            if self.host.slots.is_pinned(idle.slot()) {
                unborn.push((row.id, idle.slot()));
            } else {
                leaving.push(idle.slot());
                ids.push(row.id);
            }
        }
        self.host.remove_batch(&leaving, &ids);
        self.unbear_in_host(&unborn);
        self.died(&rows, copies, by);
        Ok(())
    }

    /// Bury rows of the device tier, which `by` takes. On an error none is buried.
    pub(super) fn bury_on_device(&mut self, dead: &[CacheSlot], by: &Judge) -> Result<()> {
        if dead.is_empty() {
            return Ok(());
        }
        let copies = self.copies_of_device(dead, by.name_needs_weights())?;
        self.ask_for_moment(dead)?;
        let Some(tier) = &self.device else { return Ok(()) };
        let (dim, floats) = (self.base.layout.dim, self.base.floats());
        let weights = |at: usize| copies.vectors.get(at * floats..at * floats + dim).unwrap_or_default();
        let of_slot = |(at, &slot): (usize, &CacheSlot)| by.dead(tier.header(slot), weights(at));
        let rows: Vec<Dead> = dead.iter().enumerate().map(of_slot).collect();
        let on_ssd = dead.iter().zip(&rows).filter(|(slot, _)| tier.slots.state(**slot).has(RowState::ON_SSD));
        self.bury_copies(&on_ssd.map(|(_, row)| row.id).collect::<Vec<Id>>())?;
        self.keep_device(dead);
        let mut shadows = Vec::new();
        for (&slot, &Dead { id, .. }) in dead.iter().zip(&rows) {
            let shadow = self.host.slots.get(id);
            if shadow != NO_SLOT {
                shadows.push((id, shadow));
            }
            let tier = self.device_mut();
            if tier.slots.is_pinned(slot) {
                // The next plan that wants the row brings it to the device, as it does with a row that another plan was to bring.
                tier.slots.set_state(slot, RowState::OCCUPIED.with(RowState::LOADING).with(RowState::PROVISIONAL));
                *tier.header_mut(slot) = RowHeader { id, ..RowHeader::default() };
                self.counts.became_provisional(1);
                self.absent_reads += 1;
            } else {
                tier.remove(slot, id);
            }
        }
        // Plans that pinned a row's slot in the host tier while it was on the device may still come for it.
        self.unbear_in_host(&shadows);
        self.died(&rows, copies, by);
        Ok(())
    }

    /// Give pinned rows of the host tier their initial values again: they are not born. Plans that are to train them count them anew.
    fn unbear_in_host(&mut self, rows: &[(Id, CacheSlot)]) {
        if rows.is_empty() {
            return;
        }
        self.bear_in_host(rows);
        for &(_, slot) in rows {
            self.host.slots.set_state(slot, RowState::OCCUPIED.with(RowState::PROVISIONAL));
        }
        self.counts.became_provisional(rows.len() as u64);
        self.absent_reads += rows.len() as u64;
    }

    /// Bury rows that were read from SSD and are in no other tier, and which `by` takes. On an error none is buried.
    pub(super) fn bury_read(&mut self, dead: &[RowRef<'_>], by: &Judge) -> Result<()> {
        if dead.is_empty() {
            return Ok(());
        }
        let copies = self.copies_of_read(dead.iter().copied())?;
        self.bury_copies(&dead.iter().map(|row| row.header.id).collect::<Vec<Id>>())?;
        let dim = self.base.layout.dim;
        let rows: Vec<Dead> = dead.iter().map(|row| by.dead(row.header, &row.vector[..dim])).collect();
        self.died(&rows, copies, by);
        Ok(())
    }

    /// Bury the dead ones among these rows that are on SSD alone.
    pub(super) fn bury_dead_on_ssd(&mut self, ids: &[Id], by: &Judge) -> Result<()> {
        let Some(ssd) = &self.base.ssd else { return Ok(()) };
        let in_ram = |id: Id| is_in_ram(&self.host, self.device.as_ref(), id);
        let elsewhere: Vec<Id> = ids.iter().copied().filter(|&id| !in_ram(id)).collect();
        let mut there = vec![false; elsewhere.len()];
        ssd.maybe_contains(&elsewhere, &mut there);
        let there = elsewhere.into_iter().zip(there).filter(|(_, there)| *there);
        let wanted: Vec<(Id, usize)> = there.enumerate().map(|(row, (id, _))| (id, row)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let (dim, floats) = (self.base.layout.dim, self.base.floats());
        let mut headers = memory::zeros("judge rows on SSD", wanted.len())?;
        let mut vectors = memory::zeros("judge rows on SSD", wanted.len() * floats)?;
        let absent = self.base.read_from_ssd(ssd, &wanted, &mut headers, &mut vectors);
        let absent = absent.map_err(|error| self.base.in_table(error))?;
        let dead_row = |&(_, at): &(Id, usize)| {
            let row = RowRef { header: &headers[at], vector: &vectors[at * floats..][..floats] };
            let dead = absent.binary_search(&(at as u32)).is_err() && by.sweep.kills(row.header, &row.vector[..dim]);
            dead.then_some(row)
        };
        let dead: Vec<RowRef<'_>> = wanted.iter().filter_map(dead_row).collect();
        self.bury_read(&dead, by)
    }

    /// Remove the copies on SSD of rows that are about to be buried. A tier that only reads forgets them without a word on disk, since it
    /// publishes no state any more.
    fn bury_copies(&mut self, ids: &[Id]) -> Result<()> {
        let Some(ssd) = &self.base.ssd else { return Ok(()) };
        match self.base.remove_on_ssd(ssd, ids) {
            Err(_) if ssd.is_read_only() => {
                ssd.remove_unwritten(ids);
                Ok(())
            }
            removed => removed,
        }
    }

    /// These rows, which `by` takes, are in no tier any more, and `copies` are to be told of. A delta says the sweep that took them. The ids
    /// of those are noted too that the checkpoints on which deltas build may have with other columns, and of those that died after such a
    /// checkpoint was saved.
    pub(super) fn died(&mut self, rows: &[Dead], copies: Chunk, by: &Judge) {
        if rows.is_empty() {
            return;
        }
        self.tell_dead(copies, by);
        let as_swept = self.is_as_swept();
        // An export that could meet some of them and not others ends.
        self.base.contents_changed();
        if as_swept {
            self.as_swept = Some(self.base.version());
        }
        self.counts.died(rows.len() as u64);
        by.count(rows, &mut self.evicted_by_rule);
        let is_late = self.epoch != by.epoch;
        let noted = rows.iter().filter(|row| is_late || self.lineage.must_list(row.modified_epoch));
        let noted: Vec<Id> = noted.map(|row| row.id).collect();
        self.lineage.note_swept(self.epoch, (rows.len() - noted.len()) as u64);
        self.note_left(&noted);
    }
}
