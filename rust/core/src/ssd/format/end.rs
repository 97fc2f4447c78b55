//! The tail of a segment's file, which is written at once: its last records, its footer, padding and the trailer.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, BufPool, PooledBuf};
use crate::memory;
use crate::process::PerProcess;
use crate::ssd::format::footer::{FooterEntry, FooterTrailer, MAX_ENTRY_BYTES, SegmentFooter, TRAILER_BYTES};

/// A segment is padded with zeros to its full length if less than 1/64 of its space remains. Then its file can be
/// reused for another segment.
const FILL_UP_SHARE: u64 = 64;

/// Maximum bytes of padding in a file of `file_bytes`.
pub(crate) fn max_padding_bytes(file_bytes: u64) -> u64 {
    file_bytes / FILL_UP_SHARE + ALIGNMENT as u64
}

/// Returns the length of a segment's file that needs at least `least` bytes, of `capacity_bytes`.
pub(crate) fn file_bytes(least: u64, capacity_bytes: u64) -> u64 {
    if capacity_bytes.saturating_sub(least) <= capacity_bytes / FILL_UP_SHARE {
        least.max(capacity_bytes)
    } else {
        least
    }
}

/// The bytes of a file from its last records on.
pub(crate) struct SegmentTail {
    pub(crate) bytes: SegmentTailBytes,
    pub(crate) trailer: FooterTrailer,
    /// Length of the file.
    pub(crate) file_bytes: u64,
}

/// Encodes the tail of segment `serial`, whose last `records` start at offset `start`, in a file of at most
/// `capacity_bytes`. Returns `Kind::Memory` if the allocation fails, even after releasing the reserve ([`memory`]).
pub(crate) fn encode_tail(
    start: u64,
    records: &[u8],
    entries: &mut [FooterEntry],
    serial: u64,
    capacity_bytes: u64,
) -> Result<SegmentTail> {
    let most_bytes = capacity_bytes.saturating_sub(start + records.len() as u64) as usize;
    let footer = SegmentFooter::of(entries, most_bytes);
    let least = start + (records.len() + footer.bytes()).next_multiple_of(ALIGNMENT) as u64;
    let file_bytes = file_bytes(least, capacity_bytes);
    let mut bytes = SegmentTailBytes::new((file_bytes - start) as usize)?;
    bytes[..records.len()].copy_from_slice(records);
    let trailer = footer.encode(serial, &mut bytes[records.len()..]);
    Ok(SegmentTail { bytes, trailer, file_bytes })
}

/// Bytes of a large buffer. A few are kept for reuse: allocating the memory takes longer than filling it.
const LARGE_BUFFER_BYTES: usize = 4 << 20;
/// Number of large buffers that are kept.
const LARGE_BUFFERS_KEPT: usize = 2;
/// Minimum bytes of a tail that uses a large buffer.
const LARGE_FROM_BYTES: usize = 1 << 20;

/// The bytes of a tail.
pub(crate) struct SegmentTailBytes {
    buffer: PooledBuf,
    bytes: usize,
}

impl SegmentTailBytes {
    /// Allocates `bytes`, with unspecified contents. Returns `Kind::Memory` if the allocation fails, even after
    /// releasing the reserve.
    fn new(bytes: usize) -> Result<Self> {
        static LARGE: PerProcess<Arc<BufPool>> = PerProcess::new();
        let pool = if bytes < LARGE_FROM_BYTES {
            Arc::new(BufPool::new(0, 0)) // keeps no buffers
        } else {
            Arc::clone(LARGE.get(|| Ok(Arc::new(BufPool::new(LARGE_BUFFER_BYTES, LARGE_BUFFERS_KEPT))))?)
        };
        Ok(Self { buffer: memory::or_from_reserve(|| pool.take_at_least(bytes))?, bytes })
    }
}

impl Deref for SegmentTailBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer[..self.bytes]
    }
}

impl DerefMut for SegmentTailBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }
}

fn max_footer_bytes(entries: usize) -> usize {
    entries * MAX_ENTRY_BYTES + TRAILER_BYTES
}

/// Maximum memory that [`encode_tail`] uses for a segment of `records` records, the last of which are in a buffer of
/// `buffer_bytes`.
pub(crate) fn max_tail_bytes(records: usize, buffer_bytes: usize) -> usize {
    // The order of the entries needs less memory than the entries.
    let end = max_footer_bytes(records) + buffer_bytes;
    max_footer_bytes(records) + if end < LARGE_FROM_BYTES { end } else { end.max(LARGE_BUFFER_BYTES) }
}
