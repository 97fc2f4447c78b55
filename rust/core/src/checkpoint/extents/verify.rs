//! Bytes held against the checksums of their chunks.

use std::path::Path;

use crate::checkpoint::manifest::dense::DENSE_CHUNK_BYTES;
use crate::error::{Error, Result};

/// `Corruption` unless the CRC-32C of each chunk of `bytes` is the one in `checksums`. The bytes are those at `start` of the file `path`;
/// `label` says what the checksum of a chunk of some length is called.
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
