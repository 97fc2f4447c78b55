//! Who is told of rows that are evicted: copies of them, made before they go, wait in a queue. Where nobody is to be told, each of these
//! calls is one branch.

use std::sync::Arc;

use super::Residency;
use super::judge::Judge;
use crate::cache::rows::Chunk;
use crate::cache::watch::{EvictedQueue, EvictedRows};
use crate::error::Result;
use crate::host::Idle;
use crate::memory;
use crate::rows::RowRef;
use crate::types::CacheSlot;

/// What is kept of a table that tells of evicted rows.
#[derive(Debug)]
pub(super) struct Told {
    queue: Arc<EvictedQueue>,
}

impl Told {
    /// Tell of rows that a sweep took, each as taken by the first one that takes it.
    pub(super) fn died(&self, rows: Chunk, by: &Judge, dim: usize) {
        let row = |at: usize| rows.row(at, self.queue.floats());
        let kind = |at| by.step_and_name(row(at).header, &row(at).vector[..dim]);
        let kinds: Vec<(u64, &'static str)> = (0..rows.headers.len()).map(kind).collect();
        let Some(&first) = kinds.first() else { return };
        if kinds.iter().all(|kind| *kind == first) {
            return self.queue.push(EvictedRows { step: first.0, reason: first.1, rows });
        }
        let mut parts: Vec<EvictedRows> = Vec::new();
        for (at, &(step, reason)) in kinds.iter().enumerate() {
            let place = parts.iter().position(|part| (part.step, part.reason) == (step, reason)).unwrap_or(parts.len());
            if place == parts.len() {
                parts.push(EvictedRows { step, reason, rows: Chunk::default() });
            }
            parts[place].rows.push(row(at));
        }
        for part in parts {
            self.queue.push(part);
        }
    }
}

impl Residency {
    /// Keep copies of rows that are evicted from now on, in the queue that is returned.
    pub(crate) fn keep_evicted(&mut self) -> Arc<EvictedQueue> {
        let floats = self.base.floats();
        let told = self.told.get_or_insert_with(|| Box::new(Told { queue: Arc::new(EvictedQueue::new(floats)) }));
        Arc::clone(&told.queue)
    }

    /// Whether somebody is to be told of evicted rows.
    #[inline]
    pub(super) fn tells(&self) -> bool {
        self.told.is_some()
    }

    /// Whether sweeps are to go no further before batches, because those who are told of rows do not keep up with them.
    pub(super) fn waits_to_tell(&self) -> bool {
        self.told.as_ref().is_some_and(|told| told.queue.is_full())
    }

    /// How many rows wait to be told of.
    pub(super) fn untold(&self) -> u64 {
        self.told.as_ref().map_or(0, |told| told.queue.rows() as u64)
    }

    /// Copies of rows of the host tier that are about to be evicted; none where nobody is told.
    ///
    /// Errors: `Memory`.
    pub(super) fn copies_of_host(&self, slots: &[Idle]) -> Result<Chunk> {
        if !self.tells() {
            return Ok(Chunk::default());
        }
        let mut copies = self.room_for_copies(slots.len())?;
        for idle in slots {
            copies.push(self.host.row(idle.quiet()));
        }
        Ok(copies)
    }

    /// Copies of rows of the device tier that are about to be evicted; none where nobody is told, and they are not needed otherwise.
    ///
    /// Errors: `Memory`, and those of reads from the device.
    pub(super) fn copies_of_device(&mut self, slots: &[CacheSlot], are_needed: bool) -> Result<Chunk> {
        if !self.tells() && !are_needed {
            return Ok(Chunk::default());
        }
        self.copies_of(slots)
    }

    /// Copies of rows that were read from SSD and are about to be evicted; none where nobody is told.
    ///
    /// Errors: `Memory`.
    pub(super) fn copies_of_read<'a>(&self, rows: impl ExactSizeIterator<Item = RowRef<'a>>) -> Result<Chunk> {
        if !self.tells() {
            return Ok(Chunk::default());
        }
        let mut copies = self.room_for_copies(rows.len())?;
        rows.for_each(|row| copies.push(row));
        Ok(copies)
    }

    fn room_for_copies(&self, rows: usize) -> Result<Chunk> {
        let mut copies = Chunk::default();
        memory::reserve(&mut copies.headers, "copy evicted rows", rows)?;
        memory::reserve(&mut copies.vectors, "copy evicted rows", rows * self.base.floats())?;
        Ok(copies)
    }

    /// Tell of rows that a sweep took.
    pub(super) fn tell_dead(&self, copies: Chunk, by: &Judge) {
        if let Some(told) = self.told.as_ref().filter(|_| !copies.headers.is_empty()) {
            told.died(copies, by, self.base.layout.dim);
        }
    }

    /// Tell of rows that were dropped because the table is full.
    pub(super) fn tell_dropped(&self, copies: Chunk) {
        if let Some(told) = &self.told {
            told.queue.push(EvictedRows { step: self.step, reason: EvictedRows::FULL, rows: copies });
        }
    }

    /// The rows are about to go for another reason: tell of those that sweeps have taken. What cannot be read is logged.
    ///
    /// Errors: the one that [`Residency::owes_copies`] tells of.
    pub(crate) fn tell_rest(&mut self) -> Result<()> {
        if self.tells()
            && let Err(error) = self.finish_sweep()
        {
            if self.owes_copies() {
                return Err(error);
            }
            let table = &self.base.config.name;
            tracing::warn!("table {table:?}: a sweep could not be finished, and nobody is told of the rest: {error}");
        }
        Ok(())
    }

    /// Nobody is told of what comes from now on.
    pub(crate) fn end_telling(&self) {
        if let Some(told) = &self.told {
            told.queue.end();
        }
    }
}
