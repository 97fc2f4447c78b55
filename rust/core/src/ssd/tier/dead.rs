//! Which records of a segment are dead, so that nobody needs to look for the ids of those.

use crate::prefetch::prefetch;

/// A bit for each record of a segment, which says whether the index has ceased to point to it.
#[derive(Debug, Default)]
pub(crate) struct DeadRecords {
    words: Vec<u64>,
}

impl DeadRecords {
    /// The index no longer points to this record.
    #[inline]
    pub(crate) fn add(&mut self, record: u32) {
        let word = record as usize / 64;
        if word >= self.words.len() {
            // Records die in any order, so the next ones are likely to be about as high.
            self.words.resize((word + 1).next_power_of_two(), 0);
        }
        self.words[word] |= 1 << (record % 64);
    }

    /// Start to load what is known of a record into the processor's cache.
    #[inline]
    pub(crate) fn prefetch(&self, record: u32) {
        prefetch(&self.words, record as usize / 64);
    }

    /// Whether a record is dead.
    #[inline]
    pub(crate) fn contains(&self, record: u32) -> bool {
        self.words.get(record as usize / 64).is_some_and(|word| word >> (record % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_records_are_those_added() {
        let mut dead = DeadRecords::default();
        let added = [0, 63, 64, 5000];
        for record in added {
            dead.add(record);
        }
        let found: Vec<u32> = (0..10_000).filter(|record| dead.contains(*record)).collect();
        assert_eq!(found, added);
    }
}
