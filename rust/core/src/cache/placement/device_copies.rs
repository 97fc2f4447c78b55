//! Copies of device rows, for operations that need some of them in RAM.
//!
//! Code outside of the Rust core reads rows of the device tier, without the table's lock. An operation that needs
//! device rows without copies therefore requests them by an error, before any change that it could not repeat. Its
//! caller releases the lock, has the rows read, and runs the operation again: see
//! [`TableInner::with_device_rows`](crate::cache::lock::TableInner::with_device_rows).

use std::collections::HashMap;

use super::{Placement, ROWS_PER_GATHER};
use crate::cache::row_blocks::RowChunk;
use crate::cache::table_context::TableContext;
use crate::error::{Error, Kind, Result};
use crate::rows::RowHeader;
use crate::runtime::memory;
use crate::types::{CacheSlot, Id};

/// Number of failed reads after which an operation that [retries](Placement::retry_copies) keeps its error.
const MOST_FAILURES: u32 = 2;

/// Device rows that an operation has read, and rows that it still requires. The caller of the operation owns this and
/// keeps `rows_in_use` for its lifetime: no row arrives on the device, and no kernel writes one there. So a copy is
/// valid as long as its slot has the same row.
#[derive(Debug, Default)]
pub(crate) struct DeviceCopies {
    /// The slots that were read, each with the id of its row, in the order of the copies: `[n]`.
    read: Vec<(CacheSlot, Id)>,
    /// Maps a slot to its row's id and the index of its latest copy. Built lazily.
    positions: HashMap<CacheSlot, (Id, usize)>,
    /// Vector parts of the copies: `[n, V]`.
    vectors: Vec<f32>,
    /// Scalar slots of the copies: `[n]`.
    scalars: Vec<f32>,
    /// Rows to read before the operation runs again.
    pending_reads: Vec<(CacheSlot, Id)>,
    /// True if some of them are victims, which leave the device tier once they are read.
    has_victims: bool,
    /// Number of bytes read since they were last counted.
    uncounted_bytes: u64,
    /// The error of a failed read. The operation receives it when it requests copies again.
    error: Option<Error>,
    /// Number of failed reads.
    failures: u32,
}

impl DeviceCopies {
    /// True if rows are to be read before the operation runs again.
    pub(crate) fn has_pending_reads(&self) -> bool {
        !self.pending_reads.is_empty()
    }

    /// True if the operation has chosen rows that are to leave the device.
    pub(crate) fn has_victims(&self) -> bool {
        self.has_victims
    }

    /// Reads the pending rows. If that fails, the operation receives the error when it runs again.
    pub(crate) fn read(&mut self, context: &TableContext) {
        let pending = std::mem::take(&mut self.pending_reads);
        self.positions.clear();
        if let Err(error) = pending.chunks(ROWS_PER_GATHER).try_for_each(|part| self.read_part(context, part)) {
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
            // Later reads use these places.
            self.scalars.truncate(begin);
            self.vectors.truncate(begin * floats);
            return Err(error);
        }
        self.uncounted_bytes += (slots.len() * floats * 4) as u64;
        self.read.extend_from_slice(part);
        Ok(())
    }

    /// Returns the copies by slot.
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

impl Placement {
    /// Starts an operation with the copies made for it.
    pub(crate) fn set_copies(&mut self, copies: DeviceCopies) {
        self.copies = copies;
        self.traffic.device.read_bytes += std::mem::take(&mut self.copies.uncounted_bytes);
    }

    /// True if the error of an operation only requests reads from the device, after which the operation runs again.
    pub(crate) fn needs_device_reads(&self) -> bool {
        self.copies.has_pending_reads()
    }

    /// Marks the pending rows as victims, which leave the device once they are read.
    pub(super) fn mark_victims(&mut self) {
        self.copies.has_victims = true;
    }

    /// True if rows were read for this operation.
    pub(crate) fn has_copies(&self) -> bool {
        !self.copies.read.is_empty()
    }

    /// Clears the error of a read for optional work, so that required work may read the rows again.
    pub(crate) fn retry_copies(&mut self) {
        if self.copies.failures < MOST_FAILURES {
            self.copies.error = None;
        }
    }

    /// Drops the copies, because the rest of this operation does not need them.
    pub(crate) fn forget_copies(&mut self) {
        self.copies.read.clear();
        self.copies.positions.clear();
        self.copies.vectors.clear();
        self.copies.scalars.clear();
    }

    /// Makes sure that copies of the rows in these device slots exist.
    ///
    /// Errors: that of a failed read; the one that [`Placement::needs_device_reads`] reports.
    fn require_copies(&mut self, slots: &[CacheSlot]) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        if let Some(error) = &self.copies.error {
            return Err(error.clone());
        }
        let row = |&slot: &CacheSlot| (slot, self.device.as_ref().map_or(0, |tier| tier.id(slot)));
        // Mostly the request equals the rows that were read, in the same order, or nothing was read.
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
        Err(Kind::State.error(format!(
            "table {table:?}: rows of its device tier were to be read first: a bug of torchrec-embcache to report"
        )))
    }

    /// Returns copies of the rows in these device slots. Errors: as [`Placement::require_copies`], and `Memory`.
    pub(crate) fn copies_of(&mut self, slots: &[CacheSlot]) -> Result<RowChunk> {
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

    /// Like [`Placement::copies_of`], if the rest of this operation does not need these copies. Moves them out if there
    /// are no others.
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

    /// Makes sure that copies of the device rows that the snapshot needs exist. Rows that cannot be read fail the
    /// snapshot, never the caller.
    ///
    /// Errors: the one that [`Placement::needs_device_reads`] reports.
    pub(crate) fn require_snapshot_copies(&mut self, slots: &[CacheSlot]) -> Result<()> {
        let Some(snapshot) = &self.changes.snapshot else { return Ok(()) };
        let wanted = snapshot.pending_on_device(slots);
        match self.require_copies(&wanted) {
            Err(error) if self.needs_device_reads() => Err(error),
            _ => Ok(()),
        }
    }
}
