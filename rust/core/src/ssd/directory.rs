//! A tier's directory: how it is held, so that nobody else writes there.

use std::path::Path;

use crate::error::Result;
use crate::io::{DirLock, DirLockPurpose, IoEngine};

/// Permission bits that a tier's directory may have.
pub(crate) const DIR_MODE: u32 = 0o750;

/// A tier's directory, which is held as long as this lives. The lock on the directory is given up first. Until the one on its file goes
/// too, whoever opens the table next is told the pid.
#[derive(Debug)]
pub(crate) struct TierDirLock {
    _directory: DirLock,
    _file: DirLock,
}

/// Hold a table's directory, which exists, so that no other table of any process does. It is held by its lock file, which says who holds
/// it, and by a lock on the directory itself, which stays where somebody removes that file.
///
/// Errors: `InUse`, at once.
pub(crate) fn lock_tier_dir(engine: &dyn IoEngine, dir: &Path) -> Result<TierDirLock> {
    let file = engine.lock_dir(dir)?;
    Ok(TierDirLock { _directory: engine.lock_dir_for(dir, DirLockPurpose::ToOpen)?, _file: file })
}
