//! Ids, their buckets, and the metadata of a row.

use std::ops::Range;

/// An id of the user: any 64-bit integer, also a negative one.
pub type Id = i64;

/// A cache slot: the index of a row in the tier that kernels run on. `NO_SLOT` means "no row": kernels read it as
/// zeros, and skip it in updates.
pub type CacheSlot = u32;

/// See [`CacheSlot`].
pub const NO_SLOT: CacheSlot = u32::MAX;

/// The default number of buckets of a table. It is a prime, which helps ids whose low bits are not random.
pub const DEFAULT_TOTAL_NUM_BUCKETS: u32 = 4093;

/// The mapping of ids to the table's buckets: `hash_id(id) mod total_num_buckets`. The hash distributes ids of any
/// pattern evenly over the buckets, and the buckets over the ranks.
///
/// The remainder is computed by a multiplication with the reciprocal of the divisor (Barrett, "Implementing the RSA
/// algorithm on a standard digital signal processor", CRYPTO '86).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketMapper {
    total: u32,
    reciprocal: u64,
}

/// The buckets of `rank` of `world`. Ranks differ by at most one bucket, and the first ranks have more.
pub(crate) fn buckets_of_rank(total: u32, rank: u32, world: u32) -> Range<u32> {
    let (each, more) = (total / world, total % world);
    let start = |rank: u32| rank * each + rank.min(more);
    start(rank)..start(rank + 1)
}

impl BucketMapper {
    /// # Panics
    /// Panics if there are no buckets.
    pub fn new(total_num_buckets: u32) -> Self {
        Self { total: total_num_buckets, reciprocal: u64::MAX / u64::from(total_num_buckets) }
    }

    /// The number of buckets.
    pub fn total(self) -> u32 {
        self.total
    }

    /// The bucket of an id.
    #[inline]
    pub fn of(self, id: Id) -> u32 {
        let (hashed, divisor) = (hash_id(id), u64::from(self.total));
        // The quotient is exact or one too small, because the reciprocal is at most one less than 2⁶⁴ / divisor.
        let quotient = ((u128::from(hashed) * u128::from(self.reciprocal)) >> 64) as u64;
        let rest = hashed - quotient * divisor;
        (if rest < divisor { rest } else { rest - divisor }) as u32
    }
}

/// The 64-bit hash of an id for buckets, the SSD tier's index and footers. It is the finalizer of `SplitMix64`, a
/// bijection (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the constants of
/// Stafford's variant 13). It is part of the formats on disk, and must not change; `tests/fixtures/v1/buckets.txt` pins
/// it.
#[inline]
pub fn hash_id(id: Id) -> u64 {
    let mut x = id as u64;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The inverse of [`hash_id`].
#[inline]
pub fn id_of_hash(hash: u64) -> Id {
    let mut x = hash ^ (hash >> 31) ^ (hash >> 62);
    x = x.wrapping_mul(0x3196_42b2_d24d_8ec3);
    x = x ^ (x >> 27) ^ (x >> 54);
    x = x.wrapping_mul(0x96de_1b17_3f11_9089);
    (x ^ (x >> 30) ^ (x >> 60)) as Id
}

/// The key of a table: the xxh3-64 hash of the table's name at its creation. It is stored with the table's files, so
/// that renaming the table does not change initial weights.
pub fn table_key(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

/// The default half life of scores.
pub const DEFAULT_SCORE_HALF_LIFE_STEPS: u64 = 1024;

#[cfg(test)]
mod tests;
