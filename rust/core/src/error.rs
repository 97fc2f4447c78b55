//! The crate's error type. Its kind selects the Python exception, and its message states the remedy.

use std::any::Any;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

/// The category of an error, as far as a caller can act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A configuration value is out of range, or contradicts another value.
    Config,
    /// An argument of a call (ids, offsets, rows) is malformed.
    Input,
    /// The last tier is full, and no budget has space for the row.
    Capacity,
    /// A memory allocation failed. Nothing has changed.
    Memory,
    /// An allocation on the device of a table, which may be the CPU, failed for copies of rows. Nothing has changed.
    DeviceMemory,
    /// Bytes from disk differ from the bytes that were written.
    Corruption,
    /// A file operation failed. `errno` is the reason.
    Storage,
    /// A path is rejected because of a symbolic link, a sensitive word, a system directory or its length.
    Path,
    /// A file or directory has the wrong owner or mode, or cannot be accessed.
    Permission,
    /// Another process or table has locked the directory.
    InUse,
    /// The call does not fit the state of the object (it is closed, it was used already, or its rows are in use).
    State,
    /// A checkpoint or an SSD directory belongs to another table or configuration.
    Mismatch,
    /// An earlier write failed. The SSD tier can only be read until it is reopened.
    ReadOnly,
    /// The requested operation is not supported.
    Unsupported,
    /// The served checkpoint was published too long ago.
    Stale,
}

impl Kind {
    /// Creates an error of this kind.
    pub fn error(self, message: impl Into<String>) -> Error {
        Error { kind: self, message: message.into(), path: None, errno: None }
    }
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: its kind, a message that states the remedy, and the file and the `errno` if known.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: Kind,
    message: String,
    path: Option<PathBuf>,
    errno: Option<i32>,
}

impl Error {
    /// Creates the error of a failed file operation. `operation` is in the infinitive ("write the segment").
    pub fn io(operation: &str, path: &Path, source: &std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::PermissionDenied => Kind::Permission,
            _ => Kind::Storage,
        };
        let mut message = format!("cannot {operation} {}: {source}", path.display());
        if source.raw_os_error() == Some(libc::EMFILE) {
            let limit =
                getrlimit(Resource::Nofile).current.map_or("any number of".to_owned(), |files| files.to_string());
            let limited =
                format!("; this process may have {limit} files open (RLIMIT_NOFILE), and every segment is one");
            message.push_str(&limited);
            message.push_str(": raise it (ulimit -n), or use fewer or smaller SSD tiers");
        }
        Self { kind, message, path: Some(path.to_owned()), errno: source.raw_os_error() }
    }

    /// Creates the error of a failed memory allocation. `operation` is in the infinitive ("map rows").
    pub fn memory(operation: &str, bytes: usize, source: &std::io::Error) -> Self {
        Self {
            kind: Kind::Memory,
            message: format!(
                "cannot {operation}: the system refuses {bytes} bytes of memory ({source}); lower the budget or raise the limit"
            ),
            path: None,
            errno: source.raw_os_error(),
        }
    }

    /// Creates the error of bytes at `offset` of `path` that failed a check.
    pub fn corruption(
        path: &Path,
        offset: u64,
        subject: &str,
        expected: impl std::fmt::Display,
        got: impl std::fmt::Display,
    ) -> Self {
        Kind::Corruption
            .error(format!(
                "{} is damaged at byte {offset}: {subject} should be {expected} and is {got}",
                path.display()
            ))
            .at(path)
    }

    /// Creates the error of an `operation` that panicked. `panic` is the panic's payload.
    pub fn panicked(operation: &str, panic: &(dyn Any + Send)) -> Self {
        let said = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let said = said.unwrap_or("no message");
        Kind::State
            .error(format!("{operation} ended in a panic ({said}): this is a bug of torchrec-embcache, report it"))
    }

    /// Sets `path` as the file or directory of the error.
    #[must_use]
    pub fn at(mut self, path: &Path) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// Replaces `from` by `to` in the message and in the path, including paths below `from`.
    #[must_use]
    pub fn renamed(mut self, from: &Path, to: &Path) -> Self {
        let (from_name, to_name) = (from.to_string_lossy(), to.to_string_lossy());
        let mut parts = self.message.split(&*from_name);
        let mut message = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            // A path that only shares a prefix with `from` is kept: "/proc/self/fd/57" for "/proc/self/fd/5".
            message.push_str(if part.starts_with(char::is_alphanumeric) { &from_name } else { &to_name });
            message.push_str(part);
        }
        self.message = message;
        self.path = self.path.map(|path| path.strip_prefix(from).map_or_else(|_| path.clone(), |below| to.join(below)));
        self
    }

    /// Puts `context` in front of the message.
    #[must_use]
    pub fn context(mut self, context: impl std::fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// Replaces the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The kind, which decides how a caller can react.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// True if the bytes are corrupted or missing. Any other file error means that the bytes could not be read this
    /// time, so the file must not be skipped or removed.
    pub(crate) fn is_damage_or_absence(&self) -> bool {
        self.kind == Kind::Corruption || self.errno == Some(libc::ENOENT)
    }

    /// The file or directory concerned, if known.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The operating system's error number, if any.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}

#[cfg(test)]
mod tests;
