//! Reads the manifests of a checkpoint and verifies them against their identities.

use std::path::Path;

use super::digest::{RankDigest, checksum};
use super::manifests::{CheckpointId, CheckpointManifest, MAX_MANIFEST_BYTES, RankManifest, parse, unseal};
use super::names::{MANIFEST_FILE, rank_file};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Error, Result};
use crate::io::{IoEngine, read_file};

/// Reads the coordinator's manifest of the checkpoint in `dir`, verifies its seal, and returns it with its identity.
pub(crate) fn read_manifest(dir: &CheckpointDirectory) -> Result<(CheckpointManifest, CheckpointId)> {
    let path = dir.join(MANIFEST_FILE);
    let sealed = read_file(dir.engine(), &path, MAX_MANIFEST_BYTES)?;
    let manifest: CheckpointManifest = parse(&unseal(&sealed, &path)?, &path)?;
    let identity = CheckpointId { name: manifest.name.clone(), manifest_xxh3: checksum(&sealed) };
    Ok((manifest, identity))
}

/// Reads the ranks' manifests and verifies them against their digests.
pub(crate) fn read_ranks(dir: &CheckpointDirectory, digests: &[RankDigest]) -> Result<Vec<RankManifest>> {
    let world = digests.len() as u32;
    digests
        .iter()
        .enumerate()
        .map(|(rank, digest)| {
            let path = dir.join(rank_file(rank as u32, world));
            parse(&read_digested(dir.engine(), &path, digest)?, &path)
        })
        .collect()
}

/// Reads the file at `path`, which must match `digest`.
pub(crate) fn read_digested(engine: &dyn IoEngine, path: &Path, digest: &RankDigest) -> Result<Vec<u8>> {
    let bytes = read_file(engine, path, digest.bytes.min(MAX_MANIFEST_BYTES))?;
    let found = RankDigest { bytes: bytes.len() as u64, xxh3: checksum(&bytes) };
    if found != *digest {
        return Err(Error::corruption(
            path,
            0,
            "the manifest's length and checksum",
            format!("{} and {:016x}", digest.bytes, digest.xxh3),
            format!("{} and {:016x}", found.bytes, found.xxh3),
        ));
    }
    Ok(bytes)
}
