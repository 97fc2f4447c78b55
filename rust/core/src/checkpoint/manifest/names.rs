//! What every file of a checkpoint is called and says that it is, and the bounds that all of them keep.

use crate::paths::encode_name;

/// What every manifest says it is.
pub const FORMAT: &str = "torchrec-embcache";
/// The version of the format.
pub const VERSION: u32 = 1;
/// Bytes of a column under one checksum.
pub const CHUNK_BYTES: usize = 16 << 10;
/// Tombstones of a file at most.
pub(crate) const TOMBSTONES_PER_FILE: usize = 1 << 20;
/// The coordinator's manifest, written when all ranks are done.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// A file in the directory of a checkpoint that a file elsewhere refers to, which it names. The checkpoint stays as long as it is there.
pub const REFERENCE_FILE: &str = "REFERENCED_BY";

/// The directory of a table in a checkpoint. Encoded names have no `+`, so that distinct tables have distinct directories.
pub(crate) fn table_dir(module: &str, table: &str) -> String {
    format!("{}+{}", encode_name(module), encode_name(table))
}

pub(crate) fn rank_file(rank: u32, world: u32) -> String {
    format!("{rank}-of-{world}.json")
}

pub(crate) fn data_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.safetensors")
}

/// A file of the counts of ids that wait for rows.
pub(crate) fn counts_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.counts.safetensors")
}

/// The file of a segment of a rank's SSD tier.
pub(crate) fn segment_file(rank: u32, world: u32, serial: u64) -> String {
    format!("{rank}-of-{world}.{serial:016x}.seg")
}
