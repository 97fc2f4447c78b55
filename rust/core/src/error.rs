//! The crate's error type. Its kind decides which Python exception is raised, and its message says what to do next.

use std::any::Any;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

/// What went wrong, as far as a caller can act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A configuration value is out of range, or contradicts another one.
    Config,
    /// An argument of a call (ids, offsets, rows) is malformed.
    Input,
    /// The last tier is full, and no budget has room for the row.
    Capacity,
    /// The system refused memory. Nothing has changed.
    Memory,
    /// The device of a table, which may be the CPU, had no memory for copies of rows. Nothing has changed.
    DeviceMemory,
    /// Bytes from disk are not those that were written.
    Corruption,
    /// An operation on a file failed. `errno` says how.
    Storage,
    /// A path is refused because of a symbolic link, a sensitive word, a system directory or its length.
    Path,
    /// A file or directory has the wrong owner or mode, or cannot be accessed.
    Permission,
    /// Another process or table holds the directory.
    InUse,
    /// The call does not fit the state of the object (it is closed, it was used already, its rows are in use).
    State,
    /// A checkpoint or an SSD directory belongs to another table or configuration.
    Mismatch,
    /// An earlier write failed. The SSD tier can only be read until it is reopened.
    ReadOnly,
    /// What was asked for is not supported.
    Unsupported,
    /// What is served was published too long ago.
    Stale,
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error: its kind, a message that says what to do, and the file and the `errno` where they are known.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: Kind,
    message: String,
    path: Option<PathBuf>,
    errno: Option<i32>,
}

impl Error {
    /// An error of `kind`.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), path: None, errno: None }
    }

    /// A failed file operation. `operation` is the operation in the infinitive ("write the segment").
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

    /// Memory that the system refused. `operation` is the operation in the infinitive ("map rows").
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

    /// Bytes at byte `offset` of `path` that failed a check.
    pub fn corruption(
        path: &Path,
        offset: u64,
        subject: &str,
        expected: impl std::fmt::Display,
        got: impl std::fmt::Display,
    ) -> Self {
        Self {
            kind: Kind::Corruption,
            message: format!(
                "{} is damaged at byte {offset}: {subject} should be {expected} and is {got}",
                path.display()
            ),
            path: Some(path.to_owned()),
            errno: None,
        }
    }

    /// The error of `operation` when it ended in a panic. `panic` is the panic's payload.
    pub fn panicked(operation: &str, panic: &(dyn Any + Send)) -> Self {
        let said = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let said = said.unwrap_or("no message");
        Self::new(
            Kind::State,
            format!("{operation} ended in a panic ({said}): this is a bug of torchrec-embcache, report it"),
        )
    }

    /// The same error with `path` as the file or directory that it concerns.
    #[must_use]
    pub fn at(mut self, path: &Path) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// The same error with `to` in place of `from`, in the message and in the path, also where it names something below `from`.
    #[must_use]
    pub fn renamed(mut self, from: &Path, to: &Path) -> Self {
        let (from_name, to_name) = (from.to_string_lossy(), to.to_string_lossy());
        let mut parts = self.message.split(&*from_name);
        let mut message = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            // A path that only begins with the same characters stays, as "/proc/self/fd/57" does for "/proc/self/fd/5".
            message.push_str(if part.starts_with(char::is_alphanumeric) { &from_name } else { &to_name });
            message.push_str(part);
        }
        self.message = message;
        self.path = self.path.map(|path| path.strip_prefix(from).map_or_else(|_| path.clone(), |below| to.join(below)));
        self
    }

    /// The same error with `context` in front of its message.
    #[must_use]
    pub fn context(mut self, context: impl std::fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// The same error with another kind.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The kind: what a caller can act on.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the error says that bytes are damaged or missing. Any other error of a file says only that its bytes could not be
    /// read this time, so the file must be neither passed over nor removed.
    pub(crate) fn is_damage_or_absence(&self) -> bool {
        self.kind == Kind::Corruption || self.errno == Some(libc::ENOENT)
    }

    /// The file or directory concerned, where it is known.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The operating system's error number, where there is one.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_renamed_where_it_speaks_of_a_path_or_of_what_lies_below() {
        let refused = std::io::Error::from_raw_os_error(libc::EIO);
        let (five, fifty, user) = (Path::new("/fd/5"), Path::new("/fd/57"), Path::new("/user"));
        let about = |path: &str, from: &Path| Error::io("open", Path::new(path), &refused).renamed(from, user);
        for (path, from, expected) in [
            ("/fd/5", five, "/user"),
            ("/fd/5/x", five, "/user/x"),
            ("/fd/57/x", five, "/fd/57/x"),
            ("/fd/57/x", fifty, "/user/x"),
        ] {
            let error = about(path, from);
            assert_eq!(error.path(), Some(Path::new(expected)));
            assert!(error.to_string().starts_with(&format!("cannot open {expected}: ")), "{error}");
        }
    }
}
