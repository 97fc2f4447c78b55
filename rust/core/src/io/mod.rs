//! File I/O behind one trait, [`IoEngine`]. It has implementations on `io_uring` and on plain system calls. With the
//! feature `testing` it also has one in memory, and one with injected faults.
//!
//! Every file operation of the SSD tier and of checkpoints goes through an [`IoEngine`], so that the fault engine sees
//! each of them.

mod buffers;
mod confined_dir;
mod dir_lock;
mod disk;
mod link;
mod mapped_file;
pub(crate) mod open_files;
mod psync;
#[cfg(any(test, feature = "testing"))]
mod testing;
#[cfg(target_os = "linux")]
mod uring;

pub use buffers::{ALIGNMENT, AlignedBuf, BufPool, PooledBuf};
pub use confined_dir::{ConfinedEngine, EntryCheck};
pub use dir_lock::{DirLock, DirLockPurpose, LOCK_FILE};
pub use disk::DiskEngine;
pub(crate) use link::copy_file;
pub use link::link_or_copy;
pub use mapped_file::{FileMapping, MappingAccess};
pub use psync::PsyncEngine;
#[cfg(any(test, feature = "testing"))]
pub use testing::{FaultEngine, IoFault, IoOperation, MemoryEngine};
#[cfg(target_os = "linux")]
pub use uring::UringEngine;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Kind, Result};
use crate::runtime::process::PerProcess;

/// The environment variable that overrides the selection. Its values are `uring` and `pread`.
const ENGINE_VARIABLE: &str = "EMBCACHE_IO";

/// The requested limit of open files of a process, since each segment of each table is one.
const OPEN_FILE_LIMIT: u64 = 1 << 16;

static PROCESS_ENGINE: PerProcess<Arc<dyn IoEngine>> = PerProcess::new();

/// Mode of opening a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOpenMode {
    /// Opens an existing file for reading.
    Read,
    /// Opens an existing file for writing and reading. Its bytes and its length stay.
    Write,
    /// Creates a new file for writing and reading, and preallocates space. Its length is 0 until it is written. An
    /// existing file is an error.
    Create {
        /// Bytes to preallocate; 0 for none.
        preallocate: u64,
    },
}

/// One read of a batch of reads.
#[derive(Clone, Debug)]
pub struct IoReadRequest {
    /// The file to read from.
    pub file: Arc<dyn IoFile>,
    /// Byte in the file at which the read starts. It need not be aligned.
    pub offset: u64,
    /// Number of bytes to read, of any alignment.
    pub len: usize,
}

/// An open file. Dropping the last handle closes it.
pub trait IoFile: Send + Sync + fmt::Debug {
    /// The path by which it was opened.
    fn path(&self) -> &Path;
    /// Length in bytes.
    fn len(&self) -> Result<u64>;
    /// True if its length is 0.
    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }
    /// True if its reads and writes bypass the page cache (`O_DIRECT`).
    fn is_direct(&self) -> bool {
        false
    }
    /// Writes all of `data` at byte `offset`. Both `offset` and the length of `data` must be multiples of
    /// [`ALIGNMENT`]; otherwise every engine returns `Kind::Input`. Data in an [`AlignedBuf`] is written without a
    /// copy.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;
    /// Reads exactly `into.len()` bytes at byte `offset`, which need not be aligned. `Kind::Corruption` if the file
    /// ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()>;
    /// Truncates the file to `len` bytes, or extends it with zeros.
    fn set_len(&self, len: u64) -> Result<()>;
    /// Makes the file's data and length durable.
    fn sync(&self) -> Result<()>;
    /// Number of the file's names (hard links). A file with links outside this package is never written again.
    fn links(&self) -> Result<u64>;
    /// Time of the last write. An engine whose files have no times returns the time of the call.
    fn modified(&self) -> Result<SystemTime> {
        Ok(SystemTime::now())
    }
    /// Maps the entire file for reading; it must not be written again. An engine whose files cannot be mapped returns a
    /// copy.
    fn map(&self, _access: MappingAccess) -> Result<FileMapping> {
        FileMapping::copied(self.path(), self.len()? as usize, |bytes| self.read_at(0, bytes))
    }
    /// The concrete type, by which an engine recognizes its own files.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// Receives the results of a batch of reads. It is called once per read, in any order, with the read's position in the
/// batch, its bytes, and its duration, from submission to completion. The duration of a read that was not submitted is
/// zero.
pub type ReadSink<'a> = dyn FnMut(usize, Result<&[u8]>, Duration) + Send + 'a;

/// An implementation of file I/O. A process needs one. Its methods may be called from any thread.
pub trait IoEngine: Send + Sync + fmt::Debug {
    /// The engine's name for reports: `io_uring`, `pread`, `memory` or `fault over …`, with `+direct` if `O_DIRECT` is
    /// in use.
    fn name(&self) -> String;
    /// Opens or creates a file.
    fn open(&self, path: &Path, mode: IoOpenMode) -> Result<Arc<dyn IoFile>>;
    /// Runs all reads of a batch, many at a time, and passes each to `sink` when it completes. This blocks until all
    /// are done. A read that fails, or that extends past the end of its file, is passed as an error and does not stop
    /// the others.
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>);
    /// Creates a directory and its missing parents.
    fn create_dir_all(&self, path: &Path) -> Result<()>;
    /// Lists the entries of a directory, sorted by name. `Kind::Storage` if the directory is missing.
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>>;
    /// True if a path exists. A symbolic link counts and is not followed. Returns `false` only if the system reports
    /// that nothing exists there (`ENOENT`, `ENOTDIR`). Every other failure is an error, because a caller that
    /// considers the path free would ignore existing contents.
    fn exists(&self, path: &Path) -> Result<bool>;
    /// Returns an error for a directory that is a symbolic link, is not a directory, belongs to another user, or whose
    /// permission bits exceed `allowed_mode`. A missing one passes. An engine whose files have no owners accepts all.
    fn check_private(&self, _path: &Path, _allowed_mode: u32) -> Result<()> {
        Ok(())
    }
    /// Renames a file or directory, replacing the target.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;
    /// Links an open file of this engine, or of one over the same files, to the further name `to`, which must not
    /// exist. This links the open descriptor: replacing the file at its old name concurrently has no effect. `EXDEV` if
    /// the file belongs to another engine; `ENOENT` if it has no name left.
    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> Result<()>;
    /// Removes a directory and everything in it.
    fn remove_dir_all(&self, path: &Path) -> Result<()>;
    /// Makes the entries of a directory durable.
    fn sync_dir(&self, path: &Path) -> Result<()>;
    /// Locks an existing directory exclusively, until the lock is dropped. If the lock is held, fails without waiting
    /// with `Kind::InUse`, which names the holder's pid.
    fn lock_dir(&self, path: &Path) -> Result<DirLock>;
    /// Locks a file exclusively, until the lock is dropped, and creates the file if it is missing. If the lock is held,
    /// fails without waiting with `Kind::InUse`. Engines that wrap another one only for directories need not support
    /// it.
    fn lock_file(&self, path: &Path) -> Result<DirLock> {
        Err(Kind::Unsupported.error(format!("cannot lock {}: this engine locks directories only", path.display())))
    }
    /// Locks a directory itself: shared to read it, or exclusively for other purposes. If another lock conflicts with
    /// it, fails without waiting with `Kind::InUse`. This is independent of [`IoEngine::lock_dir`].
    fn lock_dir_for(&self, path: &Path, purpose: DirLockPurpose) -> Result<DirLock>;
}

/// Returns the engine of this process: `io_uring` if available (a ring was created, and a read through it succeeded),
/// and plain `pread` otherwise, which is logged. The environment variable `EMBCACHE_IO` (`uring` or `pread`) overrides
/// the selection. [`IoEngine::name`] identifies it. A forked child gets its own engine. The first call raises the
/// process's limit of open files as far as permitted.
///
/// Errors: `Config` for another value of the variable; `Unsupported` if it requests `io_uring` and that is unavailable.
pub fn default_engine() -> Result<Arc<dyn IoEngine>> {
    let make = || {
        raise_file_limit();
        choose_engine(std::env::var_os(ENGINE_VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref())
    };
    PROCESS_ENGINE.get(make).cloned()
}

/// Writes `data` to `path` so that a crash leaves either the old file or the complete new one. This writes a temporary
/// file in the same directory, syncs it, renames it to `path`, and syncs the directory.
pub fn write_atomically(engine: &dyn IoEngine, path: &Path, data: &[u8]) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = dir.join(name);
    if engine.exists(&temporary)? {
        engine.remove_file(&temporary)?;
    }
    write_whole(engine, &temporary, data)?.sync()?;
    engine.rename(&temporary, path)?;
    engine.sync_dir(dir)
}

/// Creates a file with the contents `data`. Nothing of it is durable yet.
pub(crate) fn write_whole(engine: &dyn IoEngine, path: &Path, data: &[u8]) -> Result<Arc<dyn IoFile>> {
    let file = engine.open(path, IoOpenMode::Create { preallocate: 0 })?;
    let mut padded = AlignedBuf::zeroed(data.len().next_multiple_of(ALIGNMENT));
    padded[..data.len()].copy_from_slice(data);
    file.write_at(0, &padded)?;
    file.set_len(data.len() as u64)?;
    Ok(file)
}

/// Reads an entire file. Rejects a file longer than `limit_bytes` before any memory is allocated (`Kind::Corruption`).
pub fn read_file(engine: &dyn IoEngine, path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    let file = engine.open(path, IoOpenMode::Read)?;
    let len = file.len()?;
    if len > limit_bytes {
        return Err(Error::corruption(path, 0, "the file's length", format!("at most {limit_bytes}"), len));
    }
    let mut data = vec![0; len as usize];
    file.read_at(0, &mut data)?;
    Ok(data)
}

/// Raises this process's soft limit of open files towards the hard limit. The usual 1024 is too low for some tables.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let target = limit.maximum.map_or(OPEN_FILE_LIMIT, |hard| hard.min(OPEN_FILE_LIMIT));
    if limit.current.is_some_and(|soft| soft < target) {
        // If this fails, opening a file fails later with an error that names the file and the errno.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(target), maximum: limit.maximum });
    }
}

/// Returns the engine for a value of the environment variable.
fn choose_engine(requested: Option<&str>) -> Result<Arc<dyn IoEngine>> {
    match requested {
        None | Some("") => Ok(uring_engine().unwrap_or_else(|error| {
            tracing::warn!("files are read by pread, which takes more time of the processor: {error}");
            Arc::new(PsyncEngine::default())
        })),
        Some("uring") => uring_engine(),
        Some("pread") => Ok(Arc::new(PsyncEngine::default())),
        Some(other) => Err(Kind::Config.error(format!("{ENGINE_VARIABLE}={other:?} is not known: use uring or pread"))),
    }
}

/// Rejects a write that direct I/O does not support. Every engine uses this, so that all reject the same writes.
fn check_aligned(path: &Path, offset: u64, len: usize) -> Result<()> {
    if offset.is_multiple_of(ALIGNMENT as u64) && len.is_multiple_of(ALIGNMENT) {
        return Ok(());
    }
    Err(Kind::Input.error(format!(
        "cannot write {len} bytes at byte {offset} of {}: offset and length must be multiples of {ALIGNMENT}",
        path.display()
    )))
}

/// The error of opening a path with `O_NOFOLLOW`.
fn open_error(action: &str, path: &Path, source: &std::io::Error) -> Error {
    if source.raw_os_error() == Some(libc::ELOOP) {
        return Kind::Path
            .error(format!("cannot {action} {}: it is a symbolic link; give the path it points to", path.display()));
    }
    Error::io(action, path, source)
}

/// Converts the result of inspecting `path`; see [`IoEngine::exists`].
fn exists_result<T>(path: &Path, look: std::io::Result<T>) -> Result<bool> {
    match look {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(false),
        Err(error) => Err(Error::io("look at", path, &error)),
    }
}

/// The error of a read that extends past the end of its file.
fn short_file_error(path: &Path, wanted_end: u64, len: u64) -> Error {
    Error::corruption(path, len, "the file's length", format!("at least {wanted_end}"), len)
}

#[cfg(target_os = "linux")]
fn uring_engine() -> Result<Arc<dyn IoEngine>> {
    Ok(Arc::new(UringEngine::new(true)?))
}

#[cfg(not(target_os = "linux"))]
fn uring_engine() -> Result<Arc<dyn IoEngine>> {
    Err(Kind::Unsupported.error("io_uring exists on Linux only: unset EMBCACHE_IO or set it to pread"))
}

#[cfg(test)]
mod tests;
