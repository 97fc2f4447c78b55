//! A directory of checkpoints that passed its checks, and is held from then on.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::io::{BeneathEngine, IoEngine, default_engine};
use crate::paths::Checks;

/// What the directory was checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Load,
    Save,
}

/// A user's directory that passed the checks of path, owner and permission bits once, and an engine that works in it.
///
/// The directory is held by its descriptor. Whoever replaces a component of its path later changes nothing that is read or written here.
#[derive(Clone, Debug)]
pub struct Directory {
    path: PathBuf,
    engine: Arc<dyn IoEngine>,
    access: Access,
    /// The directory itself; none where it is no directory of this machine's file systems.
    descriptor: Option<Arc<OwnedFd>>,
}

impl Directory {
    /// Check a directory to save to, and make it (mode 0750) when it is missing. With [`Checks::Basic`] the links in `path` are followed,
    /// now and not again.
    ///
    /// Errors: those of [`Checks::open_to_save`].
    pub fn to_save(path: &Path, checks: Checks) -> Result<Self> {
        let path = if checks == Checks::Basic { checks.resolve_to_save(path)? } else { path.to_owned() };
        Self::held(checks.open_to_save(&path)?, Access::Save)
    }

    /// Check a directory to load from, which need not be writable. Links are followed as by [`Directory::to_save`].
    ///
    /// Errors: those of [`Checks::open_to_load`].
    pub fn to_load(path: &Path, checks: Checks) -> Result<Self> {
        let path = if checks == Checks::Basic { checks.resolve_to_load(path)? } else { path.to_owned() };
        Self::held(checks.open_to_load(&path)?, Access::Load)
    }

    fn held((path, descriptor): (PathBuf, OwnedFd), access: Access) -> Result<Self> {
        let own = descriptor.try_clone().map_err(|error| Error::io("hold", &path, &error))?;
        let engine = BeneathEngine::engine(default_engine()?, &path, descriptor);
        Ok(Self { path, engine, access, descriptor: Some(Arc::new(own)) })
    }

    /// A directory of an engine that is no file system, such as [`crate::io::MemoryEngine`]: there is no owner or permission to check.
    pub fn in_engine(engine: Arc<dyn IoEngine>, path: &Path) -> Self {
        Self { path: path.to_owned(), engine, access: Access::Save, descriptor: None }
    }

    /// The absolute path, without links, as it was when the directory was checked.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The engine that works in the directory.
    pub fn engine(&self) -> &Arc<dyn IoEngine> {
        &self.engine
    }

    /// The engine, to change what the directory holds.
    ///
    /// Errors: `State` where the directory was checked for a load, which asks for less.
    pub fn engine_to_save(&self) -> Result<&Arc<dyn IoEngine>> {
        if self.access == Access::Save {
            return Ok(&self.engine);
        }
        Err(Error::new(
            Kind::State,
            format!("{} was opened to load from: open it to save, which asks for more", self.path.display()),
        ))
    }

    /// The descriptor that holds the directory; none of a directory in an engine.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(|descriptor| descriptor.as_fd())
    }
}
