//! Queue of rows that were evicted, by a rule or because the table was full, until a consumer takes them.
//!
//! The queue has its own lock, which may be taken while the table's lock is held, and never the other way round. No
//! thread waits for space in the queue, because taking the rows may need the table's lock. So its bound is soft: while
//! it [is full](EvictedQueue::is_full) sweeps do not advance before batches, but calls that need all rows finish them
//! nevertheless.

use std::collections::{HashMap, VecDeque};

use super::row_blocks::RowChunk;
use crate::rows::RowHeader;
use crate::runtime::sync::{Condvar, Mutex, lock, wait};

/// Maximum number of rows of a chunk.
const MOST_ROWS: usize = 1 << 16;
/// Maximum number of bytes of a chunk, unless one row has more.
const MOST_BYTES: usize = 16 << 20;
/// Target maximum number of queued chunks.
const MOST_CHUNKS: usize = 4;

/// Evicted rows, with their values at the eviction.
#[derive(Clone, Debug)]
pub struct EvictedRows {
    /// The training step after which they were evicted.
    pub step: u64,
    /// The kind of the rule that matched them, or [`EvictedRows::FULL`].
    pub reason: &'static str,
    /// The rows.
    pub rows: RowChunk,
}

impl EvictedRows {
    /// The reason of rows that a full table dropped.
    pub const FULL: &'static str = "full";
}

/// The rows of a chunk, in order of arrival.
#[derive(Debug)]
struct EvictedChunk {
    step: u64,
    reason: &'static str,
    rows: usize,
    parts: Vec<RowChunk>,
}

/// The queued evicted rows of one table.
#[derive(Debug)]
pub struct EvictedQueue {
    /// Number of floats in a row's vector part.
    floats: usize,
    waiting: Mutex<EvictedBacklog>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct EvictedBacklog {
    /// In the order of their first rows. None is empty.
    chunks: VecDeque<EvictedChunk>,
    /// The number of the first chunk. The following chunks have consecutive numbers.
    first: u64,
    /// The number of the latest chunk of a step and a reason. It may be full.
    newest: HashMap<(u64, &'static str), u64>,
    rows: usize,
    /// True if waiting consumers get no rows and sweeps are to stop.
    is_paused: bool,
    /// True if no more rows will be added.
    ended: bool,
    /// True if a waiting consumer has received the end of the queue.
    end_is_delivered: bool,
}

impl EvictedBacklog {
    /// Adds rows to the latest chunk of the same step and reason, up to `most` rows, and to new chunks.
    fn add(&mut self, EvictedRows { step, reason, rows }: EvictedRows, floats: usize, most: usize) {
        self.rows += rows.headers.len();
        let newest =
            self.newest.get(&(step, reason)).and_then(|number| self.chunks.get_mut((number - self.first) as usize));
        let room = newest.as_ref().map_or(0, |chunk| most - chunk.rows);
        let mut pieces = split_rows(rows, room, most, floats);
        if let Some(chunk) = newest.filter(|_| room > 0)
            && let Some(piece) = pieces.pop()
        {
            chunk.rows += piece.headers.len();
            chunk.parts.push(piece);
        }
        while let Some(piece) = pieces.pop() {
            self.newest.insert((step, reason), self.first + self.chunks.len() as u64);
            self.chunks.push_back(EvictedChunk { step, reason, rows: piece.headers.len(), parts: vec![piece] });
        }
    }

    /// Takes the first chunk.
    fn take(&mut self) -> Option<EvictedChunk> {
        let chunk = self.chunks.pop_front()?;
        let kind = (chunk.step, chunk.reason);
        if self.newest.get(&kind) == Some(&self.first) {
            self.newest.remove(&kind);
        }
        self.first += 1;
        self.rows -= chunk.rows;
        Some(chunk)
    }
}

/// Splits rows into pieces, in reverse order: the first has at most `space` rows, unless `space` is 0, and each other
/// has at most `most`.
fn split_rows(mut rows: RowChunk, space: usize, most: usize, floats: usize) -> Vec<RowChunk> {
    let first = if space == 0 { most } else { space };
    let mut pieces = Vec::new();
    // Starts from the end, so that no row is moved twice.
    while rows.headers.len() > first {
        let at = first + (rows.headers.len() - first - 1) / most * most;
        pieces.push(RowChunk { headers: rows.headers.split_off(at), vectors: rows.vectors.split_off(at * floats) });
    }
    pieces.push(rows);
    pieces
}

impl EvictedQueue {
    /// The empty queue of a table whose rows have a vector part of `floats` floats.
    pub(crate) fn new(floats: usize) -> Self {
        Self { floats, waiting: Mutex::new(EvictedBacklog::default()), changed: Condvar::new() }
    }

    /// Returns the number of floats in a row's vector part.
    pub fn floats(&self) -> usize {
        self.floats
    }

    /// Returns the number of queued rows.
    pub fn rows(&self) -> usize {
        lock(&self.waiting).rows
    }

    /// True if sweeps should not remove rows for now, as far as possible: many rows are queued, or the queue is
    /// [paused](Self::pause).
    pub(crate) fn is_full(&self) -> bool {
        let waiting = lock(&self.waiting);
        waiting.is_paused || waiting.rows >= MOST_CHUNKS * self.rows_of_chunk()
    }

    /// Adds rows.
    pub(crate) fn push(&self, rows: EvictedRows) {
        if rows.rows.headers.is_empty() {
            return;
        }
        lock(&self.waiting).add(rows, self.floats, self.rows_of_chunk());
        self.changed.notify_all();
    }

    /// Takes the next chunk, if rows are queued: rows of one step and one reason, in order of arrival.
    pub fn take(&self) -> Option<EvictedRows> {
        let chunk = lock(&self.waiting).take();
        chunk.map(|chunk| join_parts(chunk, self.floats))
    }

    /// Like [`EvictedQueue::take`], but waits until rows are queued and the queue is not paused. `None` when it has
    /// ended and no row remains.
    pub fn wait(&self) -> Option<EvictedRows> {
        let mut waiting = lock(&self.waiting);
        while waiting.is_paused || waiting.chunks.is_empty() && !waiting.ended {
            waiting = wait(&self.changed, waiting);
        }
        let chunk = waiting.take();
        waiting.end_is_delivered |= chunk.is_none();
        drop(waiting);
        chunk.map(|chunk| join_parts(chunk, self.floats))
    }

    /// Makes consumers wait, and sweeps too, until [`EvictedQueue::resume`] or the end.
    pub fn pause(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.is_paused = !waiting.ended;
    }

    /// Undoes [`EvictedQueue::pause`].
    pub fn resume(&self) {
        lock(&self.waiting).is_paused = false;
        self.changed.notify_all();
    }

    /// Ends the queue: no more rows will be added, and queued rows can still be taken.
    pub fn end(&self) {
        let mut waiting = lock(&self.waiting);
        (waiting.ended, waiting.is_paused) = (true, false);
        self.changed.notify_all();
    }

    /// Undoes [`EvictedQueue::end`], because the table stays open. Returns true if no consumer waits, because it has
    /// received the end.
    pub fn reopen(&self) -> bool {
        let mut waiting = lock(&self.waiting);
        waiting.ended = false;
        std::mem::take(&mut waiting.end_is_delivered)
    }

    /// Returns true if no more rows will be added.
    pub fn is_ended(&self) -> bool {
        lock(&self.waiting).ended
    }

    /// Number of rows of a full chunk.
    pub(crate) fn rows_of_chunk(&self) -> usize {
        (MOST_BYTES / (self.floats * size_of::<f32>() + size_of::<RowHeader>())).clamp(1, MOST_ROWS)
    }
}

/// Concatenates the rows of a chunk.
fn join_parts(EvictedChunk { step, reason, rows, parts }: EvictedChunk, floats: usize) -> EvictedRows {
    let mut parts = parts.into_iter();
    let mut all = parts.next().unwrap_or_default();
    let more = rows - all.headers.len();
    all.headers.reserve(more);
    all.vectors.reserve(more * floats);
    for mut part in parts {
        all.headers.append(&mut part.headers);
        all.vectors.append(&mut part.vectors);
    }
    EvictedRows { step, reason, rows: all }
}

#[cfg(all(test, not(loom)))]
mod tests;
