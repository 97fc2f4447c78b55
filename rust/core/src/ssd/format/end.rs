//! The end of a segment's file, as it is written at once: its last records, its footer, padding and the trailer.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::error::Result;
use crate::io::{ALIGNMENT, BufPool, PooledBuf};
use crate::memory;
use crate::process::PerProcess;
use crate::ssd::format::footer::{FooterEntry, FooterTrailer, MAX_ENTRY_BYTES, SegmentFooter, TRAILER_BYTES};

/// A segment is filled up with zeros where less than one part in this many of its room is left. Then its file has the full length, and can
/// be written again for another segment.
const FILL_UP_SHARE: u64 = 64;

/// The most bytes of padding in a file of `file_bytes`.
pub(crate) fn max_padding_bytes(file_bytes: u64) -> u64 {
    file_bytes / FILL_UP_SHARE + ALIGNMENT as u64
}

/// The bytes of a segment's file that needs `least` and has `capacity_bytes`.
pub(crate) fn file_bytes(least: u64, capacity_bytes: u64) -> u64 {
    if capacity_bytes.saturating_sub(least) <= capacity_bytes / FILL_UP_SHARE {
        least.max(capacity_bytes)
    } else {
        least
    }
}

/// What is written from the start of a segment's last records on.
pub(crate) struct SegmentTail {
    pub(crate) bytes: SegmentTailBytes,
    pub(crate) trailer: FooterTrailer,
    /// Length of the file.
    pub(crate) file_bytes: u64,
}

/// The end of segment `serial`, whose last `records` lie at `start`, and which has `capacity_bytes` bytes. `Kind::Memory` where the system refuses
/// what that takes, the reserve ([`memory`]) included.
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

/// Bytes of a large end, of which a few are kept to be used again: the system takes longer to give the memory than to fill it.
const LARGE_BUFFER_BYTES: usize = 4 << 20;
/// So many are kept.
const LARGE_BUFFERS_KEPT: usize = 2;
/// An end of fewer bytes is not large.
const LARGE_FROM_BYTES: usize = 1 << 20;

/// The bytes of an end.
pub(crate) struct SegmentTailBytes {
    buffer: PooledBuf,
    bytes: usize,
}

impl SegmentTailBytes {
    /// So many bytes, with any contents. `Kind::Memory` where the system refuses them, the reserve included.
    fn new(bytes: usize) -> Result<Self> {
        static LARGE: PerProcess<Arc<BufPool>> = PerProcess::new();
        let pool = if bytes < LARGE_FROM_BYTES {
            Arc::new(BufPool::new(0, 0)) // which keeps nothing
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

/// The most bytes that [`encode_tail`] takes for a segment of `records` records, the last of which lie in a buffer of `buffer_bytes`.
pub(crate) fn max_tail_bytes(records: usize, buffer_bytes: usize) -> usize {
    // The order of the entries takes less than they do.
    let end = max_footer_bytes(records) + buffer_bytes;
    max_footer_bytes(records) + if end < LARGE_FROM_BYTES { end } else { end.max(LARGE_BUFFER_BYTES) }
}
