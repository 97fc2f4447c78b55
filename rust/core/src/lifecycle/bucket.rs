//! The counts of one bucket, as checkpoints keep them.

use std::collections::HashMap;

use crate::types::Id;

/// An id that waits for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedId {
    /// The id.
    pub id: Id,
    /// Its occurrences.
    pub shows: u32,
    /// Its clicks.
    pub clicks: u32,
    /// Whether it belongs to the older generation of its bucket, so that it is forgotten next.
    pub is_older: bool,
}

/// The ids of a bucket that wait for rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketCounts {
    /// The bucket.
    pub bucket: u32,
    /// How many generations of the bucket have ended, modulo 2³².
    pub generation: u32,
    /// The ids, rising as unsigned numbers.
    pub ids: Vec<CountedId>,
}

impl BucketCounts {
    /// The ids that are still remembered when the bucket is at this `generation`, as they are then.
    #[must_use]
    pub fn aged_to(mut self, generation: u32) -> Self {
        match generation.wrapping_sub(self.generation) {
            0 => {}
            1 => {
                self.ids.retain(|pending| !pending.is_older);
                self.ids.iter_mut().for_each(|pending| pending.is_older = true);
            }
            _ => self.ids.clear(),
        }
        self.generation = generation;
        self
    }
}

/// The buckets whose counts a save beside training still has to write, as they were when it began. Whoever is about to change the counts
/// of such a bucket has them copied here first.
#[derive(Debug)]
pub(crate) struct SnapshotCounts {
    /// Only ids that were counted in this epoch or later; `None` for all.
    pub(crate) since: Option<u32>,
    first: u32,
    is_pending: Vec<bool>,
    copies: HashMap<u32, BucketCounts>,
}

impl SnapshotCounts {
    /// Of the buckets `first..first + buckets`.
    pub(crate) fn new(first: u32, buckets: usize, since: Option<u32>) -> Self {
        Self { since, first, is_pending: vec![true; buckets], copies: HashMap::new() }
    }

    /// Whether the counts of a bucket are still to be copied.
    pub(crate) fn is_pending(&self, bucket: u32) -> bool {
        self.is_pending[(bucket - self.first) as usize]
    }

    /// Keep a copy of a bucket's counts.
    pub(crate) fn keep(&mut self, counts: BucketCounts) {
        self.is_pending[(counts.bucket - self.first) as usize] = false;
        self.copies.insert(counts.bucket, counts);
    }

    /// Take the counts of a bucket: those that were kept, or those of now, which `current` gives.
    pub(crate) fn take(&mut self, bucket: u32, current: impl FnOnce(Option<u32>) -> BucketCounts) -> BucketCounts {
        if std::mem::take(&mut self.is_pending[(bucket - self.first) as usize]) {
            return current(self.since);
        }
        self.copies.remove(&bucket).unwrap_or(BucketCounts { bucket, ..BucketCounts::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_age_by_the_generations_that_have_ended_since() {
        let pending = [(1, false), (2, true)].map(|(id, is_older)| CountedId { id, shows: 3, clicks: 1, is_older });
        let counts = BucketCounts { bucket: 5, generation: u32::MAX, ids: pending.to_vec() };
        assert_eq!(counts.clone().aged_to(u32::MAX), counts);
        let aged = counts.clone().aged_to(0);
        assert_eq!((aged.generation, aged.ids), (0, vec![CountedId { is_older: true, ..pending[0] }]));
        assert!(counts.aged_to(1).ids.is_empty());
    }
}
