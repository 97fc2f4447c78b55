//! Checks of user-specified directories, before anything in them is read or written; and encoding of user names as file
//! names.
//!
//! A check walks the path from the root with one `openat` for each component, which follows no link. So the checked
//! directory is the one that is used: another user could only replace a directory whose parent is writable by others,
//! and such parents are rejected.

use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags, Stat};

use crate::error::{Error, Kind, Result};

mod given;
mod names;
#[cfg(test)]
mod tests;
mod walk;
mod words;

pub use given::{MAX_ABSOLUTE_BYTES, MAX_PATH_CHARS, checked_user_path};
pub use names::encode_name;

use given::absolute;
use walk::{WalkedDir, a_group_may_write, os_error, others_may_write, walk};
use words::sensitive_word;

/// Maximum permission bits of a checkpoint's directory, and its mode when it is created.
pub const CHECKPOINT_MODE: u32 = 0o750;
/// Maximum permission bits of an SSD tier's directory, and of a checkpoint's directory under [`PathChecks::Basic`]:
/// only the owner may write.
pub const SSD_DIR_MODE: u32 = 0o755;
/// The special bits of a mode: set-user-ID, set-group-ID and sticky.
const SPECIAL_BITS: u32 = 0o7000;
/// The permission bits and the special bits of a mode.
const MODE_BITS: u32 = 0o7777;
/// The write bits of the group and of all users.
const OTHERS_WRITE: u32 = 0o022;
/// The sticky bit: in a directory of this mode users may remove only their own files.
const STICKY: u32 = 0o1000;
/// The set-group-ID bit of a directory, which new subdirectories inherit.
const SET_GROUP_ID: u32 = 0o2000;

/// Directories that belong to the system, with everything below them.
const SYSTEM_DIRECTORIES: [&str; 11] =
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/boot", "/proc", "/sys"];
/// `/dev` contains devices, except for its file system in RAM.
const DEVICES: &str = "/dev";
const SHARED_MEMORY: &str = "/dev/shm";
/// Name of the less strict rules in messages.
const BASIC: &str = "path_checks=\"basic\", which refuses only what others can write to";
/// Name of the rules for a volume with other writers in messages.
const TRUSTED: &str =
    "where everybody who can write there is trusted, as in a volume of a pod, give path_checks=\"trusted\"";

/// The rules for a checkpoint's directory.
///
/// All require a path without `..` that [`checked_user_path`] accepts. All reject a symbolic link in any component: a
/// caller that follows links resolves them once, by [`PathChecks::resolve_to_save`], and uses the target afterwards.
/// `Strict` and `Basic` reject a parent that others may write to. For saves, they also reject a directory of another
/// user, and a parent that a group may write to or that belongs neither to the caller nor to root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChecks {
    /// No sensitive word, no system directory, a mode of at most [`CHECKPOINT_MODE`], and nothing opened in the
    /// directory that others may write to or that has special bits. Loads and saves have the same rules.
    Strict,
    /// A mode of at most [`SSD_DIR_MODE`], and nothing opened in the directory that others may write to.
    Basic,
    /// Any owner and any mode, for the directory, its parents and everything that is opened in it. Every user who can
    /// write there is trusted.
    Trusted,
}

/// The rules that differ between uses of a directory.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a separate rule
struct PathRules {
    /// The name of the path in messages.
    field: &'static str,
    /// Reject sensitive words and system directories.
    check_words: bool,
    /// Permission bits and special bits that the directory may have.
    allowed_mode: u32,
    /// The directory must belong to the caller.
    must_own: bool,
    /// Only the caller and root may be able to replace a component of the path. Without this, only directories that any
    /// user may write to are rejected.
    no_other_writers: bool,
    /// Others may write to the directory and to its parents.
    trust_writers: bool,
    /// The caller must be able to write.
    writable: bool,
    /// Create the directory and its parents if missing.
    create: bool,
}

impl PathChecks {
    fn rules(self, writable: bool) -> PathRules {
        let (strict, trusted) = (self == Self::Strict, self == Self::Trusted);
        let own = strict || (writable && !trusted);
        PathRules {
            field: "path",
            check_words: strict,
            allowed_mode: self.allowed_mode(),
            must_own: own,
            no_other_writers: own,
            trust_writers: trusted,
            writable,
            create: writable,
        }
    }

    /// Permission bits and special bits that a directory may have.
    fn allowed_mode(self) -> u32 {
        match self {
            Self::Strict => CHECKPOINT_MODE,
            Self::Basic => SSD_DIR_MODE | SPECIAL_BITS,
            Self::Trusted => MODE_BITS,
        }
    }

    /// Returns the check of an entry below the directory, whose arguments are the entry's path, its stat and its
    /// parent's stat, or `None` if there is no rule. Its error is `Kind::Permission`.
    #[allow(clippy::type_complexity)] // the layer of files has a name for it
    pub fn entry_check(self) -> Option<fn(&Path, &Stat, &Stat) -> Result<()>> {
        match self {
            Self::Strict => Some(check_strict_entry),
            Self::Basic => Some(check_basic_entry),
            Self::Trusted => None,
        }
    }

    /// Checks the directory of a checkpoint to save, and creates it (mode 0750) if it is missing. Returns the absolute
    /// path, and the directory open for reading. Operations relative to this descriptor use the checked directory, even
    /// if the path changes.
    ///
    /// Errors: `Kind::Path` (invalid path, `..`, symbolic link, not a directory; for strict checks: sensitive word,
    /// system directory), `Kind::Permission` (its mode, another owner, not writable, a parent in which others may
    /// replace it).
    pub fn open_to_save(self, path: &Path) -> Result<(PathBuf, OwnedFd)> {
        open(path, self.rules(true))
    }

    /// Checks the directory of a checkpoint to load, like [`PathChecks::open_to_save`]. It must exist, and need not be
    /// writable.
    pub fn open_to_load(self, path: &Path) -> Result<(PathBuf, OwnedFd)> {
        open(path, self.rules(false))
    }

    /// Like [`PathChecks::open_to_save`], but returns only the path.
    pub fn directory_to_save(self, path: &Path) -> Result<PathBuf> {
        check(path, self.rules(true))
    }

    /// Like [`PathChecks::open_to_load`], but returns only the path.
    pub fn directory_to_load(self, path: &Path) -> Result<PathBuf> {
        check(path, self.rules(false))
    }

    /// Resolves `path` to an absolute path. Links and `..` are followed; missing components at the end are kept as
    /// specified. A link that others may redirect is rejected. The directory itself is checked when it is opened.
    pub fn resolve_to_save(self, path: &Path) -> Result<PathBuf> {
        walk::resolve(path, self.rules(true))
    }

    /// Like [`PathChecks::resolve_to_save`], for a path that is only read.
    pub fn resolve_to_load(self, path: &Path) -> Result<PathBuf> {
        walk::resolve(path, self.rules(false))
    }
}

/// [`PathChecks::directory_to_save`] with strict checks.
pub fn directory_to_save(path: &Path) -> Result<PathBuf> {
    PathChecks::Strict.directory_to_save(path)
}

/// [`PathChecks::directory_to_load`] with strict checks.
pub fn directory_to_load(path: &Path) -> Result<PathBuf> {
    PathChecks::Strict.directory_to_load(path)
}

/// [`PathChecks::open_to_save`] with strict checks.
pub fn open_to_save(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    PathChecks::Strict.open_to_save(path)
}

/// [`PathChecks::open_to_load`] with strict checks.
pub fn open_to_load(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    PathChecks::Strict.open_to_load(path)
}

/// The rules for the directory of an SSD tier.
fn ssd_rules(checks: PathChecks) -> PathRules {
    let trusted = checks == PathChecks::Trusted;
    PathRules {
        field: "ssd_dir",
        check_words: false,
        allowed_mode: if trusted { MODE_BITS } else { SSD_DIR_MODE | SPECIAL_BITS },
        must_own: !trusted,
        no_other_writers: !trusted,
        trust_writers: trusted,
        writable: true,
        create: false,
    }
}

/// Checks a user's `ssd_dir`: it must exist, be writable by the caller and, unless `checks` is [`PathChecks::Trusted`],
/// by no other user. Returns the absolute path.
///
/// Errors: `Kind::Path` (invalid path, `..`, symbolic link, missing, not a directory), `Kind::Permission` (group or
/// others may write, another owner, not writable, a parent in which others may replace it).
pub fn directory_for_ssd(path: &Path, checks: PathChecks) -> Result<PathBuf> {
    check(path, ssd_rules(checks))
}

/// Like [`directory_for_ssd`], but also returns the open directory, like [`PathChecks::open_to_save`].
pub fn open_for_ssd(path: &Path, checks: PathChecks) -> Result<(PathBuf, OwnedFd)> {
    open(path, ssd_rules(checks))
}

fn check(user_path: &Path, rules: PathRules) -> Result<PathBuf> {
    checked(user_path, rules).map(|(path, _)| path)
}

/// Checks a directory and opens it for reading. The opened directory is the checked one, even if the path changes
/// concurrently.
fn open(user_path: &Path, rules: PathRules) -> Result<(PathBuf, OwnedFd)> {
    let (path, directory) = checked(user_path, rules)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let readable = rustix::fs::openat(&directory, ".", flags, Mode::empty()).map_err(|e| os_error("open", &path, e))?;
    Ok((path, readable))
}

fn path_error(user_path: &Path, field: &str, why: &str) -> Error {
    Error::new(Kind::Path, format!("{field} '{}' {why}", user_path.display())).at(user_path)
}

fn checked(user_path: &Path, rules: PathRules) -> Result<(PathBuf, OwnedFd)> {
    let absolute = absolute(user_path, rules.field)?;
    if user_path.components().any(|component| component == Component::ParentDir) {
        return Err(path_error(user_path, rules.field, "contains '..': name the directory itself"));
    }
    // Joining removes single dots and doubled slashes.
    let path: PathBuf = absolute.components().collect();
    if rules.check_words {
        if let Some(word) = path.components().find_map(sensitive_word) {
            let why = format!(
                "contains the word {word:?}, which names a place for secrets: choose another path, or give Saver {BASIC}"
            );
            return Err(path_error(user_path, rules.field, &why));
        }
        if let Some(system) = system_directory(&path) {
            let why = format!("lies in the system directory {system}: choose another path, or give Saver {BASIC}");
            return Err(path_error(user_path, rules.field, &why));
        }
    }
    let WalkedDir { directory, inherited } = walk(&path, rules, user_path)?;
    let stat = rustix::fs::fstat(&directory).map_err(|e| os_error("inspect", &path, e))?;
    check_owner(&path, rules, &stat)?;
    check_mode(&path, rules, &stat, inherited)?;
    let access = Access::EXEC_OK | if rules.writable { Access::WRITE_OK } else { Access::READ_OK };
    rustix::fs::accessat(&directory, ".", access, AtFlags::EACCESS)
        .map_err(|e| os_error(if rules.writable { "write to" } else { "read" }, &path, e).context(rules.field))?;
    Ok((path, directory))
}

fn permission_error(path: &Path, why: String) -> Error {
    Error::new(Kind::Permission, why).at(path)
}

fn caller_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn check_owner(path: &Path, rules: PathRules, stat: &Stat) -> Result<()> {
    if !rules.must_own || stat.st_uid == caller_uid() {
        return Ok(());
    }
    let cure = if rules.writable {
        format!("make a directory of your own and give that; or, {TRUSTED}")
    } else {
        format!("copy it to a directory of your own, or give Saver {BASIC}")
    };
    let why = format!(
        "{} {} belongs to user {} and the caller is user {}: {cure}",
        rules.field,
        path.display(),
        stat.st_uid,
        caller_uid()
    );
    Err(permission_error(path, why))
}

/// Checks the mode. `inherited` has the special bits that the OS set because the parent has them.
fn check_mode(path: &Path, rules: PathRules, stat: &Stat, inherited: u32) -> Result<()> {
    let mode = stat.st_mode & MODE_BITS;
    if mode & !(rules.allowed_mode | inherited) == 0 {
        return Ok(());
    }
    let shown = path.display();
    let limit = rules.allowed_mode & !SPECIAL_BITS;
    let allows = format!("{} {shown} has mode {mode:04o}, which allows more than {limit:04o}", rules.field);
    // Users who share the directory depend on its mode, so the message proposes another directory.
    let cure = if mode & STICKY != 0 && others_may_write(stat) {
        format!("users share it: make a directory of your own in it (mkdir -m 750 {shown}/NAME) and give that")
    } else if stat.st_uid != caller_uid() {
        format!("copy what you need to a directory of your own, or, {TRUSTED}")
    } else if rules.allowed_mode == CHECKPOINT_MODE && mode & !(SSD_DIR_MODE | SPECIAL_BITS) == 0 {
        format!("give Saver {BASIC}, or chmod {} {shown}", narrowed(stat, limit))
    } else if mode & OTHERS_WRITE != 0 {
        format!("chmod {} {shown}; or, {TRUSTED}", narrowed(stat, limit))
    } else {
        format!("chmod {} {shown}", narrowed(stat, limit))
    };
    Err(permission_error(path, format!("{allows}: {cure}")))
}

/// The mode to pass to `chmod` so that an entry has only bits of `limit`. GNU's chmod keeps the special bits of a
/// directory if they are not specified.
fn narrowed(stat: &Stat, limit: u32) -> String {
    let mode = stat.st_mode & limit;
    if stat.st_mode & SPECIAL_BITS == 0 { format!("{mode:o}") } else { format!("00{mode:o}") }
}

/// The special bits that an entry has only because its parent, a directory, has them.
fn inherited(parent: &Stat) -> u32 {
    parent.st_mode & SET_GROUP_ID
}

/// See [`PathChecks::entry_check`]. Read permissions are checked only on the directory itself, which blocks access to
/// its entries.
fn check_strict_entry(path: &Path, entry: &Stat, parent: &Stat) -> Result<()> {
    let mode = entry.st_mode & MODE_BITS;
    if mode & !(SSD_DIR_MODE | inherited(parent)) == 0 {
        return Ok(());
    }
    let (shown, cure) = (path.display(), narrowed(entry, CHECKPOINT_MODE));
    Err(permission_error(
        path,
        format!("{shown} has mode {mode:04o}, and others may write to it or it has special bits: chmod {cure} {shown}"),
    ))
}

/// See [`PathChecks::entry_check`].
fn check_basic_entry(path: &Path, entry: &Stat, _parent: &Stat) -> Result<()> {
    if !others_may_write(entry) && !a_group_may_write(entry) {
        return Ok(());
    }
    let (shown, mode) = (path.display(), entry.st_mode & MODE_BITS);
    let cure = narrowed(entry, SSD_DIR_MODE);
    Err(permission_error(
        path,
        format!("{shown} has mode {mode:04o}, and others may write to it: chmod {cure} {shown}, or, {TRUSTED}"),
    ))
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
