//! The limit of row write-back to a disk that costs nothing: a plain loop.

use embcache::types::Id;

use crate::plain::PlainIndex;
use crate::tier::RECORD_BYTES;

/// Number of rows to prefetch.
const AHEAD: usize = 16;
/// Bytes of records that are kept, like the write buffers of a disk.
const KEPT: usize = 1 << 23;

/// Writes rows as contiguous records, and keeps the position of each id's latest record.
pub struct PlainWriteBack {
    index: PlainIndex,
    records: Vec<u8>,
    next: u64,
}

impl PlainWriteBack {
    /// Description of the limit.
    pub const WHAT: &str =
        "plain loop: copy a row into a record, crc32c, replace its place in an open-addressing table, prefetching";

    /// A store that has a record of each id.
    pub fn new(ids: impl ExactSizeIterator<Item = Id>) -> Self {
        let mut index = PlainIndex::with_room(ids.len());
        ids.zip(1..).for_each(|(id, place)| index.put(id, place));
        Self { index, records: vec![0; KEPT / RECORD_BYTES * RECORD_BYTES], next: 1 }
    }

    /// Writes the rows of `ids`, with these bytes.
    ///
    /// # Panics
    /// Panics if there are fewer rows than ids.
    pub fn write(&mut self, ids: &[Id], rows: &[&[u8]]) {
        for (at, (id, row)) in ids.iter().zip(rows).enumerate() {
            if let Some(later) = ids.get(at + AHEAD) {
                self.index.prefetch(*later);
            }
            let place = self.next as usize * RECORD_BYTES % self.records.len();
            let record = &mut self.records[place..place + RECORD_BYTES];
            record[4..12].copy_from_slice(&id.to_le_bytes());
            record[12..20].copy_from_slice(&self.next.to_le_bytes());
            record[RECORD_BYTES - row.len()..].copy_from_slice(row);
            let crc = crc32c::crc32c(&record[4..]);
            record[..4].copy_from_slice(&crc.to_le_bytes());
            self.index.replace(*id, self.next);
            self.next += 1;
        }
    }
}
