//! Which checkpoints of a directory stay: the newest ones, those that are referred to, and all that these build on.

use std::collections::BTreeSet;

use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::holds::hold_to_remove;
use crate::checkpoint::manifest::latest::{CheckpointName, LatestCheckpoint, PartName};
use crate::checkpoint::manifest::names::{MANIFEST_FILE, REFERENCE_FILE};
use crate::checkpoint::manifest::read::read_manifest;
use crate::error::{Error, Kind, Result};

fn is_complete(root: &CheckpointDirectory, name: CheckpointName) -> Result<bool> {
    root.subdirectory(name).has(MANIFEST_FILE)
}

/// The name of the checkpoint that `name` builds on, if it builds on one.
fn parent(root: &CheckpointDirectory, name: CheckpointName) -> Result<Option<CheckpointName>> {
    let (manifest, _) = read_manifest(&root.subdirectory(name))?;
    manifest.parent.map(|parent| parent.name.parse()).transpose()
}

/// The age of a checkpoint, greater for newer ones. A delta is newer than what it builds on, which has a higher number where it was merged while
/// the delta was written.
fn age(root: &CheckpointDirectory, name: CheckpointName) -> Result<(u64, bool, CheckpointName)> {
    let built_on = match parent(root, name) {
        // A symbolic link or a file in the place of its directory builds on nothing.
        Err(error) if error.is_damage_or_absence() || error.kind() == Kind::Path => None,
        built_on => built_on?,
    };
    Ok(match built_on {
        Some(older) if older.seq > name.seq => (older.seq, true, name),
        _ => (name.seq, false, name),
    })
}

/// Returns these checkpoints, the newest first.
fn newest_first(root: &CheckpointDirectory, names: Vec<CheckpointName>) -> Result<Vec<CheckpointName>> {
    let mut aged = names.into_iter().map(|name| age(root, name)).collect::<Result<Vec<_>>>()?;
    aged.sort_unstable_by(|a, b| b.cmp(a));
    Ok(aged.into_iter().map(|(.., name)| name).collect())
}

/// The complete checkpoints that stay: of those up to the one that `LATEST` names the `keep` newest, those that a file elsewhere refers
/// to, and all that these build on.
///
/// `None` means that every complete checkpoint stays. That is so where `LATEST` is missing or names no complete checkpoint, and where it
/// cannot be told what one of them builds on: any of the others may be the only one that can still be loaded.
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
        let mut next = stays.then_some(name);
        while let Some(name) = next.filter(|&name| stay.insert(name)) {
            next = match parent(root, name) {
                Err(error) if error.is_damage_or_absence() => return Ok(None),
                // A manifest that cannot be read now may be readable later, and name another checkpoint. So nothing is removed.
                parent => parent?,
            };
        }
    }
    Ok(Some(stay))
}

/// Add to `needed` all that the checkpoint `name` builds on, up to a checkpoint that is damaged or that a save is still writing.
fn add_chain(root: &CheckpointDirectory, name: CheckpointName, needed: &mut BTreeSet<CheckpointName>) -> Result<()> {
    let parent = |name| match parent(root, name) {
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
pub(crate) fn remove_old_checkpoints(root: &CheckpointDirectory, keep: usize) -> Result<Vec<Error>> {
    let mut left = Vec::new();
    let stays = |kept: &Option<BTreeSet<CheckpointName>>, name: CheckpointName| match kept {
        Some(kept) => Ok(kept.contains(&name)),
        None => is_complete(root, name),
    };
    // To find these reads the manifests of all that stay, which may be a long chain. So it is done once for all that stay.
    let kept_first = checkpoints_to_keep(root, keep)?;
    let mut leaving = Vec::new();
    for name in root.list_names::<CheckpointName>()? {
        if !stays(&kept_first, name)? {
            leaving.push(name);
        }
    }
    let mut in_use = BTreeSet::new();
    // A delta is removed before what it builds on. So whenever this stops, every delta that is left has all it needs.
    for name in newest_first(root, leaving)? {
        if in_use.contains(&name) {
            continue;
        }
        let dir = root.subdirectory(name);
        let _lock = match hold_to_remove(root, &dir) {
            Ok(Some(lock)) => lock,
            Ok(None) => {
                if let Err(error) = add_chain(root, name, &mut in_use) {
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
        let kept_now = checkpoints_to_keep(root, keep)?;
        if stays(&kept_now, name)? {
            // Somebody may begin to read it now, and what it builds on with it.
            in_use.extend(kept_now.into_iter().flatten());
            continue;
        }
        left.extend(dir.remove().err());
    }
    Ok(left)
}

/// The result of a removal of checkpoints.
#[derive(Debug)]
pub struct PruneReport {
    /// The checkpoints that were removed, oldest first.
    pub removed: Vec<CheckpointName>,
    /// Why some could not be removed.
    pub errors: Vec<Error>,
}

/// Remove every checkpoint of `root` but the `keep` newest and all that they build on. What unfinished saves have left is removed too.
/// What a save writes, and what is read, with all that it builds on, stays.
///
/// Errors: `Path` where there is no checkpoint, `Corruption` where `LATEST` is damaged, `Storage`.
pub fn prune(root: &CheckpointDirectory, keep: usize) -> Result<PruneReport> {
    root.check_to_save()?;
    LatestCheckpoint::read(root)?;
    let mut removed = root.list_names::<CheckpointName>()?;
    removed.sort_unstable();
    let mut left = remove_old_checkpoints(root, keep)?;
    left.extend(remove_stale_parts(root)?);
    let stay: BTreeSet<CheckpointName> = root.list_names()?.into_iter().collect();
    removed.retain(|name| !stay.contains(name));
    Ok(PruneReport { removed, errors: left })
}

/// Remove the parts in `root` that nobody holds. Returns why some could not be removed.
pub fn remove_stale_parts(root: &CheckpointDirectory) -> Result<Vec<Error>> {
    root.check_to_save()?;
    let mut left = Vec::new();
    for name in root.list_names::<PartName>()? {
        let dir = root.subdirectory(name);
        match hold_to_remove(root, &dir) {
            Ok(Some(_lock)) => left.extend(dir.remove().err()),
            Ok(None) => {}
            Err(error) => left.push(error),
        }
    }
    Ok(left)
}
