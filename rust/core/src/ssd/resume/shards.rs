//! Removes the directories of other shards of a table, which runs with another number of ranks have left.

use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, LOCK_FILE};
use crate::ssd::directory::{DIR_MODE, lock_tier_dir};
use crate::ssd::format::names::{is_temporary, segment_serial, state_commit_id};

/// See [`SsdTier::remove_shard`](crate::ssd::SsdTier::remove_shard).
pub(crate) fn remove_shard(dir: &Path, engine: &dyn IoEngine) -> Result<()> {
    engine.check_private(dir, DIR_MODE)?;
    // This precedes the lock, which would create a file in a directory that is not a tier's.
    check_tier_directory(dir, &engine.list(dir)?)?;
    let held = lock_tier_dir(engine, dir)?;
    // Checks again under the lock, which only programs that ignore it can bypass to add files.
    let listing = engine.list(dir)?;
    check_tier_directory(dir, &listing)?;
    // States are removed first, so that no state is ever without its segments.
    for path in listing.iter().filter(|path| state_commit_id(path).is_some() || is_temporary(path)) {
        engine.remove_file(path)?;
    }
    engine.sync_dir(dir)?;
    engine.remove_dir_all(dir)?;
    drop(held);
    engine.sync_dir(dir.parent().unwrap_or(Path::new("/")))
}

/// Returns `State` unless `listing` is that of a tier's directory: its lock file, and otherwise only states and
/// segments.
fn check_tier_directory(dir: &Path, listing: &[PathBuf]) -> Result<()> {
    let is_lock = |path: &Path| path.file_name().is_some_and(|name| name == LOCK_FILE);
    let is_ours = |path: &Path| {
        is_lock(path) || state_commit_id(path).is_some() || segment_serial(path).is_some() || is_temporary(path)
    };
    let refuse = |what: String| {
        let message =
            format!("{} is not removed, because {what}: remove it yourself if nobody needs it", dir.display());
        Err(Error::new(Kind::State, message))
    };
    if let Some(other) = listing.iter().find(|path| !is_ours(path)) {
        return refuse(format!("it holds {}, which is no file of a table", other.display()));
    }
    if !listing.iter().any(|path| is_lock(path)) {
        return refuse("no table was ever opened there".into());
    }
    Ok(())
}
