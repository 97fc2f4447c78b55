//! File I/O behind one trait, so that the same store runs on `io_uring`, on plain system calls, in memory, and under made faults.
//!
//! Every file operation of the SSD tier and of checkpoints goes through an [`IoEngine`]: the fault engine sees each of them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};

mod aligned;
#[cfg(target_os = "linux")]
mod arena;
mod beneath;
mod cover;
pub(crate) mod descriptors;
mod disk;
mod fault;
mod link;
mod lock;
mod lock_fork;
mod memory;
mod memory_tree;
mod psync;
mod select;
#[cfg(target_os = "linux")]
mod uring;

pub use aligned::{ALIGNMENT, AlignedBuf, BufPool, PooledBuf};
pub use beneath::BeneathEngine;
pub use disk::DiskEngine;
pub use fault::{Fault, FaultEngine, Operation};
pub use link::link_or_copy;
pub use lock::{DirLock, Hold, LOCK_FILE};
pub use memory::MemoryEngine;
pub use psync::PsyncEngine;
pub use select::{default_engine, fallback_reason};
#[cfg(target_os = "linux")]
pub use uring::UringEngine;

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// Read an existing file.
    Read,
    /// Write and read an existing file, which keeps its bytes and its length.
    Write,
    /// Make a new file (an existing one is an error) for writing and reading, with room for this many bytes set aside. Its
    /// length is 0 until something is written.
    Create {
        /// Bytes to preallocate; 0 for none.
        preallocate: u64,
    },
}

/// One read of a batch.
#[derive(Clone, Debug)]
pub struct Read {
    /// The file.
    pub file: Arc<dyn IoFile>,
    /// First byte wanted; any alignment.
    pub offset: u64,
    /// Bytes wanted; any length.
    pub len: usize,
}

/// An open file. Dropping the last handle closes it.
pub trait IoFile: Send + Sync + fmt::Debug {
    /// The path it was opened by.
    fn path(&self) -> &Path;
    /// Its length in bytes.
    fn len(&self) -> Result<u64>;
    /// Whether it is empty.
    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Whether its reads and writes pass by the page cache.
    fn is_direct(&self) -> bool {
        false
    }
    /// Write all of `data` at `offset`. Both `offset` and the data's length must be multiples of [`ALIGNMENT`] (`Kind::Input`
    /// otherwise, with every engine); data in an [`AlignedBuf`] is written without a copy.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;
    /// Read exactly `into.len()` bytes at `offset`, any alignment; a short file is `Kind::Corruption`.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()>;
    /// Cut or extend to `len` bytes.
    fn set_len(&self, len: u64) -> Result<()>;
    /// Make data and length durable.
    fn sync(&self) -> Result<()>;
    /// How many names it has: a file with others than ours is never written again.
    fn links(&self) -> Result<u64>;
    /// For the engines' own use.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// What a batched read hands its rows to: called once a read, in any order, with the read's position in the batch and its bytes.
pub type ReadSink<'a> = dyn FnMut(usize, Result<&[u8]>) + Send + 'a;

/// A way to do file I/O. One a process is enough; all methods may be called from any thread.
pub trait IoEngine: Send + Sync + fmt::Debug {
    /// `io_uring`, `pread`, `memory` or `fault`, with `+direct` where `O_DIRECT` is in use.
    fn name(&self) -> String;
    /// Open a file.
    fn open(&self, path: &Path, how: Open) -> Result<Arc<dyn IoFile>>;
    /// Do all reads of a batch, as deep as the device likes, and hand each to `sink` as it completes; blocks until all are done.
    /// A read that fails, or ends past the end of its file, is handed over as an error and does not stop the others.
    fn read_batch(&self, reads: &[Read], sink: &mut ReadSink<'_>);
    /// Make a directory and its parents.
    fn create_dir_all(&self, path: &Path) -> Result<()>;
    /// The entries of a directory, sorted by name; `Kind::Storage` when it is missing.
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>>;
    /// Whether something lies at a path; a link there is not followed. `false` only where the system says that nothing does (`ENOENT`,
    /// `ENOTDIR`): whoever takes a path that could not be looked at for one without anything goes on without what lies there.
    fn exists(&self, path: &Path) -> Result<bool>;
    /// Refuse a directory that is a link, no directory, another user's, or has permission bits beyond `allowed_mode`; a missing one passes.
    /// Where files have no owners all pass.
    fn check_private(&self, _path: &Path, _allowed_mode: u32) -> Result<()> {
        Ok(())
    }
    /// Rename, replacing the target.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;
    /// Give an open file of this engine, or of one that is over the same files, a second name, which nothing has. By the descriptor: whoever
    /// exchanges what lies under its name meanwhile changes nothing. `EXDEV` where it is another engine's; `ENOENT` where it has no name left.
    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()>;
    /// Remove a file.
    fn remove_file(&self, path: &Path) -> Result<()>;
    /// Remove a directory and all in it.
    fn remove_dir_all(&self, path: &Path) -> Result<()>;
    /// Make a directory's entries durable.
    fn sync_dir(&self, path: &Path) -> Result<()>;
    /// Hold a directory, which must exist, for as long as the lock lives; `Kind::InUse`, naming the pid, at once when it is held.
    fn lock_dir(&self, path: &Path) -> Result<DirLock>;
    /// Hold a directory itself: with others to read it, or alone to remove or open it. `Kind::InUse` at once when it is held otherwise.
    /// Independent of [`IoEngine::lock_dir`].
    fn hold_dir(&self, path: &Path, how: Hold) -> Result<DirLock>;
}

/// Refuse a write that direct I/O could not do, so that every engine refuses the same.
fn check_aligned(path: &Path, offset: u64, len: usize) -> Result<()> {
    if offset.is_multiple_of(ALIGNMENT as u64) && len.is_multiple_of(ALIGNMENT) {
        return Ok(());
    }
    Err(Error::new(
        Kind::Input,
        format!(
            "cannot write {len} bytes at byte {offset} of {}: offset and length must be multiples of {ALIGNMENT}",
            path.display()
        ),
    ))
}

/// The error of opening a path with `O_NOFOLLOW`.
fn open_error(what: &str, path: &Path, source: &std::io::Error) -> Error {
    if source.raw_os_error() == Some(libc::ELOOP) {
        return Error::new(
            Kind::Path,
            format!("cannot {what} {}: it is a symbolic link; give the path it points to", path.display()),
        );
    }
    Error::io(what, path, source)
}

/// Whether a look at `path` found something; see [`IoEngine::exists`].
fn found<T>(path: &Path, look: std::io::Result<T>) -> Result<bool> {
    match look {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(false),
        Err(error) => Err(Error::io("look at", path, &error)),
    }
}

/// The error of a read that ends past the end of its file.
fn short_file(path: &Path, wanted_end: u64, len: u64) -> Error {
    Error::corruption(path, len, "the file's length", format!("at least {wanted_end}"), len)
}

/// Write `data` to `path` so that after a crash the file is whole, old or new: temporary file beside it, write, sync, rename,
/// sync the directory.
pub fn publish(engine: &dyn IoEngine, path: &Path, data: &[u8]) -> Result<()> {
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

/// Make a file that holds `data`. Nothing of it is durable yet.
pub(crate) fn write_whole(engine: &dyn IoEngine, path: &Path, data: &[u8]) -> Result<Arc<dyn IoFile>> {
    let file = engine.open(path, Open::Create { preallocate: 0 })?;
    let mut padded = AlignedBuf::zeroed(data.len().next_multiple_of(ALIGNMENT));
    padded[..data.len()].copy_from_slice(data);
    file.write_at(0, &padded)?;
    file.set_len(data.len() as u64)?;
    Ok(file)
}

/// Read a whole file, refusing one larger than `limit_bytes` before anything is allocated.
pub fn read_file(engine: &dyn IoEngine, path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    let file = engine.open(path, Open::Read)?;
    let len = file.len()?;
    if len > limit_bytes {
        return Err(Error::corruption(path, 0, "the file's length", format!("at most {limit_bytes}"), len));
    }
    let mut data = vec![0; len as usize];
    file.read_at(0, &mut data)?;
    Ok(data)
}
