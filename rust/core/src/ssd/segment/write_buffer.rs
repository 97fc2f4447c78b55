//! Write buffers. A process has one pool of them, which all of its tables share.
//!
//! A table that appends takes a buffer. A full buffer goes to the writers, and returns to the pool after the write. No
//! table ever waits for another's half-filled buffer: the pool exceeds its limit, and then requests that the tables
//! submit their buffers at the end of a call ([`WriteBufferPool::is_short`]). Tables wait only if too many buffers are
//! being written ([`WriteBufferPool::throttle`]).

use crate::io::AlignedBuf;
use crate::runtime::sync::{Condvar, Mutex, lock, wait};

/// Bytes of a buffer of the pool.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;
/// Maximum number of free buffers that are kept for reuse.
const MAX_FREE_BUFFERS: usize = 16;
/// If more buffers than these are in use, tables submit half-filled ones.
const SOFT_LIMIT_BUFFERS: usize = 64;
/// If this many buffers are queued for writing, appends wait too.
pub(crate) const MAX_WAITING_BUFFERS: usize = 24;

#[derive(Debug, Default)]
struct WriteBufferCounts {
    free: Vec<AlignedBuf>,
    in_use: usize,
    waiting: usize,
}

/// The write buffers of the process.
#[derive(Debug, Default)]
pub(crate) struct WriteBufferPool {
    counts: Mutex<WriteBufferCounts>,
    written: Condvar,
}

impl WriteBufferPool {
    /// Returns the process's pool.
    #[cfg(not(loom))]
    pub(crate) fn of_process() -> &'static Self {
        static POOL: crate::runtime::process::PerProcess<WriteBufferPool> = crate::runtime::process::PerProcess::new();
        POOL.get(|| Ok(Self::default())).expect("a pool is made without fail")
    }

    /// Returns the model's pool.
    #[cfg(loom)]
    pub(crate) fn of_process() -> &'static Self {
        loom::lazy_static! {
            static ref POOL: WriteBufferPool = WriteBufferPool::default();
        }
        &POOL
    }

    /// Takes a buffer of `bytes`, with unspecified contents.
    pub(crate) fn take(&self, bytes: usize) -> AlignedBuf {
        if bytes != BLOCK_BYTES {
            return AlignedBuf::zeroed(bytes);
        }
        let mut counts = lock(&self.counts);
        counts.in_use += 1;
        let free = counts.free.pop();
        drop(counts);
        free.unwrap_or_else(|| AlignedBuf::zeroed(bytes))
    }

    /// Returns the bytes to be allocated for `buffers` buffers of `bytes` each.
    pub(crate) fn missing_bytes(&self, buffers: usize, bytes: usize) -> usize {
        let free = if bytes == BLOCK_BYTES { lock(&self.counts).free.len() } else { 0 };
        buffers.saturating_sub(free) * bytes
    }

    /// Returns a buffer to the pool.
    pub(crate) fn give_back(&self, buffer: AlignedBuf) {
        if buffer.len() != BLOCK_BYTES {
            return;
        }
        let mut counts = lock(&self.counts);
        counts.in_use = counts.in_use.saturating_sub(1);
        if counts.free.len() < MAX_FREE_BUFFERS {
            counts.free.push(buffer);
        }
    }

    /// True if tables should submit their half-filled buffers.
    pub(crate) fn is_short(&self) -> bool {
        lock(&self.counts).in_use > SOFT_LIMIT_BUFFERS
    }

    /// Number of buffers that tables and the writers have.
    #[cfg(test)]
    pub(crate) fn in_use(&self) -> usize {
        lock(&self.counts).in_use
    }

    /// Waits while too many buffers are queued for writing. Must be called without any lock.
    pub(crate) fn throttle(&self) {
        let mut counts = lock(&self.counts);
        while counts.waiting >= MAX_WAITING_BUFFERS {
            counts = wait(&self.written, counts);
        }
    }

    /// Counts a buffer that is queued for writing.
    pub(crate) fn begin_write(&self) {
        lock(&self.counts).waiting += 1;
    }

    /// Counts a buffer that is written.
    pub(crate) fn end_write(&self) {
        lock(&self.counts).waiting -= 1;
        self.written.notify_all();
    }
}

/// A filled buffer that is being written. It has the bytes `start..start + filled` of the file. The first `to_write` of
/// them are to be written; the rest is also in the next block.
#[derive(Debug)]
pub(crate) struct WriteBlock {
    /// `None` only while it is dropped.
    buffer: Option<AlignedBuf>,
    pub(crate) start: u64,
    pub(crate) filled: usize,
    pub(crate) to_write: usize,
}

impl Drop for WriteBlock {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            WriteBufferPool::of_process().give_back(buffer);
        }
    }
}

impl WriteBlock {
    pub(crate) fn new(buffer: AlignedBuf, start: u64, filled: usize, to_write: usize) -> Self {
        Self { buffer: Some(buffer), start, filled, to_write }
    }

    /// All bytes of the buffer, including those after `filled`.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }

    /// Returns the bytes at `offset` of the file, if all of them are in this block.
    pub(crate) fn get(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let at = offset.checked_sub(self.start)? as usize;
        let end = at.checked_add(len)?;
        (end <= self.filled).then(|| &self.bytes()[at..end])
    }
}
