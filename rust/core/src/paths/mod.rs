//! Checks on directories that users name, made before anything in them is read or written; and names of files made from users' names.
//!
//! A check walks the path from the root with one `openat` for each component, which follows no link. So what was checked is what is there:
//! another user could only replace a directory whose parent others may write to, and such parents are refused.

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

/// Permission bits that a checkpoint's directory may have, and is made with.
pub const CHECKPOINT_MODE: u32 = 0o750;
/// Permission bits that the directory of an SSD tier may have, and that of a checkpoint under [`Checks::Basic`]: nobody but its owner
/// may write.
pub const SSD_DIR_MODE: u32 = 0o755;
/// The special bits of a mode: set-user-ID, set-group-ID and sticky.
const SPECIAL_BITS: u32 = 0o7000;
/// The permission bits and the special bits of a mode.
const MODE_BITS: u32 = 0o7777;
/// The permission bits by which a group and all users may write.
const OTHERS_WRITE: u32 = 0o022;
/// The sticky bit: in a directory of this mode users may remove only what is theirs.
const STICKY: u32 = 0o1000;
/// The set-group-ID bit of a directory, which the system gives to directories made in it.
const SET_GROUP_ID: u32 = 0o2000;

/// Directories that belong to the system, with all that lies below them.
const SYSTEM_DIRECTORIES: [&str; 11] =
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/boot", "/proc", "/sys"];
/// `/dev` holds devices, except for its file system in RAM.
const DEVICES: &str = "/dev";
const SHARED_MEMORY: &str = "/dev/shm";
/// How messages call the less strict rules.
const BASIC: &str = "path_checks=\"basic\", which refuses only what others can write to";
/// How messages call the rules for a volume that others may write to.
const TRUSTED: &str =
    "where everybody who can write there is trusted, as in a volume of a pod, give path_checks=\"trusted\"";

/// Which rules a checkpoint's directory must keep.
///
/// All take a path without `..`, whose text [`given_path`] accepts. All refuse a symbolic link in any component: a caller who wants links
/// followed resolves them once, by [`Checks::resolve_to_save`], and uses their target from then on. `Strict` and `Basic` refuse a parent
/// that others may write to. To save, they also refuse a directory of another user, and a parent that a group may write to or that belongs
/// neither to the caller nor to root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChecks {
    /// No sensitive word, no system directory, a mode of at most [`CHECKPOINT_MODE`], and nothing opened in the directory that others may
    /// write to or that has special bits. A load asks the same as a save.
    Strict,
    /// A mode of at most [`SSD_DIR_MODE`], and nothing opened in the directory that others may write to.
    Basic,
    /// Any owner and any mode, of the directory, its parents and all that is opened in it. Everybody who can write there is trusted.
    Trusted,
}

/// The rules that differ between uses of a directory.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a rule of its own
struct PathRules {
    /// What messages call the path.
    field: &'static str,
    /// Refuse sensitive words and system directories.
    check_words: bool,
    /// Permission bits and special bits that the directory may have.
    allowed_mode: u32,
    /// The directory must belong to the caller.
    must_own: bool,
    /// Nobody but the caller and root may be able to replace a component of the path. Without this only directories are refused that any
    /// user may write to.
    no_other_writers: bool,
    /// Others may write to the directory and to its parents.
    trust_writers: bool,
    /// The caller must be able to write.
    writable: bool,
    /// Make the directory and its parents when missing.
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

    /// The rule for an entry below the directory, given its path, what it is, and what its parent is; `None` where there is no rule. Its error
    /// is `Kind::Permission`.
    #[allow(clippy::type_complexity)] // the layer of files has a name for it
    pub fn entry_check(self) -> Option<fn(&Path, &Stat, &Stat) -> Result<()>> {
        match self {
            Self::Strict => Some(check_strict_entry),
            Self::Basic => Some(check_basic_entry),
            Self::Trusted => None,
        }
    }

    /// Check the directory that a checkpoint is saved to, and make it (mode 0750) when it is missing. Returns the absolute path, and the
    /// directory open for reading. Work below this descriptor is work in what was checked, whatever the path names by then.
    ///
    /// Errors: `Kind::Path` (the text of the path, `..`, symbolic link, not a directory; of strict checks: sensitive word, system
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
    PathChecks::Strict.directory_to_save(path)
}

/// [`Checks::directory_to_load`] with strict checks.
pub fn directory_to_load(path: &Path) -> Result<PathBuf> {
    PathChecks::Strict.directory_to_load(path)
}

/// [`Checks::open_to_save`] with strict checks.
pub fn open_to_save(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    PathChecks::Strict.open_to_save(path)
}

/// [`Checks::open_to_load`] with strict checks.
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

/// Check a user's `ssd_dir`: it must exist, be writable by the caller and, unless `checks` is [`Checks::Trusted`], by nobody else. Returns
/// the absolute path.
///
/// Errors: `Kind::Path` (the text of the path, `..`, symbolic link, missing, not a directory), `Kind::Permission` (group or others
/// may write, another owner, not writable, a parent in which others may exchange it).
pub fn directory_for_ssd(path: &Path, checks: PathChecks) -> Result<PathBuf> {
    check(path, ssd_rules(checks))
}

/// Check as [`directory_for_ssd`] does, and return the directory open too, as [`Checks::open_to_save`] does.
pub fn open_for_ssd(path: &Path, checks: PathChecks) -> Result<(PathBuf, OwnedFd)> {
    open(path, ssd_rules(checks))
}

fn check(user_path: &Path, rules: PathRules) -> Result<PathBuf> {
    checked(user_path, rules).map(|(path, _)| path)
}

/// Check a directory and open it for reading. What is opened is what was checked, whatever happened to the path meanwhile.
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
    // Joining drops single dots and doubled slashes.
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

/// `inherited`: the special bits that the system gave to the directory because its parent has them.
fn check_mode(path: &Path, rules: PathRules, stat: &Stat, inherited: u32) -> Result<()> {
    let mode = stat.st_mode & MODE_BITS;
    if mode & !(rules.allowed_mode | inherited) == 0 {
        return Ok(());
    }
    let shown = path.display();
    let limit = rules.allowed_mode & !SPECIAL_BITS;
    let allows = format!("{} {shown} has mode {mode:04o}, which allows more than {limit:04o}", rules.field);
    // Users who share the directory need its mode as it is, so the message proposes another directory.
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

/// The mode that `chmod` is to be given so that an entry has no bits but those of `limit`. GNU's chmod keeps the special bits of a directory
/// where they are not named.
fn narrowed(stat: &Stat, limit: u32) -> String {
    let mode = stat.st_mode & limit;
    if stat.st_mode & SPECIAL_BITS == 0 { format!("{mode:o}") } else { format!("00{mode:o}") }
}

/// The special bits that an entry has only because its parent, a directory, has them.
fn inherited(parent: &Stat) -> u32 {
    parent.st_mode & SET_GROUP_ID
}

/// See [`Checks::entry_check`]. What others may read counts in the directory's own mode, below which they do not get.
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

/// See [`Checks::entry_check`].
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
