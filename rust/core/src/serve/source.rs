//! Sources of newer checkpoints: the served directory, or a trainer's directory whose deltas apply to the served
//! checkpoint.
//!
//! A serving checkpoint records the trainer's checkpoint from which it was made. The trainer's later deltas can be
//! applied to it. A chain then consists of the checkpoint in the served directory and the deltas in the trainer's,
//! where nothing is ever written.

use super::data_files::RowFileLink;
use super::open::{open_links, open_readers};
use super::version::{OpenedLink, ServeContext, ServedVersion, extend_version, origin_of};
use crate::checkpoint::{
    CheckpointChain, CheckpointDirectory, CheckpointId, CheckpointName, LatestCheckpoint, OpenCheckpoint, WaitCallback,
    open_parent,
};
use crate::error::{Error, Kind, Result};

/// The directories of a server.
#[derive(Clone, Debug)]
pub(super) struct ServingSource {
    /// The served directory.
    pub(super) root: CheckpointDirectory,
    /// The same directory, if indexes may be written to it.
    pub(super) writable: Option<CheckpointDirectory>,
    /// The trainer's directory, if it is another one.
    pub(super) trainer: Option<CheckpointDirectory>,
}

/// The checkpoints of a version, locked for reading.
pub(super) struct VersionLinks {
    /// Those in the served directory.
    served: CheckpointChain,
    /// The trainer's deltas after them, latest first.
    trainer_deltas: Vec<OpenCheckpoint>,
}

impl VersionLinks {
    /// All of them, oldest first.
    pub(super) fn opened(&self) -> Result<Vec<OpenedLink<'_>>> {
        open_readers(self.served.links().iter().rev().chain(self.trainer_deltas.iter().rev()))
    }

    /// True if all are in the served directory.
    pub(super) fn are_all_served(&self) -> bool {
        self.trainer_deltas.is_empty()
    }
}

/// Checkpoints of a directory, latest first.
struct ChainWalk {
    links: Vec<OpenCheckpoint>,
    /// True if the oldest of them is a delta on the checkpoint `since`. Otherwise the chain ends there.
    reached: bool,
}

/// Follows the parents of a checkpoint of a directory, until one of them is a delta on `since`.
fn walk_chain(directory: &CheckpointDirectory, latest: LatestCheckpoint, since: &CheckpointId) -> Result<ChainWalk> {
    let mut links = vec![OpenCheckpoint::open(directory, latest)?];
    while let Some(parent) = links[links.len() - 1].manifest().parent.clone() {
        if parent == *since {
            return Ok(ChainWalk { links, reached: true });
        }
        links.push(open_parent(directory, &links[links.len() - 1], &parent)?);
    }
    Ok(ChainWalk { links, reached: false })
}

impl ServingSource {
    /// The directory that is polled for newer checkpoints.
    pub(super) fn followed(&self) -> &CheckpointDirectory {
        self.trainer.as_ref().unwrap_or(&self.root)
    }

    /// True if a checkpoint of the followed directory is a delta on `parent`. The delta has a lower number if `parent`
    /// was merged while it was written.
    pub(super) fn is_built_on(&self, latest: LatestCheckpoint, parent: CheckpointName) -> Result<bool> {
        if !self.followed().has(&latest.to_string())? {
            return Ok(false);
        }
        let newest = OpenCheckpoint::open(self.followed(), latest)?;
        Ok(newest.manifest().parent.as_ref().is_some_and(|named| named.name == parent.to_string()))
    }

    /// The checkpoint of the followed directory with the same contents as a version.
    pub(super) fn checkpoint_of(&self, version: &ServedVersion) -> Result<CheckpointName> {
        if self.trainer.is_some() { version.origin().name.parse() } else { Ok(version.name()) }
    }

    /// Opens the checkpoints of a version. Returns `Mismatch` if one of them is missing, or was replaced by another of
    /// the same name.
    pub(super) fn links_of(&self, version: &ServedVersion) -> Result<VersionLinks> {
        let own = &version.links[version.base.links - 1];
        let own = CheckpointChain::open(&self.root, LatestCheckpoint { name: own.name.parse()? })?;
        let after = match &self.trainer {
            Some(trainer) if version.links.len() > version.base.links => {
                walk_chain(trainer, LatestCheckpoint { name: version.name() }, &version.base.origin)?.links
            }
            _ => Vec::new(),
        };
        let links = VersionLinks { served: own, trainer_deltas: after };
        let found =
            links.served.links().iter().rev().chain(links.trainer_deltas.iter().rev()).map(OpenCheckpoint::identity);
        if found.eq(version.links.iter().map(RowFileLink::identity)) {
            return Ok(links);
        }
        Err(Kind::Mismatch
            .error(format!("the checkpoints of {} differ from those that are served under its name", version.name()))
            .at(self.followed().path()))
    }

    /// Opens the version of a newer checkpoint: the current one with the deltas after it, if the newer one is based on
    /// it. `wait` is called while an index is built, or waited for; an error from it aborts this.
    pub(super) fn next(
        &self,
        opening: &ServeContext,
        before: &ServedVersion,
        latest: LatestCheckpoint,
        wait: &mut WaitCallback<'_>,
    ) -> Result<ServedVersion> {
        match &self.trainer {
            None => self.next_of_own(opening, before, latest, wait),
            Some(trainer) => self.next_of_trainer(opening, before, (trainer, latest), wait),
        }
    }

    fn next_of_own(
        &self,
        opening: &ServeContext,
        before: &ServedVersion,
        latest: LatestCheckpoint,
        wait: &mut WaitCallback<'_>,
    ) -> Result<ServedVersion> {
        let ChainWalk { links, reached } = walk_chain(&self.root, latest, &before.newest())?;
        if reached {
            return apply_deltas(opening, before, &links, false);
        }
        open_links(&open_readers(links.iter().rev())?, self.writable.as_ref(), opening, wait)
    }

    fn next_of_trainer(
        &self,
        opening: &ServeContext,
        before: &ServedVersion,
        (trainer, latest): (&CheckpointDirectory, LatestCheckpoint),
        wait: &mut WaitCallback<'_>,
    ) -> Result<ServedVersion> {
        let mut ended = false;
        let mut ends = || wait().inspect_err(|_| ended = true);
        let converted = self.next_of_converted(opening, before, (trainer, latest), &mut ends);
        match converted {
            Ok(Some(next)) => return Ok(next),
            Err(error) if ended => return Err(error),
            _ => {}
        }
        let walked = walk_chain(trainer, latest, &before.origin());
        match (converted, walked) {
            // Even if the served directory is missing or corrupted, the trainer's deltas can be applied to the current
            // version.
            (Err(error), Ok(ChainWalk { links, reached: true })) => {
                tracing::warn!("no newer converted checkpoint is taken up: {error}");
                apply_deltas(opening, before, &links, true)
            }
            (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            (Ok(_), Ok(ChainWalk { links, reached })) => {
                if reached {
                    apply_deltas(opening, before, &links, true)
                } else {
                    Err(not_converted(&links[0], before))
                }
            }
        }
    }

    /// Opens the version of a checkpoint that was converted since the one of `before` was opened, with the trainer's
    /// deltas after it. Returns `None` if there is no such checkpoint, or the trainer's latest one is not based on its
    /// source.
    fn next_of_converted(
        &self,
        opening: &ServeContext,
        before: &ServedVersion,
        (trainer, latest): (&CheckpointDirectory, LatestCheckpoint),
        wait: &mut WaitCallback<'_>,
    ) -> Result<Option<ServedVersion>> {
        let newest = LatestCheckpoint::read(&self.root)?;
        if newest.name.to_string() == before.links[before.base.links - 1].name {
            return Ok(None);
        }
        let chain = CheckpointChain::open(&self.root, newest)?;
        let origin = origin_of(&chain.links()[0]);
        let ChainWalk { links, reached } = walk_chain(trainer, latest, &origin)?;
        let is_newest = links[0].identity() == origin;
        if !reached && !is_newest {
            return Ok(None);
        }
        let own = open_readers(chain.links().iter().rev())?;
        let base = open_links(&own, self.writable.as_ref(), opening, wait)?;
        if is_newest { Ok(Some(base)) } else { apply_deltas(opening, &base, &links, true).map(Some) }
    }
}

/// Returns a version with the deltas `links` applied, which are ordered latest first.
fn apply_deltas(
    opening: &ServeContext,
    before: &ServedVersion,
    links: &[OpenCheckpoint],
    is_trainers: bool,
) -> Result<ServedVersion> {
    let child = links.last().expect("a walk has a checkpoint");
    let (manifest, name) = (child.manifest(), &before.origin().name);
    // The parent of such a delta is the checkpoint from which the serving checkpoint was made.
    let fits = if before.manifest.made_from.is_some() {
        manifest.check_fits_served(&before.manifest)
    } else {
        manifest.check_fits_parent(&before.manifest)
    };
    fits.map_err(|what| {
        Error::corruption(child.directory().path(), 0, "its tables", format!("a delta of {name}"), what)
    })?;
    extend_version(opening, before, &open_readers(links.iter().rev())?, is_trainers)
}

fn not_converted(newest: &OpenCheckpoint, served: &ServedVersion) -> Error {
    let path = newest.directory().path();
    let name = &newest.manifest().name;
    let origin = &served.origin().name;
    Kind::Mismatch.error(format!(
        "the trainer's checkpoint {name} does not build on {origin}, which is served: run `embcache convert` with `--to serving` on the \
         trainer's directory into the one that is served, so that {name} can be served too"
    )).at(path)
}
