//! Verifies bytes against the checksums of their chunks.

use std::path::Path;

use crate::checkpoint::manifest::dense::DENSE_CHUNK_BYTES;
use crate::error::{Error, Result};

/// Returns `Corruption` if the CRC-32C of a chunk of `bytes` differs from `checksums`. `bytes` are at offset `start` of
/// the file `path`; `label` names the checksum of a chunk of a given length.
pub(crate) fn verify_chunks(
    path: &Path,
    start: u64,
    checksums: &[u32],
    bytes: &[u8],
    label: &dyn Fn(usize) -> String,
) -> Result<()> {
    assert!(checksums.len() * DENSE_CHUNK_BYTES >= bytes.len(), "each chunk has a checksum");
    for (n, (chunk, &expected)) in bytes.chunks(DENSE_CHUNK_BYTES).zip(checksums).enumerate() {
        let found = crc32c::crc32c(chunk);
        if expected != found {
            let at = start + (n * DENSE_CHUNK_BYTES) as u64;
            return Err(Error::corruption(path, at, &label(chunk.len()), expected, found));
        }
    }
    Ok(())
}
