//! Names of checkpoints and checkpoint parts, `LATEST`, which names the latest complete checkpoint of a directory, and
//! the locks on the directory and on the checkpoints in it.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::checkpoint::directory::CheckpointDirectory;
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, DirLockPurpose, read_file};

/// The file that names the latest complete checkpoint.
pub(crate) const LATEST_FILE: &str = "LATEST";
/// Time that a save or a load waits for another save, which holds the lock for a few file operations only.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two attempts to take a lock, because an engine cannot wait for one.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Name of a checkpoint's directory: a sequence number that grows with every save to the path, and a random part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointName {
    /// Sequence number, from 1.
    pub seq: u64,
    /// Distinguishes saves with the same number.
    pub random: u64,
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:010}-{:016x}", self.seq, self.random)
    }
}

impl FromStr for CheckpointName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (seq, random) = text.split_once('-')?;
            let name = Self { seq: seq.parse().ok()?, random: u64::from_str_radix(random, 16).ok()? };
            (name.to_string() == text).then_some(name)
        };
        parse().ok_or_else(|| Kind::Corruption.error(format!("{text:?} is not the name of a checkpoint")))
    }
}

/// Contents of `LATEST`: the name of a checkpoint, whose manifest contains its own checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatestCheckpoint {
    /// The checkpoint.
    pub name: CheckpointName,
}

impl fmt::Display for LatestCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.fmt(f)
    }
}

impl FromStr for LatestCheckpoint {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        Ok(Self { name: line.parse()? })
    }
}

impl LatestCheckpoint {
    /// Reads `LATEST` in `directory`. Returns `Kind::Path` if it is missing and `Kind::Corruption` if it is invalid.
    pub fn read(directory: &CheckpointDirectory) -> Result<Self> {
        let path = directory.join(LATEST_FILE);
        if !directory.has(LATEST_FILE)? {
            return Err(Kind::Path
                .error(format!(
                    "there is no checkpoint in {}: {LATEST_FILE} is missing; check the path, or save one first",
                    directory.path().display()
                ))
                .at(directory.path()));
        }
        let bytes = read_file(directory.engine(), &path, 256)?;
        let line = std::str::from_utf8(&bytes).ok().and_then(|text| text.strip_suffix('\n')).unwrap_or_default();
        line.parse().map_err(|_| {
            let found = String::from_utf8_lossy(&bytes);
            Error::corruption(
                &path,
                0,
                "the name of a checkpoint",
                "ten digits, '-', sixteen hexadecimal digits",
                format!("{found:?}"),
            )
        })
    }

    /// Like [`Self::read`], but returns `None` if there is no checkpoint.
    pub fn find(directory: &CheckpointDirectory) -> Result<Option<Self>> {
        if directory.has(LATEST_FILE)? { Self::read(directory).map(Some) } else { Ok(None) }
    }
}

/// Name of a checkpoint part's directory: a random number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartName(pub u64);

impl fmt::Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part-{:016x}", self.0)
    }
}

impl FromStr for PartName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let random = text.strip_prefix("part-").and_then(|random| u64::from_str_radix(random, 16).ok());
        random
            .map(Self)
            .filter(|name| name.to_string() == text)
            .ok_or_else(|| Kind::Input.error(format!("{text:?} is not the name of a part of a checkpoint")))
    }
}

/// Called repeatedly during long work, for example between two attempts to take a lock. An error from it aborts that
/// work.
pub type WaitCallback<'a> = dyn FnMut() -> Result<()> + 'a;

/// Locks the directory of checkpoints for a few file operations: while `LATEST` is checked and replaced, and while a
/// directory in it is created or removed.
pub(crate) fn lock_root(root: &CheckpointDirectory) -> Result<DirLock> {
    lock_with_timeout(|| root.lock())
}

/// Locks the checkpoint in `dir` for reading, so that no save removes it.
///
/// Errors: `InUse` if a save is removing it; `Storage` if it does not exist.
pub(crate) fn hold_to_read(dir: &CheckpointDirectory) -> Result<DirLock> {
    // A removal locks even the latest checkpoint briefly, until it has found that it is the latest.
    lock_with_timeout(|| dir.hold(DirLockPurpose::ToRead))
}

/// Waits for a lock for at most [`LOCK_TIMEOUT`].
fn lock_with_timeout(lock: impl Fn() -> Result<DirLock>) -> Result<DirLock> {
    let start = Instant::now();
    wait_for_lock(lock, |in_use| if start.elapsed() < LOCK_TIMEOUT { Ok(()) } else { Err(in_use) })
}

/// Retries `lock` while it returns `InUse`. `wait` is called with that error, and returns the one that ends the wait.
fn wait_for_lock(lock: impl Fn() -> Result<DirLock>, mut wait: impl FnMut(Error) -> Result<()>) -> Result<DirLock> {
    loop {
        match lock() {
            Err(in_use) if in_use.kind() == Kind::InUse => wait(in_use)?,
            held => return held,
        }
        sleep(LOCK_RETRY_INTERVAL);
    }
}

/// Locks the root directory of RecIS-format saves for a few file operations: a save with [`DirLockPurpose::ToChange`],
/// a load with [`DirLockPurpose::ToRead`]. Other processes hold it briefly, or while they remove an older save.
pub(crate) fn hold_recis_root(
    root: &CheckpointDirectory,
    mode: DirLockPurpose,
    wait: &mut WaitCallback<'_>,
) -> Result<DirLock> {
    wait_for_lock(|| root.hold(mode), |_| wait())
}

/// Returns a lock, or `None` if it conflicts with one that is held.
pub(crate) fn unless_in_use<T>(lock: Result<T>) -> Result<Option<T>> {
    match lock {
        Err(error) if error.kind() == Kind::InUse => Ok(None),
        held => held.map(Some),
    }
}

/// Locks the directory `dir` for removal; returns `None` if it is being read, or written by shards of a RecIS-format
/// save.
pub(crate) fn hold_unread(dir: &CheckpointDirectory) -> Result<Option<DirLock>> {
    unless_in_use(dir.hold(DirLockPurpose::ToRemove))
}

/// Creates the directory `name` in `root` and locks it. Removals wait for this call, so that they never see a created
/// but unlocked directory.
pub(crate) fn make_held(root: &CheckpointDirectory, name: impl Display) -> Result<(CheckpointDirectory, DirLock)> {
    let dir = root.subdirectory(name);
    let _no_removal = lock_root(root)?;
    dir.make()?;
    let lock = dir.lock()?;
    Ok((dir, lock))
}

/// Locks the directory `dir` in `root` for removal; returns `None` if a save writes it or a load reads it.
pub(crate) fn hold_to_remove(root: &CheckpointDirectory, dir: &CheckpointDirectory) -> Result<Option<[DirLock; 2]>> {
    let _no_creation = lock_root(root)?;
    // This lock is taken first because the other one creates a file, which must not happen in a checkpoint that stays.
    let Some(unread) = hold_unread(dir)? else { return Ok(None) };
    Ok(unless_in_use(dir.lock())?.map(|unwritten| [unread, unwritten]))
}
