//! Small files of RecIS-format saves: read with the errors of a load, verified by CRC-32C, and written as JSON.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde_json::ser::PrettyFormatter;

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, IoFile, IoOpenMode};

/// Larger manifests are rejected before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// Opens a regular file of a complete save. Returns `Corruption` if it is missing or not a regular file.
pub(crate) fn open_file(engine: &dyn IoEngine, path: &Path) -> Result<Arc<dyn IoFile>> {
    engine.open(path, IoOpenMode::Read).map_err(|error| match error.errno() {
        Some(libc::ENOENT) => Error::corruption(path, 0, "what is there", "a file", "nothing"),
        Some(libc::ENXIO) => Error::corruption(path, 0, "what is there", "a regular file", "a socket or a pipe"),
        _ => error,
    })
}

/// Reads an entire file of at most `limit` bytes.
pub(crate) fn read_small(engine: &dyn IoEngine, path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open_file(engine, path)?;
    let len = file.len()?;
    if len > limit {
        return Err(Error::corruption(path, 0, "the file's length", format!("at most {limit}"), len));
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes)?;
    Ok(bytes)
}

/// Reads a manifest whose checksum is `expected`.
pub(crate) fn read_checked(engine: &dyn IoEngine, path: &Path, expected: u32) -> Result<Vec<u8>> {
    let bytes = read_small(engine, path, MAX_MANIFEST_BYTES)?;
    check_crc(path, &bytes, expected)?;
    Ok(bytes)
}

/// Returns `Corruption` unless the CRC-32C of `bytes`, the entire file, is `expected`.
pub(crate) fn check_crc(path: &Path, bytes: &[u8], expected: u32) -> Result<()> {
    let found = crc32c::crc32c(bytes);
    if found == expected { Ok(()) } else { Err(Error::corruption(path, 0, "the checksum", expected, found)) }
}

/// Decodes a file of one line and strips its newline.
pub(crate) fn read_utf8_line(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()?.strip_suffix('\n')
}

/// Formats a manifest: JSON with one blank per level and a final newline.
pub(crate) fn render(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut json = serde_json::Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b" "));
    value
        .serialize(&mut json)
        .map_err(|error| Error::new(Kind::Input, format!("cannot write the manifest as JSON: {error}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}
