//! Rows by id, outside of batches: read them, find them, forget all. None of this touches a replacement policy's order of use.

use super::table::{Shared, State, Table};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::{RowAddress, RowHeader, RowMut};
use crate::slots::RowState;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Rows handled under one hold of the table's lock.
pub(super) const ROWS_PER_CALL: usize = 4096;

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
        self.read_rows_if(ids, false)
    }

    /// As [`Table::read_rows`], also of a table that waits for a load: for the load itself.
    pub fn read_incomplete_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        self.read_rows_if(ids, true)
    }

    fn read_rows_if(&self, ids: &[Id], incomplete: bool) -> Result<FoundRows> {
        let floats = self.shared.layout.vector_floats();
        let mut all = FoundRows::default();
        memory::reserve(&mut all.headers, "read rows", ids.len())?;
        memory::reserve(&mut all.vectors, "read rows", ids.len() * floats)?;
        for ids in ids.chunks(ROWS_PER_CALL) {
            let _rows = self.shared.reading_rows()?;
            let mut state = if incomplete { self.shared.lock_any()? } else { self.shared.lock()? };
            let mut some = self.shared.read_now(&mut state, ids)?;
            all.found.append(&mut some.found);
            all.headers.append(&mut some.headers);
            all.vectors.append(&mut some.vectors);
        }
        Ok(all)
    }

    /// `State` while a batch in flight uses any row.
    pub fn check_idle(&self) -> Result<()> {
        self.shared.refuse_in_use(&mut *self.shared.lock_any()?)
    }

    /// Forget every row, after a save beside training where one is under way. `State` while a batch in flight uses any.
    pub fn clear(&self) -> Result<()> {
        let (_rows, mut state) = loop {
            self.shared.check_process()?;
            self.shared.wait_for_moment()?;
            let locked = (self.shared.reading_rows()?, self.shared.lock_any()?);
            if locked.1.moment.is_none() {
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
pub(super) enum Place {
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

    pub(super) fn refuse_rows_in_use(&self, state: &mut State, ids: impl Iterator<Item = Id>) -> Result<()> {
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
            let slot = state.device.as_ref().map_or(NO_SLOT, |device| device.slot_with_row(id));
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
    #[allow(unsafe_code)]
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
                    // SAFETY: the buffers are long enough and are not touched before the fetch below is done.
                    let to = unsafe { RowMut::new(RowAddress { header, vector }) };
                    requests.push((ids[position], to));
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
    pub(super) fn places(&self, state: &State, ids: &[Id]) -> Result<Vec<Place>> {
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

    /// Rows in RAM or on the device are about to change or to go: keep what a moment wants of them.
    pub(super) fn keep_places(&self, state: &mut State, places: &[Place]) {
        if state.moment.is_none() {
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
}
