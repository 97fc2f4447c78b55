//! The coordinator's part of a save: creates a checkpoint, publishes it as the latest one, and removes older ones.

use std::time::{SystemTime, UNIX_EPOCH};

use super::chunked_file::WriterThreads;
use super::directory::CheckpointDirectory;
use super::manifest::{CHUNK_BYTES, FORMAT, MANIFEST_FILE, RankDigest, VERSION, checksum, seal_text};
use super::retention::{remove_old_checkpoints, remove_stale_parts};
use crate::checkpoint::manifest::latest::{CheckpointName, LATEST_FILE, LatestCheckpoint, lock_root, make_held};
use crate::checkpoint::manifest::manifests::{
    CheckpointId, CheckpointKind, CheckpointManifest, DENSE_FILE, DenseEntry, MAX_MANIFEST_BYTES, dense_bytes,
    merge_tables, read_manifest, read_rank,
};
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, LOCK_FILE, write_atomically, write_whole};

/// Options of a save. By default the checkpoint is full, and no older one is kept.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// Base of a delta. It must still be the latest checkpoint when the delta is published.
    pub parent: Option<CheckpointId>,
    /// The checkpoint whose chain is merged into this one. It must still be the latest one when this is published.
    pub merged: Option<CheckpointId>,
    /// If true, this is a linked checkpoint: tables with an SSD tier are stored as their segments. It has no parent.
    pub linked: bool,
    /// The checkpoint from which a serving checkpoint is made. If set, this is a serving checkpoint, which has no
    /// parent.
    pub made_from: Option<CheckpointId>,
    /// Number of latest checkpoints to keep, including this one: at least 1. Their base checkpoints are kept too.
    pub keep: usize,
}

/// A save in progress. If dropped without [`Self::publish`], it leaves a directory that the next save removes.
#[derive(Debug)]
pub struct CheckpointSave {
    pub(crate) root: CheckpointDirectory,
    /// The checkpoint's own directory.
    pub(crate) dir: CheckpointDirectory,
    name: CheckpointName,
    options: SaveOptions,
    /// Digest of `dense.json`, if the checkpoint has dense extents.
    dense: Option<RankDigest>,
    /// Syncs the line that will be `LATEST`, and the name of the checkpoint's directory, while rows are written.
    early_sync: WriterThreads,
    /// While this lock is held, no other save removes the directory.
    _lock: DirLock,
}

/// Returns the time in milliseconds since 1970; 0 if the clock is earlier.
fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Result of publishing a checkpoint.
#[derive(Debug)]
pub struct PublishedCheckpoint {
    /// The checkpoint that loads find from this point.
    pub latest: LatestCheckpoint,
    /// Its identity: the name and the XXH3 of its manifest.
    pub identity: CheckpointId,
    /// Base of a delta: the parent with which the save was started, or the checkpoint that this parent was merged into
    /// since.
    pub parent: Option<CheckpointId>,
    /// Errors of older checkpoints that could not be removed. The next save tries again.
    pub cleanup_errors: Vec<Error>,
}

impl CheckpointSave {
    /// Creates the directory of a new checkpoint in `root`. Also removes leftovers of unfinished saves, and checkpoints
    /// that are not kept. `random` distinguishes saves that run at the same time.
    pub fn begin(root: &CheckpointDirectory, random: u64) -> Result<Self> {
        Self::begin_with(root, random, SaveOptions::default())
    }

    /// Like [`Self::begin`], with options.
    pub fn begin_with(root: &CheckpointDirectory, random: u64, options: SaveOptions) -> Result<Self> {
        root.check_to_save()?;
        // Leftovers do not harm this save, and publishing reports them. If LATEST is corrupted, all checkpoints are
        // kept.
        let _ = remove_old_checkpoints(root, options.keep);
        let latest = LatestCheckpoint::find(root).ok().flatten().map(|latest| latest.name);
        let highest = root.list_names::<CheckpointName>()?.into_iter().chain(latest).map(|name| name.seq).max();
        let seq = highest.unwrap_or(0).checked_add(1).ok_or_else(|| {
            Kind::Corruption.error(format!("{}: the sequence numbers are used up", root.path().display()))
        })?;
        let name = CheckpointName { seq, random };
        let (dir, lock) = make_held(root, name)?;
        let line =
            write_whole(dir.engine(), &dir.join(LATEST_FILE), format!("{}\n", LatestCheckpoint { name }).as_bytes())?;
        let (mut early_sync, synced) = (WriterThreads::start(1, 1), root.clone());
        early_sync.run(move || line.sync().and_then(|()| synced.sync()))?;
        early_sync.close();
        Ok(Self { root: root.clone(), dir, name, options, dense: None, early_sync, _lock: lock })
    }

    /// Name of the new checkpoint, for the ranks' writers.
    pub fn name(&self) -> CheckpointName {
        self.name
    }

    /// Writes the caller's description of the ranks' dense extents. With it the checkpoint has dense state.
    pub fn write_dense_metadata(&mut self, metadata: &[u8]) -> Result<()> {
        if metadata.len() as u64 > MAX_MANIFEST_BYTES {
            let what = format!("{} bytes describe the extents: at most {MAX_MANIFEST_BYTES} can", metadata.len());
            return Err(Kind::Input.error(what));
        }
        write_atomically(self.dir.engine(), &self.dir.join(DENSE_FILE), metadata)?;
        self.dense = Some(RankDigest { bytes: metadata.len() as u64, xxh3: checksum(metadata) });
        Ok(())
    }

    /// Makes the checkpoint the latest one. `digests` are those of the ranks' manifests, by rank. Rows modified after
    /// this call have `next_epoch`.
    ///
    /// After an error a load finds the previous checkpoint, and the files of this save are removed. There is one
    /// exception: if only the last sync fails, which makes the new `LATEST` durable, a load finds either of the two,
    /// complete.
    pub fn publish(mut self, digests: &[RankDigest], next_epoch: u32) -> Result<PublishedCheckpoint> {
        let published = self.make_newest(digests, next_epoch);
        if published.is_err() && self.is_not_newest() {
            // The publication error is returned. The next save removes any leftovers.
            let _ = self.abandon();
        }
        published
    }

    /// True if `LATEST` certainly does not name this checkpoint.
    fn is_not_newest(&self) -> bool {
        LatestCheckpoint::find(&self.root).is_ok_and(|latest| latest.is_none_or(|latest| latest.name != self.name))
    }

    fn make_newest(&mut self, digests: &[RankDigest], next_epoch: u32) -> Result<PublishedCheckpoint> {
        let ranks = (0..digests.len() as u32).map(|rank| read_rank(&self.dir, digests, rank));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        let path = self.dir.path().to_owned();
        let refuse = |why: String| Kind::State.error(format!("cannot publish {}: {why}", path.display()));
        let SaveOptions { parent, merged, linked, made_from, keep } = self.options.clone();
        let kind = match (parent.is_some(), linked, made_from.is_some()) {
            (true, ..) => CheckpointKind::Delta,
            (false, true, _) => CheckpointKind::Linked,
            (false, false, true) => CheckpointKind::Serving,
            (false, false, false) => CheckpointKind::Full,
        };
        let tables = merge_tables(&ranks, kind).map_err(refuse)?;
        let mut manifest = CheckpointManifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            name: self.name.to_string(),
            seq: self.name.seq,
            saved_unix_ms: unix_ms(),
            kind,
            parent: parent.clone(),
            merged: merged.clone(),
            made_from,
            next_epoch,
            chunk_bytes: CHUNK_BYTES as u64,
            ranks: digests.to_vec(),
            tables,
            dense: self.dense.map(|metadata| DenseEntry { metadata, bytes: dense_bytes(&ranks) }),
        };
        manifest.check(self.name).map_err(refuse)?;
        manifest.check_ranks(&ranks).map_err(refuse)?;
        let mut sealed = seal_text(&manifest)?;
        let latest = LatestCheckpoint { name: self.name };
        // Waits before taking the lock, because other saves wait for the lock.
        self.early_sync.end()?;
        {
            let _naming = lock_root(&self.root)?;
            if let Some(merged) = &merged {
                self.check_newest(merged)?;
            }
            if let Some(parent) = &parent {
                let (found, identity) = self.newest_to_build_on(parent, &manifest)?;
                manifest.check_fits_parent(&found).map_err(refuse)?;
                if identity != *parent {
                    manifest.parent = Some(identity);
                    sealed = seal_text(&manifest)?;
                }
            }
            self.name_latest(&sealed)?;
        }
        // The checkpoint that LATEST names is never removed, so the lock file is not needed. It is harmless if it
        // stays.
        let _ = self.dir.engine().remove_file(&self.dir.join(LOCK_FILE));
        let mut cleanup_errors = remove_old_checkpoints(&self.root, keep).unwrap_or_else(|error| vec![error]);
        cleanup_errors.extend(remove_stale_parts(&self.root).unwrap_or_else(|error| vec![error]));
        let identity = CheckpointId { name: self.name.to_string(), manifest_xxh3: checksum(&sealed) };
        Ok(PublishedCheckpoint { latest, identity, parent: manifest.parent, cleanup_errors })
    }

    /// Returns the manifest and identity of the latest checkpoint, if `delta`, which was started on `parent`, can be
    /// based on it. This is `parent`, or the checkpoint that `parent` was merged into since: it has the same rows,
    /// steps and epochs, and counts of the same tables.
    ///
    /// Errors: `State` if it is neither.
    fn newest_to_build_on(
        &self,
        parent: &CheckpointId,
        delta: &CheckpointManifest,
    ) -> Result<(CheckpointManifest, CheckpointId)> {
        if let Some(newest) = LatestCheckpoint::find(&self.root)? {
            let (found, identity) = read_manifest(&self.root.subdirectory(newest.name))?;
            let counted = |manifest: &CheckpointManifest| {
                manifest.tables.iter().map(|table| table.pending.is_some()).collect::<Vec<_>>()
            };
            let is_merged = found.merged.as_ref() == Some(parent) && counted(&found) == counted(delta);
            if identity == *parent || is_merged {
                return Ok((found, identity));
            }
        }
        self.check_newest(parent)?;
        let path = self.dir.path().display();
        let why = format!("cannot publish {path}: {} has changed since this save began", parent.name);
        Err(Kind::State.error(why))
    }

    /// Returns `State` unless `named` is still the latest checkpoint. Publishing on top of an older one would undo the
    /// saves since.
    fn check_newest(&self, named: &CheckpointId) -> Result<()> {
        let newest = LatestCheckpoint::find(&self.root)?.map(|latest| latest.name.to_string());
        if newest.as_deref() == Some(named.name.as_str()) {
            return Ok(());
        }
        Err(Kind::State.error(format!(
            "cannot publish {}: it builds on {} and the newest checkpoint in {} is {} by now; save again",
            self.name,
            named.name,
            self.root.path().display(),
            newest.as_deref().unwrap_or("none")
        )))
    }

    /// Publishes the manifest, then replaces `LATEST`. Each step starts when the previous one is durable. Temporary
    /// files are in the checkpoint's own directory, so that concurrent saves do not touch each other's files.
    fn name_latest(&self, manifest: &[u8]) -> Result<()> {
        let engine = self.root.engine();
        write_atomically(engine, &self.dir.join(MANIFEST_FILE), manifest)?;
        engine.rename(&self.dir.join(LATEST_FILE), &self.root.join(LATEST_FILE))?;
        self.root.sync()
    }

    /// Cancels the save and removes its files.
    pub fn abandon(mut self) -> Result<()> {
        // The directory is removed even if that sync failed.
        let _ = self.early_sync.end();
        self.dir.remove()
    }
}
