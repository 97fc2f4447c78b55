//! Copies of device rows, for operations that need some of them in RAM.
//!
//! Code that is not the core's reads rows of the device tier, and the table's lock is not held meanwhile. So an operation that needs device
//! rows of which there are no copies says which, by an error, before it changes anything that it could not do again. Whoever runs the
//! operation gives the lock back, has the rows read, and runs it again: see
//! [`TableInner::with_device_rows`](crate::cache::locks::TableInner::with_device_rows).

use std::collections::HashMap;

use super::{ROWS_PER_GATHER, Residency};
use crate::cache::base::TableContext;
use crate::cache::rows::RowChunk;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::rows::RowHeader;
use crate::types::{CacheSlot, Id};

/// What an operation has read of the device tier, and what it is still to be given. Whoever runs the operation owns this, and keeps
/// `rows_in_use` as long as it lives. No row arrives on the device meanwhile, and no kernel writes one there. So a copy is the row of its slot
/// as long as that slot has the row.
#[derive(Debug, Default)]
pub(crate) struct DeviceCopies {
    /// The slots that were read, each with the id of its row, in the order of the copies: `[n]`.
    read: Vec<(CacheSlot, Id)>,
    /// Of each of these slots: the id of its row, and the number of its last copy. It is made when it is asked for.
    positions: HashMap<CacheSlot, (Id, usize)>,
    /// Vector parts of the copies: `[n, V]`.
    vectors: Vec<f32>,
    /// Scalar slots of the copies: `[n]`.
    scalars: Vec<f32>,
    /// Rows that are to be read before the operation is run again.
    pending_reads: Vec<(CacheSlot, Id)>,
    /// Whether some of these are of victims of the device tier, which are to leave once they are read.
    has_victims: bool,
    /// Bytes that were read since they were counted.
    uncounted_bytes: u64,
    /// Why rows could not be read. The operation is told when it asks again.
    error: Option<Error>,
    /// How many reads have failed.
    failures: u32,
}

/// So many reads may fail before an operation that [tries again](Residency::try_copies_again) gets an error for good.
const MOST_FAILURES: u32 = 2;

impl DeviceCopies {
    /// Whether rows are to be read before the operation is run again.
    pub(crate) fn has_pending_reads(&self) -> bool {
        !self.pending_reads.is_empty()
    }

    /// Whether the operation has chosen rows that are to leave the device.
    pub(crate) fn has_victims(&self) -> bool {
        self.has_victims
    }

    /// Read the rows that are owed. Where that fails, the operation gets the error when it is run again.
    pub(crate) fn read(&mut self, context: &TableContext) {
        let owed = std::mem::take(&mut self.pending_reads);
        self.positions.clear();
        if let Err(error) = owed.chunks(ROWS_PER_GATHER).try_for_each(|part| self.read_part(context, part)) {
            self.error = Some(error);
            self.failures += 1;
        }
    }

    fn read_part(&mut self, context: &TableContext, part: &[(CacheSlot, Id)]) -> Result<()> {
        const PURPOSE: &str = "read rows from the device";
        let floats = context.floats();
        let slots: Vec<CacheSlot> = part.iter().map(|(slot, _)| *slot).collect();
        let (begin, end) = (self.scalars.len(), self.scalars.len() + slots.len());
        memory::reserve(&mut self.scalars, PURPOSE, slots.len())?;
        memory::reserve(&mut self.vectors, PURPOSE, slots.len() * floats)?;
        self.scalars.resize(end, 0.0);
        self.vectors.resize(end * floats, 0.0);
        if let Err(error) = context.gather(&slots, &mut self.vectors[begin * floats..], &mut self.scalars[begin..]) {
            // The rows that are read later take these places.
            self.scalars.truncate(begin);
            self.vectors.truncate(begin * floats);
            return Err(error);
        }
        self.uncounted_bytes += (slots.len() * floats * 4) as u64;
        self.read.extend_from_slice(part);
        Ok(())
    }

    /// Where the copies of slots are.
    fn positions(&mut self) -> &HashMap<CacheSlot, (Id, usize)> {
        if self.positions.is_empty() {
            self.positions = self.read.iter().zip(0..).map(|(&(slot, id), number)| (slot, (id, number))).collect();
        }
        &self.positions
    }

    fn vector(&self, number: usize, floats: usize) -> &[f32] {
        &self.vectors[number * floats..][..floats]
    }
}

impl Residency {
    /// An operation begins, with the copies that were made for it so far.
    pub(crate) fn set_copies(&mut self, copies: DeviceCopies) {
        self.copies = copies;
        self.traffic.device.read_bytes += std::mem::take(&mut self.copies.uncounted_bytes);
    }

    /// The operation has ended.
    pub(crate) fn take_copies(&mut self) -> DeviceCopies {
        std::mem::take(&mut self.copies)
    }

    /// Whether the error that an operation has met says only that it is to be run again, once rows were read from the device.
    pub(super) fn needs_device_reads(&self) -> bool {
        self.copies.has_pending_reads()
    }

    /// These rows are to leave the device once they are read.
    pub(super) fn mark_victims(&mut self) {
        self.copies.has_victims = true;
    }

    /// Whether rows were read for this operation.
    pub(super) fn has_copies(&self) -> bool {
        !self.copies.read.is_empty()
    }

    /// Rows could not be read for something that may be left out. Let them be read once more for what may not.
    pub(super) fn retry_copies(&mut self) {
        if self.copies.failures < MOST_FAILURES {
            self.copies.error = None;
        }
    }

    /// Forget the copies that there are, because nothing later in this operation needs them.
    pub(super) fn forget_copies(&mut self) {
        self.copies.read.clear();
        self.copies.positions.clear();
        self.copies.vectors.clear();
        self.copies.scalars.clear();
    }

    /// Make sure that there are copies of the rows in these device slots.
    ///
    /// Errors: why they could not be read; and the error that [`Residency::needs_device_reads`] tells of.
    pub(super) fn require_copies(&mut self, slots: &[CacheSlot]) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        if let Some(error) = &self.copies.error {
            return Err(error.clone());
        }
        let row = |&slot: &CacheSlot| (slot, self.device.as_ref().map_or(0, |tier| tier.id(slot)));
        // Mostly all that was read is asked for, in its order, or nothing was read.
        if slots.iter().map(row).eq(self.copies.read.iter().copied()) {
            return Ok(());
        }
        let copies = self.copies.positions();
        let is_missing = |(slot, id): &(CacheSlot, Id)| copies.get(slot).is_none_or(|(of, _)| of != id);
        let missing: Vec<(CacheSlot, Id)> = slots.iter().map(row).filter(is_missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        self.copies.pending_reads.extend(missing);
        let table = &self.context.config.name;
        let message = format!(
            "table {table:?}: rows of its device tier were to be read first: a bug of torchrec-embcache to report"
        );
        Err(Error::new(Kind::State, message))
    }

    /// Copies of the rows in these device slots. Errors as [`Residency::require_copies`], and `Memory`.
    pub(super) fn copies_of(&mut self, slots: &[CacheSlot]) -> Result<RowChunk> {
        self.require_copies(slots)?;
        self.copies.positions();
        let (floats, mut rows) = (self.context.floats(), RowChunk::default());
        memory::reserve(&mut rows.headers, "read rows from the device", slots.len())?;
        memory::reserve(&mut rows.vectors, "read rows from the device", slots.len() * floats)?;
        let Some(tier) = &self.device else { return Ok(rows) };
        for slot in slots {
            let (_, number) = self.copies.positions[slot];
            rows.headers.push(RowHeader { scalar: self.copies.scalars[number], ..*tier.header(*slot) });
            rows.vectors.extend_from_slice(self.copies.vector(number, floats));
        }
        Ok(rows)
    }

    /// As [`Residency::copies_of`], where nothing later in this operation needs these copies. They are not copied once more, if they are all that
    /// there are.
    pub(super) fn last_copies_of(&mut self, slots: &[CacheSlot]) -> Result<RowChunk> {
        self.require_copies(slots)?;
        let in_order = self.copies.read.iter().map(|(slot, _)| slot).eq(slots);
        let Some(tier) = self.device.as_ref().filter(|_| in_order) else { return self.copies_of(slots) };
        let header = |(slot, scalar): (&CacheSlot, &f32)| RowHeader { scalar: *scalar, ..*tier.header(*slot) };
        let headers = slots.iter().zip(&self.copies.scalars).map(header).collect();
        let vectors = std::mem::take(&mut self.copies.vectors);
        self.forget_copies();
        Ok(RowChunk { headers, vectors })
    }

    /// Make sure that there are copies of those of these device rows that a moment wants. Rows that cannot be read fail the moment, never the
    /// caller.
    ///
    /// Errors: the one that [`Residency::needs_device_reads`] tells of.
    pub(super) fn require_snapshot_copies(&mut self, slots: &[CacheSlot]) -> Result<()> {
        let Some(moment) = &self.snapshot else { return Ok(()) };
        let wanted = moment.pending_on_device(slots);
        match self.require_copies(&wanted) {
            Err(error) if self.needs_device_reads() => Err(error),
            _ => Ok(()),
        }
    }
}
