//! The dense state of a checkpoint: bytes of any meaning (tensors, objects) as extents of one stream per rank.
//!
//! A rank's stream is divided into files `dense/<rank>-of-<world>.<n>.extents`. An extent starts at a multiple of
//! [`ALIGNMENT`] and may span several files. A file contains at most 256 MiB of the stream, a multiple of
//! [`ALIGNMENT`], followed by one page of that size with the CRC-32C of each 256 KiB, little-endian, padded with zeros.
//!
//! The file `dense.json` describes the extents. The coordinator writes it, and its manifest contains the file's
//! checksum. The Rust core does not interpret it.

use serde::{Deserialize, Serialize};

use super::digest::RankDigest;
use crate::io::ALIGNMENT;

/// Bytes of a stream per checksum.
pub(crate) const DENSE_CHUNK_BYTES: usize = 256 << 10;
/// The file in the checkpoint's directory that describes the extents.
pub(crate) const DENSE_FILE: &str = "dense.json";
/// Subdirectory of the checkpoint that contains the dense data files.
pub(crate) const DENSE_DIR: &str = "dense";
/// Size of the checksum page at the end of a file.
pub(crate) const CHECKSUM_PAGE_BYTES: usize = ALIGNMENT;
/// Maximum bytes of a stream per file: one chunk per checksum that fits the page.
pub(crate) const DENSE_FILE_BYTES: u64 = (CHECKSUM_PAGE_BYTES / 4 * DENSE_CHUNK_BYTES) as u64;
/// Size of one I/O request, in whole chunks.
pub(crate) const DENSE_PIECE_BYTES: usize = 16 * DENSE_CHUNK_BYTES;
/// Number of threads that write or read pieces.
pub(crate) const DENSE_THREADS: usize = 4;

pub(crate) fn dense_data_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.extents")
}

/// Entry of a dense data file in a rank's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DenseFile {
    /// Length of the file, including its checksum page.
    pub(crate) bytes: u64,
    /// CRC-32C of the checksum page.
    pub(crate) checksums_crc32c: u32,
}

impl DenseFile {
    /// Bytes of the stream in the file.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.bytes - CHECKSUM_PAGE_BYTES as u64
    }
}

/// One rank's stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseShare {
    pub(crate) files: Vec<DenseFile>,
}

impl DenseShare {
    /// Length of the stream in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(DenseFile::data_bytes).sum()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let page = CHECKSUM_PAGE_BYTES as u64;
        let whole = |file: &DenseFile| {
            (2 * page..=DENSE_FILE_BYTES + page).contains(&file.bytes) && file.bytes.is_multiple_of(ALIGNMENT as u64)
        };
        match self.files.iter().position(|file| !whole(file)) {
            Some(n) => Err(format!("file {n} of extents cannot have {} bytes", self.files[n].bytes)),
            None => Ok(()),
        }
    }
}

/// The dense state in the coordinator's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseEntry {
    /// Length and checksum of `dense.json`.
    pub metadata: RankDigest,
    /// Bytes of all ranks' streams.
    pub bytes: u64,
}

/// A part of a rank's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseExtent {
    /// Offset in the stream.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}
