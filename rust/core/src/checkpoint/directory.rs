//! A directory of checkpoints that passed its checks, and is held from then on.

use std::fmt::Display;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::io::{ConfinedEngine, DirLock, DirLockPurpose, IoEngine, default_engine};
use crate::paths::PathChecks;

/// What the directory was checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectoryAccess {
    Load,
    Save,
}

/// A user's directory that passed the checks of path, owner and permission bits once, or a directory below it.
///
/// The user's directory is held by its descriptor. Whoever replaces a component of its path later changes nothing that is read or written
/// here. Everything in this module that works in a directory takes this handle and no path, and nobody outside this crate gets the engine
/// that works in it. So nothing is done in a directory that was not checked.
#[derive(Clone, Debug)]
pub struct CheckpointDirectory {
    path: PathBuf,
    engine: Arc<dyn IoEngine>,
    access: DirectoryAccess,
    checks: PathChecks,
    /// The user's directory itself. There is none where it is no directory of this machine's file systems, and in a handle from `below`.
    descriptor: Option<Arc<OwnedFd>>,
}

impl CheckpointDirectory {
    /// Check a directory to save to, and make it (mode 0750) when it is missing. The links in `path` are followed, now and not again, except
    /// with [`Checks::Strict`].
    ///
    /// Errors: those of [`Checks::open_to_save`].
    pub fn open_to_save(path: &Path, checks: PathChecks) -> Result<Self> {
        let path = if checks == PathChecks::Strict { path.to_owned() } else { checks.resolve_to_save(path)? };
        Self::from_descriptor(checks.open_to_save(&path)?, DirectoryAccess::Save, checks)
    }

    /// Check a directory to load from, which need not be writable. Links are followed as by [`Directory::to_save`].
    ///
    /// Errors: those of [`Checks::open_to_load`].
    pub fn open_to_load(path: &Path, checks: PathChecks) -> Result<Self> {
        let path = if checks == PathChecks::Strict { path.to_owned() } else { checks.resolve_to_load(path)? };
        Self::from_descriptor(checks.open_to_load(&path)?, DirectoryAccess::Load, checks)
    }

    /// Open, to save, a directory that another handle was on, maybe in another process, by that handle's path. It is checked as this one was,
    /// but at most as [`Checks::Basic`] does. That path had no links, and so none is followed.
    ///
    /// Errors: those of [`Checks::open_to_save`].
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

    /// The directory `path` of any engine, such as [`crate::io::MemoryEngine`]. Nothing is checked: this is for tests and benchmarks.
    pub fn with_engine(engine: Arc<dyn IoEngine>, path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            engine,
            access: DirectoryAccess::Save,
            checks: PathChecks::Basic,
            descriptor: None,
        }
    }

    /// The absolute path, without links, as it was when the directory was checked.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of what has this name in the directory.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// The directory that has this name in this one, whether or not it is there. No link in its place is followed.
    pub(crate) fn subdirectory(&self, name: impl Display) -> Self {
        Self {
            path: self.join(name.to_string()),
            engine: Arc::clone(&self.engine),
            access: self.access,
            checks: self.checks,
            descriptor: None,
        }
    }

    /// The engine that works in the directory.
    pub(crate) fn engine(&self) -> &dyn IoEngine {
        &*self.engine
    }

    /// The same engine, for what outlives this handle.
    pub(crate) fn shared_engine(&self) -> Arc<dyn IoEngine> {
        Arc::clone(&self.engine)
    }

    /// An engine that works in this directory and in `other`, to move files from one to the other. One may lie in the other.
    pub(crate) fn engine_with(&self, other: &Self) -> Result<Arc<dyn IoEngine>> {
        // Each engine passes on what does not lie in its own directory. So the one whose directory lies deeper comes first.
        let (first, second) = if other.path.starts_with(&self.path) { (other, self) } else { (self, other) };
        let Some(descriptor) = first.descriptor.as_ref().filter(|_| first.path != second.path) else {
            return Ok(self.shared_engine());
        };
        let own = descriptor.try_clone().map_err(|error| Error::io("hold", &first.path, &error))?;
        Ok(ConfinedEngine::engine(second.shared_engine(), &first.path, own, first.checks.entry_check()))
    }

    /// Make the directory, if it is not there, in a directory that is.
    pub(crate) fn make(&self) -> Result<()> {
        self.engine.create_dir_all(&self.path)
    }

    /// Make the names in the directory durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.engine.sync_dir(&self.path)
    }

    /// Remove the directory with all that it holds.
    pub(crate) fn remove(&self) -> Result<()> {
        self.engine.remove_dir_all(&self.path)
    }

    /// The names in the directory that are names of a `T`. Others are left out.
    pub(crate) fn list_names<T: FromStr>(&self) -> Result<Vec<T>> {
        let name = |entry: &PathBuf| entry.file_name()?.to_str()?.parse().ok();
        Ok(self.engine.list(&self.path)?.iter().filter_map(name).collect())
    }

    /// Hold the file `lock` of the directory, as [`IoEngine::lock_dir`] does.
    pub(crate) fn lock(&self) -> Result<DirLock> {
        self.engine.lock_dir(&self.path)
    }

    /// Hold the directory itself, as [`IoEngine::lock_dir_for`] does.
    pub(crate) fn hold(&self, how: DirLockPurpose) -> Result<DirLock> {
        self.engine.lock_dir_for(&self.path, how)
    }

    /// Whether something lies in the directory under this name. A link is not followed.
    pub fn has(&self, name: &str) -> Result<bool> {
        self.engine.exists(&self.join(name))
    }

    /// Whatever changes what the directory holds calls this first.
    ///
    /// Errors: `State` where the directory was checked for a load, which asks for less.
    pub(crate) fn check_to_save(&self) -> Result<()> {
        if self.access == DirectoryAccess::Save {
            return Ok(());
        }
        Err(Error::new(
            Kind::State,
            format!("{} was opened to load from: open it to save, which asks for more", self.path.display()),
        ))
    }

    /// The descriptor that holds the user's directory; `None` of a directory in an engine.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(|descriptor| descriptor.as_fd())
    }
}
