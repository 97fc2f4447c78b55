//! Digests, which identify manifests by length and checksum.

use serde::{Deserialize, Serialize};

/// Checksum of a manifest: 64-bit XXH3.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Identifies a rank's manifest. Returned by [`crate::checkpoint::RankWriter::finish`] and verified by
/// [`crate::checkpoint::CheckpointSave::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankDigest {
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3 of the contents.
    pub xxh3: u64,
}
