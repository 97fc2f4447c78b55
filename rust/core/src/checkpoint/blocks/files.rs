//! Small files of block-level saves: read with the errors of a load, checked by their CRC-32C, and written as JSON.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde_json::ser::PrettyFormatter;

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, IoFile, IoOpenMode};

/// Larger manifests are refused before they are read.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// Open a regular file that a complete save has. `Corruption` where there is none, or something else.
pub(crate) fn open_file(engine: &dyn IoEngine, path: &Path) -> Result<Arc<dyn IoFile>> {
    engine.open(path, IoOpenMode::Read).map_err(|error| match error.errno() {
        Some(libc::ENOENT) => Error::corruption(path, 0, "what is there", "a file", "nothing"),
        Some(libc::ENXIO) => Error::corruption(path, 0, "what is there", "a regular file", "a socket or a pipe"),
        _ => error,
    })
}

/// Read a whole file of at most `limit` bytes.
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

/// Read a manifest whose checksum is `expected`.
pub(crate) fn read_checked(engine: &dyn IoEngine, path: &Path, expected: u32) -> Result<Vec<u8>> {
    let bytes = read_small(engine, path, MAX_MANIFEST_BYTES)?;
    check_crc(path, &bytes, expected)?;
    Ok(bytes)
}

/// `Corruption` unless the CRC-32C of `bytes`, which are all of the file, is `expected`.
pub(crate) fn check_crc(path: &Path, bytes: &[u8], expected: u32) -> Result<()> {
    let found = crc32c::crc32c(bytes);
    if found == expected { Ok(()) } else { Err(Error::corruption(path, 0, "the checksum", expected, found)) }
}

/// The one line that `bytes` are, without its end.
pub(crate) fn read_utf8_line(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()?.strip_suffix('\n')
}

/// JSON as manifests are written: one blank a level, and a line's end.
pub(crate) fn render(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut json = serde_json::Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b" "));
    value
        .serialize(&mut json)
        .map_err(|error| Error::new(Kind::Input, format!("cannot write the manifest as JSON: {error}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}
