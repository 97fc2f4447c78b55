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

/// What a checkpoint builds on.
fn parent(engine: &dyn IoEngine, root: &Path, name: CheckpointName) -> Result<Option<CheckpointName>> {
    let (manifest, _) = read_manifest(engine, &root.join(name.to_string()))?;
    manifest.parent.map(|parent| parent.name.parse()).transpose()
}

/// The complete checkpoints that stay: the `keep` newest up to the one that `LATEST` names, and all that these build on. `None` where
/// every complete one stays: `LATEST` is missing or names none that is complete, or it cannot be told what one builds on, so that one
/// of the others may be all there is.
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
                // Nothing is removed by what cannot be read now: asked again, it may say what another one builds on.
                parent => parent?,
            };
        }
    }
    Ok(Some(stay))
}

/// Add what the checkpoint `name` builds on to `needed`, up to one that is damaged or that a save is still writing.
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

/// Remove every checkpoint that no save is writing, no load is reading, and that does not stay. What a load reads, and all that this
/// builds on, is left to a later sweep. Returns what could not be removed.
pub(crate) fn sweep(engine: &dyn IoEngine, root: &Path, keep: usize) -> Result<Vec<Error>> {
    let mut left = Vec::new();
    let stays = |name: CheckpointName| {
        Ok::<_, Error>(match kept(engine, root, keep)? {
            Some(kept) => kept.contains(&name),
            None => is_complete(engine, root, name)?,
        })
    };
    // Deltas go before what they build on: whenever this stops, each that is there has all it needs.
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
                    // What it builds on comes later, and would go.
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
        // Looked at again under the lock: a save names its checkpoint before it lets go of it, and only then.
        if stays(name)? {
            continue;
        }
        left.extend(engine.remove_dir_all(&dir).err());
    }
    Ok(left)
}

/// Remove the parts in `root` that nobody holds. Returns what could not be removed.
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
