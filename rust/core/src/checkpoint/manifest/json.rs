//! Manifests as JSON, and the seal: the field with the manifest's own checksum.

use std::fmt::Display;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::digest::checksum;
use super::names::{FORMAT, VERSION};
use crate::error::{Error, Kind, Result};

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
        return Err(Error::new(
            Kind::Unsupported,
            format!(
                "{} has format version {} and this release reads {VERSION}: load it with the release that wrote it",
                path.display(),
                head.version
            ),
        )
        .at(path));
    }
    serde_json::from_slice(bytes).map_err(damaged)
}

/// Serializes a manifest as JSON.
pub(crate) fn render<T: Serialize>(manifest: &T) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(manifest)
        .map_err(|e| Error::new(Kind::Input, format!("cannot write the manifest as JSON: {e}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Start of the last field of a sealed manifest. Its value is the checksum of the manifest without that field.
const SEAL: &str = ",\n  \"xxh3\": ";
const END: &str = "\n}\n";

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
    let said = String::from_utf8_lossy(&sealed[at.map_or(sealed.len(), |at| at + SEAL.len())..]);
    let said: String = said.chars().take_while(char::is_ascii_digit).collect();
    let said = if said.is_empty() { "none".to_owned() } else { said };
    if said == found.to_string() {
        let (whole, len) = (seal(&rendered).len(), sealed.len());
        return Err(Error::corruption(path, whole as u64, "the manifest's length", whole, len));
    }
    Err(Error::corruption(path, at.unwrap_or(0) as u64, "the manifest's checksum", said, found))
}

/// Serializes a value as JSON with the seal of a manifest.
pub(crate) fn seal_text<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    Ok(seal(&render(value)?))
}
