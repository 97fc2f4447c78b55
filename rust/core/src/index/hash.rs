//! The hash of ids for tables in memory.
//!
//! Colliding ids must not be predictable, because each lookup would then walk past all the others. So the multiplier of
//! the hash is random for each table, and comes from the operating system. Nothing that is written to disk, and no
//! order of results, may depend on this hash. Data on disk uses [`crate::types::hash_id`].

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::types::Id;

/// A hash by two multiplications. The second is Fibonacci hashing (Knuth, The Art of Computer Programming, volume 3,
/// section 6.4). Between them the upper half of the first product is folded into its lower half. So no stride of ids
/// correlates with the random multiplier, as can happen by chance with only one multiplication ([`IdHash::once`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdHash(u64);

impl IdHash {
    /// A hash with an unpredictable random multiplier.
    pub(crate) fn random() -> Self {
        Self::new(RandomState::new().hash_one(0_u64))
    }

    /// A hash whose multiplier is `seed`, made odd.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// The seed that recreates this hash.
    pub(crate) fn seed(self) -> u64 {
        self.0
    }

    /// A hash by one multiplication, which is faster and weaker. Its upper bits are the well mixed ones. It is for
    /// tables that can change to another hash if ids collide.
    #[inline(always)] // it is called in loops that are compiled for several instruction sets
    #[allow(clippy::inline_always)]
    pub(crate) fn once(self, id: Id) -> u64 {
        let id = id as u64;
        (id ^ (id >> 32)).wrapping_mul(self.0)
    }

    /// The hash of an id. Its upper bits are the well mixed ones.
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
    type Hasher = SingleIdHasher;

    fn build_hasher(&self) -> SingleIdHasher {
        SingleIdHasher { hash: *self, found: 0 }
    }
}

/// The hash of one id for the maps of the standard library. They use the lower bits first, so the halves are swapped.
pub(crate) struct SingleIdHasher {
    hash: IdHash,
    found: u64,
}

impl Hasher for SingleIdHasher {
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
mod tests;
