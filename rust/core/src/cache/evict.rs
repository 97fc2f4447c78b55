//! Making room: rows leave the host tier for the SSD tier, or the table.

use std::collections::HashSet;

use super::table::{Shared, State};
use crate::config::OnFull;
use crate::error::{Error, Kind, Result};
use crate::rows::RowRef;
use crate::slots::{RowState, SlotMap};
use crate::ssd::SsdTier;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Rows handed to the SSD tier in one call at most: bounds how much space it must find at once.
const ROWS_PER_APPEND: usize = 4096;

impl Shared {
    /// Evict unpinned rows by policy until `wanted` slots are free, or none is left to evict. Dirty ones are handed to the SSD tier
    /// first; on its error nothing has changed.
    pub(crate) fn make_room(&self, state: &mut State, wanted: u32) -> Result<()> {
        if self.ssd.is_none() {
            return Ok(());
        }
        while state.host.slots.free_slots() < wanted {
            let missing = (wanted - state.host.slots.free_slots()) as usize;
            if self.evict_some(state, missing.min(ROWS_PER_APPEND))? == 0 {
                break;
            }
        }
        Ok(())
    }

    fn evict_some(&self, state: &mut State, rows: usize) -> Result<usize> {
        let mut victims = Vec::with_capacity(rows);
        while victims.len() < rows {
            let headers = std::sync::Arc::clone(state.host.arena());
            let Some(slot) = state.host.slots.victim(|slot| header_id(&headers, slot)) else { break };
            victims.push(slot);
        }
        state.keep_host(&victims);
        if let Err(error) = self.write_down(state, &victims) {
            for &slot in &victims {
                let id = state.host.id(slot);
                state.host.slots.spare(slot, id);
            }
            return Err(error);
        }
        for &slot in &victims {
            let id = state.host.id(slot);
            state.host.slots.evict(slot, id);
        }
        state.host_stats.evictions += victims.len() as u64;
        state.host.shrink_overflow();
        self.fit_host_to_index(state);
        Ok(victims.len())
    }

    /// `ReadOnly` once a write of the SSD tier failed: nothing changes rows then, also where they are in RAM.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match &self.ssd {
            Some(ssd) if ssd.is_read_only() => {
                ssd.check_writable().map_err(|error| error.context(format!("table {:?}", self.config.name)))
            }
            _ => Ok(()),
        }
    }

    /// Append rows to the SSD tier, whose error says which table it is of and what is safe.
    pub(crate) fn append(&self, ssd: &SsdTier, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        ssd.append(rows, known).map_err(|error| self.not_written(error))
    }

    /// Remove rows that are on SSD from there; the error as that of [`Shared::append`].
    pub(crate) fn remove_on_ssd(&self, ssd: &SsdTier, ids: &[Id]) -> Result<()> {
        if ids.is_empty() { Ok(()) } else { ssd.remove(ids).map_err(|error| self.not_written(error)) }
    }

    fn not_written(&self, error: Error) -> Error {
        let table = format!("table {:?}", self.config.name);
        match error.kind() {
            Kind::Storage => error.context(format!(
                "{table}: nothing more can be written to its SSD tier, so it trains no further; its rows stay as the steps before left \
                 them, and can be read and saved elsewhere with Saver"
            )),
            _ => error.context(table),
        }
    }

    /// Hand the dirty ones among these current host rows to the SSD tier and mark them clean.
    pub(crate) fn write_down(&self, state: &mut State, slots: &[CacheSlot]) -> Result<()> {
        let Some(ssd) = &self.ssd else { return Ok(()) };
        for slots in slots.chunks(ROWS_PER_APPEND) {
            let dirty: Vec<CacheSlot> =
                slots.iter().copied().filter(|&slot| state.host.slots.state(slot).has(RowState::DIRTY)).collect();
            if dirty.is_empty() {
                continue;
            }
            let rows: Vec<RowRef<'_>> = dirty.iter().map(|&slot| state.host.row(slot)).collect();
            let known: Vec<bool> =
                dirty.iter().map(|&slot| state.host.slots.state(slot).has(RowState::ON_SSD)).collect();
            self.note_written_down(state, &dirty);
            self.append(ssd, &rows, &known)?;
            drop(rows);
            for slot in dirty {
                let row = state.host.slots.state(slot).without(RowState::DIRTY).with(RowState::ON_SSD);
                state.host.slots.set_state(slot, row);
            }
        }
        Ok(())
    }

    /// Hand every dirty row of the host and device tiers to the SSD tier. The caller keeps kernels out.
    pub(crate) fn write_down_all(&self, state: &mut State) -> Result<()> {
        let current: Vec<CacheSlot> =
            state.host.slots.occupied_from(0).filter(|&slot| state.host.slots.state(slot).is_current()).collect();
        self.write_down(state, &current)?;
        self.write_down_device(state)
    }

    /// Follow the SSD index's growth: fewer rows fit beside it in the host budget. This comes after a change that is done, so it does not
    /// fail: a row that cannot be written down stays where it is, and what is wrong is said by the next call that writes.
    pub(crate) fn fit_host_to_index(&self, state: &mut State) {
        let fits = self.host_rows_beside_index(state).max(1) as u32;
        let limit = state.host.slots.limit();
        // Shrinking moves rows, so it makes room for another 64 KiB of index at once.
        let ahead = ((64 * 1024 / state.host.row_bytes()) as u32).clamp(1, fits / 8 + 1);
        let target = if fits == state.host.slots.capacity() { fits } else { (fits - ahead.min(fits)).max(1) };
        if fits < limit || target > limit {
            state.host.slots.set_limit(target);
        }
        if fits < limit {
            self.move_below_limit(state);
        }
    }

    /// Move unpinned rows from slots above the limit to free ones below, evicting by policy where there is none.
    fn move_below_limit(&self, state: &mut State) {
        let limit = state.host.slots.limit();
        let capacity = state.host.slots.capacity();
        let above: Vec<CacheSlot> = state.host.slots.occupied_from(limit).filter(|&slot| slot < capacity).collect();
        for slot in above {
            if !state.host.slots.state(slot).is_current() || state.host.slots.is_pinned(slot) {
                continue;
            }
            state.keep_host(&[slot]);
            if let Some(to) = self.free_slot_to_move_to(state) {
                state.host.relocate(slot, to);
            } else if self.ssd.is_some() {
                if self.write_down(state, &[slot]).is_err() {
                    return;
                }
                state.host.remove(slot, true);
                state.host_stats.evictions += 1;
            }
        }
        if state.host.slots.occupied_from(limit).all(|slot| slot >= capacity) {
            state.host.arena().discard(limit..capacity);
        }
    }

    /// Move unpinned rows out of the overflow: into the budget where it has room, else down. On an error
    /// the rows that cannot be written stay, and only they.
    pub(crate) fn drain_overflow(&self, state: &mut State) -> Result<()> {
        if state.host.slots.overflow_used() == 0 {
            return Ok(());
        }
        let capacity = state.host.slots.capacity();
        let mut idle: Vec<CacheSlot> = state
            .host
            .slots
            .occupied_from(capacity)
            .filter(|&slot| state.host.slots.state(slot).is_current())
            .collect();
        idle.retain(|&slot| !state.host.slots.is_pinned(slot));
        state.keep_host(&idle);
        let mut failed = Ok(());
        for slot in idle {
            if let Some(to) = self.free_slot_to_move_to(state) {
                state.host.relocate(slot, to);
            } else if self.ssd.is_some() {
                if let Err(error) = self.write_down(state, &[slot]) {
                    failed = Err(error);
                    continue;
                }
                state.host.remove(slot, true);
                state.host_stats.evictions += 1;
            }
        }
        state.host.shrink_overflow();
        failed
    }

    /// Drop `rows` rows from the table by policy (`on_full = evict`): first those that are on SSD alone, the oldest first, then those in
    /// RAM. Rows that plans use stay, and those `needed` by the caller, who may know already where they are.
    pub(crate) fn drop_rows(&self, state: &mut State, rows: u64, needed: &[Id]) -> Result<()> {
        debug_assert_eq!(self.config.on_full, OnFull::Evict);
        let needed: HashSet<Id> = needed.iter().copied().collect();
        // An export that could miss some of them ends.
        self.contents_changed();
        let mut left = rows;
        left -= self.drop_from_ssd(state, left, &needed)?;
        left -= self.drop_from_host(state, left, &needed)?;
        self.drop_from_device(state, left, &needed)
    }

    /// Drop up to `rows` rows that are on SSD alone; how many.
    fn drop_from_ssd(&self, state: &mut State, rows: u64, needed: &HashSet<Id>) -> Result<u64> {
        let Some(ssd) = &self.ssd else { return Ok(0) };
        let in_tier = |slots: &SlotMap| u64::from(slots.used()) + u64::from(slots.overflow_used());
        let in_ram = in_tier(&state.host.slots) + state.device.as_ref().map_or(0, |device| in_tier(&device.slots));
        // Where RAM has all rows, the SSD tier would look at each segment in vain.
        let rows = rows.min(state.rows.saturating_sub(in_ram.saturating_sub(state.provisional)));
        if rows == 0 {
            return Ok(0);
        }
        let (host, device) = (&state.host, &state.device);
        let in_ram =
            |id: Id| host.slots.get(id) != NO_SLOT || device.as_ref().is_some_and(|d| d.slots.get(id) != NO_SLOT);
        let dropped = ssd.evict(rows, &|id| needed.contains(&id) || in_ram(id))?;
        self.note_dropped(state, &dropped);
        Ok(dropped.len() as u64)
    }

    /// Drop up to `rows` rows of the host tier, from the SSD tier too; how many. On an error none is dropped.
    fn drop_from_host(&self, state: &mut State, rows: u64, needed: &HashSet<Id>) -> Result<u64> {
        let headers = std::sync::Arc::clone(state.host.arena());
        let (mut victims, mut spared) = (Vec::new(), Vec::new());
        while (victims.len() as u64) < rows {
            let Some(slot) = state.host.slots.victim(|slot| header_id(&headers, slot)) else { break };
            let id = state.host.id(slot);
            if needed.contains(&id) { spared.push((slot, id)) } else { victims.push((slot, id)) }
        }
        let removed = self.remove_victims(&state.host.slots, &victims);
        if removed.is_err() {
            spared.append(&mut victims);
        }
        for (slot, id) in spared {
            state.host.slots.spare(slot, id);
        }
        removed?;
        let (slots, ids): (Vec<CacheSlot>, Vec<Id>) = victims.into_iter().unzip();
        state.keep_host(&slots);
        for (&slot, &id) in slots.iter().zip(&ids) {
            state.host.slots.evict(slot, id);
        }
        state.host.shrink_overflow();
        state.host_stats.evictions += ids.len() as u64;
        self.note_dropped(state, &ids);
        Ok(ids.len() as u64)
    }

    /// Drop up to `rows` rows of the device tier, from the SSD tier too. On an error none is dropped.
    fn drop_from_device(&self, state: &mut State, rows: u64, needed: &HashSet<Id>) -> Result<()> {
        let (host, Some(device)) = (&state.host, &mut state.device) else { return Ok(()) };
        let (mut victims, mut spared) = (Vec::new(), Vec::new());
        while (victims.len() as u64) < rows {
            let Some(slot) = device.victim() else { break };
            let id = device.id(slot);
            // A plan that has pinned its place in the host tier may come for it.
            let stays = needed.contains(&id) || host.slots.get(id) != NO_SLOT;
            if stays { spared.push((slot, id)) } else { victims.push((slot, id)) }
        }
        let removed = self.remove_victims(&device.slots, &victims);
        if removed.is_err() {
            spared.append(&mut victims);
        }
        for (slot, id) in spared {
            device.slots.spare(slot, id);
        }
        removed?;
        let (slots, ids): (Vec<CacheSlot>, Vec<Id>) = victims.into_iter().unzip();
        self.keep_device(state, &slots);
        if let Some(device) = &mut state.device {
            for (&slot, &id) in slots.iter().zip(&ids) {
                device.slots.evict(slot, id);
            }
        }
        state.device_stats.evictions += ids.len() as u64;
        self.note_dropped(state, &ids);
        Ok(())
    }

    /// Remove from SSD what it has of rows that are about to be dropped.
    fn remove_victims(&self, slots: &SlotMap, victims: &[(CacheSlot, Id)]) -> Result<()> {
        let Some(ssd) = &self.ssd else { return Ok(()) };
        let there = victims.iter().filter(|(slot, _)| slots.state(*slot).has(RowState::ON_SSD));
        self.remove_on_ssd(ssd, &there.map(|&(_, id)| id).collect::<Vec<Id>>())
    }

    fn note_dropped(&self, state: &mut State, ids: &[Id]) {
        state.rows -= ids.len() as u64;
        state.dropped_rows += ids.len() as u64;
        self.note_left(state, ids);
    }

    /// Rows left the table.
    pub(crate) fn note_left(&self, state: &mut State, ids: &[Id]) {
        let before = state.lineage.bytes();
        state.lineage.note_left(state.epoch, ids);
        // On SSD their ids take room of rows in RAM; without it they have room beside the budget.
        if self.ssd.is_some() && state.lineage.bytes() > before {
            self.fit_host_to_index(state);
        }
    }
}

#[allow(unsafe_code)]
fn header_id(arena: &crate::rows::Arena, slot: CacheSlot) -> Id {
    // SAFETY: the slot is occupied, so valid in the arena; the caller holds the table's lock, under which headers are written.
    unsafe { (*arena.row(slot).header).id }
}
