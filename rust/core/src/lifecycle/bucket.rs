//! The admission counts of one bucket, as stored in checkpoints.

use std::collections::HashMap;

use crate::types::Id;

/// A pending id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedId {
    /// The id.
    pub id: Id,
    /// Its occurrences.
    pub shows: u32,
    /// Its clicks.
    pub clicks: u32,
    /// True if it belongs to the older generation of its bucket, which is forgotten next.
    pub is_older: bool,
}

/// The pending ids of a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketCounts {
    /// The bucket.
    pub bucket: u32,
    /// Number of generations of the bucket that have ended, modulo 2³².
    pub generation: u32,
    /// The ids, in ascending order as unsigned integers.
    pub ids: Vec<CountedId>,
}

impl BucketCounts {
    /// Returns the ids that are still remembered when the bucket is at this `generation`, in their state at that time.
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

/// A snapshot of the counts that an asynchronous save has not written yet. Before the counts of such a bucket change,
/// they are copied here.
#[derive(Debug)]
pub(crate) struct SnapshotCounts {
    /// Only ids that were counted in this epoch or later; `None` for all.
    pub(crate) since: Option<u32>,
    first: u32,
    is_pending: Vec<bool>,
    copies: HashMap<u32, BucketCounts>,
}

impl SnapshotCounts {
    /// Creates a snapshot of the buckets `first..first + buckets`.
    pub(crate) fn new(first: u32, buckets: usize, since: Option<u32>) -> Self {
        Self { since, first, is_pending: vec![true; buckets], copies: HashMap::new() }
    }

    /// True if the counts of a bucket are not copied yet.
    pub(crate) fn is_pending(&self, bucket: u32) -> bool {
        self.is_pending[(bucket - self.first) as usize]
    }

    /// Stores a copy of a bucket's counts.
    pub(crate) fn keep(&mut self, counts: BucketCounts) {
        self.is_pending[(counts.bucket - self.first) as usize] = false;
        self.copies.insert(counts.bucket, counts);
    }

    /// Takes the counts of a bucket: the copy, or the current counts from `current` if there is no copy.
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
