//! Delivery of evicted rows: copies, made before the rows are removed, are queued for a consumer. Without a consumer
//! each of these calls is one branch.

use std::sync::Arc;

use super::Placement;
use super::rule_match::SweepMatcher;
use crate::cache::evicted_rows::{EvictedQueue, EvictedRows};
use crate::cache::row_blocks::RowChunk;
use crate::error::Result;
use crate::rows::RowRef;
use crate::runtime::memory;
use crate::tiers::WriteAccess;
use crate::types::CacheSlot;

/// The queue of evicted rows of a table with a consumer.
#[derive(Debug)]
pub(crate) struct EvictionNotifier {
    pub(crate) queue: Arc<EvictedQueue>,
}

impl EvictionNotifier {
    /// Queues rows expired by a sweep, grouped by the step and reason of the first sweep that matches each.
    pub(crate) fn push_expired(&self, rows: RowChunk, matcher: &SweepMatcher, dim: usize) {
        let row = |at: usize| rows.row(at, self.queue.floats());
        let kind = |at| matcher.step_and_reason(row(at).header, &row(at).vector[..dim]);
        let kinds: Vec<(u64, &'static str)> = (0..rows.headers.len()).map(kind).collect();
        let Some(&first) = kinds.first() else { return };
        if kinds.iter().all(|kind| *kind == first) {
            return self.queue.push(EvictedRows { step: first.0, reason: first.1, rows });
        }
        let mut parts: Vec<EvictedRows> = Vec::new();
        for (at, &(step, reason)) in kinds.iter().enumerate() {
            let place = parts.iter().position(|part| (part.step, part.reason) == (step, reason)).unwrap_or(parts.len());
            if place == parts.len() {
                parts.push(EvictedRows { step, reason, rows: RowChunk::default() });
            }
            parts[place].rows.push(row(at));
        }
        for part in parts {
            self.queue.push(part);
        }
    }
}

impl Placement {
    /// Starts queueing copies of evicted rows. Returns the queue.
    pub(crate) fn start_evicted_queue(&mut self) -> Arc<EvictedQueue> {
        let floats = self.context.floats();
        let notifier = self
            .notifier
            .get_or_insert_with(|| Box::new(EvictionNotifier { queue: Arc::new(EvictedQueue::new(floats)) }));
        Arc::clone(&notifier.queue)
    }

    /// True if evicted rows have a consumer.
    #[inline]
    pub(crate) fn has_notifier(&self) -> bool {
        self.notifier.is_some()
    }

    /// True if sweeps must not advance before batches, because the consumer of evicted rows does not keep up.
    pub(crate) fn is_notifier_full(&self) -> bool {
        self.notifier.as_ref().is_some_and(|notifier| notifier.queue.is_full())
    }

    /// Returns copies of rows of the host tier that are about to be evicted; none without a consumer.
    ///
    /// Errors: `Memory`.
    pub(crate) fn copies_of_host(&self, slots: &[WriteAccess]) -> Result<RowChunk> {
        if !self.has_notifier() {
            return Ok(RowChunk::default());
        }
        let mut copies = self.space_for_copies(slots.len())?;
        for access in slots {
            copies.push(self.host.row(access.read_access()));
        }
        Ok(copies)
    }

    /// Returns copies of rows of the device tier that are about to be evicted; none without a consumer, unless
    /// `are_needed`.
    ///
    /// Errors: `Memory`, and those of reads from the device.
    pub(crate) fn copies_of_device(&mut self, slots: &[CacheSlot], are_needed: bool) -> Result<RowChunk> {
        if !self.has_notifier() && !are_needed {
            return Ok(RowChunk::default());
        }
        self.copies_of(slots)
    }

    /// Returns copies of rows that were read from SSD and are about to be evicted; none without a consumer.
    ///
    /// Errors: `Memory`.
    pub(crate) fn copies_of_read<'a>(&self, rows: impl ExactSizeIterator<Item = RowRef<'a>>) -> Result<RowChunk> {
        if !self.has_notifier() {
            return Ok(RowChunk::default());
        }
        let mut copies = self.space_for_copies(rows.len())?;
        rows.for_each(|row| copies.push(row));
        Ok(copies)
    }

    fn space_for_copies(&self, rows: usize) -> Result<RowChunk> {
        let mut copies = RowChunk::default();
        memory::reserve(&mut copies.headers, "copy evicted rows", rows)?;
        memory::reserve(&mut copies.vectors, "copy evicted rows", rows * self.context.floats())?;
        Ok(copies)
    }

    /// Queues rows expired by a sweep.
    pub(crate) fn notify_expired(&self, copies: RowChunk, matcher: &SweepMatcher) {
        if let Some(notifier) = self.notifier.as_ref().filter(|_| !copies.headers.is_empty()) {
            notifier.push_expired(copies, matcher, self.context.layout.dim);
        }
    }

    /// Queues rows that were dropped because the table is full.
    pub(super) fn notify_dropped(&self, copies: RowChunk) {
        if let Some(notifier) = &self.notifier {
            notifier.queue.push(EvictedRows { step: self.changes.step, reason: EvictedRows::FULL, rows: copies });
        }
    }

    /// Ends the queue: later evictions are not delivered.
    pub(crate) fn end_notifying(&self) {
        if let Some(notifier) = &self.notifier {
            notifier.queue.end();
        }
    }
}
