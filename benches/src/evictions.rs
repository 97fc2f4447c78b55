//! The rows that are demoted from RAM to an SSD tier, to free space for the rows of a batch.

use crate::workload::{SplitMix64, Zipf};

/// The stream of the ranks that are evicted from an LRU cache. Ids are drawn by Zipf's law, the cache fits a tenth of
/// them, and all are modified. Ids of the law's head are rarely evicted, so the stream is the law's tail.
pub struct Evictions {
    random: SplitMix64,
    law: Zipf,
    /// For each rank its neighbours in the order of use: the newer and the older one.
    links: Vec<[u32; 2]>,
    newest: u32,
    oldest: u32,
}

const NONE: u32 = u32::MAX;
/// The links of a rank that is not in RAM.
const OUT: [u32; 2] = [NONE - 1, NONE - 1];

impl Evictions {
    /// The stream over the ranks `0..rows`, with a full cache.
    pub fn new(seed: u64, rows: u32, exponent: f64) -> Self {
        let links = vec![OUT; rows as usize];
        let mut this =
            Self { random: SplitMix64(seed), law: Zipf::new(rows.into(), exponent), links, newest: NONE, oldest: NONE };
        let mut held = 0;
        while held < rows / 10 {
            held += u32::from(!this.used());
        }
        this
    }

    /// Uses the next id. Returns true if it was in RAM.
    fn used(&mut self) -> bool {
        let rank = self.law.draw(&mut self.random) as u32;
        let held = self.links[rank as usize] != OUT;
        if held {
            if self.newest == rank {
                return true;
            }
            self.unlink(rank);
        }
        self.links[rank as usize] = [NONE, self.newest];
        match self.newest {
            NONE => self.oldest = rank,
            newest => self.links[newest as usize][0] = rank,
        }
        self.newest = rank;
        held
    }

    fn unlink(&mut self, rank: u32) {
        let [newer, older] = self.links[rank as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize][1] = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize][0] = newer,
        }
    }
}

impl Iterator for Evictions {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        while self.used() {}
        let leaving = self.oldest;
        self.unlink(leaving);
        self.links[leaving as usize] = OUT;
        Some(leaving)
    }
}
