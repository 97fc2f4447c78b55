//! A directory held by one table of one process, freed by its death.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::disk::check_regular;
use super::lock_fork::GivenUpByChildren;
use crate::error::{Error, Kind, Result};

/// The file in a locked directory that holds the lock and the pid of its owner. It stays when the lock is freed.
pub const LOCK_FILE: &str = "lock";

/// Why a directory is held by [`super::IoEngine::hold_dir`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// To read it. Any number of readers hold a directory at once.
    ToRead,
    /// To remove it. Nobody else holds it then.
    ToRemove,
    /// To open the table whose files are in it, or to remove those. Nobody else holds it then.
    ToOpen,
}

/// A directory held as long as this lives in the process that made it. Processes that it forks do not hold the directory.
pub struct DirLock {
    dir: PathBuf,
    _hold: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for DirLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirLock").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// The lock on a file or a directory. It is given up explicitly, because closing the file does not give it up while another process has
/// a copy of the descriptor.
struct Flock {
    /// Dropped first: from then on a fork leaves the descriptor alone.
    _fork: Option<GivenUpByChildren>,
    file: File,
    process: u32,
}

impl Flock {
    fn of(file: File) -> Self {
        Self { _fork: GivenUpByChildren::new(file.as_raw_fd()), file, process: std::process::id() }
    }
}

impl Drop for Flock {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: flock takes an open descriptor and flags. Where it fails, closing the file gives the lock up.
            unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_UN) };
        }
    }
}

impl DirLock {
    /// Hold a directory that exists, by `flock` on its file `lock`, and write this process's pid into it.
    ///
    /// Errors: `InUse` at once when another table, in this process or another one, holds it; `Path` when `lock` is a symbolic
    /// link, `Corruption` when it is no file; `Permission` and `Storage` as the file system says.
    pub fn acquire(dir: &Path) -> Result<Self> {
        let path = dir.join(LOCK_FILE);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o640)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map_err(|e| super::open_error("open the lock file", &path, &e))?;
        // Of a pipe it would wait for what nobody writes.
        check_regular(&path, &file)?;
        loop {
            // SAFETY: flock takes an open descriptor and flags; `file` is open for the length of the call.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                break;
            }
            let error = std::io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EWOULDBLOCK) => return Err(in_use(dir, &owner(&mut file))),
                _ => return Err(Error::io("lock", &path, &error)),
            }
        }
        let line = format!("{}\n", std::process::id());
        let mut found = String::new();
        // What this process wrote before stays: changing the file may wait for a disk that is being synced.
        if (&file).take(line.len() as u64 + 1).read_to_string(&mut found).is_err() || found != line {
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| file.write_all(line.as_bytes()))
                .map_err(|e| Error::io("write the pid to", &path, &e))?;
        }
        Ok(Self::held(dir, Flock::of(file)))
    }

    /// Hold a directory that exists by `flock` on the directory itself, which needs no right to write there.
    ///
    /// Where the file system has no such locks the directory counts as held. (NFS refuses to lock a directory alone.)
    ///
    /// Errors: `InUse` at once when another hold, in this process or another one, forbids it; `Permission` and `Storage` as the file
    /// system says.
    pub fn hold(dir: &Path, how: Hold) -> Result<Self> {
        // The entry "." is never a link, and neither is what a path by a descriptor leads to.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
            .open(dir.join("."))
            .map_err(|e| super::open_error("open the directory", dir, &e))?;
        let wanted = match how {
            Hold::ToRead => libc::LOCK_SH,
            Hold::ToRemove | Hold::ToOpen => libc::LOCK_EX,
        };
        loop {
            // SAFETY: flock takes an open descriptor and flags; `file` is open for the length of the call.
            if unsafe { libc::flock(file.as_raw_fd(), wanted | libc::LOCK_NB) } == 0 {
                return Ok(Self::held(dir, Flock::of(file)));
            }
            let error = std::io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EWOULDBLOCK) => return Err(held_otherwise(dir, how)),
                Some(libc::EBADF | libc::EINVAL | libc::ENOLCK | libc::ENOSYS | libc::EOPNOTSUPP) => {
                    return Ok(Self::held(dir, ()));
                }
                _ => return Err(Error::io("lock", dir, &error)),
            }
        }
    }

    /// Hold the directory `dir` itself, or the file `name` in it, which is made, by `flock`: shared with others that hold it so, or
    /// alone. With `wait` this waits until it can be held, or until a signal comes; `None` where it is not held after all.
    pub fn of_entry(dir: &Path, name: Option<&str>, alone: bool, wait: bool) -> Result<Option<Self>> {
        let (path, mut options) = (dir.join(name.unwrap_or(".")), File::options());
        match name {
            None => options.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW),
            Some(_) => options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o640)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK),
        };
        let file = options.open(&path).map_err(|e| super::open_error("lock", &path, &e))?;
        let how = if alone { libc::LOCK_EX } else { libc::LOCK_SH } | if wait { 0 } else { libc::LOCK_NB };
        // SAFETY: flock takes an open descriptor and flags; `file` is open for the length of the call.
        if unsafe { libc::flock(file.as_raw_fd(), how) } == 0 {
            return Ok(Some(Self::held(&path, Flock::of(file))));
        }
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EWOULDBLOCK) => Ok(None),
            _ => Err(Error::io("lock", &path, &error)),
        }
    }

    /// A hold that lasts until `hold` is dropped.
    pub(super) fn held(dir: &Path, hold: impl Any + Send + Sync) -> Self {
        Self { dir: dir.to_owned(), _hold: Box::new(hold) }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The pid that the holder wrote. It takes the lock first and writes then: an empty file is read again a few times.
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

pub(super) fn in_use(dir: &Path, by: &str) -> Error {
    Error::new(
        Kind::InUse,
        format!(
            "{} is in use {by}: close that table, end that process and those it started, or give this table a directory of its own",
            dir.display()
        ),
    )
}

pub(super) fn held_otherwise(dir: &Path, wanted: Hold) -> Error {
    let by = match wanted {
        Hold::ToRead => "another process is removing it; load the newest checkpoint".to_owned(),
        Hold::ToRemove => "another process or thread is reading it; a later save removes it".to_owned(),
        Hold::ToOpen => format!(
            "a table of this process or of another one has it open, although the file '{LOCK_FILE}' that says by which process was removed \
             or replaced. Close that table or end its process (`fuser -v {}` names it), or give this table a directory of its own",
            dir.display()
        ),
    };
    Error::new(Kind::InUse, format!("{} is in use: {by}", dir.display())).at(dir)
}
