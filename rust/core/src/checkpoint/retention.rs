//! Which checkpoints of a directory stay: the newest ones, and whatever those build on.

use std::collections::BTreeSet;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::latest::{CheckpointName, Latest};
use super::save::{MANIFEST_FILE, read_manifest};
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, Hold, IoEngine};

/// How long a save waits for another one to name its checkpoint: a few file operations.
const PATIENCE: Duration = Duration::from_secs(60);

/// Hold the directory of checkpoints, for a few file operations: while `LATEST` is replaced, as what it names is compared with what it
/// should name before; and while a directory in it is made or swept.
pub(super) fn lock_root(engine: &dyn IoEngine, root: &Path) -> Result<DirLock> {
    let began = Instant::now();
    loop {
        match engine.lock_dir(root) {
            Err(error) if error.kind() == Kind::InUse && began.elapsed() < PATIENCE => {
                sleep(Duration::from_millis(5));
            }
            held => return held,
        }
    }
}

/// Make the directory `dir` in `root` and hold it. Sweeps wait meanwhile: they see none that is made and not held yet.
pub(super) fn make_held(engine: &dyn IoEngine, root: &Path, dir: &Path) -> Result<DirLock> {
    let _no_sweep = lock_root(engine, root)?;
    engine.create_dir_all(dir)?;
    engine.lock_dir(dir)
}

/// Hold the directory `dir` in `root` to remove it; `None` where a save writes it or a load reads it.
pub(super) fn hold_to_sweep(engine: &dyn IoEngine, root: &Path, dir: &Path) -> Result<Option<[DirLock; 2]>> {
    let _none_is_made = lock_root(engine, root)?;
    // First, so that no file is made in a checkpoint that stays.
    let unread = match engine.hold_dir(dir, Hold::ToRemove) {
        Err(error) if error.kind() == Kind::InUse => return Ok(None),
        held => held?,
    };
    match engine.lock_dir(dir) {
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        held => held.map(|unwritten| Some([unread, unwritten])),
    }
}

/// Hold the checkpoint in `dir` as long as it is read: no save removes it meanwhile.
///
/// Errors: `InUse` where a save is removing it; `Storage` where it is gone.
pub(super) fn hold_to_read(engine: &dyn IoEngine, dir: &Path) -> Result<DirLock> {
    let began = Instant::now();
    loop {
        match engine.hold_dir(dir, Hold::ToRead) {
            // A sweep looks for a moment at what it finds out to be the newest.
            Err(error) if error.kind() == Kind::InUse && began.elapsed() < PATIENCE => {
                sleep(Duration::from_millis(5));
            }
            held => return held,
        }
    }
}

/// Names of the checkpoints in a directory, complete or not.
pub(super) fn checkpoints(engine: &dyn IoEngine, root: &Path) -> Result<Vec<CheckpointName>> {
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
pub(super) fn sweep(engine: &dyn IoEngine, root: &Path, keep: usize) -> Result<Vec<Error>> {
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
