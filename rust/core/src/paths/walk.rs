//! Walks over paths, one component at a time from the root. Each parent is checked before anything below it is
//! accessed.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::given::absolute;
use super::{BASIC, CHECKPOINT_MODE, PathRules, STICKY, TRUSTED, caller_uid, inherited, path_error, permission_error};
use crate::error::{Error, Result};

/// Maximum number of links in one path: the limit of the kernel.
const MOST_LINKS: u32 = 40;

/// Directories that all users share. No message proposes to change their modes.
const SHARED_DIRS: [&str; 4] = ["/", "/tmp", "/var/tmp", "/dev/shm"];

const STEP_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) fn os_error(operation: &str, path: &Path, errno: Errno) -> Error {
    Error::io(operation, path, &errno.into())
}

fn file_system_root() -> Result<OwnedFd> {
    rustix::fs::openat(CWD, "/", STEP_FLAGS, Mode::empty()).map_err(|e| os_error("open", Path::new("/"), e))
}

fn stat_of(directory: &OwnedFd, path: &Path) -> Result<Stat> {
    rustix::fs::fstat(directory).map_err(|e| os_error("inspect", path, e))
}

/// A directory that a walk has reached.
pub(super) struct WalkedDir {
    pub(super) directory: OwnedFd,
    /// The special bits that it only has because its parent has them.
    pub(super) inherited: u32,
}

/// Opens `path`, which is absolute and has no dots or links. Messages use `user_path`.
pub(super) fn walk(path: &Path, rules: PathRules, user_path: &Path) -> Result<WalkedDir> {
    let mut here = PathBuf::from("/");
    let (mut directory, mut from_parent) = (file_system_root()?, 0);
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        let parent = stat_of(&directory, &here)?;
        check_parent(&parent, &here, rules)?;
        from_parent = inherited(&parent);
        here.push(name);
        let found = match rustix::fs::openat(&directory, name, STEP_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) if rules.create => {
                make(&directory, name, &here)?;
                rustix::fs::openat(&directory, name, STEP_FLAGS, Mode::empty())
            }
            Err(Errno::NOENT) => {
                let cure = if rules.writable {
                    format!("make it (mkdir -p -m 750 {})", path.display())
                } else {
                    "check the path".into()
                };
                let why = format!("is missing: there is no directory {}: {cure}", here.display());
                return Err(path_error(user_path, rules.field, &why));
            }
            found => found,
        };
        directory = found.map_err(|errno| cannot_open(errno, &here, rules, user_path))?;
        match FileType::from_raw_mode(stat_of(&directory, &here)?.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => {
                let or = if rules.check_words { format!(", or give Saver {BASIC}") } else { String::new() };
                let why = format!("passes the symbolic link {}: name its target{or}", here.display());
                return Err(path_error(user_path, rules.field, &why));
            }
            _ => {
                return Err(path_error(
                    user_path,
                    rules.field,
                    &format!("is no directory: {} is a file: give another path", here.display()),
                ));
            }
        }
    }
    Ok(WalkedDir { directory, inherited: from_parent })
}

fn cannot_open(errno: Errno, reached: &Path, rules: PathRules, user_path: &Path) -> Error {
    if errno != Errno::NAMETOOLONG {
        return os_error("open", reached, errno);
    }
    let shortened: String = reached.display().to_string().chars().take(200).collect();
    path_error(user_path, rules.field, &format!("has a component that no file system takes: {shortened}"))
}

/// The directories from the root to the current position of a walk.
struct PathTrail {
    root: OwnedFd,
    below: Vec<(OsString, OwnedFd)>,
}

impl PathTrail {
    fn last(&self) -> &OwnedFd {
        self.below.last().map_or(&self.root, |(_, directory)| directory)
    }

    fn path(&self) -> PathBuf {
        Path::new("/").join(self.below.iter().map(|(name, _)| name).collect::<PathBuf>())
    }
}

/// See [`super::PathChecks::resolve_to_save`].
pub(super) fn resolve(user_path: &Path, rules: PathRules) -> Result<PathBuf> {
    let mut trail = PathTrail { root: file_system_root()?, below: Vec::new() };
    let mut todo = components(&absolute(user_path, rules.field)?);
    let mut links = 0;
    while let Some(name) = todo.pop_front() {
        if name == ".." {
            trail.below.pop();
            continue;
        }
        let here = trail.path().join(&name);
        let next = match rustix::fs::openat(trail.last(), &name, STEP_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => return missing(&here, &todo, rules, user_path),
            found => found.map_err(|errno| cannot_open(errno, &here, rules, user_path))?,
        };
        let stat = stat_of(&next, &here)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => trail.below.push((name, next)),
            FileType::Symlink => {
                links += 1;
                if links > MOST_LINKS {
                    return Err(path_error(
                        user_path,
                        rules.field,
                        &format!("passes more than {MOST_LINKS} symbolic links"),
                    ));
                }
                check_link(&stat, &stat_of(trail.last(), &trail.path())?, &here, rules)?;
                let target = rustix::fs::readlinkat(&next, "", Vec::new()).map_err(|e| os_error("read", &here, e))?;
                let target = Path::new(OsStr::from_bytes(target.as_bytes()));
                if target.is_absolute() {
                    trail.below.clear();
                }
                let mut first = components(target);
                first.append(&mut todo);
                todo = first;
            }
            _ => {
                return Err(path_error(
                    user_path,
                    rules.field,
                    &format!("is no directory: {} is a file: give another path", here.display()),
                ));
            }
        }
    }
    Ok(trail.path())
}

fn components(path: &Path) -> VecDeque<OsString> {
    let kept = path.components().filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    kept.map(|part| part.as_os_str().to_owned()).collect()
}

/// Returns the complete path if `reached` and everything below it are missing.
fn missing(reached: &Path, below: &VecDeque<OsString>, rules: PathRules, user_path: &Path) -> Result<PathBuf> {
    if below.iter().any(|name| name == "..") {
        let why = format!("goes up by '..' from {}, which is missing", reached.display());
        return Err(path_error(user_path, rules.field, &why));
    }
    Ok(below.iter().fold(reached.to_owned(), |path, name| path.join(name)))
}

/// Rejects a link that another user may redirect: one that belongs neither to the caller, nor to root, nor to the owner
/// of its directory.
fn check_link(link: &Stat, parent: &Stat, reached: &Path, rules: PathRules) -> Result<()> {
    check_parent(parent, reached.parent().unwrap_or(reached), rules)?;
    if rules.trust_writers || [0, caller_uid(), parent.st_uid].contains(&link.st_uid) {
        return Ok(());
    }
    let why = format!(
        "the symbolic link {} belongs to user {}, who may point it elsewhere: name its target",
        reached.display(),
        link.st_uid
    );
    Err(permission_error(reached, why))
}

pub(super) fn others_may_write(stat: &Stat) -> bool {
    stat.st_mode & 0o002 != 0
}

/// True if users other than the owner may write by the group. A group whose number is the caller's user id, and which
/// is the caller's effective group, does not count: it contains only this user.
pub(super) fn a_group_may_write(stat: &Stat) -> bool {
    let group = stat.st_gid;
    let own = group != 0 && group == caller_uid() && group == rustix::process::getegid().as_raw();
    stat.st_mode & 0o020 != 0 && !own
}

/// Rejects a directory in which others may replace a component of a path. In a directory with the sticky bit others may
/// replace only their own entries, and those are rejected as the next component.
fn check_parent(stat: &Stat, path: &Path, rules: PathRules) -> Result<()> {
    if rules.trust_writers {
        return Ok(());
    }
    let sticky = stat.st_mode & STICKY != 0;
    let shown = path.display();
    let (who, take) = if !sticky && others_may_write(stat) {
        ("any user".to_owned(), "o-w")
    } else if rules.no_other_writers && !sticky && a_group_may_write(stat) {
        (format!("group {}", stat.st_gid), "g-w")
    } else if rules.no_other_writers && stat.st_uid != 0 && stat.st_uid != caller_uid() {
        let why = format!(
            "user {} owns {shown} and may exchange what lies in it: use a directory whose parents are all yours or root's; or, \
             {TRUSTED}",
            stat.st_uid
        );
        return Err(permission_error(path, why));
    } else {
        return Ok(());
    };
    let take = if take == "o-w" && a_group_may_write(stat) { "o-w,g-w" } else { take };
    let cure = if stat.st_uid == caller_uid() && !SHARED_DIRS.iter().any(|shared| path == Path::new(shared)) {
        format!("chmod {take} {shown}, or make a directory of your own elsewhere")
    } else {
        "make a directory of your own elsewhere".to_owned()
    };
    let mode = stat.st_mode & 0o7777;
    Err(permission_error(
        path,
        format!("{who} may exchange what lies in {shown} (mode {mode:04o}): {cure}; or, {TRUSTED}"),
    ))
}

/// Creates the directory `name` in `parent`, durably. Another rank may create it at the same time.
fn make(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<()> {
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(CHECKPOINT_MODE)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(os_error("make", path, e)),
    }
    rustix::fs::openat(parent, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(rustix::fs::fsync)
        .map_err(|e| os_error("sync the parent of", path, e))
}
