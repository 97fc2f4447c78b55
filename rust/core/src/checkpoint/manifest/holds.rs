//! Locks that saves, removals and loads take on a directory of checkpoints and on the checkpoints in it.

use std::fmt::Display;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Kind, Result};
use crate::io::{DirLock, DirLockPurpose};

/// Time that a save or a load waits for another save, which holds the lock for a few file operations only.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// Locks the directory of checkpoints for a few file operations: while `LATEST` is checked and replaced, and while a
/// directory in it is created or removed.
pub(crate) fn lock_root(root: &CheckpointDirectory) -> Result<DirLock> {
    let began = Instant::now();
    loop {
        match root.lock() {
            Err(error) if error.kind() == Kind::InUse && began.elapsed() < LOCK_TIMEOUT => {
                sleep(Duration::from_millis(5));
            }
            held => return held,
        }
    }
}

/// Called repeatedly during long work, for example between two attempts to take a lock. An error from it aborts that
/// work.
pub type WaitCallback<'a> = dyn FnMut() -> Result<()> + 'a;

/// Locks the root directory of RecIS-format saves for a few file operations: a save with [`DirLockPurpose::ToChange`],
/// a load with [`DirLockPurpose::ToRead`]. Other processes hold it briefly, or while they remove an older save. The
/// lock is retried every 5 ms, because an engine cannot wait for a lock.
pub(crate) fn hold_recis_root(
    root: &CheckpointDirectory,
    mode: DirLockPurpose,
    wait: &mut WaitCallback<'_>,
) -> Result<DirLock> {
    loop {
        match root.hold(mode) {
            Err(error) if error.kind() == Kind::InUse => {
                wait()?;
                sleep(Duration::from_millis(5));
            }
            held => return held,
        }
    }
}

/// Locks the directory `dir` for removal; returns `None` if it is being read, or written by shards of a RecIS-format
/// save.
pub(crate) fn hold_unread(dir: &CheckpointDirectory) -> Result<Option<DirLock>> {
    match dir.hold(DirLockPurpose::ToRemove) {
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        held => held.map(Some),
    }
}

/// Creates the directory `name` in `root` and locks it. Removals wait for this call, so that they never see a created
/// but unlocked directory.
pub(crate) fn make_held(root: &CheckpointDirectory, name: impl Display) -> Result<(CheckpointDirectory, DirLock)> {
    let dir = root.subdirectory(name);
    let _no_sweep = lock_root(root)?;
    dir.make()?;
    let lock = dir.lock()?;
    Ok((dir, lock))
}

/// Locks the directory `dir` in `root` for removal; returns `None` if a save writes it or a load reads it.
pub(crate) fn hold_to_remove(root: &CheckpointDirectory, dir: &CheckpointDirectory) -> Result<Option<[DirLock; 2]>> {
    let _none_is_made = lock_root(root)?;
    // This lock is taken first because the other one creates a file, which must not happen in a checkpoint that stays.
    let Some(unread) = hold_unread(dir)? else { return Ok(None) };
    match dir.lock() {
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        held => held.map(|unwritten| Some([unread, unwritten])),
    }
}

/// Locks the checkpoint in `dir` for reading, so that no save removes it.
///
/// Errors: `InUse` if a save is removing it; `Storage` if it does not exist.
pub(crate) fn hold_to_read(dir: &CheckpointDirectory) -> Result<DirLock> {
    let began = Instant::now();
    loop {
        match dir.hold(DirLockPurpose::ToRead) {
            // A removal locks even the latest checkpoint briefly, until it has found that it is the latest.
            Err(error) if error.kind() == Kind::InUse && began.elapsed() < LOCK_TIMEOUT => {
                sleep(Duration::from_millis(5));
            }
            held => return held,
        }
    }
}
