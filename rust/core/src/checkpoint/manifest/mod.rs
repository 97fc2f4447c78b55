//! Metadata of checkpoints: names of files, and manifests as sealed JSON, identified by length and checksum.

use std::fmt::Display;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::paths::encode_name;

pub(crate) mod latest;
pub(crate) mod manifests;
pub(crate) mod spec;

/// Format name in every manifest.
pub const FORMAT: &str = "torchrec-embcache";
/// Format version.
pub const VERSION: u32 = 1;
/// Bytes of a column per checksum.
pub const CHUNK_BYTES: usize = 16 << 10;
/// Maximum number of tombstones per group.
pub(crate) const TOMBSTONES_PER_GROUP: usize = 1 << 20;
/// The coordinator's manifest, written after all ranks have finished.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// A file in a checkpoint's directory that names a file elsewhere which refers to the checkpoint. The checkpoint is
/// kept while it exists.
pub const REFERENCE_FILE: &str = "REFERENCED_BY";
/// Start of the last field of a sealed manifest. Its value is the checksum of the manifest without that field.
const SEAL: &str = ",\n  \"xxh3\": ";
const END: &str = "\n}\n";

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

/// A file of a rank's dense state.
pub(crate) fn dense_data_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.extents")
}

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

/// The fields that are read first, so that another version is reported as such, whatever its other fields are.
#[derive(Deserialize)]
struct ManifestHeader {
    format: String,
    version: serde_json::Value,
}

/// Returns the error for a manifest that contradicts itself, another one, or the format. `reason` states the
/// contradiction.
pub(crate) fn inconsistent(path: &Path, reason: impl Display) -> Error {
    Error::corruption(path, 0, "the manifest", "consistent", format!("not: {reason}"))
}

/// Parses a manifest. Returns `Unsupported` for another version, and `Corruption` for any other invalid manifest.
pub(crate) fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8], path: &Path) -> Result<T> {
    let damaged = |e: serde_json::Error| Error::corruption(path, 0, "the manifest", "valid", e).at(path);
    let head: ManifestHeader = serde_json::from_slice(bytes).map_err(damaged)?;
    if head.format != FORMAT {
        return Err(Error::corruption(path, 0, "the format", FORMAT, head.format));
    }
    if head.version != VERSION {
        return Err(Kind::Unsupported
            .error(format!(
                "{} has format version {} and this release reads {VERSION}: load it with the release that wrote it",
                path.display(),
                head.version
            ))
            .at(path));
    }
    serde_json::from_slice(bytes).map_err(damaged)
}

/// Serializes a manifest as JSON.
pub(crate) fn render<T: Serialize>(manifest: &T) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(manifest)
        .map_err(|e| Kind::Input.error(format!("cannot write the manifest as JSON: {e}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Appends the checksum of a rendered manifest as its last field.
pub(crate) fn seal(rendered: &[u8]) -> Vec<u8> {
    let body = rendered.strip_suffix(END.as_bytes()).expect("what render() gives ends an object");
    [body, format!("{SEAL}{}{END}", checksum(rendered)).as_bytes()].concat()
}

/// Removes and verifies the seal. Returns `Corruption` if any bit has changed.
pub(crate) fn unseal(sealed: &[u8], path: &Path) -> Result<Vec<u8>> {
    let at = sealed.windows(SEAL.len()).rposition(|window| window == SEAL.as_bytes());
    let rendered = [&sealed[..at.unwrap_or(0)], END.as_bytes()].concat();
    if sealed == seal(&rendered) {
        return Ok(rendered);
    }
    let found = checksum(&rendered);
    let stored = String::from_utf8_lossy(&sealed[at.map_or(sealed.len(), |at| at + SEAL.len())..]);
    let stored: String = stored.chars().take_while(char::is_ascii_digit).collect();
    let stored = if stored.is_empty() { "none".to_owned() } else { stored };
    if stored == found.to_string() {
        let (whole, len) = (seal(&rendered).len(), sealed.len());
        return Err(Error::corruption(path, whole as u64, "the manifest's length", whole, len));
    }
    Err(Error::corruption(path, at.unwrap_or(0) as u64, "the manifest's checksum", stored, found))
}

/// Serializes a value as JSON with the seal of a manifest.
pub(crate) fn seal_text<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    Ok(seal(&render(value)?))
}
