//! Holds on a directory of checkpoints, and on the checkpoints in it, by saves, sweeps and loads.

use std::fmt::Display;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Kind, Result};
use crate::io::{DirLock, DirLockPurpose};

/// How long a save or a load waits for another save, which holds what it needs for a few file operations.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// Hold the directory of checkpoints for a few file operations. This is held while `LATEST` is compared with what it should name and then
/// replaced, and while a directory in it is made or removed.
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

/// Called now and then in work that takes long, for example between two looks at what another process holds. Its error ends that work.
pub type WaitCallback<'a> = dyn FnMut() -> Result<()> + 'a;

/// Hold the directory of block-level saves itself for a few file operations: a save holds it [`Hold::ToChange`], a load [`Hold::ToRead`].
/// Others do so in moments, or as long as they remove an older save. They are asked every 5 ms, since an engine does not wait for a lock.
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

/// Hold the directory `dir` to remove it; `None` where it is read, or written by shards of a block-level save.
pub(crate) fn hold_unread(dir: &CheckpointDirectory) -> Result<Option<DirLock>> {
    match dir.hold(DirLockPurpose::ToRemove) {
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        held => held.map(Some),
    }
}

/// Make the directory `name` in `root` and hold it. Sweeps wait meanwhile, so that they see no directory that is made and not yet held.
pub(crate) fn make_held(root: &CheckpointDirectory, name: impl Display) -> Result<(CheckpointDirectory, DirLock)> {
    let dir = root.subdirectory(name);
    let _no_sweep = lock_root(root)?;
    dir.make()?;
    let lock = dir.lock()?;
    Ok((dir, lock))
}

/// Hold the directory `dir` in `root` to remove it; `None` where a save writes it or a load reads it.
pub(crate) fn hold_to_remove(root: &CheckpointDirectory, dir: &CheckpointDirectory) -> Result<Option<[DirLock; 2]>> {
    let _none_is_made = lock_root(root)?;
    // This hold comes first, because the other one makes a file, and none is to be made in a checkpoint that stays.
    let Some(unread) = hold_unread(dir)? else { return Ok(None) };
    match dir.lock() {
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        held => held.map(|unwritten| Some([unread, unwritten])),
    }
}

/// Hold the checkpoint in `dir` while it is read, so that no save removes it.
///
/// Errors: `InUse` where a save is removing it; `Storage` where it is gone.
pub(crate) fn hold_to_read(dir: &CheckpointDirectory) -> Result<DirLock> {
    let began = Instant::now();
    loop {
        match dir.hold(DirLockPurpose::ToRead) {
            // A sweep holds the newest checkpoint for a moment, until it knows that it is the newest.
            Err(error) if error.kind() == Kind::InUse && began.elapsed() < LOCK_TIMEOUT => {
                sleep(Duration::from_millis(5));
            }
            held => return held,
        }
    }
}
