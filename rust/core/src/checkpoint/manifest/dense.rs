//! The dense part of a checkpoint: bytes of any meaning (tensors, objects) as extents of one stream a rank.
//!
//! A rank's stream is cut into files `dense/<rank>-of-<world>.<n>.extents`; an extent starts at a multiple of [`ALIGNMENT`] and may
//! cross from file to file. A file is at most 256 MiB of the stream, a multiple of [`ALIGNMENT`], and then one page of that size:
//! CRC-32C of each 256 KiB of it, little-endian, and zeros.
//!
//! The file `dense.json` says what the extents mean. The coordinator writes it, and its manifest has the file's checksum. The core does not
//! look into it.

use serde::{Deserialize, Serialize};

use super::digest::RankDigest;
use crate::io::ALIGNMENT;

/// How many bytes of a stream are under one checksum.
pub(crate) const DENSE_CHUNK_BYTES: usize = 256 << 10;
/// The file, in the checkpoint's directory, that says what the extents mean.
pub(crate) const DENSE_FILE: &str = "dense.json";
/// The directory of the extents' files in the checkpoint's.
pub(crate) const DENSE_DIR: &str = "dense";
/// Bytes of the page of checksums that ends a file.
pub(crate) const CHECKSUM_PAGE_BYTES: usize = ALIGNMENT;
/// The most bytes of a stream in one file: as many chunks as the page has checksums for.
pub(crate) const DENSE_FILE_BYTES: u64 = (CHECKSUM_PAGE_BYTES / 4 * DENSE_CHUNK_BYTES) as u64;
/// How many bytes one request has: whole chunks.
pub(crate) const DENSE_PIECE_BYTES: usize = 16 * DENSE_CHUNK_BYTES;
/// How many threads write or read pieces.
pub(crate) const DENSE_THREADS: usize = 4;

pub(crate) fn dense_data_file(rank: u32, world: u32, n: usize) -> String {
    format!("{rank}-of-{world}.{n}.extents")
}

/// A file of extents in a rank's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DenseFile {
    /// Length of the file, its page of checksums included.
    pub(crate) bytes: u64,
    /// CRC-32C of the page of checksums.
    pub(crate) checksums_crc32c: u32,
}

impl DenseFile {
    /// Bytes of the stream that the file holds.
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
    /// Bytes of the stream.
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

/// The dense part in the coordinator's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseEntry {
    /// What identifies `dense.json`.
    pub metadata: RankDigest,
    /// Bytes of all ranks' streams.
    pub bytes: u64,
}

/// A part of a rank's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseExtent {
    /// Where it starts in the stream.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}
