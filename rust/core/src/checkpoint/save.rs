//! The coordinator's part of a save: what makes a checkpoint the newest one, and what becomes of those before.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::format::{CHUNK_BYTES, FORMAT, VERSION, rank_file};
use super::latest::{CheckpointName, LATEST_FILE, Latest};
use super::manifest::{
    CheckpointKind, MAX_MANIFEST_BYTES, Manifest, RankDigest, RankManifest, checksum, merge, parse, render, seal,
};
use crate::error::{Error, Kind, Result};
use crate::io::{ALIGNMENT, AlignedBuf, DirLock, IoEngine, LOCK_FILE, Open, publish, read_file};

/// The coordinator's manifest, written when all ranks are done.
pub(super) const MANIFEST_FILE: &str = "manifest.json";

/// A save under way. Dropped without [`Save::publish`], it leaves a directory that the next save sweeps.
#[derive(Debug)]
pub struct Save {
    engine: Arc<dyn IoEngine>,
    root: PathBuf,
    name: CheckpointName,
    /// While this is held no other save sweeps the directory.
    _lock: DirLock,
}

/// What a save did besides.
#[derive(Debug)]
pub struct Published {
    /// The checkpoint that loads now find.
    pub latest: Latest,
    /// Older checkpoints that could not be removed; the next save tries again.
    pub left: Vec<Error>,
}

impl Save {
    /// Make the directory of a new checkpoint in `root`, which exists, and sweep what unfinished saves left there, and what `LATEST`
    /// superseded. `random` tells saves that run at the same time apart.
    pub fn begin(engine: Arc<dyn IoEngine>, root: &Path, random: u64) -> Result<Self> {
        // What cannot be removed does no harm to this save, and publishing reports it. Where LATEST is damaged nothing is removed.
        let _ = sweep(&*engine, root);
        let latest = Latest::find(&*engine, root).ok().flatten().map(|latest| latest.name);
        let highest = checkpoints(&*engine, root)?.into_iter().chain(latest).map(|name| name.seq).max();
        let seq = highest.unwrap_or(0).checked_add(1).ok_or_else(|| {
            Error::new(Kind::Corruption, format!("{}: the sequence numbers are used up", root.display()))
        })?;
        let name = CheckpointName { seq, random };
        let dir = root.join(name.to_string());
        engine.create_dir_all(&dir)?;
        let lock = engine.lock_dir(&dir)?;
        engine.sync_dir(root)?;
        Ok(Self { engine, root: root.to_owned(), name, _lock: lock })
    }

    /// The new checkpoint's name, for the ranks' writers.
    pub fn name(&self) -> CheckpointName {
        self.name
    }

    /// Make the checkpoint the newest one; `digests` are the ranks', by rank. Rows modified from now on carry `next_epoch`.
    ///
    /// When it fails, a load finds the checkpoint before, except when making the new name durable failed at the very end: then it
    /// finds either, whole.
    pub fn publish(self, digests: &[RankDigest], next_epoch: u32) -> Result<Published> {
        let engine = &*self.engine;
        let dir = self.root.join(self.name.to_string());
        let ranks = read_ranks(engine, &dir, digests)?;
        let refuse = |why: String| Error::new(Kind::State, format!("cannot publish {}: {why}", dir.display()));
        let kind = CheckpointKind::Full;
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            name: self.name.to_string(),
            seq: self.name.seq,
            kind,
            parent: None,
            next_epoch,
            chunk_bytes: CHUNK_BYTES as u64,
            ranks: digests.to_vec(),
            tables: merge(&ranks, kind).map_err(refuse)?,
        };
        manifest.check(self.name).map_err(refuse)?;
        manifest.check_ranks(&ranks).map_err(refuse)?;
        publish(engine, &dir.join(MANIFEST_FILE), &seal(&render(&manifest)?))?;
        let latest = Latest { name: self.name };
        self.name_latest(&dir, latest)?;
        // Nobody sweeps what LATEST names, so the lock's file has done its work; where it stays it does no harm.
        let _ = engine.remove_file(&dir.join(LOCK_FILE));
        let left = sweep(engine, &self.root).unwrap_or_else(|error| vec![error]);
        Ok(Published { latest, left })
    }

    /// Replace `LATEST`, from a temporary file in the checkpoint's own directory: two saves at once do not meet.
    fn name_latest(&self, dir: &Path, latest: Latest) -> Result<()> {
        let line = format!("{latest}\n");
        let temporary = dir.join(LATEST_FILE);
        let file = self.engine.open(&temporary, Open::Create { preallocate: 0 })?;
        let mut padded = AlignedBuf::zeroed(ALIGNMENT);
        padded[..line.len()].copy_from_slice(line.as_bytes());
        file.write_at(0, &padded)?;
        file.set_len(line.len() as u64)?;
        file.sync()?;
        self.engine.rename(&temporary, &self.root.join(LATEST_FILE))?;
        self.engine.sync_dir(&self.root)
    }

    /// Give the save up and remove what it wrote.
    pub fn abandon(self) -> Result<()> {
        self.engine.remove_dir_all(&self.root.join(self.name.to_string()))
    }
}

/// The ranks' manifests, checked against their digests.
pub(super) fn read_ranks(engine: &dyn IoEngine, dir: &Path, digests: &[RankDigest]) -> Result<Vec<RankManifest>> {
    let world = digests.len() as u32;
    digests
        .iter()
        .enumerate()
        .map(|(rank, digest)| {
            let path = dir.join(rank_file(rank as u32, world));
            parse(&read_digested(engine, &path, digest)?, &path)
        })
        .collect()
}

fn read_digested(engine: &dyn IoEngine, path: &Path, digest: &RankDigest) -> Result<Vec<u8>> {
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

/// Names of the checkpoints in a directory, complete or not.
fn checkpoints(engine: &dyn IoEngine, root: &Path) -> Result<Vec<CheckpointName>> {
    let entries = engine.list(root)?;
    Ok(entries.iter().filter_map(|entry| entry.file_name()?.to_str()?.parse().ok()).collect())
}

/// Remove every checkpoint that `LATEST` does not name and no save is writing; complete ones only if the one that `LATEST` names is
/// complete: where that file is missing or lies, one of the others may be all there is. Returns what could not be removed.
fn sweep(engine: &dyn IoEngine, root: &Path) -> Result<Vec<Error>> {
    let is_complete = |name: CheckpointName| engine.exists(&root.join(name.to_string()).join(MANIFEST_FILE));
    let stays = |name: CheckpointName| {
        Ok::<_, Error>(match Latest::find(engine, root)? {
            Some(latest) if latest.name == name => true,
            Some(latest) if is_complete(latest.name) => false,
            _ => is_complete(name),
        })
    };
    let mut left = Vec::new();
    for name in checkpoints(engine, root)? {
        if stays(name)? {
            continue;
        }
        let dir = root.join(name.to_string());
        let _lock = match engine.lock_dir(&dir) {
            Ok(lock) => lock,
            Err(error) if error.kind() == Kind::InUse => continue,
            Err(error) => {
                left.push(error);
                continue;
            }
        };
        // Read under the lock: a save names its checkpoint before it lets go of it, and only then.
        if stays(name)? {
            continue;
        }
        left.extend(engine.remove_dir_all(&dir).err());
    }
    Ok(left)
}
