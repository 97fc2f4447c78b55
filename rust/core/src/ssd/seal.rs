//! The end of a segment's file: its last records and its footer, as they are written together.

use super::buffer::Block;
use super::format::{Entry, MOST_ENTRY_BYTES, TRAILER_BYTES, Trailer, encode_footer};
use crate::error::Result;
use crate::io::{ALIGNMENT, AlignedBuf};
use crate::memory;

/// A segment with less than one part in this many of its room left is full.
const WORTH_FILLING: u64 = 64;

/// The most bytes between entries and trailer of a file of `file_bytes`.
pub(super) fn most_padding(file_bytes: u64) -> u64 {
    file_bytes / WORTH_FILLING + ALIGNMENT as u64
}

/// What is written from the start of a segment's last block on.
pub(super) struct End {
    pub(super) bytes: AlignedBuf,
    pub(super) trailer: Trailer,
    /// Length of the file.
    pub(super) file_bytes: u64,
}

/// The end of segment `serial`, of which `tail` is the last block, and which has `room` bytes. `Kind::Memory` where the system refuses
/// what that takes, the reserve ([`memory`]) included.
pub(super) fn end_of(tail: &Block, entries: &mut [Entry], serial: u64, room: u64) -> Result<End> {
    let mut footer = Vec::new();
    memory::reserve(&mut footer, "write a segment's footer", most_footer_bytes(entries.len()))?;
    let trailer = encode_footer(entries, serial, &mut footer);
    let (entries, trailer_bytes) = footer.split_at(footer.len() - TRAILER_BYTES);
    let least = tail.start + (tail.filled + footer.len()).next_multiple_of(ALIGNMENT) as u64;
    // A file that is all but full is filled, so that it is of the size to be written again.
    let file_bytes = if room.saturating_sub(least) <= room / WORTH_FILLING { least.max(room) } else { least };
    let mut bytes = memory::or_from_reserve(|| AlignedBuf::try_zeroed((file_bytes - tail.start) as usize))?;
    let (records, trailer_at) = (tail.filled, bytes.len() - TRAILER_BYTES);
    bytes[..records].copy_from_slice(&tail.bytes()[..records]);
    bytes[records..records + entries.len()].copy_from_slice(entries);
    bytes[trailer_at..].copy_from_slice(trailer_bytes);
    Ok(End { bytes, trailer, file_bytes })
}

fn most_footer_bytes(entries: usize) -> usize {
    entries * MOST_ENTRY_BYTES + TRAILER_BYTES
}

/// Bytes that [`end_of`] takes at most, for a segment of `records` records in blocks of `block_bytes`.
pub(super) fn end_bytes(records: usize, block_bytes: usize) -> usize {
    2 * most_footer_bytes(records) + block_bytes
}
