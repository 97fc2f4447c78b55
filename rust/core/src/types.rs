//! Ids, their buckets, and the metadata of a row.

/// An id as the user gives it. It may be any 64-bit integer, also a negative one.
pub type Id = i64;

/// A cache slot: the number of a row's position in the tier that kernels run on. `NO_SLOT` stands for "no row": kernels read it as
/// zeros, and skip it in updates.
pub type CacheSlot = u32;

/// See [`CacheSlot`].
pub const NO_SLOT: CacheSlot = u32::MAX;

/// The default number of buckets of a table. It is a prime, which serves ids whose low bits say little.
pub const DEFAULT_TOTAL_NUM_BUCKETS: u32 = 4093;

/// The plain bucket of an id: `uint64(id) mod total_num_buckets`. Block-level checkpoints slice ids in this way. For the buckets of
/// a table see [`Bucketing`].
#[inline]
pub fn bucket_of(id: Id, total_num_buckets: u32) -> u32 {
    (id as u64 % u64::from(total_num_buckets)) as u32
}

/// The function that is applied to an id before it is divided by the number of buckets. It is part of the formats on disk, where
/// each table names its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BucketHash {
    /// The id itself. Files of version 1, which name no function, are of this kind. Small ids then all fall into the buckets of the
    /// first rank.
    #[default]
    Plain,
    /// [`hash_id`], which spreads ids of any pattern evenly over the buckets, and the buckets over the ranks.
    SplitMix64,
}

impl BucketHash {
    /// The name that files and the Python binding use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::SplitMix64 => "splitmix64",
        }
    }

    /// The inverse of [`BucketHash::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Plain, Self::SplitMix64].into_iter().find(|hash| hash.name() == name)
    }

    /// The number that is divided for an id.
    #[inline]
    pub fn of(self, id: Id) -> u64 {
        match self {
            Self::Plain => id as u64,
            Self::SplitMix64 => hash_id(id),
        }
    }
}

/// The rule by which the ids of a table fall into its buckets: `hash(uint64(id)) mod total_num_buckets`.
///
/// The remainder is computed by a multiplication with the reciprocal of the divisor (Barrett, "Implementing the RSA algorithm on a
/// standard digital signal processor", CRYPTO '86).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucketing {
    total: u32,
    hash: BucketHash,
    reciprocal: u64,
}

impl Bucketing {
    /// # Panics
    /// Panics when there are no buckets.
    pub fn new(total_num_buckets: u32, hash: BucketHash) -> Self {
        Self { total: total_num_buckets, hash, reciprocal: u64::MAX / u64::from(total_num_buckets) }
    }

    /// The number of buckets.
    pub fn total(self) -> u32 {
        self.total
    }

    /// The bucket of an id.
    #[inline]
    pub fn of(self, id: Id) -> u32 {
        let (hashed, divisor) = (self.hash.of(id), u64::from(self.total));
        // The quotient is exact or one too small, because the reciprocal is at most one less than 2⁶⁴ / divisor.
        let quotient = ((u128::from(hashed) * u128::from(self.reciprocal)) >> 64) as u64;
        let rest = hashed - quotient * divisor;
        (if rest < divisor { rest } else { rest - divisor }) as u32
    }
}

/// The 64-bit hash of an id that buckets, the SSD tier's index and footers use. It is the finaliser of `SplitMix64`, a bijection
/// (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the constants of Stafford's variant
/// 13). It is part of the formats on disk, and can never change; `tests/fixtures/v2/buckets.txt` pins it.
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

/// The key of a table: the xxh3-64 hash of the table's name when it was created. It is kept with the table's files, so that
/// renaming the table does not change births.
pub fn table_key(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

/// The metadata of a row. It changes when a training step commits, and moves together with the row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowMeta {
    /// The number of occurrences in training batches. It stops at the largest `u32`.
    pub count: u32,
    /// The table's step counter at the last training step that used the row.
    pub last_step: u64,
    /// How much the row is used: the sum of its occurrences, which halves over every [`TableConfig::score_half_life_steps`] steps
    /// (see [`Decay`](crate::rows::Decay)). This is what it was at `last_step`.
    ///
    /// [`TableConfig::score_half_life_steps`]: crate::config::TableConfig::score_half_life_steps
    pub score: f32,
    /// The table's checkpoint epoch at the last training step that used the row.
    pub modified_epoch: u32,
}

/// The half life of scores where a table does not say another one.
pub const DEFAULT_SCORE_HALF_LIFE_STEPS: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_remainders_of_all_ids_and_of_their_hashes() {
        for divisor in [1, 2, 3, 7, 641, DEFAULT_TOTAL_NUM_BUCKETS, 1 << 16, (1 << 31) - 1, 1 << 31, u32::MAX] {
            let plain = Bucketing::new(divisor, BucketHash::Plain);
            let hashed = Bucketing::new(divisor, BucketHash::SplitMix64);
            let near = |id: i64| (-2..3).map(move |off| id.wrapping_add(off));
            let multiples = [0, 1, 2, u64::MAX / u64::from(divisor)].map(|by| (by * u64::from(divisor)) as i64);
            let ids = multiples.into_iter().chain([i64::MAX, i64::MIN, -1]).flat_map(near);
            for id in ids.chain((0..1000).map(|n| hash_id(n) as i64)) {
                assert_eq!(plain.of(id), bucket_of(id, divisor), "{id} by {divisor}");
                assert_eq!(hashed.of(id), bucket_of(hash_id(id) as Id, divisor), "{id} by {divisor}");
            }
        }
    }

    #[test]
    fn a_hash_gives_its_id_back() {
        for bit in 0..64 {
            for id in [1_i64 << bit, (1_i64 << bit).wrapping_sub(1), !(1_i64 << bit), hash_id(bit) as i64] {
                assert_eq!(id_of_hash(hash_id(id)), id);
            }
        }
    }
}
