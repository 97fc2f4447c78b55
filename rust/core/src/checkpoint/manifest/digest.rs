//! A digest identifies a manifest by its length and its checksum.

use serde::{Deserialize, Serialize};

/// The checksum of manifests: XXH3, 64 bits.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Identifies a rank's manifest. [`crate::checkpoint::RankWriter::finish`] makes it, and [`crate::checkpoint::Save::publish`] checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankDigest {
    /// Its length.
    pub bytes: u64,
    /// Its XXH3.
    pub xxh3: u64,
}
