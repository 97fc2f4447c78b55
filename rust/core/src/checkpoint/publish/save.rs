//! The coordinator's part of a save: what makes a checkpoint the newest one, and what becomes of those before.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use super::retention::{checkpoints, sweep, sweep_parts};
use crate::checkpoint::manifest::dense::{DENSE_FILE, DenseEntry};
use crate::checkpoint::manifest::digest::{RankDigest, checksum};
use crate::checkpoint::manifest::holds::{lock_root, make_held};
use crate::checkpoint::manifest::latest::{CheckpointName, LATEST_FILE, Latest};
use crate::checkpoint::manifest::manifests::{
    CheckpointKind, MAX_MANIFEST_BYTES, Manifest, Parent, dense_bytes, merge, render, seal,
};
use crate::checkpoint::manifest::names::{CHUNK_BYTES, FORMAT, MANIFEST_FILE, VERSION};
use crate::checkpoint::manifest::read::{read_manifest, read_ranks};
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, IoEngine, LOCK_FILE, publish, write_whole};
use crate::memory::room_for_threads;

/// What a save is to be. The default: full, and it alone stays.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// The checkpoint that it builds on, of which it holds the changes; it must still be the newest when this one is published.
    pub parent: Option<Parent>,
    /// The delta that it holds the rows of, merged with all that it builds on; that, too, must still be the newest.
    pub merged: Option<Parent>,
    /// Whether tables with an SSD tier are in it as their segments; then it has no parent.
    pub snapshot: bool,
    /// So many of the newest checkpoints stay, this one included (one at least), and those that they build on.
    pub keep: usize,
}

/// A save under way. Dropped without [`Save::publish`], it leaves a directory that the next save sweeps.
#[derive(Debug)]
pub struct Save {
    pub(crate) engine: Arc<dyn IoEngine>,
    pub(crate) root: PathBuf,
    pub(crate) name: CheckpointName,
    options: SaveOptions,
    /// What identifies `dense.json`, where the checkpoint has extents.
    dense: Option<RankDigest>,
    early: Early,
    /// While this is held no other save sweeps the directory.
    _lock: DirLock,
}

/// The line that is to be `LATEST`, and the name of the checkpoint's directory: they become durable while rows are written.
#[derive(Debug)]
struct Early(Option<JoinHandle<Result<()>>>);

impl Early {
    fn begin(sync: impl Fn() -> Result<()> + Send + Sync + 'static) -> Result<Self> {
        if !room_for_threads() {
            return sync().map(|()| Self(None));
        }
        let sync = Arc::new(sync);
        let beside = Arc::clone(&sync);
        match Builder::new().name("embcache-name".into()).spawn(move || beside()) {
            Ok(thread) => Ok(Self(Some(thread))),
            Err(_) => sync().map(|()| Self(None)),
        }
    }

    fn wait(&mut self) -> Result<()> {
        let ended = self.0.take().map_or(Ok(Ok(())), JoinHandle::join);
        ended.unwrap_or_else(|_| {
            Err(Error::new(Kind::Storage, "the thread that syncs a checkpoint's name ended in a panic"))
        })
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        // Nothing is published that needs it.
        let _ = self.wait();
    }
}

/// What a save did besides.
#[derive(Debug)]
pub struct Published {
    /// The checkpoint that loads now find.
    pub latest: Latest,
    /// As a delta that builds on it names it.
    pub identity: Parent,
    /// Older checkpoints that could not be removed; the next save tries again.
    pub left: Vec<Error>,
}

impl Save {
    /// Make the directory of a new checkpoint in `root`, which exists, and sweep what unfinished saves left there, and what `LATEST`
    /// superseded. `random` tells saves that run at the same time apart.
    pub fn begin(engine: Arc<dyn IoEngine>, root: &Path, random: u64) -> Result<Self> {
        Self::begin_with(engine, root, random, SaveOptions::default())
    }

    /// As [`Save::begin`], of a delta, of a merged checkpoint, or where older ones are to stay.
    pub fn begin_with(engine: Arc<dyn IoEngine>, root: &Path, random: u64, options: SaveOptions) -> Result<Self> {
        // What cannot be removed does no harm to this save, and publishing reports it. Where LATEST is damaged nothing is removed.
        let _ = sweep(&*engine, root, options.keep);
        let latest = Latest::find(&*engine, root).ok().flatten().map(|latest| latest.name);
        let highest = checkpoints(&*engine, root)?.into_iter().chain(latest).map(|name| name.seq).max();
        let seq = highest.unwrap_or(0).checked_add(1).ok_or_else(|| {
            Error::new(Kind::Corruption, format!("{}: the sequence numbers are used up", root.display()))
        })?;
        let name = CheckpointName { seq, random };
        let dir = root.join(name.to_string());
        let lock = make_held(&*engine, root, &dir)?;
        let line = write_whole(&*engine, &dir.join(LATEST_FILE), format!("{}\n", Latest { name }).as_bytes())?;
        let early = {
            let (engine, root) = (Arc::clone(&engine), root.to_owned());
            Early::begin(move || line.sync().and_then(|()| engine.sync_dir(&root)))?
        };
        Ok(Self { engine, root: root.to_owned(), name, options, dense: None, early, _lock: lock })
    }

    /// The new checkpoint's name, for the ranks' writers.
    pub fn name(&self) -> CheckpointName {
        self.name
    }

    /// The checkpoint's directory.
    pub(crate) fn dir(&self) -> PathBuf {
        self.root.join(self.name.to_string())
    }

    /// Write what the ranks' extents mean, in the caller's terms; with it the checkpoint has a dense part.
    pub fn write_dense_metadata(&mut self, metadata: &[u8]) -> Result<()> {
        if metadata.len() as u64 > MAX_MANIFEST_BYTES {
            let what = format!("{} bytes describe the extents: at most {MAX_MANIFEST_BYTES} can", metadata.len());
            return Err(Error::new(Kind::Input, what));
        }
        publish(&*self.engine, &self.dir().join(DENSE_FILE), metadata)?;
        self.dense = Some(RankDigest { bytes: metadata.len() as u64, xxh3: checksum(metadata) });
        Ok(())
    }

    /// Make the checkpoint the newest one; `digests` are the ranks', by rank. Rows modified from now on carry `next_epoch`.
    ///
    /// When it fails, a load finds the checkpoint before, except when making the new name durable failed at the very end: then it
    /// finds either, whole.
    pub fn publish(mut self, digests: &[RankDigest], next_epoch: u32) -> Result<Published> {
        let engine = &*self.engine;
        let dir = self.dir();
        let ranks = read_ranks(engine, &dir, digests)?;
        let refuse = |why: String| Error::new(Kind::State, format!("cannot publish {}: {why}", dir.display()));
        let SaveOptions { parent, merged, snapshot, keep } = self.options.clone();
        let kind = match (parent.is_some(), snapshot) {
            (true, _) => CheckpointKind::Delta,
            (false, true) => CheckpointKind::Snapshot,
            (false, false) => CheckpointKind::Full,
        };
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            name: self.name.to_string(),
            seq: self.name.seq,
            kind,
            parent: parent.clone(),
            merged: merged.clone(),
            next_epoch,
            chunk_bytes: CHUNK_BYTES as u64,
            ranks: digests.to_vec(),
            tables: merge(&ranks, kind).map_err(refuse)?,
            dense: self.dense.map(|metadata| DenseEntry { metadata, bytes: dense_bytes(&ranks) }),
        };
        manifest.check(self.name).map_err(refuse)?;
        manifest.check_ranks(&ranks).map_err(refuse)?;
        let sealed = seal(&render(&manifest)?);
        let latest = Latest { name: self.name };
        // Others that begin a save wait for who names one.
        self.early.wait()?;
        {
            let _naming = lock_root(engine, &self.root)?;
            if let Some(named) = parent.as_ref().or(merged.as_ref()) {
                self.check_newest(named)?;
            }
            if let Some(parent) = parent {
                let (found, identity) = read_manifest(engine, &self.root.join(&parent.name))?;
                if identity != parent {
                    return Err(refuse(format!("{} is another than it was when this one was begun", parent.name)));
                }
                manifest.check_fits_parent(&found).map_err(refuse)?;
            }
            self.name_latest(&dir, &sealed)?;
        }
        // Nobody sweeps what LATEST names, so the lock's file has done its work; where it stays it does no harm.
        let _ = engine.remove_file(&dir.join(LOCK_FILE));
        let mut left = sweep(engine, &self.root, keep).unwrap_or_else(|error| vec![error]);
        left.extend(sweep_parts(engine, &self.root).unwrap_or_else(|error| vec![error]));
        let identity = Parent { name: self.name.to_string(), manifest_xxh3: checksum(&sealed) };
        Ok(Published { latest, identity, left })
    }

    /// `State` unless `named` is the newest checkpoint: what builds on another would take back what was saved since.
    fn check_newest(&self, named: &Parent) -> Result<()> {
        let newest = Latest::find(&*self.engine, &self.root)?.map(|latest| latest.name.to_string());
        if newest.as_deref() == Some(named.name.as_str()) {
            return Ok(());
        }
        Err(Error::new(
            Kind::State,
            format!(
                "cannot publish {}: it builds on {} and the newest checkpoint in {} is {} by now; save again",
                self.name,
                named.name,
                self.root.display(),
                newest.as_deref().unwrap_or("none")
            ),
        ))
    }

    /// Put the manifest in its place, then replace `LATEST`, from temporary files in the checkpoint's own directory: two saves at once do
    /// not meet. What each step builds on is durable before it.
    fn name_latest(&self, dir: &Path, manifest: &[u8]) -> Result<()> {
        let engine = &*self.engine;
        publish(engine, &dir.join(MANIFEST_FILE), manifest)?;
        engine.rename(&dir.join(LATEST_FILE), &self.root.join(LATEST_FILE))?;
        engine.sync_dir(&self.root)
    }

    /// Give the save up and remove what it wrote.
    pub fn abandon(mut self) -> Result<()> {
        // A failed sync is no reason to leave anything behind.
        let _ = self.early.wait();
        self.engine.remove_dir_all(&self.dir())
    }
}
