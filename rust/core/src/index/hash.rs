//! The hash of ids in tables that live in memory only.
//!
//! Whoever chooses ids must not be able to choose ids that meet in one place, which would make each look-up walk past all others. So
//! the multiplier is random, by table, and the operating system gives it. Nothing that is written to disk, and no order of results,
//! may hang on this hash; what is on disk uses [`crate::types::hash_id`].

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::types::Id;

/// Two multiplications, with the upper half of the first product folded into its lower one between: no stride of ids is in step with
/// the multiplier, as it can be by chance with one multiplication alone ([`IdHash::once`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdHash(u64);

impl IdHash {
    /// A hash that nobody can foresee.
    pub(crate) fn random() -> Self {
        Self::new(RandomState::new().hash_one(0_u64))
    }

    /// The hash of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    #[cfg(test)]
    pub(crate) fn multiplier(self) -> u64 {
        self.0
    }

    /// A hash by one multiplication, whose upper bits are the good ones: for tables that can take another hash where ids meet.
    #[inline]
    pub(crate) fn once(self, id: Id) -> u64 {
        let id = id as u64;
        (id ^ (id >> 32)).wrapping_mul(self.0)
    }

    /// The hash of an id; its upper bits are the good ones.
    #[inline]
    pub(crate) fn of(self, id: Id) -> u64 {
        let product = (id as u64).wrapping_mul(self.0);
        (product ^ (product >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

impl Default for IdHash {
    fn default() -> Self {
        Self::random()
    }
}

impl BuildHasher for IdHash {
    type Hasher = OneId;

    fn build_hasher(&self) -> OneId {
        OneId { hash: *self, found: 0 }
    }
}

/// Hashes one id for the maps of the standard library, which look at the lower bits first.
pub(crate) struct OneId {
    hash: IdHash,
    found: u64,
}

impl Hasher for OneId {
    fn finish(&self) -> u64 {
        self.found
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_i64((self.found ^ u64::from(byte)) as Id);
        }
    }

    fn write_i64(&mut self, id: Id) {
        self.found = self.hash.of(id).rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hash_is_its_own_and_tells_ids_apart_that_differ_in_any_bit() {
        let (one, other) = (IdHash::random(), IdHash::random());
        assert_ne!(one.of(1), other.of(1));
        for bit in 0..64 {
            let (upper, lower) = (one.of(1 << bit) >> 44, one.of(0) >> 44);
            assert!(upper != lower || one.of(1 << bit) != one.of(0), "bit {bit}");
        }
        assert_ne!(one.hash_one(5_i64), one.hash_one(6_i64));
    }
}
