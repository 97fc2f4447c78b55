//! Which checkpoints of a directory stay: the newest ones, and whatever those build on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::checkpoint::manifest::holds::hold_to_sweep;
use crate::checkpoint::manifest::latest::{CheckpointName, Latest, PartName};
use crate::checkpoint::manifest::names::MANIFEST_FILE;
use crate::checkpoint::manifest::read::read_manifest;
use crate::error::{Error, Result};
use crate::io::IoEngine;

/// Names of the checkpoints in a directory, complete or not.
pub(crate) fn checkpoints(engine: &dyn IoEngine, root: &Path) -> Result<Vec<CheckpointName>> {
    let entries = engine.list(root)?;
    Ok(entries.iter().filter_map(|entry| entry.file_name()?.to_str()?.parse().ok()).collect())
}

fn is_complete(engine: &dyn IoEngine, root: &Path, name: CheckpointName) -> Result<bool> {
    engine.exists(&root.join(name.to_string()).join(MANIFEST_FILE))
}

/// The name of the checkpoint that `name` builds on, if it builds on one.
fn parent(engine: &dyn IoEngine, root: &Path, name: CheckpointName) -> Result<Option<CheckpointName>> {
    let (manifest, _) = read_manifest(engine, &root.join(name.to_string()))?;
    manifest.parent.map(|parent| parent.name.parse()).transpose()
}

/// The complete checkpoints that stay: the `keep` newest up to the one that `LATEST` names, and all that these build on.
///
/// `None` means that every complete checkpoint stays. That is so where `LATEST` is missing or names no complete checkpoint, and where it
/// cannot be told what one of them builds on: any of the others may be the only one that can still be loaded.
fn kept(engine: &dyn IoEngine, root: &Path, keep: usize) -> Result<Option<BTreeSet<CheckpointName>>> {
    let Some(latest) = Latest::find(engine, root)?.map(|latest| latest.name) else { return Ok(None) };
    if !is_complete(engine, root, latest)? {
        return Ok(None);
    }
    let mut complete = Vec::new();
    for name in checkpoints(engine, root)? {
        if name != latest && name.seq < latest.seq && is_complete(engine, root, name)? {
            complete.push(name);
        }
    }
    complete.sort_unstable();
    let mut stay = BTreeSet::new();
    for &name in [latest].iter().chain(complete.iter().rev()).take(keep.max(1)) {
        let mut next = Some(name);
        while let Some(name) = next.filter(|&name| stay.insert(name)) {
            next = match parent(engine, root, name) {
                Err(error) if error.is_damage_or_absence() => return Ok(None),
                // A manifest that cannot be read now may be readable later, and name another checkpoint. So nothing is removed.
                parent => parent?,
            };
        }
    }
    Ok(Some(stay))
}

/// Add to `needed` all that the checkpoint `name` builds on, up to a checkpoint that is damaged or that a save is still writing.
fn add_chain(
    engine: &dyn IoEngine,
    root: &Path,
    name: CheckpointName,
    needed: &mut BTreeSet<CheckpointName>,
) -> Result<()> {
    let parent = |name| match parent(engine, root, name) {
        Err(error) if error.is_damage_or_absence() => Ok(None),
        parent => parent,
    };
    let mut next = parent(name)?;
    while let Some(name) = next.filter(|&name| needed.insert(name)) {
        next = parent(name)?;
    }
    Ok(())
}

/// Remove every checkpoint that does not stay, that no save is writing and no load is reading. A checkpoint that is being read is left to
/// a later sweep, and so is all that it builds on. Returns why some could not be removed.
pub(crate) fn sweep(engine: &dyn IoEngine, root: &Path, keep: usize) -> Result<Vec<Error>> {
    let mut left = Vec::new();
    let stays = |name: CheckpointName| {
        Ok::<_, Error>(match kept(engine, root, keep)? {
            Some(kept) => kept.contains(&name),
            None => is_complete(engine, root, name)?,
        })
    };
    // A delta is removed before what it builds on. So whenever this stops, every delta that is left has all it needs.
    let mut names = checkpoints(engine, root)?;
    names.sort_unstable_by(|a, b| b.cmp(a));
    let mut in_use = BTreeSet::new();
    for name in names {
        if in_use.contains(&name) || stays(name)? {
            continue;
        }
        let dir = root.join(name.to_string());
        let _lock = match hold_to_sweep(engine, root, &dir) {
            Ok(Some(lock)) => lock,
            Ok(None) => {
                if let Err(error) = add_chain(engine, root, name, &mut in_use) {
                    // What it builds on comes later in this loop and would be removed.
                    left.push(error);
                    break;
                }
                continue;
            }
            Err(error) => {
                left.push(error);
                continue;
            }
        };
        // This is asked again under the lock, because a save that held the checkpoint until now may have published it.
        if stays(name)? {
            continue;
        }
        left.extend(engine.remove_dir_all(&dir).err());
    }
    Ok(left)
}

/// Remove the parts in `root` that nobody holds. Returns why some could not be removed.
pub fn sweep_parts(engine: &dyn IoEngine, root: &Path) -> Result<Vec<Error>> {
    let is_part = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<PartName>().is_ok())
    };
    let mut left = Vec::new();
    for dir in engine.list(root)?.into_iter().filter(is_part) {
        match hold_to_sweep(engine, root, &dir) {
            Ok(Some(_lock)) => left.extend(engine.remove_dir_all(&dir).err()),
            Ok(None) => {}
            Err(error) => left.push(error),
        }
    }
    Ok(left)
}
