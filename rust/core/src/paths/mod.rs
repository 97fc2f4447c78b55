//! Checks on directories that users name, made before anything in them is read or written; and names of files made from users' names.
//!
//! A check walks the path from the root with one `openat` for each component, which follows no link. So what was checked is what is there:
//! another user could only replace a directory whose parent others may write to, and such parents are refused.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags, Stat};

use crate::error::{Error, Kind, Result};

mod names;
#[cfg(test)]
mod tests;
mod walk;

pub use names::encode_name;

use walk::{os, others_may_write, walk};

/// Longest path that is accepted, in bytes.
pub const MAX_PATH_BYTES: usize = 1024;
/// Permission bits that a checkpoint's directory may have, and is made with.
pub const CHECKPOINT_MODE: u32 = 0o750;
/// Permission bits that the directory of an SSD tier may have, and that of a checkpoint under [`Checks::Basic`]: nobody but its owner
/// may write.
pub const SSD_DIR_MODE: u32 = 0o755;

/// Words that no path of a checkpoint may have, compared without case: such places hold secrets.
const SENSITIVE_WORDS: [&str; 3] = ["key", "password", "privatekey"];
/// Directories that belong to the system, with all that lies below them.
const SYSTEM_DIRECTORIES: [&str; 11] =
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/boot", "/proc", "/sys"];
/// `/dev` holds devices, except for its file system in RAM.
const DEVICES: &str = "/dev";
const SHARED_MEMORY: &str = "/dev/shm";
/// How messages call the less strict rules.
const BASIC: &str = "path_checks=\"basic\", which refuses only what others can write to";

/// Which rules a checkpoint's directory must keep.
///
/// Both take a path of 1 to [`MAX_PATH_BYTES`] bytes without `..`. Both refuse a symbolic link in any component: a caller who wants links
/// followed resolves them once, by [`Checks::resolve_to_save`], and uses their target from then on. Both refuse a parent that others may
/// write to. To save, they also refuse a directory of another user, and a parent that a group may write to or that belongs neither to the
/// caller nor to root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checks {
    /// No sensitive word, no system directory, and a mode of at most [`CHECKPOINT_MODE`]. A load asks the same as a save.
    Strict,
    /// Only a mode of at most [`SSD_DIR_MODE`], beyond what both ask.
    Basic,
}

/// The rules that differ between uses of a directory.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a rule of its own
struct Rules {
    /// What messages call the path.
    field: &'static str,
    /// Refuse sensitive words and system directories.
    names: bool,
    /// Permission bits that the directory may have.
    allowed_mode: u32,
    /// The directory must belong to the caller.
    own: bool,
    /// Nobody but the caller and root may be able to replace a component of the path. Without this only directories are refused that any
    /// user may write to.
    alone: bool,
    /// The caller must be able to write.
    writable: bool,
    /// Make the directory and its parents when missing.
    create: bool,
}

impl Checks {
    fn rules(self, writable: bool) -> Rules {
        let strict = self == Self::Strict;
        Rules {
            field: "path",
            names: strict,
            allowed_mode: if strict { CHECKPOINT_MODE } else { SSD_DIR_MODE },
            own: strict || writable,
            alone: strict || writable,
            writable,
            create: writable,
        }
    }

    /// Check the directory that a checkpoint is saved to, and make it (mode 0750) when it is missing. Returns the absolute path, and the
    /// directory open for reading. Work below this descriptor is work in what was checked, whatever the path names by then.
    ///
    /// Errors: `Kind::Path` (length, `..`, a leading `~`, symbolic link, not a directory; of strict checks: sensitive word, system
    /// directory), `Kind::Permission` (its mode, another owner, not writable, a parent in which others may exchange it).
    pub fn open_to_save(self, path: &Path) -> Result<(PathBuf, OwnedFd)> {
        open(path, self.rules(true))
    }

    /// Check the directory that a checkpoint is loaded from, as [`Checks::open_to_save`] does. It must exist, and need not be writable.
    pub fn open_to_load(self, path: &Path) -> Result<(PathBuf, OwnedFd)> {
        open(path, self.rules(false))
    }

    /// Check as [`Checks::open_to_save`] does, and return the path only.
    pub fn directory_to_save(self, path: &Path) -> Result<PathBuf> {
        check(path, self.rules(true))
    }

    /// Check as [`Checks::open_to_load`] does, and return the path only.
    pub fn directory_to_load(self, path: &Path) -> Result<PathBuf> {
        check(path, self.rules(false))
    }

    /// The absolute path of what `path` leads to. Links and `..` are followed; what is missing at the end stays as it was given. A link that
    /// others may point elsewhere is refused. The directory itself is checked when it is opened.
    pub fn resolve_to_save(self, path: &Path) -> Result<PathBuf> {
        walk::resolve(path, self.rules(true))
    }

    /// Resolve as [`Checks::resolve_to_save`] does, for a path that is only read.
    pub fn resolve_to_load(self, path: &Path) -> Result<PathBuf> {
        walk::resolve(path, self.rules(false))
    }
}

/// [`Checks::directory_to_save`] with strict checks.
pub fn directory_to_save(path: &Path) -> Result<PathBuf> {
    Checks::Strict.directory_to_save(path)
}

/// [`Checks::directory_to_load`] with strict checks.
pub fn directory_to_load(path: &Path) -> Result<PathBuf> {
    Checks::Strict.directory_to_load(path)
}

/// [`Checks::open_to_save`] with strict checks.
pub fn open_to_save(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    Checks::Strict.open_to_save(path)
}

/// [`Checks::open_to_load`] with strict checks.
pub fn open_to_load(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    Checks::Strict.open_to_load(path)
}

const SSD_RULES: Rules = Rules {
    field: "ssd_dir",
    names: false,
    allowed_mode: SSD_DIR_MODE,
    own: true,
    alone: true,
    writable: true,
    create: false,
};

/// Check a user's `ssd_dir`: it must exist, be writable by the caller and by nobody else. Returns the absolute path.
///
/// Errors: `Kind::Path` (length, `..`, a leading `~`, symbolic link, missing, not a directory), `Kind::Permission` (group or others
/// may write, another owner, not writable, a parent in which others may exchange it).
pub fn directory_for_ssd(path: &Path) -> Result<PathBuf> {
    check(path, SSD_RULES)
}

/// Check as [`directory_for_ssd`] does, and return the directory open too, as [`Checks::open_to_save`] does.
pub fn open_for_ssd(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    open(path, SSD_RULES)
}

fn check(given: &Path, rules: Rules) -> Result<PathBuf> {
    checked(given, rules).map(|(path, _)| path)
}

/// Check a directory and open it for reading. What is opened is what was checked, whatever happened to the path meanwhile.
fn open(given: &Path, rules: Rules) -> Result<(PathBuf, OwnedFd)> {
    let (path, directory) = checked(given, rules)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let readable = rustix::fs::openat(&directory, ".", flags, Mode::empty()).map_err(|e| os("open", &path, e))?;
    Ok((path, readable))
}

fn refuse(given: &Path, rules: Rules, why: &str) -> Error {
    Error::new(Kind::Path, format!("{} '{}' {why}", rules.field, given.display())).at(given)
}

/// Check the text of a path, and make the path absolute. Its dots stay.
fn absolute(given: &Path, rules: Rules) -> Result<PathBuf> {
    let bytes = given.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH_BYTES {
        let why = format!("has {} bytes: use 1 to {MAX_PATH_BYTES}", bytes.len());
        return Err(refuse(given, rules, &why));
    }
    if bytes.contains(&0) {
        return Err(refuse(given, rules, "contains a null byte"));
    }
    if bytes.starts_with(b"~") {
        let why = "begins with '~', which only a shell replaces by a home directory: give \
                   pathlib.Path(...).expanduser() of it, or './~...' for a directory of that name";
        return Err(refuse(given, rules, why));
    }
    std::path::absolute(given).map_err(|e| Error::io("resolve", given, &e))
}

fn checked(given: &Path, rules: Rules) -> Result<(PathBuf, OwnedFd)> {
    let absolute = absolute(given, rules)?;
    if given.components().any(|component| component == Component::ParentDir) {
        return Err(refuse(given, rules, "contains '..': name the directory itself"));
    }
    // Joining drops single dots and doubled slashes.
    let path: PathBuf = absolute.components().collect();
    if rules.names {
        if let Some(word) = path.components().find_map(sensitive_word) {
            let why = format!(
                "contains the word {word:?}, which names a place for secrets: choose another path, or give Saver {BASIC}"
            );
            return Err(refuse(given, rules, &why));
        }
        if let Some(system) = system_directory(&path) {
            let why = format!("lies in the system directory {system}: choose another path, or give Saver {BASIC}");
            return Err(refuse(given, rules, &why));
        }
    }
    let directory = walk(&path, rules, given)?;
    let stat = rustix::fs::fstat(&directory).map_err(|e| os("inspect", &path, e))?;
    check_owner(&path, rules, &stat)?;
    check_mode(&path, rules, &stat)?;
    let access = Access::EXEC_OK | if rules.writable { Access::WRITE_OK } else { Access::READ_OK };
    rustix::fs::accessat(&directory, ".", access, AtFlags::EACCESS)
        .map_err(|e| os(if rules.writable { "write to" } else { "read" }, &path, e).context(rules.field))?;
    Ok((path, directory))
}

fn denied(path: &Path, why: String) -> Error {
    Error::new(Kind::Permission, why).at(path)
}

fn caller() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn check_owner(path: &Path, rules: Rules, stat: &Stat) -> Result<()> {
    if !rules.own || stat.st_uid == caller() {
        return Ok(());
    }
    let cure = if rules.writable {
        "make a directory of your own and give that".to_owned()
    } else {
        format!("copy it to a directory of your own, or give Saver {BASIC}")
    };
    let why = format!(
        "{} {} belongs to user {} and the caller is user {}: {cure}",
        rules.field,
        path.display(),
        stat.st_uid,
        caller()
    );
    Err(denied(path, why))
}

fn check_mode(path: &Path, rules: Rules, stat: &Stat) -> Result<()> {
    let mode = stat.st_mode & 0o777;
    if mode & !rules.allowed_mode == 0 {
        return Ok(());
    }
    let shown = path.display();
    let allows = format!(
        "{} {shown} has mode {:04o}, which allows more than {:04o}",
        rules.field,
        stat.st_mode & 0o7777,
        rules.allowed_mode
    );
    // Users who share the directory need its mode as it is, so the message proposes another directory.
    let cure = if stat.st_mode & 0o1000 != 0 && others_may_write(stat) {
        format!("users share it: make a directory of your own in it (mkdir -m 750 {shown}/NAME) and give that")
    } else if stat.st_uid != caller() {
        "copy what you need to a directory of your own".to_owned()
    } else if rules.allowed_mode == CHECKPOINT_MODE && mode & !SSD_DIR_MODE == 0 {
        format!("give Saver {BASIC}, or chmod {:o} {shown}", mode & rules.allowed_mode)
    } else {
        format!("chmod {:o} {shown}", mode & rules.allowed_mode)
    };
    Err(denied(path, format!("{allows}: {cure}")))
}

fn sensitive_word(component: Component<'_>) -> Option<&'static str> {
    let Component::Normal(name) = component else { return None };
    let name = name.to_string_lossy();
    name.split(|c: char| !c.is_alphanumeric())
        .find_map(|word| SENSITIVE_WORDS.into_iter().find(|sensitive| word.eq_ignore_ascii_case(sensitive)))
}

fn system_directory(path: &Path) -> Option<&'static str> {
    if path == Path::new("/") {
        return Some("/");
    }
    if path.starts_with(DEVICES) && !path.starts_with(SHARED_MEMORY) {
        return Some(DEVICES);
    }
    SYSTEM_DIRECTORIES.into_iter().find(|system| path.starts_with(system))
}
