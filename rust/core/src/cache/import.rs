//! Rows put in and taken out by id, outside of batches: a call does all that it was asked to do, or nothing, or says how much.
//!
//! Where a write to SSD fails amid a call, some of its rows may be on SSD already, and nothing can be written that would undo it. The call
//! then goes on to its end in RAM, past the budget, and the next one that writes is refused. What can fail otherwise comes before the first
//! change.

use super::rows::{Place, ROWS_PER_CALL, RowBlock};
use super::table::{Shared, State, Table};
use crate::config::OnFull;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowHeader, RowRef};
use crate::slots::RowState;
use crate::ssd::SsdTier;
use crate::types::{Id, NO_SLOT};

impl Table {
    /// Overwrite or add rows. `State` when a batch in flight uses one of them, `Input` for repeated ids, ids of another shard's buckets
    /// or arrays that do not fit, `Capacity`, `Storage` and `Corruption` of rows that are there and cannot be read.
    ///
    /// On an error nothing has changed, unless it says how many of the rows were imported: a table that drops rows when it is full takes
    /// them in parts, and more may be refused by the system when a write has failed.
    pub fn import_rows(&self, block: RowBlock<'_>) -> Result<()> {
        memory::check()?;
        let shared = &self.shared;
        let ids = shared.check_block(block)?;
        let _rows = shared.reading_rows()?;
        let mut state = shared.lock_any()?;
        shared.check_writable()?;
        shared.finish_loads(&mut state);
        shared.refuse_rows_in_use(&mut state, ids.iter().copied())?;
        match shared.config.on_full {
            OnFull::Error => shared.import_all(&mut state, block, &ids),
            OnFull::Evict => shared.import_in_parts(&mut state, block, &ids),
        }
    }

    /// Forget rows; how many of them the table had. Errors as `import_rows`.
    pub fn remove_rows(&self, ids: &[Id]) -> Result<u64> {
        let shared = &self.shared;
        let _rows = shared.reading_rows()?;
        let mut state = shared.lock()?;
        shared.check_writable()?;
        shared.finish_loads(&mut state);
        shared.refuse_rows_in_use(&mut state, ids.iter().copied())?;
        memory::check_room("remove rows", ids.len() * ROOM_FOR_A_ROW)?;
        let distinct: Vec<Id> = crate::index::dedupe(ids).unique;
        let mut places = shared.places_of_all(&state, &distinct)?;
        let (mut done, mut removed) = (0, 0);
        for (ids, places) in distinct.chunks(ROWS_PER_CALL).zip(places.chunks_mut(ROWS_PER_CALL)) {
            Shared::find_again(&state, ids, places);
            removed += shared
                .remove_now(&mut state, ids, places, removed > 0)
                .map_err(|error| shared.in_part(error, done, distinct.len(), "removed"))?;
            done += ids.len();
        }
        Ok(removed)
    }
}

/// Bytes that a call takes for each of its rows while it runs: ids, their table while they are compared, and where rows are. They are
/// asked for in one piece, before anything has changed.
const ROOM_FOR_A_ROW: usize = 128;

/// Rows of one hold of the table's lock, and where they are.
#[derive(Clone, Copy)]
struct Part<'a> {
    headers: &'a [RowHeader],
    /// `[n, V]`
    vectors: &'a [f32],
    ids: &'a [Id],
    places: &'a [Place],
    /// Whether rows of the same call are in the table already.
    begun: bool,
}

impl Shared {
    /// The ids of rows that are to be imported, each once and of this shard.
    fn check_block(&self, block: RowBlock<'_>) -> Result<Vec<Id>> {
        let floats = self.layout.vector_floats();
        let name = &self.config.name;
        if block.vectors.len() != block.headers.len() * floats {
            return Err(Error::new(
                Kind::Input,
                format!(
                    "table {name:?}: {} ids come with {} floats; {} are needed, {floats} a row",
                    block.headers.len(),
                    block.vectors.len(),
                    block.headers.len() * floats
                ),
            ));
        }
        let record_bytes = if self.ssd.is_some() { floats * 4 + size_of::<RowHeader>() } else { 0 };
        memory::check_room("import rows", block.headers.len() * (ROOM_FOR_A_ROW + record_bytes))?;
        let ids: Vec<Id> = block.headers.iter().map(|header| header.id).collect();
        let distinct = crate::index::dedupe(&ids);
        if distinct.unique.len() != ids.len() {
            // The first id whose number is not the next one was met before.
            let twice = distinct.inverse.iter().enumerate().find(|&(position, &number)| position != number as usize);
            let id = twice.map_or(0, |(position, _)| ids[position]);
            return Err(Error::new(Kind::Input, format!("table {name:?}: id {id} is given twice")));
        }
        let bucketing = self.config.bucketing();
        for header in block.headers {
            let bucket = bucketing.of(header.id);
            if !self.config.buckets.contains(&bucket) {
                return Err(Error::new(
                    Kind::Input,
                    format!(
                        "table {name:?}: id {} is of bucket {bucket}, this shard owns {:?}; import it on its owner",
                        header.id, self.config.buckets
                    ),
                ));
            }
        }
        Ok(ids)
    }

    /// The error of a call of which `done` of `all` rows are done.
    fn in_part(&self, error: Error, done: usize, all: usize, what: &str) -> Error {
        if done == 0 {
            return error;
        }
        error.context(format!(
            "table {:?}: the first {done} of the {all} rows were {what} and the others were not",
            self.config.name
        ))
    }

    /// Where rows are, exactly. None of them is in use.
    fn places_of_all(&self, state: &State, ids: &[Id]) -> Result<Vec<Place>> {
        let mut places = Vec::new();
        memory::reserve(&mut places, "find rows", ids.len())?;
        for ids in ids.chunks(ROWS_PER_CALL) {
            places.append(&mut self.places(state, ids)?);
        }
        Ok(places)
    }

    /// Where rows are by now whose places were found earlier under the same hold of the table's lock: making room moves rows that are in
    /// RAM, or writes them down.
    fn find_again(state: &State, ids: &[Id], places: &mut [Place]) {
        for (&id, place) in ids.iter().zip(places) {
            if let Place::Host(_) = *place {
                let slot = state.host.slots.get(id);
                *place = if slot == NO_SLOT { Place::Ssd } else { Place::Host(slot) };
            }
        }
    }

    /// Import rows of which all have a place, found before the first of them is imported.
    fn import_all(&self, state: &mut State, block: RowBlock<'_>, ids: &[Id]) -> Result<()> {
        let mut places = self.places_of_all(state, ids)?;
        self.check_import(state, ids, &places)?;
        let floats = self.layout.vector_floats();
        let mut done = 0;
        let parts = block.headers.chunks(ROWS_PER_CALL).zip(block.vectors.chunks(ROWS_PER_CALL * floats));
        let found = ids.chunks(ROWS_PER_CALL).zip(places.chunks_mut(ROWS_PER_CALL));
        for ((headers, vectors), (some, places)) in parts.zip(found) {
            Self::find_again(state, some, places);
            let part = Part { headers, vectors, ids: some, places, begun: done > 0 };
            self.import_part(state, part).map_err(|error| self.in_part(error, done, ids.len(), "imported"))?;
            done += some.len();
        }
        Ok(())
    }

    /// Import rows in parts, of which each may drop others to make room, also those of the parts before.
    fn import_in_parts(&self, state: &mut State, block: RowBlock<'_>, ids: &[Id]) -> Result<()> {
        let at_once = (self.capacity_rows(state) / 2).clamp(1, ROWS_PER_CALL as u64) as usize;
        let floats = self.layout.vector_floats();
        let mut done = 0;
        let parts = block.headers.chunks(at_once).zip(block.vectors.chunks(at_once * floats));
        for ((headers, vectors), some) in parts.zip(ids.chunks(at_once)) {
            let imported = self.places_with_room(state, some, done > 0).and_then(|places| {
                let part = Part { headers, vectors, ids: some, places: &places, begun: done > 0 };
                self.import_part(state, part)
            });
            imported.map_err(|error| self.in_part(error, done, ids.len(), "imported"))?;
            done += some.len();
        }
        Ok(())
    }

    /// Where the rows of a part are, after others were dropped so that the new ones among them fit.
    fn places_with_room(&self, state: &mut State, ids: &[Id], begun: bool) -> Result<Vec<Place>> {
        let mut places = self.places(state, ids)?;
        let new = new_rows(&places);
        if new > 0 {
            let room = self.check_capacity(state, new, ids);
            if room.is_err() && !(begun && self.ssd.as_ref().is_some_and(SsdTier::is_read_only)) {
                room?;
            }
            Self::find_again(state, ids, &mut places);
        }
        Ok(places)
    }

    /// Refuse rows of which not all would be taken: `Capacity`, `Memory`.
    fn check_import(&self, state: &mut State, ids: &[Id], places: &[Place]) -> Result<()> {
        let new = new_rows(places);
        if new > 0 {
            self.check_capacity(state, new, ids)?;
        }
        let indexed = self.ssd.as_ref().map_or(0, SsdTier::rows);
        // An entry of the index takes no more than it is charged with at most. Rows that are there already take none.
        if new > 0
            && ids.len() > ROWS_PER_CALL
            && self.ssd.is_some()
            && state.host.rows_beside_index(u64::MAX, indexed + new) == 0
        {
            return Err(self.index_full(state));
        }
        let homeless = places.iter().filter(|place| !matches!(place, Place::Host(_))).count();
        let free = state.host.slots.free_slots() as usize;
        state.host.reserve(if self.ssd.is_some() { homeless.min(free) } else { homeless })
    }

    /// Put the rows of a part in the table. On an error none of them is.
    fn import_part(&self, state: &mut State, part: Part<'_>) -> Result<()> {
        let floats = self.layout.vector_floats();
        let places = part.places;
        // What a checkpoint of before does not have was modified now.
        let stamped = state.lineage.is_wanted().then(|| {
            let now = |header: &RowHeader| RowHeader { modified_epoch: state.epoch, ..*header };
            part.headers.iter().map(now).collect::<Vec<RowHeader>>()
        });
        let headers = stamped.as_deref().unwrap_or(part.headers);
        let row = |position: usize| RowRef {
            header: &headers[position],
            vector: &part.vectors[position * floats..][..floats],
        };
        // Rows without a host slot take a free one; the rest goes straight to SSD, first, since only that can fail.
        let homeless: Vec<usize> =
            (0..places.len()).filter(|&position| !matches!(places[position], Place::Host(_))).collect();
        let known: Vec<bool> = homeless.iter().map(|&position| Self::is_on_ssd(state, places[position])).collect();
        let mut fit = homeless.len();
        if self.ssd.is_some() {
            fit = fit.min(state.host.slots.free_slots() as usize);
        }
        state.host.reserve(fit)?;
        // An export that could meet a part of these rows ends.
        self.contents_changed();
        self.keep_places(state, places);
        if let Some(ssd) = &self.ssd
            && fit < homeless.len()
        {
            let rows: Vec<RowRef<'_>> = homeless[fit..].iter().map(|&position| row(position)).collect();
            if let Err(error) = self.append(ssd, &rows, &known[fit..]) {
                let unchanged = !ssd.is_read_only() || !known[fit..].contains(&true);
                if unchanged && !part.begun {
                    return Err(error);
                }
                fit = homeless.len();
                state.host.reserve(fit).map_err(|refused| {
                    refused.context(format!(
                        "after {error}: of the rows that the SSD tier did not take, those that were there before may have their old \
                         values or the new ones, and the others are not there"
                    ))
                })?;
            }
        }
        for (index, (&position, &known)) in homeless.iter().zip(&known).enumerate() {
            if let (Place::Device(slot), Some(device)) = (places[position], &mut state.device) {
                device.slots.remove(slot, part.ids[position], false);
            }
            if index < fit {
                let on_ssd = if known { RowState::ON_SSD } else { RowState::default() };
                let slot = state.host.take(true)?.expect("overflow always has a slot");
                state.host.insert_row(slot, row(position), RowState::DIRTY.with(RowState::MODIFIED).with(on_ssd));
            }
        }
        for (position, place) in places.iter().enumerate() {
            if let Place::Host(slot) = *place {
                *state.host.header_mut(slot) = headers[position];
                state.host.vector_mut(slot).copy_from_slice(row(position).vector);
                state.host.slots.mark(slot, RowState::DIRTY.with(RowState::MODIFIED));
            }
        }
        state.rows += new_rows(places);
        self.fit_host_to_index(state);
        Ok(())
    }

    /// Whether a copy of a row, current or not, is on SSD.
    fn is_on_ssd(state: &State, place: Place) -> bool {
        match place {
            Place::Device(slot) => state.device.as_ref().is_some_and(|d| d.slots.state(slot).has(RowState::ON_SSD)),
            Place::Host(slot) => state.host.slots.state(slot).has(RowState::ON_SSD),
            Place::Ssd => true,
            Place::Nowhere => false,
        }
    }

    /// Forget rows, all or, on an error, none; where rows of the same call are `begun` to be forgotten, all also where the SSD tier cannot
    /// write any more. How many there were.
    fn remove_now(&self, state: &mut State, ids: &[Id], places: &[Place], begun: bool) -> Result<u64> {
        // As in `import_part`.
        self.contents_changed();
        if let Some(ssd) = &self.ssd {
            let there = ids.iter().zip(places).filter(|(_, place)| Self::is_on_ssd(state, **place));
            let on_ssd: Vec<Id> = there.map(|(&id, _)| id).collect();
            if let Err(error) = self.remove_on_ssd(ssd, &on_ssd) {
                if !(begun && ssd.is_read_only()) {
                    return Err(error);
                }
                ssd.remove_unwritten(&on_ssd);
            }
        }
        self.keep_places(state, places);
        let mut removed = Vec::new();
        for (&id, place) in ids.iter().zip(places) {
            match (*place, &mut state.device) {
                (Place::Device(slot), Some(device)) => device.slots.remove(slot, id, false),
                (Place::Host(slot), _) => state.host.remove(slot, false),
                (Place::Ssd, _) => {}
                _ => continue,
            }
            removed.push(id);
        }
        state.rows -= removed.len() as u64;
        self.note_left(state, &removed);
        Ok(removed.len() as u64)
    }
}

/// How many of some rows the table has not.
fn new_rows(places: &[Place]) -> u64 {
    places.iter().filter(|place| matches!(place, Place::Nowhere)).count() as u64
}
