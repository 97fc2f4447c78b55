//! What identifies a manifest: its length and its checksum.

use serde::{Deserialize, Serialize};

/// The checksum of manifests: XXH3, 64 bits.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// What identifies a rank's manifest: made by [`crate::checkpoint::RankWriter::finish`], checked by [`crate::checkpoint::Save::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankDigest {
    /// Its length.
    pub bytes: u64,
    /// Its XXH3.
    pub xxh3: u64,
}
