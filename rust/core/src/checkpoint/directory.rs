//! A directory of checkpoints that passed its checks and is held open.

use std::fmt::Display;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::io::{ConfinedEngine, DirLock, DirLockPurpose, IoEngine, default_engine};
use crate::paths::PathChecks;

/// Operation for which the directory was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectoryAccess {
    Load,
    Save,
}

/// A user's directory that passed the checks of path, owner and permission bits once, or a directory below it.
///
/// The user's directory is held by its descriptor: replacing a component of its path later does not affect reads and
/// writes through this handle. All code of this module that works in a directory takes this handle instead of a path,
/// and the engine that works in it is private to this crate. So no unchecked directory is used.
#[derive(Clone, Debug)]
pub struct CheckpointDirectory {
    path: PathBuf,
    engine: Arc<dyn IoEngine>,
    access: DirectoryAccess,
    checks: PathChecks,
    /// Descriptor of the user's directory. `None` if the directory is not on a local file system, and for handles from
    /// `subdirectory`.
    descriptor: Option<Arc<OwnedFd>>,
}

impl CheckpointDirectory {
    /// Checks a directory to save to, and creates it (mode 0750) if missing. Links in `path` are followed once, at this
    /// call, except with [`PathChecks::Strict`].
    ///
    /// Errors: as [`PathChecks::open_to_save`].
    pub fn open_to_save(path: &Path, checks: PathChecks) -> Result<Self> {
        let path = if checks == PathChecks::Strict { path.to_owned() } else { checks.resolve_to_save(path)? };
        Self::from_descriptor(checks.open_to_save(&path)?, DirectoryAccess::Save, checks)
    }

    /// Checks a directory to load from, which need not be writable. Links are followed as in [`Self::open_to_save`].
    ///
    /// Errors: as [`PathChecks::open_to_load`].
    pub fn open_to_load(path: &Path, checks: PathChecks) -> Result<Self> {
        let path = if checks == PathChecks::Strict { path.to_owned() } else { checks.resolve_to_load(path)? };
        Self::from_descriptor(checks.open_to_load(&path)?, DirectoryAccess::Load, checks)
    }

    /// Opens a directory for saving by the resolved path of another handle, which may belong to another process. The
    /// checks are those of this handle, but at most [`PathChecks::Basic`]. A resolved path contains no links, so none
    /// is followed.
    ///
    /// Errors: as [`PathChecks::open_to_save`].
    pub(crate) fn reopen_to_save(&self, path: &Path) -> Result<Self> {
        let checks = if self.checks == PathChecks::Strict { PathChecks::Basic } else { self.checks };
        Self::from_descriptor(checks.open_to_save(path)?, DirectoryAccess::Save, checks)
    }

    fn from_descriptor(
        (path, descriptor): (PathBuf, OwnedFd),
        access: DirectoryAccess,
        checks: PathChecks,
    ) -> Result<Self> {
        let own = descriptor.try_clone().map_err(|error| Error::io("hold", &path, &error))?;
        let engine = ConfinedEngine::engine(default_engine()?, &path, descriptor, checks.entry_check());
        Ok(Self { path, engine, access, checks, descriptor: Some(Arc::new(own)) })
    }

    /// Returns a handle to `path` in any engine, such as `MemoryEngine`. Checks nothing: for tests and benchmarks.
    pub fn with_engine(engine: Arc<dyn IoEngine>, path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            engine,
            access: DirectoryAccess::Save,
            checks: PathChecks::Basic,
            descriptor: None,
        }
    }

    /// Absolute path without links, resolved when the directory was checked.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the entry `name` of the directory.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the subdirectory `name`, which need not exist. A link in its place is not followed.
    pub(crate) fn subdirectory(&self, name: impl Display) -> Self {
        Self {
            path: self.join(name.to_string()),
            engine: Arc::clone(&self.engine),
            access: self.access,
            checks: self.checks,
            descriptor: None,
        }
    }

    pub(crate) fn engine(&self) -> &dyn IoEngine {
        &*self.engine
    }

    /// Returns the engine for an owner that outlives this handle.
    pub(crate) fn shared_engine(&self) -> Arc<dyn IoEngine> {
        Arc::clone(&self.engine)
    }

    /// Returns an engine that works in this directory and in `other`, to move files between them. One may be inside the
    /// other.
    pub(crate) fn engine_with(&self, other: &Self) -> Result<Arc<dyn IoEngine>> {
        // Each engine forwards paths outside its own directory, so the engine of the deeper directory is the outer one.
        let (first, second) = if other.path.starts_with(&self.path) { (other, self) } else { (self, other) };
        let Some(descriptor) = first.descriptor.as_ref().filter(|_| first.path != second.path) else {
            return Ok(self.shared_engine());
        };
        let own = descriptor.try_clone().map_err(|error| Error::io("hold", &first.path, &error))?;
        Ok(ConfinedEngine::engine(second.shared_engine(), &first.path, own, first.checks.entry_check()))
    }

    /// Creates the directory if it does not exist. Its parent must exist.
    pub(crate) fn make(&self) -> Result<()> {
        self.engine.create_dir_all(&self.path)
    }

    /// Makes the names in the directory durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.engine.sync_dir(&self.path)
    }

    /// Removes the directory and its contents.
    pub(crate) fn remove(&self) -> Result<()> {
        self.engine.remove_dir_all(&self.path)
    }

    /// Returns the names in the directory that parse as a `T`. Others are skipped.
    pub(crate) fn list_names<T: FromStr>(&self) -> Result<Vec<T>> {
        let name = |entry: &PathBuf| entry.file_name()?.to_str()?.parse().ok();
        Ok(self.engine.list(&self.path)?.iter().filter_map(name).collect())
    }

    /// Locks the file `lock` of the directory. See [`IoEngine::lock_dir`].
    pub(crate) fn lock(&self) -> Result<DirLock> {
        self.engine.lock_dir(&self.path)
    }

    /// Locks the directory itself. See [`IoEngine::lock_dir_for`].
    pub(crate) fn hold(&self, how: DirLockPurpose) -> Result<DirLock> {
        self.engine.lock_dir_for(&self.path, how)
    }

    /// True if the directory has an entry of this name. A link is not followed.
    pub fn has(&self, name: &str) -> Result<bool> {
        self.engine.exists(&self.join(name))
    }

    /// Must be called before any change to the directory's contents.
    ///
    /// Errors: `State` if the directory was opened for loading, which checks less.
    pub(crate) fn check_to_save(&self) -> Result<()> {
        if self.access == DirectoryAccess::Save {
            return Ok(());
        }
        Err(Kind::State
            .error(format!("{} was opened to load from: open it to save, which asks for more", self.path.display())))
    }

    /// Descriptor of the user's directory. `None` for a directory in another engine.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(|descriptor| descriptor.as_fd())
    }
}
