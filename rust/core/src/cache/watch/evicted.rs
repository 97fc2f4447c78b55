//! Rows that were evicted, by a rule or because the table was full, and that somebody is to be told of. Each waits here from its death
//! until it is taken.
//!
//! The queue has a lock of its own, which is taken while the table's lock is held, and never the other way round. Nobody waits for the queue
//! to have room, because whoever takes the rows may need the table's lock for that. So its bound is a wish: while it
//! [is full](EvictedQueue::is_full) sweeps do no more before batches, and whoever needs to know all rows finishes them all the same.

use std::collections::VecDeque;

use crate::cache::rows::Chunk;
use crate::rows::RowHeader;
use crate::sync::{Condvar, Mutex, lock, wait};

/// The most rows of a chunk.
const MOST_ROWS: usize = 1 << 16;
/// The most bytes of a chunk, unless one row has more.
const MOST_BYTES: usize = 16 << 20;
/// So many chunks are to wait at most.
const MOST_CHUNKS: usize = 4;

/// Evicted rows, as they were when they died.
#[derive(Clone, Debug)]
pub struct EvictedRows {
    /// The training step after which they died.
    pub step: u64,
    /// The kind of the rule that took them, or [`EvictedRows::FULL`].
    pub reason: &'static str,
    /// The rows.
    pub rows: Chunk,
}

impl EvictedRows {
    /// The reason of rows that a full table dropped.
    pub const FULL: &'static str = "full";

    fn is_like(&self, other: &Self) -> bool {
        (self.step, self.reason) == (other.step, other.reason)
    }
}

/// The rows of one table that wait to be told of.
#[derive(Debug)]
pub struct EvictedQueue {
    /// The floats of a row's vector part.
    floats: usize,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    /// In the order in which they came. None is empty.
    parts: VecDeque<EvictedRows>,
    rows: usize,
    /// Whether nothing is to be taken by those who wait, and sweeps are to stop.
    held: bool,
    /// Whether no more rows will come.
    ended: bool,
}

impl EvictedQueue {
    /// The empty queue of a table whose rows have a vector part of `floats` floats.
    pub(crate) fn new(floats: usize) -> Self {
        Self { floats, waiting: Mutex::new(Waiting::default()), changed: Condvar::new() }
    }

    /// The floats of a row's vector part.
    pub fn floats(&self) -> usize {
        self.floats
    }

    /// How many rows wait.
    pub fn rows(&self) -> usize {
        lock(&self.waiting).rows
    }

    /// Whether sweeps are to leave rows where they are for now, as far as they can: many rows wait, or the queue is [held](Self::hold).
    pub(crate) fn is_full(&self) -> bool {
        let waiting = lock(&self.waiting);
        waiting.held || waiting.rows >= MOST_CHUNKS * self.rows_of_chunk()
    }

    /// Add rows.
    pub(crate) fn push(&self, rows: EvictedRows) {
        if rows.rows.headers.is_empty() {
            return;
        }
        let mut waiting = lock(&self.waiting);
        waiting.rows += rows.rows.headers.len();
        waiting.parts.push_back(rows);
        self.changed.notify_all();
    }

    /// The next chunk, if rows wait: rows of one step and one reason, in the order in which they came.
    pub fn take(&self) -> Option<EvictedRows> {
        let parts = self.take_parts(&mut lock(&self.waiting));
        joined(parts)
    }

    /// As [`EvictedQueue::take`], once rows wait and the queue is not held. `None` when it has ended and no row is left.
    pub fn wait(&self) -> Option<EvictedRows> {
        let mut waiting = lock(&self.waiting);
        while waiting.held || waiting.parts.is_empty() && !waiting.ended {
            waiting = wait(&self.changed, waiting);
        }
        let parts = self.take_parts(&mut waiting);
        drop(waiting);
        joined(parts)
    }

    /// Keep whoever waits waiting, and sweeps too, until [`EvictedQueue::go_on`] or the end.
    pub fn hold(&self) {
        let mut waiting = lock(&self.waiting);
        waiting.held = !waiting.ended;
    }

    /// Undo [`EvictedQueue::hold`].
    pub fn go_on(&self) {
        lock(&self.waiting).held = false;
        self.changed.notify_all();
    }

    /// Say that no more rows will come, and that those which are here can be taken.
    pub fn end(&self) {
        let mut waiting = lock(&self.waiting);
        (waiting.ended, waiting.held) = (true, false);
        self.changed.notify_all();
    }

    /// Whether no more rows will come.
    pub fn is_ended(&self) -> bool {
        lock(&self.waiting).ended
    }

    /// The rows of a chunk that is full.
    pub(crate) fn rows_of_chunk(&self) -> usize {
        (MOST_BYTES / (self.floats * size_of::<f32>() + size_of::<RowHeader>())).clamp(1, MOST_ROWS)
    }

    /// Take the first part, and what is like it, up to the size of a chunk.
    fn take_parts(&self, waiting: &mut Waiting) -> Vec<EvictedRows> {
        let mut left = self.rows_of_chunk();
        let mut taken: Vec<EvictedRows> = Vec::new();
        let mut stay = VecDeque::new();
        while let Some(mut part) = waiting.parts.pop_front() {
            if left == 0 || taken.first().is_some_and(|first| !first.is_like(&part)) {
                stay.push_back(part);
                continue;
            }
            let rows = part.rows.headers.len();
            if rows > left {
                let rest = Chunk {
                    headers: part.rows.headers.split_off(left),
                    vectors: part.rows.vectors.split_off(left * self.floats),
                };
                stay.push_back(EvictedRows { rows: rest, ..part });
            }
            left -= rows.min(left);
            taken.push(part);
        }
        waiting.parts = stay;
        waiting.rows -= taken.iter().map(|part| part.rows.headers.len()).sum::<usize>();
        taken
    }
}

/// Parts of one chunk as one.
fn joined(parts: Vec<EvictedRows>) -> Option<EvictedRows> {
    let mut parts = parts.into_iter();
    let mut all = parts.next()?;
    for mut part in parts {
        all.rows.headers.append(&mut part.rows.headers);
        all.rows.vectors.append(&mut part.rows.vectors);
    }
    Some(all)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::types::Id;

    fn part(step: u64, reason: &'static str, ids: std::ops::Range<Id>) -> EvictedRows {
        let vectors = ids.clone().flat_map(|id| [id as f32, -(id as f32)]).collect();
        let headers = ids.map(|id| RowHeader { id, ..RowHeader::default() }).collect();
        EvictedRows { step, reason, rows: Chunk { headers, vectors } }
    }

    fn said(chunk: &EvictedRows) -> (u64, &'static str, Vec<Id>) {
        let ids: Vec<Id> = chunk.rows.headers.iter().map(|header| header.id).collect();
        let vectors: Vec<f32> = ids.iter().flat_map(|&id| [id as f32, -(id as f32)]).collect();
        assert_eq!(chunk.rows.vectors, vectors);
        (chunk.step, chunk.reason, ids)
    }

    #[test]
    fn rows_of_one_step_and_reason_are_one_chunk_and_no_chunk_is_too_large() {
        let queue = EvictedQueue::new(2);
        for rows in [part(1, "ttl", 0..3), part(1, "full", 3..5), part(1, "ttl", 5..6), part(2, "ttl", 6..7)] {
            queue.push(rows);
        }
        queue.push(part(1, "ttl", 0..0));
        assert_eq!(queue.rows(), 7);
        let chunks: Vec<_> = std::iter::from_fn(|| queue.take()).map(|chunk| said(&chunk)).collect();
        assert_eq!(chunks, [(1, "ttl", vec![0, 1, 2, 5]), (1, "full", vec![3, 4]), (2, "ttl", vec![6])]);
        let many = MOST_ROWS as Id;
        queue.push(part(3, "ttl", 0..many - 1));
        queue.push(part(3, "ttl", many - 1..many + 3));
        let sizes: Vec<usize> = std::iter::from_fn(|| queue.take()).map(|chunk| said(&chunk).2.len()).collect();
        assert_eq!((sizes, queue.rows()), (vec![MOST_ROWS, 3], 0));
        assert_eq!(EvictedQueue::new(MOST_BYTES).rows_of_chunk(), 1);
    }

    #[test]
    fn whoever_waits_gets_rows_when_they_come_unless_the_queue_is_held_and_all_before_its_end() {
        let queue = EvictedQueue::new(2);
        assert!(!queue.is_full());
        queue.hold();
        queue.push(part(1, "ttl", 0..3));
        assert!(queue.is_full());
        std::thread::scope(|scope| {
            let taker =
                scope.spawn(|| std::iter::from_fn(|| queue.wait()).map(|chunk| said(&chunk)).collect::<Vec<_>>());
            assert_eq!(queue.rows(), 3, "held");
            queue.go_on();
            queue.push(part(2, "ttl", 3..4));
            queue.hold();
            queue.push(part(3, "ttl", 4..5));
            queue.end();
            queue.hold();
            let all: Vec<Id> = taker.join().unwrap().into_iter().flat_map(|(_, _, ids)| ids).collect();
            assert_eq!(all, [0, 1, 2, 3, 4]);
        });
        assert!(queue.wait().is_none());
        queue.push(part(1, "ttl", 0..(MOST_CHUNKS * MOST_ROWS) as Id));
        assert!(queue.is_full());
        queue.take();
        assert!(!queue.is_full());
    }
}
