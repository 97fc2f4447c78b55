//! Fingerprints of the ids that left recently. A table of buckets without lists, as in the S3-FIFO paper (section 4.2).

use crate::runtime::simd::prefetch;
use crate::types::{Id, hash_id};

const BUCKET: usize = 8;

/// Remembers about the last `length` ids that were added. When a bucket overflows its oldest id is forgotten early. Two
/// ids in the same bucket have equal fingerprints with a probability of 2⁻³². Only the choice of victims depends on
/// this.
#[derive(Clone, Debug, Default)]
pub(super) struct GhostTable {
    /// The departure number (0 for a free entry) in the upper half, and a fingerprint of the id in the lower.
    entries: Vec<u64>,
    length: u32,
    now: u32,
}

impl GhostTable {
    /// Bytes per slot of the tier: 8 bytes per entry, 0.9 remembered ids per slot, 5/4 entries per id, and a fifth
    /// more.
    pub(super) const BYTES_PER_ID: usize = 11;

    /// Remembers `id` for the next `length` departures.
    pub(super) fn remember(&mut self, id: Id, length: u32) {
        let length = length.max(1);
        let needed = (length as usize * 5 / 4).next_multiple_of(BUCKET);
        if self.entries.len() < needed || self.now == u32::MAX {
            // A fifth more entries than needed, so that a tier that fills up does not restart with an empty table for
            // every row.
            let len = if self.now == 0 { needed } else { (needed * 6 / 5).next_multiple_of(BUCKET) };
            let mut entries = Vec::new();
            if entries.try_reserve_exact(len).is_ok() {
                entries.resize(len, 0);
                self.entries = entries;
            } else if self.entries.is_empty() {
                return;
            } else {
                // The allocation failed. The table is emptied instead, and remembers fewer departures.
                self.entries.fill(0);
            }
            self.now = 0;
        }
        self.length = length;
        self.now += 1;
        let entry = u64::from(self.now) << 32 | u64::from(fingerprint(id));
        let oldest = self.bucket(id).iter_mut().min_by_key(|entry| **entry >> 32);
        if let Some(oldest) = oldest {
            *oldest = entry;
        }
    }

    /// Returns true if `id` left recently, and forgets it.
    pub(super) fn take(&mut self, id: Id) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let (now, length) = (self.now, self.length);
        let found = self.bucket(id).iter_mut().find(|entry| {
            let left = (**entry >> 32) as u32;
            left != 0 && **entry as u32 == fingerprint(id) && now - left < length
        });
        found.map(|entry| *entry = 0).is_some()
    }

    /// Prefetches the bucket of `id` into the CPU cache.
    pub(super) fn prefetch(&self, id: Id) {
        if !self.entries.is_empty() {
            prefetch(&self.entries, self.start(id));
        }
    }

    /// The index of the first entry of an id's bucket.
    fn start(&self, id: Id) -> usize {
        let buckets = self.entries.len() / BUCKET;
        ((u128::from(hash_id(id)) * buckets as u128) >> 64) as usize * BUCKET
    }

    fn bucket(&mut self, id: Id) -> &mut [u64] {
        let start = self.start(id);
        &mut self.entries[start..][..BUCKET]
    }
}

/// The lower half of the hash. Its upper bits choose the bucket.
fn fingerprint(id: Id) -> u32 {
    hash_id(id) as u32
}
