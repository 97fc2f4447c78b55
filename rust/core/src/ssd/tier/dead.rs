//! The known dead records of a segment, whose ids need no lookup.

use crate::prefetch::prefetch;

/// A bit per record of a segment, set if the index does not point to it.
#[derive(Debug, Default)]
pub(crate) struct DeadRecords {
    words: Vec<u64>,
}

impl DeadRecords {
    /// Marks a record as dead.
    #[inline]
    pub(crate) fn add(&mut self, record: u32) {
        let word = record as usize / 64;
        if word >= self.words.len() {
            // Records become dead in any order, so the next ones are likely to have similarly high numbers.
            self.words.resize((word + 1).next_power_of_two(), 0);
        }
        self.words[word] |= 1 << (record % 64);
    }

    /// Prefetches a record's bit into the CPU cache.
    #[inline]
    pub(crate) fn prefetch(&self, record: u32) {
        prefetch(&self.words, record as usize / 64);
    }

    /// True if a record is dead.
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
