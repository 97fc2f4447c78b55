//! A tier's directory: how it is held, so that nobody else writes there.

use std::path::Path;

use crate::error::Result;
use crate::io::{DirLock, Hold, IoEngine};

/// Permission bits that a tier's directory may have.
pub(crate) const DIR_MODE: u32 = 0o750;

/// A tier's directory, which is held as long as this lives. The lock on the directory is given up first. Until the one on its file goes
/// too, whoever opens the table next is told the pid.
#[derive(Debug)]
pub(crate) struct HeldDir {
    _directory: DirLock,
    _file: DirLock,
}

/// Hold a table's directory, which exists, so that no other table of any process does. It is held by its lock file, which says who holds
/// it, and by a lock on the directory itself, which stays where somebody removes that file.
///
/// Errors: `InUse`, at once.
pub(crate) fn hold_alone(engine: &dyn IoEngine, dir: &Path) -> Result<HeldDir> {
    let file = engine.lock_dir(dir)?;
    Ok(HeldDir { _directory: engine.hold_dir(dir, Hold::ToOpen)?, _file: file })
}
