//! Locks a tier's directory, so that no other table writes there.

use std::path::Path;

use crate::error::Result;
use crate::io::{DirLock, DirLockPurpose, IoEngine};

/// Permission bits of a tier's directory.
pub(crate) const DIR_MODE: u32 = 0o750;

/// Locks a tier's directory until it is dropped. The lock on the directory is released first: until the lock on its
/// file is released too, another open of the table reports the pid.
#[derive(Debug)]
pub(crate) struct TierDirLock {
    _directory: DirLock,
    _file: DirLock,
}

/// Locks a table's existing directory against other tables of any process. The lock file names the holder. The second
/// lock, on the directory itself, holds even if the lock file is deleted.
///
/// Errors: `InUse`, without waiting.
pub(crate) fn lock_tier_dir(engine: &dyn IoEngine, dir: &Path) -> Result<TierDirLock> {
    let file = engine.lock_dir(dir)?;
    Ok(TierDirLock { _directory: engine.lock_dir_for(dir, DirLockPurpose::ToOpen)?, _file: file })
}
