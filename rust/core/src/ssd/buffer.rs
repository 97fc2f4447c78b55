//! Write buffers: one pool a process, so that hundreds of tables share what one needs.
//!
//! A table that appends takes a buffer; when it is full the buffer goes to the flusher and comes back after the write. No table
//! ever waits for another's half-filled buffer: the pool gives more than its share and asks ([`Pool::is_short`]) the tables to
//! hand theirs in at the end of a call. What is bounded by waiting ([`Pool::throttle`]) is what waits for the disk.

use crate::io::AlignedBuf;
use crate::sync::{Condvar, Mutex, lock, wait};

/// Bytes of a buffer of the pool.
pub(super) const BLOCK_BYTES: usize = 1 << 20;
/// Buffers kept for reuse.
const KEPT: usize = 16;
/// Buffers out at once before tables are asked to hand in half-filled ones.
const SHARE: usize = 64;
/// Buffers that may wait for the disk before appending waits.
pub(super) const WAITING: usize = 24;

#[derive(Debug, Default)]
struct Counts {
    free: Vec<AlignedBuf>,
    out: usize,
    waiting: usize,
}

/// The buffers of the process.
#[derive(Debug, Default)]
pub(super) struct Pool {
    counts: Mutex<Counts>,
    written: Condvar,
}

impl Pool {
    /// The process's pool.
    #[cfg(not(loom))]
    pub(super) fn shared() -> &'static Self {
        static POOL: crate::process::PerProcess<Pool> = crate::process::PerProcess::new();
        POOL.get(|| Ok(Self::default())).expect("a pool is made without fail")
    }

    /// The model's pool.
    #[cfg(loom)]
    pub(super) fn shared() -> &'static Self {
        loom::lazy_static! {
            static ref POOL: Pool = Pool::default();
        }
        &POOL
    }

    /// A buffer of `bytes`; its contents are whatever they are.
    pub(super) fn take(&self, bytes: usize) -> AlignedBuf {
        if bytes != BLOCK_BYTES {
            return AlignedBuf::zeroed(bytes);
        }
        let mut counts = lock(&self.counts);
        counts.out += 1;
        let free = counts.free.pop();
        drop(counts);
        free.unwrap_or_else(|| AlignedBuf::zeroed(bytes))
    }

    /// Bytes that the system has to give for `buffers` of `bytes` each.
    pub(super) fn missing_bytes(&self, buffers: usize, bytes: usize) -> usize {
        let free = if bytes == BLOCK_BYTES { lock(&self.counts).free.len() } else { 0 };
        buffers.saturating_sub(free) * bytes
    }

    /// Give a buffer back.
    pub(super) fn give(&self, buffer: AlignedBuf) {
        if buffer.len() != BLOCK_BYTES {
            return;
        }
        let mut counts = lock(&self.counts);
        counts.out = counts.out.saturating_sub(1);
        if counts.free.len() < KEPT {
            counts.free.push(buffer);
        }
    }

    /// Whether tables should hand in their half-filled buffers.
    pub(super) fn is_short(&self) -> bool {
        lock(&self.counts).out > SHARE
    }

    /// Buffers that tables and the flusher have now.
    #[cfg(test)]
    pub(super) fn out(&self) -> usize {
        lock(&self.counts).out
    }

    /// Wait while too much waits for the disk. To be called without any lock.
    pub(super) fn throttle(&self) {
        let mut counts = lock(&self.counts);
        while counts.waiting >= WAITING {
            counts = wait(&self.written, counts);
        }
    }

    /// A buffer waits for the disk from now on.
    pub(super) fn submitted(&self) {
        lock(&self.counts).waiting += 1;
    }

    /// It does no longer.
    pub(super) fn done(&self) {
        lock(&self.counts).waiting -= 1;
        self.written.notify_all();
    }
}

/// A filled buffer on its way to disk: bytes `start..start + filled` of the file, of which the first `to_write` are to be written
/// (the rest is in the next block too).
#[derive(Debug)]
pub(super) struct Block {
    /// `None` only while it is dropped.
    buffer: Option<AlignedBuf>,
    pub(super) start: u64,
    pub(super) filled: usize,
    pub(super) to_write: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            Pool::shared().give(buffer);
        }
    }
}

impl Block {
    pub(super) fn new(buffer: AlignedBuf, start: u64, filled: usize, to_write: usize) -> Self {
        Self { buffer: Some(buffer), start, filled, to_write }
    }

    /// All of its bytes, and after them whatever is in the buffer.
    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }

    /// The bytes at `offset` of the file, if all of them are here.
    pub(super) fn get(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let at = offset.checked_sub(self.start)? as usize;
        let end = at.checked_add(len)?;
        (end <= self.filled).then(|| &self.bytes()[at..end])
    }
}
