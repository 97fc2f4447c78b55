//! Retention: keeps the latest checkpoints of a directory, those with a reference, and all base checkpoints of both.
//! Removes others.

use std::collections::BTreeSet;

use super::directory::CheckpointDirectory;
use super::manifest::{MANIFEST_FILE, REFERENCE_FILE};
use crate::checkpoint::manifest::latest::{CheckpointName, LatestCheckpoint, PartName, hold_to_remove};
use crate::checkpoint::manifest::manifests::read_manifest;
use crate::error::{Error, Kind, Result};

fn is_complete(root: &CheckpointDirectory, name: CheckpointName) -> Result<bool> {
    root.subdirectory(name).has(MANIFEST_FILE)
}

/// Returns the base of the checkpoint `name`, if it has one.
fn parent(root: &CheckpointDirectory, name: CheckpointName) -> Result<Option<CheckpointName>> {
    let (manifest, _) = read_manifest(&root.subdirectory(name))?;
    manifest.parent.map(|parent| parent.name.parse()).transpose()
}

/// Sort key by age, greater for newer checkpoints. A delta is newer than its base, which has a higher number if it was
/// merged while the delta was written.
fn age(root: &CheckpointDirectory, name: CheckpointName) -> Result<(u64, bool, CheckpointName)> {
    let built_on = match parent(root, name) {
        // A symbolic link or a file in the place of its directory has no base.
        Err(error) if error.is_damage_or_absence() || error.kind() == Kind::Path => None,
        built_on => built_on?,
    };
    Ok(match built_on {
        Some(older) if older.seq > name.seq => (older.seq, true, name),
        _ => (name.seq, false, name),
    })
}

/// Sorts these checkpoints, latest first.
fn newest_first(root: &CheckpointDirectory, names: Vec<CheckpointName>) -> Result<Vec<CheckpointName>> {
    let mut aged = names.into_iter().map(|name| age(root, name)).collect::<Result<Vec<_>>>()?;
    aged.sort_unstable_by(|a, b| b.cmp(a));
    Ok(aged.into_iter().map(|(.., name)| name).collect())
}

/// Returns the complete checkpoints to keep: the `keep` latest ones up to `LATEST`, those with a reference from
/// elsewhere, and all base checkpoints of both.
///
/// `None` means that every complete checkpoint is kept. This is the case if `LATEST` is missing or names no complete
/// checkpoint, and if the base of one of them cannot be determined: any other checkpoint may be the only one that can
/// still be loaded.
fn checkpoints_to_keep(root: &CheckpointDirectory, keep: usize) -> Result<Option<BTreeSet<CheckpointName>>> {
    let Some(latest) = LatestCheckpoint::find(root)?.map(|latest| latest.name) else { return Ok(None) };
    if !is_complete(root, latest)? {
        return Ok(None);
    }
    let mut complete = Vec::new();
    for name in root.list_names::<CheckpointName>()? {
        if name.seq < latest.seq && is_complete(root, name)? {
            complete.push(name);
        }
    }
    if keep > 1 {
        complete = newest_first(root, complete)?;
    }
    let mut stay = BTreeSet::new();
    for (place, &name) in [latest].iter().chain(&complete).enumerate() {
        let stays = place < keep.max(1) || root.subdirectory(name).has(REFERENCE_FILE)?;
        if stays && !add_chain(root, name, &mut stay)? {
            return Ok(None);
        }
    }
    Ok(Some(stay))
}

/// Adds `name` and its base checkpoints to `chain`. Returns false if it ends at one that is corrupted or still being
/// written, whose base is unknown.
///
/// A manifest that cannot be read at present is an error: it may be readable later and name another checkpoint, so
/// nothing is removed.
fn add_chain(root: &CheckpointDirectory, name: CheckpointName, chain: &mut BTreeSet<CheckpointName>) -> Result<bool> {
    let mut next = Some(name);
    while let Some(name) = next.filter(|&name| chain.insert(name)) {
        next = match parent(root, name) {
            Err(error) if error.is_damage_or_absence() => return Ok(false),
            parent => parent?,
        };
    }
    Ok(true)
}

/// Removes every checkpoint that is not kept, not being written by a save and not being read by a load. A checkpoint
/// that is being read is left to a later removal, with all its base checkpoints. Returns an error for each checkpoint
/// that could not be removed.
pub(crate) fn remove_old_checkpoints(root: &CheckpointDirectory, keep: usize) -> Result<Vec<Error>> {
    let mut errors = Vec::new();
    let stays = |kept: &Option<BTreeSet<CheckpointName>>, name: CheckpointName| match kept {
        Some(kept) => Ok(kept.contains(&name)),
        None => is_complete(root, name),
    };
    // This reads the manifests of all kept checkpoints, which may be a long chain. So it runs once before the loop.
    let kept_first = checkpoints_to_keep(root, keep)?;
    let mut leaving = Vec::new();
    for name in root.list_names::<CheckpointName>()? {
        if !stays(&kept_first, name)? {
            leaving.push(name);
        }
    }
    let mut in_use = BTreeSet::new();
    // A delta is removed before its base. So if this stops at any point, every remaining delta has its complete chain.
    for name in newest_first(root, leaving)? {
        if in_use.contains(&name) {
            continue;
        }
        let dir = root.subdirectory(name);
        let _lock = match hold_to_remove(root, &dir) {
            Ok(Some(lock)) => lock,
            Ok(None) => {
                if let Err(error) = add_chain(root, name, &mut in_use) {
                    // Its base checkpoints follow later in this loop and would be removed.
                    errors.push(error);
                    break;
                }
                continue;
            }
            Err(error) => {
                errors.push(error);
                continue;
            }
        };
        // Evaluated again under the lock, because a save that held the checkpoint until this point may have published
        // it.
        let kept_now = checkpoints_to_keep(root, keep)?;
        if stays(&kept_now, name)? {
            // A reader may open this checkpoint and its base checkpoints at any time.
            in_use.extend(kept_now.into_iter().flatten());
            continue;
        }
        errors.extend(dir.remove().err());
    }
    Ok(errors)
}

/// Result of a removal of checkpoints.
#[derive(Debug)]
pub struct PruneReport {
    /// The removed checkpoints, oldest first.
    pub removed: Vec<CheckpointName>,
    /// Errors of checkpoints that could not be removed.
    pub errors: Vec<Error>,
}

/// Removes every checkpoint of `root` except the `keep` latest and their base checkpoints, and leftovers of unfinished
/// saves. Keeps checkpoints that a save is writing, and checkpoints that are being read with their base checkpoints.
///
/// Errors: `Path` if there is no checkpoint, `Corruption` if `LATEST` is invalid, `Storage`.
pub fn prune(root: &CheckpointDirectory, keep: usize) -> Result<PruneReport> {
    root.check_to_save()?;
    LatestCheckpoint::read(root)?;
    let mut removed = root.list_names::<CheckpointName>()?;
    removed.sort_unstable();
    let mut errors = remove_old_checkpoints(root, keep)?;
    errors.extend(remove_stale_parts(root)?);
    let stay: BTreeSet<CheckpointName> = root.list_names()?.into_iter().collect();
    removed.retain(|name| !stay.contains(name));
    Ok(PruneReport { removed, errors })
}

/// Removes the checkpoint parts in `root` that no process holds. Returns an error for each part that could not be
/// removed.
pub fn remove_stale_parts(root: &CheckpointDirectory) -> Result<Vec<Error>> {
    root.check_to_save()?;
    let mut errors = Vec::new();
    for name in root.list_names::<PartName>()? {
        let dir = root.subdirectory(name);
        match hold_to_remove(root, &dir) {
            Ok(Some(_lock)) => errors.extend(dir.remove().err()),
            Ok(None) => {}
            Err(error) => errors.push(error),
        }
    }
    Ok(errors)
}
