//! Rows by id, outside of batches: read, overwrite, forget. None of this touches a replacement policy's order of use.

use super::table::{Shared, State, Table};
use crate::config::OnFull;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowHeader, RowMut, RowRef};
use crate::slots::RowState;
use crate::ssd::SsdTier;
use crate::types::{CacheSlot, Id, NO_SLOT, bucket_of};

/// Rows handled under one hold of the table's lock.
const ROWS_PER_CALL: usize = 4096;

/// Rows to write: `n` headers (id, metadata, scalar slot) and `[n, V]` vector parts.
#[derive(Clone, Copy, Debug)]
pub struct RowBlock<'a> {
    /// `[n]`
    pub headers: &'a [RowHeader],
    /// `[n, V]`
    pub vectors: &'a [f32],
}

/// Rows read, in the order asked for.
#[derive(Clone, Debug, Default)]
pub struct FoundRows {
    /// `[n]`: whether the table has the row; otherwise its initial values stand here.
    pub found: Vec<bool>,
    /// `[n]`
    pub headers: Vec<RowHeader>,
    /// `[n, V]`
    pub vectors: Vec<f32>,
}

impl Table {
    /// The rows of `ids` (`[n]`, repetitions allowed) as they are now; initial values for ids the table does not have.
    pub fn read_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        let floats = self.shared.layout.vector_floats();
        let mut all = FoundRows::default();
        memory::reserve(&mut all.headers, "read rows", ids.len())?;
        memory::reserve(&mut all.vectors, "read rows", ids.len() * floats)?;
        for ids in ids.chunks(ROWS_PER_CALL) {
            let _rows = self.shared.reading_rows()?;
            let mut state = self.shared.lock()?;
            let mut some = self.shared.read_now(&mut state, ids)?;
            all.found.append(&mut some.found);
            all.headers.append(&mut some.headers);
            all.vectors.append(&mut some.vectors);
        }
        Ok(all)
    }

    /// Overwrite or add rows. `State` when a batch in flight uses one of them, `Input` for repeated ids, ids of another shard's buckets
    /// or arrays that do not fit, `Capacity`. On an error of any but the SSD tier nothing has changed.
    pub fn import_rows(&self, block: RowBlock<'_>) -> Result<()> {
        memory::check()?;
        let floats = self.shared.layout.vector_floats();
        let name = &self.shared.config.name;
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
        let ids: Vec<Id> = block.headers.iter().map(|header| header.id).collect();
        let distinct = crate::index::dedupe(&ids);
        if distinct.unique.len() != ids.len() {
            // The first id whose number is not the next one was met before.
            let twice = distinct.inverse.iter().enumerate().find(|&(position, &number)| position != number as usize);
            let id = twice.map_or(0, |(position, _)| ids[position]);
            return Err(Error::new(Kind::Input, format!("table {name:?}: id {id} is given twice")));
        }
        for header in block.headers {
            let bucket = bucket_of(header.id, self.shared.config.total_num_buckets);
            if !self.shared.config.buckets.contains(&bucket) {
                return Err(Error::new(
                    Kind::Input,
                    format!(
                        "table {name:?}: id {} is of bucket {bucket}, this shard owns {:?}; import it on its owner",
                        header.id, self.shared.config.buckets
                    ),
                ));
            }
        }
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock_any()?;
        self.shared.check_writable()?;
        self.shared.finish_loads(&mut state);
        self.shared.refuse_rows_in_use(&mut state, block.headers.iter().map(|header| header.id))?;
        if self.shared.config.on_full == OnFull::Error && ids.len() > ROWS_PER_CALL {
            self.shared.check_import(&mut state, &ids)?;
        }
        // Where rows may leave a full table, those of one part can make room for those of the next.
        let at_once = match self.shared.config.on_full {
            OnFull::Evict => (self.shared.capacity_rows(&state) / 2).clamp(1, ROWS_PER_CALL as u64) as usize,
            OnFull::Error => ROWS_PER_CALL,
        };
        for (headers, vectors) in block.headers.chunks(at_once).zip(block.vectors.chunks(at_once * floats)) {
            self.shared.import_now(&mut state, headers, vectors)?;
            self.shared.contents_changed();
        }
        Ok(())
    }

    /// Forget rows; how many of them the table had. Errors as `import_rows`.
    pub fn remove_rows(&self, ids: &[Id]) -> Result<u64> {
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock()?;
        self.shared.check_writable()?;
        self.shared.finish_loads(&mut state);
        self.shared.refuse_rows_in_use(&mut state, ids.iter().copied())?;
        let distinct: Vec<Id> = crate::index::dedupe(ids).unique;
        let mut removed = 0;
        for ids in distinct.chunks(ROWS_PER_CALL) {
            removed += self.shared.remove_now(&mut state, ids)?;
            self.shared.contents_changed();
        }
        Ok(removed)
    }

    /// `State` while a batch in flight uses any row.
    pub fn check_idle(&self) -> Result<()> {
        self.shared.refuse_in_use(&mut *self.shared.lock_any()?)
    }

    /// Forget every row, after a save beside training where one is under way. `State` while a batch in flight uses any.
    pub fn clear(&self) -> Result<()> {
        let (_rows, mut state) = loop {
            self.shared.check_process()?;
            self.shared.wait_for_snapshot();
            let locked = (self.shared.reading_rows()?, self.shared.lock_any()?);
            if locked.1.snapshot.is_none() {
                break locked;
            }
        };
        // The slots are about to be other rows': no read may end in one of them any more.
        self.shared.finish_loads(&mut state);
        self.shared.refuse_in_use(&mut state)?;
        if let Some(ssd) = &self.shared.ssd {
            ssd.clear()?;
        }
        state.host.clear(self.shared.config.policy);
        if let Some(device) = &mut state.device {
            device.clear(self.shared.config.policy);
        }
        state.rows = 0;
        state.provisional = 0;
        state.lineage.forget();
        self.shared.contents_changed();
        Ok(())
    }
}

/// Where a row is that is not in use.
#[derive(Clone, Copy)]
enum Place {
    Device(CacheSlot),
    Host(CacheSlot),
    /// On SSD only, verified.
    Ssd,
    Nowhere,
}

impl Shared {
    fn in_use(&self, what: impl std::fmt::Display) -> Error {
        Error::new(
            Kind::State,
            format!("table {:?}: {what}; finish or drop those batches (prefetched ones too) first", self.config.name),
        )
    }

    fn refuse_in_use(&self, state: &mut State) -> Result<()> {
        let pinned = state.host.slots.pinned() + state.device.as_mut().map_or(0, |device| device.slots.pinned());
        if pinned > 0 {
            return Err(self.in_use(format!("{pinned} rows are used by batches in flight")));
        }
        Ok(())
    }

    fn refuse_rows_in_use(&self, state: &mut State, ids: impl Iterator<Item = Id>) -> Result<()> {
        for id in ids {
            let host = state.host.slots.get(id);
            let device = state.device.as_ref().map_or(NO_SLOT, |device| device.slots.get(id));
            if host != NO_SLOT && state.host.slots.is_pinned(host)
                || device != NO_SLOT && state.device.as_mut().is_some_and(|tier| tier.slots.is_pinned(device))
            {
                return Err(self.in_use(format!("the row of id {id} is used by a batch in flight")));
            }
        }
        Ok(())
    }

    /// Read rows from whatever tier they are in. The caller keeps kernels out.
    pub(crate) fn read_now(&self, state: &mut State, ids: &[Id]) -> Result<FoundRows> {
        self.finish_loads(state);
        let floats = self.layout.vector_floats();
        let mut rows = FoundRows {
            found: vec![false; ids.len()],
            headers: memory::zeros("read rows", ids.len())?,
            vectors: memory::zeros("read rows", ids.len() * floats)?,
        };
        let mut on_device = Vec::new();
        let mut elsewhere = Vec::new();
        for (position, &id) in ids.iter().enumerate() {
            let slot = state.device.as_ref().map_or(NO_SLOT, |device| device.slots.get(id));
            if slot != NO_SLOT {
                on_device.push((position, slot));
                continue;
            }
            let slot = state.host.slots.get(id);
            if slot == NO_SLOT {
                elsewhere.push(position);
                continue;
            }
            let row = state.host.slots.state(slot);
            if row.has(RowState::FAILED) {
                return Err(self.unread_row(id));
            }
            let source = state.host.row(slot);
            rows.found[position] = row.is_current();
            rows.headers[position] = *source.header;
            rows.vectors[position * floats..][..floats].copy_from_slice(source.vector);
        }
        if !on_device.is_empty() {
            let slots: Vec<CacheSlot> = on_device.iter().map(|&(_, slot)| slot).collect();
            let gathered = self.gather_device(state, &slots)?;
            for (index, &(position, slot)) in on_device.iter().enumerate() {
                let row = gathered.row(index, floats);
                rows.found[position] = state.device.as_ref().is_some_and(|tier| tier.slots.state(slot).is_current());
                rows.headers[position] = *row.header;
                rows.vectors[position * floats..][..floats].copy_from_slice(row.vector);
            }
        }
        self.read_from_ssd(ids, &elsewhere, &mut rows)?;
        Ok(rows)
    }

    /// Read the rows at `positions` of `ids` from SSD, or give them their initial values.
    fn read_from_ssd(&self, ids: &[Id], positions: &[usize], rows: &mut FoundRows) -> Result<()> {
        let floats = self.layout.vector_floats();
        let wanted: Vec<Id> = positions.iter().map(|&position| ids[position]).collect();
        let mut maybe = vec![false; wanted.len()];
        let mut targets = Vec::new();
        if let Some(ssd) = &self.ssd {
            ssd.maybe_contains(&wanted, &mut maybe);
            let mut requests = Vec::new();
            for (&position, &there) in positions.iter().zip(&maybe) {
                if there {
                    let header = &raw mut rows.headers[position];
                    let vector = rows.vectors[position * floats..][..floats].as_mut_ptr();
                    requests.push((ids[position], RowMut { header, vector }));
                    targets.push(position);
                    rows.found[position] = true;
                }
            }
            if !requests.is_empty() {
                for absent in ssd.fetch(requests).wait()? {
                    rows.found[targets[absent as usize]] = false;
                }
            }
        }
        for &position in positions {
            if !rows.found[position] {
                let id = ids[position];
                rows.headers[position] = RowHeader { id, ..RowHeader::default() };
                let vector = &mut rows.vectors[position * floats..][..floats];
                vector.fill(0.0);
                self.birth.fill(id, &mut vector[..self.layout.dim]);
            }
        }
        Ok(())
    }

    /// Where rows are, exactly. None of them is in use.
    fn places(&self, state: &State, ids: &[Id]) -> Result<Vec<Place>> {
        let mut places = Vec::with_capacity(ids.len());
        let mut doubtful = Vec::new();
        for (position, &id) in ids.iter().enumerate() {
            let device = state.device.as_ref().map_or(NO_SLOT, |device| device.slots.get(id));
            let host = state.host.slots.get(id);
            places.push(if device != NO_SLOT {
                Place::Device(device)
            } else if host != NO_SLOT {
                Place::Host(host)
            } else {
                doubtful.push(position);
                Place::Nowhere
            });
        }
        let Some(ssd) = &self.ssd else { return Ok(places) };
        let wanted: Vec<Id> = doubtful.iter().map(|&position| ids[position]).collect();
        let mut maybe = vec![false; wanted.len()];
        ssd.maybe_contains(&wanted, &mut maybe);
        doubtful.retain({
            let mut maybe = maybe.into_iter();
            move |_| maybe.next().unwrap_or(false)
        });
        if doubtful.is_empty() {
            return Ok(places);
        }
        let wanted: Vec<Id> = doubtful.iter().map(|&position| ids[position]).collect();
        let all: Vec<usize> = (0..wanted.len()).collect();
        let floats = self.layout.vector_floats();
        let mut scratch = FoundRows {
            found: vec![false; wanted.len()],
            headers: memory::zeros("read rows", wanted.len())?,
            vectors: memory::zeros("read rows", wanted.len() * floats)?,
        };
        self.read_from_ssd(&wanted, &all, &mut scratch)?;
        for (&position, found) in doubtful.iter().zip(scratch.found) {
            if found {
                places[position] = Place::Ssd;
            }
        }
        Ok(places)
    }

    /// Rows in RAM or on the device are about to change or to go: keep what a snapshot wants of them.
    fn keep_places(&self, state: &mut State, places: &[Place]) {
        if state.snapshot.is_none() {
            return;
        }
        let (mut host, mut device) = (Vec::new(), Vec::new());
        for place in places {
            match place {
                Place::Host(slot) => host.push(*slot),
                Place::Device(slot) => device.push(*slot),
                Place::Ssd | Place::Nowhere => {}
            }
        }
        state.keep_host(&host);
        self.keep_device(state, &device);
    }

    /// Refuse rows that come in several parts where not all of them would be taken: `Capacity`, `Memory`.
    fn check_import(&self, state: &mut State, ids: &[Id]) -> Result<()> {
        let known = |state: &State| state.rows + state.provisional;
        let indexed = self.ssd.as_ref().map_or(0, SsdTier::rows);
        // An entry of the index takes no more than it is charged with at most.
        let fits = |state: &State, new: u64| {
            known(state) + new <= self.capacity_rows(state)
                && (self.ssd.is_none() || state.host.rows_beside_index(u64::MAX, indexed + new) > 0)
        };
        if !fits(state, ids.len() as u64) {
            let mut new = 0;
            for ids in ids.chunks(ROWS_PER_CALL) {
                new += self.places(state, ids)?.iter().filter(|place| matches!(place, Place::Nowhere)).count() as u64;
            }
            self.check_capacity(state, new, ids)?;
            if !fits(state, new) {
                return Err(self.index_full(state));
            }
        }
        let homeless = ids.iter().filter(|&&id| state.host.slots.get(id) == NO_SLOT).count();
        let free = state.host.slots.free_slots() as usize;
        state.host.reserve(if self.ssd.is_some() { homeless.min(free) } else { homeless })
    }

    fn import_now(&self, state: &mut State, headers: &[RowHeader], vectors: &[f32]) -> Result<()> {
        let floats = self.layout.vector_floats();
        // What a checkpoint of before does not have was modified now.
        let stamped = state.lineage.is_wanted().then(|| {
            let now = |header: &RowHeader| RowHeader { modified_epoch: state.epoch, ..*header };
            headers.iter().map(now).collect::<Vec<RowHeader>>()
        });
        let headers = stamped.as_deref().unwrap_or(headers);
        let ids: Vec<Id> = headers.iter().map(|header| header.id).collect();
        let places = self.places(state, &ids)?;
        let new = places.iter().filter(|place| matches!(place, Place::Nowhere)).count() as u64;
        if new > 0 {
            self.check_capacity(state, new, &ids)?;
        }
        self.keep_places(state, &places);
        let row =
            |position: usize| RowRef { header: &headers[position], vector: &vectors[position * floats..][..floats] };
        // Rows without a host slot take a free one; the rest goes straight to SSD, first, since only that can fail.
        let homeless: Vec<usize> =
            (0..ids.len()).filter(|&position| !matches!(places[position], Place::Host(_))).collect();
        let fit = if self.ssd.is_some() {
            (state.host.slots.free_slots() as usize).min(homeless.len())
        } else {
            homeless.len()
        };
        state.host.reserve(fit)?;
        let known = |state: &State, position: usize| match places[position] {
            Place::Device(slot) => state.device.as_ref().is_some_and(|d| d.slots.state(slot).has(RowState::ON_SSD)),
            Place::Ssd => true,
            Place::Host(_) | Place::Nowhere => false,
        };
        if let Some(ssd) = &self.ssd {
            let rows: Vec<RowRef<'_>> = homeless[fit..].iter().map(|&position| row(position)).collect();
            let known: Vec<bool> = homeless[fit..].iter().map(|&position| known(state, position)).collect();
            if !rows.is_empty() {
                self.append(ssd, &rows, &known)?;
            }
        }
        for (index, &position) in homeless.iter().enumerate() {
            let on_ssd = if known(state, position) { RowState::ON_SSD } else { RowState::default() };
            if let (Place::Device(slot), Some(device)) = (places[position], &mut state.device) {
                device.slots.remove(slot, ids[position], false);
            }
            if index < fit {
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
        state.rows += new;
        self.fit_host_to_index(state)
    }

    fn remove_now(&self, state: &mut State, ids: &[Id]) -> Result<u64> {
        let places = self.places(state, ids)?;
        if let Some(ssd) = &self.ssd {
            let on_ssd: Vec<Id> = ids
                .iter()
                .zip(&places)
                .filter(|(_, place)| match **place {
                    Place::Device(slot) => {
                        state.device.as_ref().is_some_and(|d| d.slots.state(slot).has(RowState::ON_SSD))
                    }
                    Place::Host(slot) => state.host.slots.state(slot).has(RowState::ON_SSD),
                    Place::Ssd => true,
                    Place::Nowhere => false,
                })
                .map(|(&id, _)| id)
                .collect();
            if !on_ssd.is_empty() {
                ssd.remove(&on_ssd)?;
            }
        }
        self.keep_places(state, &places);
        let mut removed = Vec::new();
        for (&id, place) in ids.iter().zip(&places) {
            match (*place, &mut state.device) {
                (Place::Device(slot), Some(device)) => device.slots.remove(slot, id, false),
                (Place::Host(slot), _) => state.host.remove(slot, false),
                (Place::Ssd, _) => {}
                _ => continue,
            }
            removed.push(id);
        }
        state.rows -= removed.len() as u64;
        self.note_left(state, &removed)?;
        Ok(removed.len() as u64)
    }
}
