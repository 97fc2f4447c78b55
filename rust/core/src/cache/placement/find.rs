//! Lookup by id outside of batches: locations and copies of rows. None of it changes the order of use of a policy.

use super::Placement;
use crate::cache::row_blocks::FoundRows;
use crate::error::{Error, Kind, Result};
use crate::rows::RowHeader;
use crate::runtime::memory;
use crate::slots::RowState;
use crate::tiers::{DeviceTier, HostTier, NoKernelWrites};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// Location of a row that no plan uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowLocation {
    Device(CacheSlot),
    Host(CacheSlot),
    /// On SSD and in no other tier. The record was read to make sure.
    Ssd,
    Absent,
}

/// True if an id has a slot in RAM or on the device.
pub(crate) fn is_in_ram(host: &HostTier, device: Option<&DeviceTier>, id: Id) -> bool {
    host.slots.get(id) != NO_SLOT || device.is_some_and(|tier| tier.slots.get(id) != NO_SLOT)
}

impl Placement {
    /// Errors: `State` while a batch in flight uses any row.
    pub(crate) fn check_unused(&mut self) -> Result<()> {
        match self.pinned() {
            0 => Ok(()),
            pinned => Err(self.in_use_error(format!("{pinned} rows are used by batches in flight"))),
        }
    }

    /// Errors: `State` while a batch in flight uses one of these rows.
    pub(crate) fn check_rows_unused(&mut self, ids: impl Iterator<Item = Id>) -> Result<()> {
        for id in ids {
            let host = self.host.slots.get(id);
            let device = self.device.as_ref().map_or(NO_SLOT, |device| device.slots.get(id));
            if host != NO_SLOT && self.host.slots.is_pinned(host)
                || device != NO_SLOT && self.device.as_mut().is_some_and(|tier| tier.slots.is_pinned(device))
            {
                return Err(self.in_use_error(format!("the row of id {id} is used by a batch in flight")));
            }
        }
        Ok(())
    }

    pub(crate) fn in_use_error(&self, subject: impl std::fmt::Display) -> Error {
        Kind::State.error(format!(
            "table {:?}: {subject}; finish or drop those batches (prefetched ones too) first",
            self.context.config.name
        ))
    }

    /// Like `Residency::read`, but does not continue a sweep: an export of these rows would be cancelled when one of
    /// them expires.
    pub(crate) fn read_unswept(&mut self, ids: &[Id], no_writes: NoKernelWrites<'_>) -> Result<FoundRows> {
        self.finish_loads();
        let floats = self.context.floats();
        let mut rows = FoundRows {
            found: vec![false; ids.len()],
            headers: memory::zeros("read rows", ids.len())?,
            vectors: memory::zeros("read rows", ids.len() * floats)?,
        };
        let mut on_device = Vec::new();
        let mut elsewhere = Vec::new();
        for (position, &id) in ids.iter().enumerate() {
            let slot = self.device.as_ref().map_or(NO_SLOT, |device| device.slot_with_row(id));
            if slot != NO_SLOT {
                on_device.push((position, slot));
                continue;
            }
            let slot = self.host.slots.get(id);
            if slot == NO_SLOT {
                elsewhere.push(position);
                continue;
            }
            let row = self.host.slots.state(slot);
            if row.has(RowState::FAILED) {
                return Err(self.unread_row_error(id));
            }
            let source = self.host.row(no_writes.read_access(slot));
            rows.found[position] = row.is_current();
            rows.headers[position] = *source.header;
            rows.vectors[position * floats..][..floats].copy_from_slice(source.vector);
        }
        if !on_device.is_empty() {
            let slots: Vec<CacheSlot> = on_device.iter().map(|&(_, slot)| slot).collect();
            let gathered = self.copies_of(&slots)?;
            for (index, &(position, slot)) in on_device.iter().enumerate() {
                let row = gathered.row(index, floats);
                rows.found[position] = self.device.as_ref().is_some_and(|tier| tier.slots.state(slot).is_current());
                rows.headers[position] = *row.header;
                rows.vectors[position * floats..][..floats].copy_from_slice(row.vector);
            }
        }
        self.read_from_ssd(ids, &elsewhere, &mut rows)?;
        Ok(rows)
    }

    /// Reads the rows at `positions` of `ids` from SSD, or fills in their initial values.
    fn read_from_ssd(&self, ids: &[Id], positions: &[usize], rows: &mut FoundRows) -> Result<()> {
        let floats = self.context.floats();
        let wanted: Vec<Id> = positions.iter().map(|&position| ids[position]).collect();
        let mut maybe = vec![false; wanted.len()];
        if let Some(ssd) = &self.context.ssd {
            ssd.maybe_contains(&wanted, &mut maybe);
            let mut requests = Vec::new();
            for (&position, &there) in positions.iter().zip(&maybe) {
                if there {
                    requests.push((ids[position], position));
                }
            }
            if !requests.is_empty() {
                let absent = self.context.read_from_ssd(ssd, &requests, &mut rows.headers, &mut rows.vectors)?;
                for &(_, position) in &requests {
                    rows.found[position] = true;
                }
                for number in absent {
                    rows.found[requests[number as usize].1] = false;
                }
            }
        }
        for &position in positions {
            if !rows.found[position] {
                let id = ids[position];
                rows.headers[position] = RowHeader { id, ..RowHeader::default() };
                self.context.fill_initial(id, &mut rows.vectors[position * floats..][..floats]);
            }
        }
        Ok(())
    }

    /// Returns the exact location of each row. Requires that no plan uses any of them.
    pub(crate) fn find(&self, ids: &[Id]) -> Result<Vec<RowLocation>> {
        let mut found = Vec::with_capacity(ids.len());
        let mut doubtful = Vec::new();
        for (position, &id) in ids.iter().enumerate() {
            let device = self.device.as_ref().map_or(NO_SLOT, |device| device.slots.get(id));
            let host = self.host.slots.get(id);
            found.push(if device != NO_SLOT {
                RowLocation::Device(device)
            } else if host != NO_SLOT {
                RowLocation::Host(host)
            } else {
                doubtful.push(position);
                RowLocation::Absent
            });
        }
        let Some(ssd) = &self.context.ssd else { return Ok(found) };
        let wanted: Vec<Id> = doubtful.iter().map(|&position| ids[position]).collect();
        let mut maybe = vec![false; wanted.len()];
        ssd.maybe_contains(&wanted, &mut maybe);
        doubtful.retain({
            let mut maybe = maybe.into_iter();
            move |_| maybe.next().unwrap_or(false)
        });
        if doubtful.is_empty() {
            return Ok(found);
        }
        // The index may return a record of another id, so the records are read.
        let wanted: Vec<Id> = doubtful.iter().map(|&position| ids[position]).collect();
        let all: Vec<usize> = (0..wanted.len()).collect();
        let mut scratch = FoundRows {
            found: vec![false; wanted.len()],
            headers: memory::zeros("read rows", wanted.len())?,
            vectors: memory::zeros("read rows", wanted.len() * self.context.floats())?,
        };
        self.read_from_ssd(&wanted, &all, &mut scratch)?;
        for (&position, is_there) in doubtful.iter().zip(scratch.found) {
            if is_there {
                found[position] = RowLocation::Ssd;
            }
        }
        Ok(found)
    }

    /// Updates locations found earlier under the same hold of the table's lock. Freeing space moves rows in RAM to
    /// other slots or writes them back.
    pub(crate) fn find_again(&self, ids: &[Id], found: &mut [RowLocation]) {
        for (&id, found) in ids.iter().zip(found) {
            if let RowLocation::Host(_) = *found {
                let slot = self.host.slots.get(id);
                *found = if slot == NO_SLOT { RowLocation::Ssd } else { RowLocation::Host(slot) };
            }
        }
    }

    /// True if a copy of the row, current or not, is on SSD.
    pub(crate) fn is_on_ssd(&self, found: RowLocation) -> bool {
        match found {
            RowLocation::Device(slot) => {
                self.device.as_ref().is_some_and(|tier| tier.slots.state(slot).has(RowState::ON_SSD))
            }
            RowLocation::Host(slot) => self.host.slots.state(slot).has(RowState::ON_SSD),
            RowLocation::Ssd => true,
            RowLocation::Absent => false,
        }
    }

    /// Makes sure that the snapshot's copies of device rows that are about to change or leave exist. Errors: those of
    /// [`Placement::require_snapshot_copies`].
    pub(crate) fn require_found_copies(&mut self, found: &[RowLocation]) -> Result<()> {
        if self.changes.snapshot.is_none() {
            return Ok(());
        }
        let on_device = found.iter().filter_map(|found| match *found {
            RowLocation::Device(slot) => Some(slot),
            RowLocation::Host(_) | RowLocation::Ssd | RowLocation::Absent => None,
        });
        self.require_snapshot_copies(&on_device.collect::<Vec<CacheSlot>>())
    }

    /// Keeps copies, for the snapshot, of rows in RAM or on the device that are about to change or leave. The caller
    /// has passed them to [`Placement::require_found_copies`] before any change.
    pub(crate) fn keep_found_pre_images(&mut self, found: &[RowLocation], no_writes: NoKernelWrites<'_>) {
        if self.changes.snapshot.is_none() {
            return;
        }
        let (mut host, mut device) = (Vec::new(), Vec::new());
        for found in found {
            match *found {
                RowLocation::Host(slot) => host.push(no_writes.read_access(slot)),
                RowLocation::Device(slot) => device.push(slot),
                RowLocation::Ssd | RowLocation::Absent => {}
            }
        }
        self.keep_host_pre_images(host.into_iter());
        self.keep_device_pre_images(&device);
    }
}
