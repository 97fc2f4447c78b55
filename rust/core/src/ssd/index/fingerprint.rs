//! The fingerprint of an id: a sub-table and a tag.

#[cfg(not(loom))]
use std::hash::BuildHasher;

use crate::types::{Id, hash_id};

/// Computes the fingerprint of an id from its hash.
#[derive(Clone, Copy, Debug)]
pub struct FingerprintHasher {
    pub(super) sub_table_bits: u32,
    pub(super) tag_bits: u32,
    /// Tags depend on it. The second and the third number are multipliers and are odd.
    secret: [u64; 3],
}

impl FingerprintHasher {
    /// Creates fingerprints of 2^`sub_table_bits` sub-tables and tags of `tag_bits` bits, with a new secret.
    pub(super) fn new(sub_table_bits: u32, tag_bits: u32) -> Self {
        Self { sub_table_bits, tag_bits, secret: [secret(), secret() | 1, secret() | 1] }
    }

    /// True if two ids have the same fingerprint.
    pub fn are_equal(self, one: Id, other: Id) -> bool {
        self.fingerprint(hash_id(one)) == self.fingerprint(hash_id(other))
    }

    /// Returns the sub-table and the tag of a hash.
    #[inline]
    pub(super) fn fingerprint(self, hash: u64) -> (usize, u64) {
        let table = (hash >> 48) as usize >> (16 - self.sub_table_bits);
        // One product maps equidistant hashes to equidistant values, whose distance may by chance be close to 2⁶⁴. The
        // second product breaks up the distances.
        let once = folded(hash ^ self.secret[0], self.secret[1]);
        (table, folded(once, self.secret[2]) >> (64 - self.tag_bits))
    }

    /// Returns the home slot of a tag in a sub-table of `homes` home slots.
    #[inline]
    pub(super) fn home(self, tag: u64, homes: u32) -> usize {
        ((tag * u64::from(homes)) >> self.tag_bits) as usize
    }
}

/// Both halves of a product in one word, so that each bit of the result depends on bits above and below it.
#[inline]
fn folded(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    (product >> 64) as u64 ^ product as u64
}

/// A random number that is secret to this process.
#[cfg(not(loom))]
pub(super) fn secret() -> u64 {
    std::collections::hash_map::RandomState::new().hash_one(0_u64)
}

/// A constant, because a loom model must be deterministic.
#[cfg(loom)]
pub(super) fn secret() -> u64 {
    0x0123_4567_89ab_cdef
}
