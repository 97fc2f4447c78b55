//! Locks on directories. A table, a reader or a remover locks a directory; the end of its process releases the lock.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::c_int;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::disk::check_regular;
use crate::error::{Error, Kind, Result};

/// The file in a locked directory that carries the lock and contains the pid of the owner. It stays when the lock is
/// released.
pub const LOCK_FILE: &str = "lock";

/// The purpose for which [`super::IoEngine::lock_dir_for`] locks a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirLockPurpose {
    /// To read the directory. Shared by any number of readers.
    ToRead,
    /// To remove the directory. Exclusive.
    ToRemove,
    /// To change shared contents of the directory. Exclusive, and an error on a file system without such locks.
    ToChange,
    /// To open the table whose files are in the directory, or to remove those files. Exclusive.
    ToOpen,
}

/// A lock on a directory, held as long as this value lives in the process that created it. Processes forked from that
/// one do not hold it.
pub struct DirLock {
    dir: PathBuf,
    _guard: Box<dyn Any + Send + Sync>,
}

opaque_debug!(DirLock, self, dir = self.dir);

/// A lock by `flock` on a file or directory. Dropping it unlocks explicitly, because closing the file releases the lock
/// only if no other process has a copy of the descriptor.
struct FlockGuard {
    /// Declared, and so dropped, before `file`: a fork must not touch a descriptor that was closed.
    _fork: Option<ForkReleaseGuard>,
    file: File,
    process: u32,
}

impl FlockGuard {
    fn of(file: File) -> Self {
        Self { _fork: ForkReleaseGuard::new(file.as_raw_fd()), file, process: std::process::id() }
    }
}

impl Drop for FlockGuard {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // If this fails, closing the file releases the lock.
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// Locks an open file or directory without waiting. Retries when a signal interrupts it.
fn try_flock(file: &File, operation: FlockOperation) -> std::result::Result<(), Errno> {
    loop {
        match flock(file, operation) {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

impl DirLock {
    /// Locks an existing directory, by `flock` on its file `lock`, and writes this process's pid into that file.
    ///
    /// Errors, without waiting: `InUse` if another table, in this process or another one, holds the lock; `Path` if
    /// `lock` is a symbolic link; `Corruption` if it is not a regular file; `Permission` and `Storage` from the file
    /// system.
    pub fn acquire(dir: &Path) -> Result<Self> {
        Self::acquire_file(&dir.join(LOCK_FILE), dir)
    }

    /// Creates the file at `path` if it is missing, locks it by `flock`, and writes this process's pid into it. The
    /// lock represents `resource`, which errors report as in use.
    ///
    /// The errors are those of [`DirLock::acquire`].
    pub(super) fn acquire_file(path: &Path, resource: &Path) -> Result<Self> {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o640)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| super::open_error("open the lock file", path, &e))?;
        // Reading a pipe, below, would wait for a writer.
        check_regular(path, &file)?;
        match try_flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(in_use_error(resource, &owner(&mut file))),
            Err(errno) => return Err(Error::io("lock", path, &errno.into())),
        }
        let line = format!("{}\n", std::process::id());
        let mut found = String::new();
        // A pid that this process wrote earlier is not written again: a write to this file may wait for a disk that is
        // being synced.
        if (&file).take(line.len() as u64 + 1).read_to_string(&mut found).is_err() || found != line {
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| file.write_all(line.as_bytes()))
                .map_err(|e| Error::io("write the pid to", path, &e))?;
        }
        Ok(Self::from_guard(resource, FlockGuard::of(file)))
    }

    /// Locks an existing directory, by `flock` on the directory itself. This needs no write permission.
    ///
    /// If the file system has no such locks, this succeeds without a lock, except for [`DirLockPurpose::ToChange`].
    /// (NFS rejects only locks on directories.)
    ///
    /// Errors, without waiting: `InUse` if another lock, in this process or another one, conflicts with this one;
    /// `Permission` and `Storage` from the file system.
    pub fn acquire_for(dir: &Path, purpose: DirLockPurpose) -> Result<Self> {
        // O_NOFOLLOW checks only the last component. "." is never a link, so this also opens a path such as
        // /proc/self/fd/N.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
            .open(dir.join("."))
            .map_err(|e| super::open_error("open the directory", dir, &e))?;
        let operation = match purpose {
            DirLockPurpose::ToRead => FlockOperation::NonBlockingLockShared,
            DirLockPurpose::ToRemove | DirLockPurpose::ToChange | DirLockPurpose::ToOpen => {
                FlockOperation::NonBlockingLockExclusive
            }
        };
        match try_flock(&file, operation) {
            Ok(()) => Ok(Self::from_guard(dir, FlockGuard::of(file))),
            Err(errno) => Self::lock_failure(dir, purpose, errno),
        }
    }

    /// Returns the result of [`DirLock::acquire_for`] for a failed `flock`.
    fn lock_failure(dir: &Path, purpose: DirLockPurpose, errno: Errno) -> Result<Self> {
        match errno {
            Errno::WOULDBLOCK => Err(conflict_error(dir, purpose)),
            Errno::BADF | Errno::INVAL | Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP
                if purpose == DirLockPurpose::ToChange =>
            {
                Err(Kind::Storage.error(format!(
                    "cannot lock {}: its file system has no locks on directories ({errno}; NFS has none), so that processes that save \
                     there would meet: save to another file system",
                    dir.display()
                )).at(dir))
            }
            Errno::BADF | Errno::INVAL | Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP => {
                Ok(Self::from_guard(dir, ()))
            }
            errno => Err(Error::io("lock", dir, &errno.into())),
        }
    }

    /// Creates a lock that lasts until `guard` is dropped.
    pub(super) fn from_guard(dir: &Path, guard: impl Any + Send + Sync) -> Self {
        Self { dir: dir.to_owned(), _guard: Box::new(guard) }
    }

    /// The locked directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Describes the owner of a lock file, by the pid in it. The owner takes the lock before it writes its pid, so an empty
/// file is read again, at most 100 times.
fn owner(file: &mut File) -> String {
    for _ in 0..100 {
        let mut pid = String::new();
        if file.rewind().and_then(|()| file.read_to_string(&mut pid)).is_err() {
            break;
        }
        if let Ok(pid) = pid.trim().parse::<u32>() {
            return format!("by pid {pid}{}", if pid == std::process::id() { " (this process)" } else { "" });
        }
        std::thread::yield_now();
    }
    "by a process that has not written its pid".to_owned()
}

pub(super) fn in_use_error(dir: &Path, holder: &str) -> Error {
    Kind::InUse.error(format!(
        "{} is in use {holder}: close that table, end that process and those it started, or give this table a directory of its own",
        dir.display()
    ))
}

pub(super) fn conflict_error(dir: &Path, purpose: DirLockPurpose) -> Error {
    let by = match purpose {
        DirLockPurpose::ToRead => "another process is removing it; load the newest checkpoint".to_owned(),
        DirLockPurpose::ToRemove => "another process or thread is reading it; a later save removes it".to_owned(),
        DirLockPurpose::ToChange => "another process is changing it or reading it; try again in a moment".to_owned(),
        DirLockPurpose::ToOpen => format!(
            "a table of this process or of another one has it open. (The file '{LOCK_FILE}', which names the process, was removed or \
             replaced.) Close that table or end its process (`fuser -v {}` names it), or give this table a directory of its own",
            dir.display()
        ),
    };
    Kind::InUse.error(format!("{} is in use: {by}", dir.display())).at(dir)
}

/// The locked descriptors, which forked children release.
///
/// A lock by `flock` lasts until every copy of its descriptor is closed. Otherwise the workers that a process forks
/// would keep holding its locks after it was killed. The child replaces its copy of each locked descriptor by one of
/// `/dev/null`. It does not close the copy: the object that owns the number may close it later, when another file may
/// have the number.
///
/// A spin lock guards the list. A fork acquires the spin lock in the parent and releases it also in
/// the child, which the standard library's mutexes do not permit.
struct ForkLockRegistry {
    busy: AtomicBool,
    descriptors: UnsafeCell<Vec<c_int>>,
}

// SAFETY: only the thread that set `busy` accesses `descriptors`.
unsafe impl Sync for ForkLockRegistry {}

static LOCKS: ForkLockRegistry =
    ForkLockRegistry { busy: AtomicBool::new(false), descriptors: UnsafeCell::new(Vec::new()) };

/// A descriptor of `/dev/null`, once the fork handlers are installed; `None` if that failed.
static DEV_NULL: OnceLock<Option<c_int>> = OnceLock::new();

impl ForkLockRegistry {
    fn lock(&self) {
        while self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.busy.store(false, Ordering::Release);
    }

    fn with(&self, change: impl FnOnce(&mut Vec<c_int>)) {
        self.lock();
        // SAFETY: `lock` returned, so no other thread is between `lock` and `unlock`.
        change(unsafe { &mut *self.descriptors.get() });
        self.unlock();
    }
}

extern "C" fn before_fork() {
    LOCKS.lock();
}

extern "C" fn after_fork_in_parent() {
    LOCKS.unlock();
}

extern "C" fn after_fork_in_child() {
    if let Some(Some(nothing)) = DEV_NULL.get() {
        // SAFETY: `before_fork` called `lock` in the thread that forked, and that is the child's only thread.
        for &descriptor in unsafe { &*LOCKS.descriptors.get() } {
            // SAFETY: dup3 takes two descriptors and is safe to call after a fork. If it fails the child keeps holding
            // the lock.
            unsafe { libc::dup3(*nothing, descriptor, libc::O_CLOEXEC) };
        }
    }
    LOCKS.unlock();
}

/// Makes every child that this process forks release a descriptor, for as long as this value lives.
struct ForkReleaseGuard(c_int);

impl ForkReleaseGuard {
    /// `None` if the handlers cannot be installed. Then children hold the lock until they exit or execute another
    /// program.
    fn new(descriptor: c_int) -> Option<Self> {
        let open = || {
            let nothing = File::open("/dev/null").ok()?.into_raw_fd();
            // SAFETY: the three functions live as long as the process, and access only data that the spin lock of
            // `ForkLockRegistry` guards.
            let status = unsafe {
                libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child))
            };
            (status == 0).then_some(nothing)
        };
        (*DEV_NULL.get_or_init(open))?;
        LOCKS.with(|descriptors| descriptors.push(descriptor));
        Some(Self(descriptor))
    }
}

impl Drop for ForkReleaseGuard {
    fn drop(&mut self) {
        LOCKS.with(|descriptors| {
            if let Some(index) = descriptors.iter().position(|&descriptor| descriptor == self.0) {
                descriptors.swap_remove(index);
            }
        });
    }
}

#[cfg(test)]
mod tests;
