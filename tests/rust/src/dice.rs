//! Seeded random numbers, and the ids of random batches.

use embcache::types::{Id, hash_id};

/// Random numbers that are determined by a seed.
#[derive(Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// A number below `sides`.
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 += 1;
        hash_id(self.0 as Id) % sides
    }

    /// Ids, of which a few occur often and most occur once.
    pub fn ids(&mut self, count: usize) -> Vec<Id> {
        let one = |dice: &mut Self| match dice.roll(4) {
            0 => dice.roll(8) as Id - 4,
            1 => dice.roll(60) as Id,
            _ => dice.roll(100_000) as Id,
        };
        (0..count).map(|_| one(self)).collect()
    }
}

/// The bits of values. They compare like the values except for zeros and NaNs.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
