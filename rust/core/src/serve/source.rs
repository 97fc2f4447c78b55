//! Where newer checkpoints come from: the directory that is served, or a trainer's directory whose deltas change what is served.
//!
//! A serving checkpoint says which checkpoint of the trainer it was made from. The trainer's deltas after that are changes of it. A chain is
//! then the checkpoint in the served directory and the deltas in the trainer's, where nothing is ever written.

use super::files::LinkOfFiles;
use super::opening::{open_links, opened};
use super::version::{OpenedLink, Opening, Version, extended, origin_of};
use crate::checkpoint::{Chain, Checkpoint, CheckpointName, Directory, Latest, Parent, Wait, open_parent};
use crate::error::{Error, Kind, Result};

/// The directories of a server.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The directory that is served.
    pub(super) root: Directory,
    /// The same directory, where indexes may be written to it.
    pub(super) writable: Option<Directory>,
    /// The trainer's directory, if it is another one.
    pub(super) trainer: Option<Directory>,
}

/// The checkpoints of a version, held to be read.
pub(super) struct Links {
    /// Those in the served directory.
    own: Chain,
    /// The trainer's deltas after them, the newest first.
    after: Vec<Checkpoint>,
}

impl Links {
    /// All of them, the oldest first.
    pub(super) fn opened(&self) -> Result<Vec<OpenedLink<'_>>> {
        opened(self.own.links().iter().rev().chain(self.after.iter().rev()))
    }

    /// Whether all lie in the served directory.
    pub(super) fn are_own(&self) -> bool {
        self.after.is_empty()
    }
}

/// Checkpoints of a directory, the newest first.
struct Walked {
    links: Vec<Checkpoint>,
    /// Whether the oldest of them is a delta of the checkpoint that was looked for. Else the chain ends there.
    reached: bool,
}

/// Go from a checkpoint of a directory to its parents, until one of them is a delta of `since`.
fn walk(directory: &Directory, latest: Latest, since: &Parent) -> Result<Walked> {
    let mut links = vec![Checkpoint::open(directory, latest)?];
    while let Some(parent) = links[links.len() - 1].manifest().parent.clone() {
        if parent == *since {
            return Ok(Walked { links, reached: true });
        }
        links.push(open_parent(directory, &links[links.len() - 1], &parent)?);
    }
    Ok(Walked { links, reached: false })
}

impl Source {
    /// The directory in which newer checkpoints are looked for.
    pub(super) fn followed(&self) -> &Directory {
        self.trainer.as_ref().unwrap_or(&self.root)
    }

    /// True if a checkpoint of the followed directory is a delta on `parent`: its number is lower where `parent` was merged while it was
    /// written.
    pub(super) fn is_built_on(&self, latest: Latest, parent: CheckpointName) -> Result<bool> {
        if !self.followed().has(&latest.to_string())? {
            return Ok(false);
        }
        let newest = Checkpoint::open(self.followed(), latest)?;
        Ok(newest.manifest().parent.as_ref().is_some_and(|named| named.name == parent.to_string()))
    }

    /// The checkpoint of the followed directory that a version equals.
    pub(super) fn checkpoint_of(&self, version: &Version) -> Result<CheckpointName> {
        if self.trainer.is_some() { version.origin().name.parse() } else { Ok(version.name()) }
    }

    /// The checkpoints of a version. `Mismatch` where one of them is gone, or another one has its name.
    pub(super) fn links_of(&self, version: &Version) -> Result<Links> {
        let own = &version.links[version.base.links - 1];
        let own = Chain::open(&self.root, Latest { name: own.name.parse()? })?;
        let after = match &self.trainer {
            Some(trainer) if version.links.len() > version.base.links => {
                walk(trainer, Latest { name: version.name() }, &version.base.origin)?.links
            }
            _ => Vec::new(),
        };
        let links = Links { own, after };
        let found = links.own.links().iter().rev().chain(links.after.iter().rev()).map(Checkpoint::identity);
        if found.eq(version.links.iter().map(LinkOfFiles::identity)) {
            return Ok(links);
        }
        let what =
            format!("the checkpoints of {} are not those any more that are served under its name", version.name());
        Err(Error::new(Kind::Mismatch, what).at(self.followed().path()))
    }

    /// The version of a newer checkpoint: the current one with the deltas after it, where the newer one builds on it. `wait` is called while an
    /// index is made, or waited for, and its error ends that.
    pub(super) fn next(
        &self,
        opening: &Opening,
        before: &Version,
        latest: Latest,
        wait: &mut Wait<'_>,
    ) -> Result<Version> {
        match &self.trainer {
            None => self.next_of_own(opening, before, latest, wait),
            Some(trainer) => self.next_of_trainer(opening, before, (trainer, latest), wait),
        }
    }

    fn next_of_own(&self, opening: &Opening, before: &Version, latest: Latest, wait: &mut Wait<'_>) -> Result<Version> {
        let Walked { links, reached } = walk(&self.root, latest, &before.newest())?;
        if reached {
            return changed(opening, before, &links, false);
        }
        open_links(&opened(links.iter().rev())?, self.writable.as_ref(), opening, wait)
    }

    fn next_of_trainer(
        &self,
        opening: &Opening,
        before: &Version,
        (trainer, latest): (&Directory, Latest),
        wait: &mut Wait<'_>,
    ) -> Result<Version> {
        let mut ended = false;
        let mut ends = || wait().inspect_err(|_| ended = true);
        let converted = self.next_of_converted(opening, before, (trainer, latest), &mut ends);
        match converted {
            Ok(Some(next)) => return Ok(next),
            Err(error) if ended => return Err(error),
            _ => {}
        }
        let walked = walk(trainer, latest, &before.origin());
        match (converted, walked) {
            // The served directory may be gone or damaged. The trainer's deltas change what is served all the same.
            (Err(error), Ok(Walked { links, reached: true })) => {
                tracing::warn!("no newer converted checkpoint is taken up: {error}");
                changed(opening, before, &links, true)
            }
            (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            (Ok(_), Ok(Walked { links, reached })) => {
                if reached {
                    changed(opening, before, &links, true)
                } else {
                    Err(not_converted(&links[0], before))
                }
            }
        }
    }

    /// The version of a checkpoint that was converted since the one of `before` was opened, with the trainer's deltas after it. `None` where there
    /// is no such checkpoint, or the trainer's newest one does not build on what it was made from.
    fn next_of_converted(
        &self,
        opening: &Opening,
        before: &Version,
        (trainer, latest): (&Directory, Latest),
        wait: &mut Wait<'_>,
    ) -> Result<Option<Version>> {
        let newest = Latest::read(&self.root)?;
        if newest.name.to_string() == before.links[before.base.links - 1].name {
            return Ok(None);
        }
        let chain = Chain::open(&self.root, newest)?;
        let origin = origin_of(&chain.links()[0]);
        let Walked { links, reached } = walk(trainer, latest, &origin)?;
        let is_newest = links[0].identity() == origin;
        if !reached && !is_newest {
            return Ok(None);
        }
        let own = opened(chain.links().iter().rev())?;
        let base = open_links(&own, self.writable.as_ref(), opening, wait)?;
        if is_newest { Ok(Some(base)) } else { changed(opening, &base, &links, true).map(Some) }
    }
}

/// A version with the deltas after it, the newest first.
fn changed(opening: &Opening, before: &Version, links: &[Checkpoint], is_trainers: bool) -> Result<Version> {
    let child = links.last().expect("a walk has a checkpoint");
    let (manifest, name) = (child.manifest(), &before.origin().name);
    // What a serving checkpoint was made from is the parent of a delta after it.
    let fits = if before.manifest.made_from.is_some() {
        manifest.check_fits_served(&before.manifest)
    } else {
        manifest.check_fits_parent(&before.manifest)
    };
    fits.map_err(|what| {
        Error::corruption(child.directory().path(), 0, "what it holds", format!("changes of {name}"), what)
    })?;
    extended(opening, before, &opened(links.iter().rev())?, is_trainers)
}

fn not_converted(newest: &Checkpoint, served: &Version) -> Error {
    let path = newest.directory().path();
    let name = &newest.manifest().name;
    let origin = &served.origin().name;
    let what = format!(
        "the trainer's checkpoint {name} does not build on {origin}, which is served: run `embcache convert` with `--to serving` on the \
         trainer's directory into the one that is served, so that {name} can be served too"
    );
    Error::new(Kind::Mismatch, what).at(path)
}
