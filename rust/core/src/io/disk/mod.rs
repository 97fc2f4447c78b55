//! Files and directories of the real file system, for the engines that differ only in reading batches.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, linkat};
use rustix::io::Errno;

use super::{DirLock, DirLockPurpose, IoEngine, IoFile, IoOpenMode, IoReadRequest, ReadSink, exists_result};
use crate::error::{Error, Kind, Result};
pub(super) use file::{DiskFile, check_regular};
use file::{FileSettings, check_process, uninterrupted};

mod file;
#[cfg(test)]
mod tests;

/// Mode of new directories, before the process's umask.
const DIR_MODE: u32 = 0o750;

/// Batched reads of a disk engine.
pub trait BatchReader: Send + Sync + fmt::Debug {
    /// The engine's name without `+direct`.
    fn name(&self) -> &'static str;
    /// See [`IoEngine::read_batch`].
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>);
}

/// Files on disk. They are opened with `O_DIRECT` if the file system supports it, and `R` reads their batches.
///
/// An engine belongs to the process that created it. In a child that this process forks, every operation returns
/// `Kind::State`.
#[derive(Debug)]
pub struct DiskEngine<R> {
    reader: R,
    files: FileSettings,
    /// True if some file was opened without `O_DIRECT` although the engine requested it.
    direct_refused: AtomicBool,
}

impl<R: BatchReader> DiskEngine<R> {
    pub(super) fn with_reader(reader: R, direct: bool) -> Self {
        Self { reader, files: FileSettings::new(direct), direct_refused: AtomicBool::new(false) }
    }

    /// Limits a system call to `bytes`, so that tests cover continued reads and writes.
    #[cfg(test)]
    pub(super) fn with_call_bytes(mut self, bytes: usize) -> Self {
        self.files.call_bytes = bytes;
        self
    }

    fn check_process(&self) -> Result<()> {
        check_process(self.files.process)
    }
}

impl<R: BatchReader> IoEngine for DiskEngine<R> {
    fn name(&self) -> String {
        let direct = self.files.direct && !self.direct_refused.load(Ordering::Relaxed);
        format!("{}{}", self.reader.name(), if direct { "+direct" } else { "" })
    }

    fn open(&self, path: &Path, mode: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        self.check_process()?;
        let file = DiskFile::open(path, mode, &self.files)?;
        if self.files.direct && !file.is_direct() {
            self.direct_refused.store(true, Ordering::Relaxed);
        }
        Ok(Arc::new(file))
    }

    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        if let Err(error) = self.check_process() {
            (0..reads.len()).for_each(|position| sink(position, Err(error.clone()), Duration::ZERO));
            return;
        }
        self.reader.read_batch(reads, sink);
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(DIR_MODE)
            .create(path)
            .map_err(|e| Error::io("make the directory", path, &e))
    }

    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        self.check_process()?;
        let mut entries = std::fs::read_dir(path)
            .and_then(|dir| dir.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>())
            .map_err(|e| Error::io("list", path, &e))?;
        entries.sort();
        Ok(entries)
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        exists_result(path, uninterrupted(|| path.symlink_metadata()))
    }

    fn check_private(&self, path: &Path, allowed_mode: u32) -> Result<()> {
        let found = match path.symlink_metadata() {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io("inspect", path, &error)),
        };
        let refuse =
            |kind, why: &str| Err(Error::new(kind, format!("the directory {} {why}", path.display())).at(path));
        if found.is_symlink() {
            return refuse(Kind::Path, "is a symbolic link: name its target");
        }
        if !found.is_dir() {
            return refuse(Kind::Path, "is a file: name a directory");
        }
        let caller = rustix::process::geteuid().as_raw();
        if found.uid() != caller {
            let owner = found.uid();
            let why = format!("belongs to user {owner} and this process runs as {caller}: use a directory of your own");
            return refuse(Kind::Permission, &why);
        }
        let mode = found.mode() & 0o777;
        if mode & !allowed_mode != 0 {
            let why = format!("has mode {mode:04o}: chmod {:o} {}", mode & allowed_mode, path.display());
            return refuse(Kind::Permission, &why);
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::rename(from, to).map_err(|e| Error::io("rename", from, &e))
    }

    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        self.check_process()?;
        let fail = |errno: Errno| Error::io("link", to, &errno.into());
        let file = file.as_any().downcast_ref::<DiskFile>().ok_or_else(|| fail(Errno::XDEV))?;
        // The entry in /proc refers to the open file itself. `AT_EMPTY_PATH` would do the same, but needs a capability.
        let open = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        linkat(CWD, open, CWD, to, AtFlags::SYMLINK_FOLLOW).map_err(fail)
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::remove_file(path).map_err(|e| Error::io("remove", path, &e))
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        std::fs::remove_dir_all(path).map_err(|e| Error::io("remove", path, &e))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.check_process()?;
        File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("sync the directory", path, &e))
    }

    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.check_process()?;
        DirLock::acquire(path)
    }

    fn lock_file(&self, path: &Path) -> Result<DirLock> {
        self.check_process()?;
        DirLock::acquire_file(path, path)
    }

    fn lock_dir_for(&self, path: &Path, purpose: DirLockPurpose) -> Result<DirLock> {
        self.check_process()?;
        DirLock::acquire_for(path, purpose)
    }
}
