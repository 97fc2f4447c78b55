//! Ids that left lately, by fingerprint: a bucketed table without lists, as in the S3-FIFO paper (section 4.2).

use crate::prefetch::prefetch;
use crate::types::{Id, hash_id};

const BUCKET: usize = 8;

/// Remembers the last `length` ids given to it, or nearly: of a bucket that overflows the oldest goes early, and two ids in 2³² of
/// a bucket look the same. Only the choice of victims hangs on it.
#[derive(Debug, Default)]
pub(super) struct Ghost {
    /// The time of departure (0: none) in the upper half, a fingerprint in the lower.
    entries: Vec<u64>,
    length: u32,
    now: u32,
}

impl Ghost {
    /// Bytes for each slot of the tier: nine tenths remembered, a quarter more entries than that, and a fifth of slack.
    pub(super) const BYTES_PER_ID: usize = 11;

    /// Remember `id` for the next `length` departures.
    pub(super) fn remember(&mut self, id: Id, length: u32) {
        let length = length.max(1);
        let needed = (length as usize * 5 / 4).next_multiple_of(BUCKET);
        if self.entries.len() < needed || self.now == u32::MAX {
            // A fifth more, so that a tier that fills up does not forget with every row.
            let wanted = if self.now == 0 { needed } else { (needed * 6 / 5).next_multiple_of(BUCKET) };
            let mut entries = Vec::new();
            if entries.try_reserve_exact(wanted).is_ok() {
                entries.resize(wanted, 0);
                self.entries = entries;
            } else if self.entries.is_empty() {
                return;
            } else {
                // No memory to remember more: what there is begins anew, and forgets earlier.
                self.entries.fill(0);
            }
            self.now = 0;
        }
        self.length = length;
        self.now += 1;
        let entry = u64::from(self.now) << 32 | u64::from(fingerprint(id));
        let oldest = self.bucket(id).iter_mut().min_by_key(|held| **held >> 32);
        if let Some(oldest) = oldest {
            *oldest = entry;
        }
    }

    /// Whether `id` left lately; it is forgotten by that.
    pub(super) fn take(&mut self, id: Id) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let (now, length) = (self.now, self.length);
        let found = self.bucket(id).iter_mut().find(|held| {
            let left = (**held >> 32) as u32;
            left != 0 && **held as u32 == fingerprint(id) && now - left < length
        });
        found.map(|held| *held = 0).is_some()
    }

    /// Start loading what is looked at for `id`.
    pub(super) fn prefetch(&self, id: Id) {
        if !self.entries.is_empty() {
            prefetch(&self.entries, self.start(id));
        }
    }

    /// Where the bucket of `id` starts.
    fn start(&self, id: Id) -> usize {
        let buckets = self.entries.len() / BUCKET;
        ((u128::from(hash_id(id)) * buckets as u128) >> 64) as usize * BUCKET
    }

    fn bucket(&mut self, id: Id) -> &mut [u64] {
        let start = self.start(id);
        &mut self.entries[start..][..BUCKET]
    }
}

/// The end of the hash, whose beginning picks the bucket.
fn fingerprint(id: Id) -> u32 {
    hash_id(id) as u32
}
