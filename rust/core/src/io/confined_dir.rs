//! File I/O confined to one directory that was checked. Replacing a component of a path at or below it by a symbolic
//! link does not redirect reads or writes.

use std::any::Any;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{
    DirLock, DirLockPurpose, FileMapping, IoEngine, IoFile, IoOpenMode, IoReadRequest, MappingAccess, ReadSink,
};
use crate::error::{Error, Kind, Result};

/// Checks an entry below the directory before it is opened: its path, its status, and the status of its parent.
pub type EntryCheck = fn(&Path, &Stat, &Stat) -> Result<()>;

/// An engine that holds one directory open. For an operation on a path below, it walks there from the directory's
/// descriptor, one component at a time without following links. The inner engine then executes the operation through
/// `/proc/self/fd`. Other paths are passed to the inner engine unchanged.
#[derive(Debug)]
pub struct ConfinedEngine {
    inner: Arc<dyn IoEngine>,
    root: PathBuf,
    directory: OwnedFd,
    /// `None` if all users who can write in the directory are trusted: then owners and modes are not checked.
    check: Option<EntryCheck>,
}

/// A directory at or below the root, open during one operation, with the path that names its descriptor.
struct ConfinedDir<'a> {
    /// `None` for the root itself, and outside of it.
    directory: Option<OwnedFd>,
    alias: PathBuf,
    real: &'a Path,
}

impl ConfinedDir<'_> {
    /// Replaces the descriptor's path in an error by the user's path.
    fn rename_error(&self, error: Error) -> Error {
        error.renamed(&self.alias, self.real)
    }
}

fn stat(entry: &OwnedFd, path: &Path) -> Result<Stat> {
    rustix::fs::fstat(entry).map_err(|errno| Error::io("inspect", path, &errno.into()))
}

fn fd_path(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

impl ConfinedEngine {
    /// Creates an engine for the contents of `root`, which is open as `directory`, as [`crate::paths::open_to_save`]
    /// returns it. `check` checks the directories on the way, and files that are opened; `None` trusts them. Returns
    /// `inner` itself if `/proc` is not mounted.
    pub fn engine(
        inner: Arc<dyn IoEngine>,
        root: &Path,
        directory: OwnedFd,
        check: Option<EntryCheck>,
    ) -> Arc<dyn IoEngine> {
        let same = |found: rustix::fs::Stat, open: rustix::fs::Stat| {
            (found.st_dev, found.st_ino) == (open.st_dev, open.st_ino)
        };
        match (rustix::fs::stat(fd_path(&directory)), rustix::fs::fstat(&directory)) {
            (Ok(found), Ok(open)) if same(found, open) => {
                Arc::new(Self { inner, root: root.to_owned(), directory, check })
            }
            _ => inner,
        }
    }

    /// Opens the directory `path`, which is the root or below it.
    fn directory<'a>(&self, path: &'a Path) -> Result<ConfinedDir<'a>> {
        let Ok(below) = path.strip_prefix(&self.root) else {
            return Ok(ConfinedDir { directory: None, alias: path.to_owned(), real: path });
        };
        let mut opened: Option<OwnedFd> = None;
        let mut current = self.root.clone();
        for component in below.components() {
            let Component::Normal(name) = component else {
                return Err(Kind::Path
                    .error(format!("{} contains '..': give a path without it", path.display()))
                    .at(path));
            };
            current.push(name);
            let from = opened.as_ref().unwrap_or(&self.directory);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let next = rustix::fs::openat(from, name, flags, Mode::empty()).map_err(|errno| {
                match errno {
                    // Kernels return different errors for a symbolic link or a file in a directory's place.
                    Errno::NOTDIR | Errno::LOOP | Errno::MLINK => Kind::Path
                        .error(format!(
                            "{} is a symbolic link or no directory: put the directory itself in its place",
                            current.display()
                        ))
                        .at(&current),
                    errno => Error::io("open", &current, &errno.into()),
                }
            })?;
            if let Some(check) = self.check {
                check(&current, &stat(&next, &current)?, &stat(from, &current)?)?;
            }
            opened = Some(next);
        }
        let alias = fd_path(opened.as_ref().unwrap_or(&self.directory));
        Ok(ConfinedDir { directory: opened, alias, real: path })
    }

    /// Calls `work` with an alias of `path` that cannot be redirected.
    fn with_entry<T>(&self, path: &Path, work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let parent = path.parent().unwrap_or(path);
        let opened = self.directory(parent)?;
        let name = path.file_name().unwrap_or_default();
        work(&opened.alias.join(name)).map_err(|error| opened.rename_error(error))
    }

    /// Checks the file `path`, if it exists, before it is opened.
    fn check_file(&self, path: &Path) -> Result<()> {
        let Some((check, name)) = self.check.zip(path.file_name()).filter(|_| path.starts_with(&self.root)) else {
            return Ok(());
        };
        let opened = self.directory(path.parent().unwrap_or(path))?;
        let parent = opened.directory.as_ref().unwrap_or(&self.directory);
        match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(file) if rustix::fs::FileType::from_raw_mode(file.st_mode).is_file() => {
                check(path, &file, &stat(parent, path)?)
            }
            // Opening it returns the error.
            _ => Ok(()),
        }
    }

    /// Calls `work` with an alias of the directory `path` that cannot be redirected.
    fn with_dir<T>(&self, path: &Path, work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let opened = self.directory(path)?;
        work(&opened.alias).map_err(|error| opened.rename_error(error))
    }
}

/// An open file that reports the user's path.
#[derive(Debug)]
struct ConfinedFile {
    inner: Arc<dyn IoFile>,
    path: PathBuf,
}

impl ConfinedFile {
    fn rename_error(&self, error: Error) -> Error {
        error.renamed(self.inner.path(), &self.path)
    }
}

impl IoFile for ConfinedFile {
    fn path(&self) -> &Path {
        &self.path
    }
    fn len(&self) -> Result<u64> {
        self.inner.len().map_err(|error| self.rename_error(error))
    }
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.inner.write_at(offset, data).map_err(|error| self.rename_error(error))
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.inner.read_at(offset, into).map_err(|error| self.rename_error(error))
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.inner.set_len(len).map_err(|error| self.rename_error(error))
    }
    fn sync(&self) -> Result<()> {
        self.inner.sync().map_err(|error| self.rename_error(error))
    }
    fn links(&self) -> Result<u64> {
        self.inner.links().map_err(|error| self.rename_error(error))
    }
    fn modified(&self) -> Result<SystemTime> {
        self.inner.modified().map_err(|error| self.rename_error(error))
    }
    fn map(&self, access: MappingAccess) -> Result<FileMapping> {
        Ok(self.inner.map(access).map_err(|error| self.rename_error(error))?.renamed(&self.path))
    }
    fn as_any(&self) -> &dyn Any {
        // The inner engine recognizes its own files by this.
        self.inner.as_any()
    }
}

impl IoEngine for ConfinedEngine {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn open(&self, path: &Path, mode: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        self.check_file(path)?;
        let inner = self.with_entry(path, |alias| self.inner.open(alias, mode))?;
        Ok(Arc::new(ConfinedFile { inner, path: path.to_owned() }))
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        self.inner.read_batch(reads, &mut |position, result, took| {
            // The error names the file by its descriptor's path. The file itself has the user's path.
            sink(
                position,
                result.map_err(|error| match error.path().map(Path::to_owned) {
                    Some(alias) => error.renamed(&alias, reads[position].file.path()),
                    None => error,
                }),
                took,
            );
        });
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        let Ok(below) = path.strip_prefix(&self.root) else { return self.inner.create_dir_all(path) };
        let mut current = self.root.clone();
        for component in below.components() {
            current.push(component);
            self.with_entry(&current, |alias| self.inner.create_dir_all(alias))?;
        }
        // An existing entry may be a symbolic link, which this rejects.
        self.directory(path).map(drop)
    }

    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let entries = self.with_dir(path, |alias| self.inner.list(alias))?;
        Ok(entries.iter().filter_map(|entry| Some(path.join(entry.file_name()?))).collect())
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        match self.with_entry(path, |alias| self.inner.exists(alias)) {
            // A parent directory of the path is missing.
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
            found => found,
        }
    }

    fn check_private(&self, path: &Path, allowed_mode: u32) -> Result<()> {
        if self.check.is_none() && path.starts_with(&self.root) {
            return Ok(());
        }
        match self.with_entry(path, |alias| self.inner.check_private(alias, allowed_mode)) {
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            checked => checked,
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.with_entry(from, |from| self.with_entry(to, |to| self.inner.rename(from, to)))
    }

    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        self.with_entry(to, |to| self.inner.link(file, to))
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.with_entry(path, |alias| self.inner.remove_file(alias))
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.with_entry(path, |alias| self.inner.remove_dir_all(alias))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.with_dir(path, |alias| self.inner.sync_dir(alias))
    }

    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.with_dir(path, |alias| self.inner.lock_dir(alias))
    }

    fn lock_file(&self, path: &Path) -> Result<DirLock> {
        self.with_entry(path, |alias| self.inner.lock_file(alias))
    }

    fn lock_dir_for(&self, path: &Path, purpose: DirLockPurpose) -> Result<DirLock> {
        self.with_dir(path, |alias| self.inner.lock_dir_for(alias, purpose))
    }
}
