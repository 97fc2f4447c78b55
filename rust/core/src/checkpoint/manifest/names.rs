//! Names of the files of a checkpoint, the format's name and version, and limits that all files keep.

use crate::paths::encode_name;

/// Format name in every manifest.
pub const FORMAT: &str = "torchrec-embcache";
/// Format version.
pub const VERSION: u32 = 1;
/// Bytes of a column per checksum.
pub const CHUNK_BYTES: usize = 16 << 10;
/// Maximum number of tombstones per file.
pub(crate) const TOMBSTONES_PER_FILE: usize = 1 << 20;
/// The coordinator's manifest, written after all ranks have finished.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// A file in a checkpoint's directory that names a file elsewhere which refers to the checkpoint. The checkpoint is
/// kept while it exists.
pub const REFERENCE_FILE: &str = "REFERENCED_BY";

/// The directory of a table in a checkpoint. Encoded names contain no `+`, so that distinct tables have distinct
/// directories.
pub(crate) fn table_dir(module: &str, table: &str) -> String {
    format!("{}+{}", encode_name(module), encode_name(table))
}

pub(crate) fn rank_file(rank: u32, world: u32) -> String {
    format!("{rank}-of-{world}.json")
}

pub(crate) fn data_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.safetensors")
}

/// A file with admission counts of pending ids.
pub(crate) fn counts_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.counts.safetensors")
}

/// The file of a segment of a rank's SSD tier.
pub(crate) fn segment_file(rank: u32, world: u32, serial: u64) -> String {
    format!("{rank}-of-{world}.{serial:016x}.seg")
}
