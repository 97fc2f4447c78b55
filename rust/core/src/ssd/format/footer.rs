//! The footer of a segment's file: an entry per record, and the trailer at the end of the file.
//!
//! ```text
//! entries  n × (id i64 | write_seq - lowest write_seq | highest epoch - modified_epoch | highest last step - last step | record number),
//!          sorted by `hash_id(id)`, then write_seq; the last four in as many bytes as the widest of the segment takes, 0 to 8, 0 to 4,
//!          0 to 8 and 0 to 3
//! padding  zeros, so that the trailer ends with the file, whose length is a multiple of 4096
//! trailer  "EMBCFOOT" | n u24 | bytes of an entry's epoch u8 | highest epoch u32 | lowest write_seq u64 | highest write_seq u64 | serial u64
//!          | highest last step u64 | lowest last step u64 | bytes of an entry's step u8 | 7 × 0
//!          | crc32c of the entries u32 | crc32c of the trailer so far u32
//! ```
//!
//! If entries have no last steps, the bytes of a step are 255, and both steps are 0. This applies to footers of
//! tombstones, and of segments whose steps would not fit: the capacity in rows assumes that entries have at most
//! [`MAX_ENTRY_BYTES`].
//!
//! The hash is not stored, because it is a function of the id. The segment's content determines if entries are rows or
//! tombstones.

use std::num::NonZeroU64;
use std::path::Path;

use crate::error::{Error, Result};
use crate::runtime::simd::prefetch;
use crate::ssd::bucket_sort::bucket_sort;
use crate::ssd::format::record::{RecordMaxima, le_u32, le_u64};
use crate::types::{Id, hash_id};

const TRAILER_MAGIC: &[u8; 8] = b"EMBCFOOT";
/// The bytes of an entry's step if the footer has no last steps.
const NO_STEPS: u8 = u8::MAX;

/// Maximum bytes of a footer's entry.
pub(crate) const MAX_ENTRY_BYTES: usize = 8 + 8 + 4 + 3;
/// Bytes of a trailer.
pub(crate) const TRAILER_BYTES: usize = 72;
/// Offset of the checksum in a trailer.
const CRC_AT: usize = TRAILER_BYTES - 4;

/// The last step of a row, if known. It is as small as a `u64`, so `u64::MAX` counts as unknown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastStep(Option<NonZeroU64>);

impl LastStep {
    pub(crate) const UNKNOWN: Self = Self(None);

    #[inline]
    pub(crate) fn of(step: u64) -> Self {
        Self(NonZeroU64::new(!step))
    }

    #[inline]
    pub(crate) fn get(self) -> Option<u64> {
        self.0.map(|step| !step.get())
    }
}

impl std::fmt::Debug for LastStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

/// An entry of the footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FooterEntry {
    pub(crate) id: Id,
    pub(crate) write_seq: u64,
    pub(crate) last_step: LastStep,
    pub(crate) modified_epoch: u32,
    pub(crate) record: u32,
}

impl FooterEntry {
    /// Sort key of a footer's entries.
    pub(crate) fn key(&self) -> (u64, u64) {
        (hash_id(self.id), self.write_seq)
    }
}

/// Range of the last steps of a segment's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepRange {
    pub(crate) lowest: u64,
    pub(crate) highest: u64,
    /// Bytes of an entry's step.
    bytes: u8,
}

/// The fields of a trailer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FooterTrailer {
    pub(crate) records: u32,
    pub(crate) highest_epoch: u32,
    pub(crate) lowest_seq: u64,
    pub(crate) highest_seq: u64,
    pub(crate) entries_crc: u32,
    /// Bytes of an entry's epoch.
    epoch_bytes: u8,
    /// The last steps of the rows, if the footer has them.
    pub(crate) steps: Option<StepRange>,
    /// Checksum of the trailer. A state identifies the segment by it.
    pub(crate) crc: u32,
}

/// Layout of the entries of one footer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryFormat {
    lowest_seq: u64,
    highest_epoch: u32,
    /// The highest last step, if the footer has them.
    highest_step: Option<u64>,
    seq_bytes: usize,
    epoch_bytes: usize,
    step_bytes: usize,
    record_bytes: usize,
}

/// Maximum bytes of an entry in a footer of `records` records, all of them up to the maxima `highest`.
#[inline]
pub(crate) fn max_entry_bytes(records: u32, highest: &RecordMaxima) -> usize {
    8 + width(highest.write_seq) + width(u64::from(highest.modified_epoch)) + width(u64::from(records))
}

/// Like [`max_entry_bytes`], for a footer with last steps.
#[inline]
pub(crate) fn max_entry_bytes_with_steps(records: u32, highest: &RecordMaxima) -> usize {
    (max_entry_bytes(records, highest) + width(highest.last_step)).min(MAX_ENTRY_BYTES)
}

/// Returns the minimum number of bytes for `value`.
#[inline]
fn width(value: u64) -> usize {
    (u64::BITS - value.leading_zeros()).div_ceil(8) as usize
}

fn le_uint(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

impl EntryFormat {
    /// Bytes of an entry.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        8 + self.seq_bytes + self.epoch_bytes + self.step_bytes + self.record_bytes
    }

    /// Writes an entry to the start of `into`, and zeros to at most 8 bytes after it: each field is written as 8 bytes,
    /// and the next field overwrites the excess.
    #[inline]
    fn encode(&self, entry: &FooterEntry, into: &mut [u8]) {
        let below = self.highest_step.zip(entry.last_step.get()).map_or(0, |(highest, last)| highest - last);
        let fields = [
            (entry.id as u64, 8),
            (entry.write_seq - self.lowest_seq, self.seq_bytes),
            (u64::from(self.highest_epoch - entry.modified_epoch), self.epoch_bytes),
            (below, self.step_bytes),
            (u64::from(entry.record), self.record_bytes),
        ];
        let mut at = 0;
        for (value, bytes) in fields {
            into[at..at + 8].copy_from_slice(&value.to_le_bytes());
            at += bytes;
        }
    }

    /// Decodes the entry in `bytes`, which have the length of one. Does not validate the values.
    #[inline]
    pub(crate) fn decode(&self, bytes: &[u8]) -> FooterEntry {
        let (id, rest) = bytes.split_at(8);
        let (seq, rest) = rest.split_at(self.seq_bytes);
        let (epoch, rest) = rest.split_at(self.epoch_bytes);
        let (step, record) = rest.split_at(self.step_bytes);
        let last_step = |highest: u64| LastStep::of(highest.saturating_sub(le_uint(step)));
        FooterEntry {
            id: le_uint(id) as Id,
            write_seq: self.lowest_seq.saturating_add(le_uint(seq)),
            last_step: self.highest_step.map_or(LastStep::UNKNOWN, last_step),
            modified_epoch: self.highest_epoch.saturating_sub(le_uint(epoch) as u32),
            record: le_uint(record) as u32,
        }
    }
}

impl FooterTrailer {
    /// Returns the layout of the entries before the trailer.
    pub(crate) fn entry_format(&self) -> EntryFormat {
        EntryFormat {
            lowest_seq: self.lowest_seq,
            highest_epoch: self.highest_epoch,
            highest_step: self.steps.map(|steps| steps.highest),
            seq_bytes: width(self.highest_seq.saturating_sub(self.lowest_seq)),
            epoch_bytes: self.epoch_bytes as usize,
            step_bytes: self.steps.map_or(0, |steps| steps.bytes as usize),
            record_bytes: width(u64::from(self.records.saturating_sub(1))),
        }
    }
}

/// A footer to be written.
pub(crate) struct SegmentFooter<'a> {
    entries: &'a [FooterEntry],
    /// The numbers of the entries in the order of the footer. Empty if they are in that order already.
    order: Vec<u64>,
    trailer: FooterTrailer,
}

impl<'a> SegmentFooter<'a> {
    /// Builds the footer of `entries`. It includes the last steps if all are known and it has at most `max_bytes` with
    /// them.
    pub(crate) fn of(entries: &'a mut [FooterEntry], max_bytes: usize) -> Self {
        let order = sorted_order(entries).unwrap_or_else(|| {
            entries.sort_unstable_by_key(FooterEntry::key);
            Vec::new()
        });
        let mut footer = Self { trailer: trailer_of(entries), order, entries };
        if footer.trailer.entry_format().bytes() > MAX_ENTRY_BYTES || footer.bytes() > max_bytes {
            footer.trailer.steps = None;
        }
        footer
    }

    /// Bytes of the footer, without the padding between the entries and the trailer.
    pub(crate) fn bytes(&self) -> usize {
        self.entries.len() * self.trailer.entry_format().bytes() + TRAILER_BYTES
    }

    /// Writes the entries to the start of `into`, the trailer to its end, and zeros between them. Returns the trailer.
    pub(crate) fn encode(mut self, serial: u64, into: &mut [u8]) -> FooterTrailer {
        let format = self.trailer.entry_format();
        // A trailer is longer than the bytes that `EntryFormat::encode` writes after an entry.
        for at in 0..self.entries.len() {
            if let Some(later) = self.order.get(at + PREFETCH_DISTANCE) {
                prefetch(self.entries, entry_number(*later));
            }
            let number = self.order.get(at).map_or(at, |ordered| entry_number(*ordered));
            format.encode(&self.entries[number], &mut into[at * format.bytes()..]);
        }
        let (body, rest) = into.split_at_mut(self.entries.len() * format.bytes());
        self.trailer.entries_crc = crc32c::crc32c(body);
        let at = rest.len() - TRAILER_BYTES;
        rest[..at].fill(0);
        encode_trailer(&mut self.trailer, serial, &mut rest[at..]);
        self.trailer
    }
}

/// An entry is prefetched into the CPU cache this many entries early.
const PREFETCH_DISTANCE: usize = 16;
/// Bits of an entry's number in an element of the order. Above them are bits of its hash.
const NUMBER_BITS: u32 = 20;

/// Extracts the entry's number from an element of the order.
fn entry_number(ordered: u64) -> usize {
    (ordered & ((1 << NUMBER_BITS) - 1)) as usize
}

/// Returns the numbers of entries by ascending keys; `None` if there are too few to be worth it or too many, or if the
/// allocation fails. A bucket has one or two.
fn sorted_order(entries: &[FooterEntry]) -> Option<Vec<u64>> {
    let buckets = entries.len().next_power_of_two();
    if buckets < 64 || entries.len() > 1 << NUMBER_BITS {
        return None;
    }
    let (mut order, mut ends): (Vec<u64>, Vec<u32>) = (Vec::new(), Vec::new());
    order.try_reserve_exact(entries.len()).ok()?;
    ends.try_reserve_exact(buckets).ok()?;
    order.resize(entries.len(), 0);
    ends.resize(buckets, 0);
    let bits = buckets.trailing_zeros();
    let items = entries.iter().enumerate().map(|(number, entry)| {
        let hash = hash_id(entry.id);
        let ordered = hash << bits >> NUMBER_BITS << NUMBER_BITS | number as u64;
        ((hash >> (u64::BITS - bits)) as usize, ordered)
    });
    bucket_sort(items, &mut ends, &mut order, |a, b| {
        // The bits of the hash decide, except for duplicate ids and a few others.
        let by_bits = (a >> NUMBER_BITS).cmp(&(b >> NUMBER_BITS));
        by_bits.then_with(|| entries[entry_number(*a)].key().cmp(&entries[entry_number(*b)].key()))
    });
    Some(order)
}

/// Returns the trailer of these entries, without the checksums.
fn trailer_of(entries: &[FooterEntry]) -> FooterTrailer {
    let (lowest_epoch, highest_epoch) = bounds(entries.iter().map(|entry| entry.modified_epoch));
    let (lowest_seq, highest_seq) = bounds(entries.iter().map(|entry| entry.write_seq));
    let known = !entries.is_empty() && entries.iter().all(|entry| entry.last_step != LastStep::UNKNOWN);
    let (lowest, highest) = bounds(entries.iter().filter_map(|entry| entry.last_step.get()));
    let steps = StepRange { lowest, highest, bytes: width(highest - lowest) as u8 };
    FooterTrailer {
        records: entries.len() as u32,
        highest_epoch,
        lowest_seq,
        highest_seq,
        entries_crc: 0,
        epoch_bytes: width(u64::from(highest_epoch - lowest_epoch)) as u8,
        steps: known.then_some(steps),
        crc: 0,
    }
}

/// Writes a trailer into `into`, and stores its checksum in `trailer`.
fn encode_trailer(trailer: &mut FooterTrailer, serial: u64, into: &mut [u8]) {
    let (steps, step_bytes) = match trailer.steps {
        Some(steps) => ([steps.highest, steps.lowest], steps.bytes),
        None => ([0, 0], NO_STEPS),
    };
    into.fill(0);
    into[..8].copy_from_slice(TRAILER_MAGIC);
    into[8..12].copy_from_slice(&trailer.records.to_le_bytes());
    into[11] = trailer.epoch_bytes;
    into[12..16].copy_from_slice(&trailer.highest_epoch.to_le_bytes());
    into[16..24].copy_from_slice(&trailer.lowest_seq.to_le_bytes());
    into[24..32].copy_from_slice(&trailer.highest_seq.to_le_bytes());
    into[32..40].copy_from_slice(&serial.to_le_bytes());
    into[40..48].copy_from_slice(&steps[0].to_le_bytes());
    into[48..56].copy_from_slice(&steps[1].to_le_bytes());
    into[56] = step_bytes;
    into[64..68].copy_from_slice(&trailer.entries_crc.to_le_bytes());
    trailer.crc = crc32c::crc32c(&into[..CRC_AT]);
    into[CRC_AT..].copy_from_slice(&trailer.crc.to_le_bytes());
}

fn bounds<T: Ord + Copy + Default>(values: impl Iterator<Item = T> + Clone) -> (T, T) {
    (values.clone().min().unwrap_or_default(), values.max().unwrap_or_default())
}

/// Checks and decodes the trailer in `bytes`, the last [`TRAILER_BYTES`] of the file at `path`, which start at
/// `offset`.
pub(crate) fn decode_trailer(bytes: &[u8], path: &Path, offset: u64, serial: u64) -> Result<FooterTrailer> {
    let (stored, crc) = (le_u32(bytes, CRC_AT), crc32c::crc32c(&bytes[..CRC_AT]));
    if stored != crc {
        let (expected, got) = (format!("{stored:08x}"), format!("{crc:08x}"));
        return Err(Error::corruption(path, offset, "the footer's checksum", expected, got));
    }
    if !bytes.starts_with(TRAILER_MAGIC) {
        let got = format!("{:?}", &bytes[..8]);
        return Err(Error::corruption(path, offset, "the footer's magic", "EMBCFOOT", got));
    }
    if le_u64(bytes, 32) != serial {
        return Err(Error::corruption(path, offset + 32, "the segment's serial", serial, le_u64(bytes, 32)));
    }
    if bytes[11] > 4 {
        return Err(Error::corruption(path, offset + 11, "the bytes of an entry's epoch", "at most 4", bytes[11]));
    }
    let steps = StepRange { lowest: le_u64(bytes, 48), highest: le_u64(bytes, 40), bytes: bytes[56] };
    let has_steps = steps.bytes != NO_STEPS;
    let fit =
        if has_steps { steps.bytes <= 8 && steps.lowest <= steps.highest } else { steps.highest | steps.lowest == 0 };
    if !fit {
        let what = "the highest and the lowest last step and the bytes of an entry's step";
        let got = format!("{}, {}, {}", steps.highest, steps.lowest, steps.bytes);
        return Err(Error::corruption(path, offset + 40, what, "a range and at most 8 bytes, or 0, 0, 255", got));
    }
    let zeros = &bytes[57..64];
    if zeros.iter().any(|byte| *byte != 0) {
        return Err(Error::corruption(
            path,
            offset + 57,
            "the last bytes before the checksums",
            "zeros",
            format!("{zeros:?}"),
        ));
    }
    let trailer = FooterTrailer {
        records: le_u32(bytes, 8) & 0xff_ffff,
        epoch_bytes: bytes[11],
        steps: has_steps.then_some(steps),
        highest_epoch: le_u32(bytes, 12),
        lowest_seq: le_u64(bytes, 16),
        highest_seq: le_u64(bytes, 24),
        entries_crc: le_u32(bytes, 64),
        crc,
    };
    let entry_bytes = trailer.entry_format().bytes();
    if entry_bytes > MAX_ENTRY_BYTES {
        let expected = format!("at most {MAX_ENTRY_BYTES}");
        return Err(Error::corruption(path, offset, "the bytes of an entry of the footer", expected, entry_bytes));
    }
    Ok(trailer)
}

#[cfg(test)]
mod tests;
