//! Checks on directories that users name, before anything in them is read or written, and names of files made from users' names.
//!
//! The checks walk the path from the root, one `openat` without following links a component, so that what was checked is what is
//! there: a directory that another user could exchange has a parent that others may write to, and such parents are refused.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, Kind, Result};

/// Longest path that is accepted, in bytes.
pub const MAX_PATH_BYTES: usize = 1024;
/// Permission bits that a checkpoint's directory may have, and is made with.
pub const CHECKPOINT_MODE: u32 = 0o750;
/// Permission bits that the directory of an SSD tier may have: nobody but its owner may write.
pub const SSD_DIR_MODE: u32 = 0o755;

/// Words that no path of a checkpoint may have, compared without case: such places hold secrets.
const SENSITIVE_WORDS: [&str; 3] = ["key", "password", "privatekey"];
/// Directories that belong to the system, themselves and all below.
const SYSTEM_DIRECTORIES: [&str; 11] =
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/boot", "/proc", "/sys"];
/// `/dev` holds devices, but for its file system in RAM.
const DEVICES: &str = "/dev";
const SHARED_MEMORY: &str = "/dev/shm";

/// What is asked of a directory, beyond what always holds: a path of 1 to [`MAX_PATH_BYTES`] bytes without `..`, no symbolic link
/// in any component, no parent that others may write to (unless sticky), a directory that belongs to the caller.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// What messages call the path.
    field: &'static str,
    /// Refuse sensitive words and system directories.
    names: bool,
    /// Permission bits that the directory may have.
    allowed_mode: u32,
    /// The caller must be able to write.
    writable: bool,
    /// Make the directory and its parents when missing.
    create: bool,
}

/// Check the directory that a checkpoint is saved to, making it (mode 0750) when missing. Returns the absolute path.
///
/// Errors: `Kind::Path` (length, `..`, symbolic link, sensitive word, system directory, not a directory), `Kind::Permission` (mode
/// wider than 0750, another owner, not writable, a parent that others may write to).
pub fn directory_to_save(path: &Path) -> Result<PathBuf> {
    check(path, Rules { field: "path", names: true, allowed_mode: CHECKPOINT_MODE, writable: true, create: true })
}

/// Check the directory that a checkpoint is loaded from: as [`directory_to_save`], but it must exist and need not be writable.
pub fn directory_to_load(path: &Path) -> Result<PathBuf> {
    check(path, Rules { field: "path", names: true, allowed_mode: CHECKPOINT_MODE, writable: false, create: false })
}

/// As [`directory_to_save`], with the directory open for reading: whoever works below this descriptor works in what was checked,
/// whatever the path names by then.
pub fn open_to_save(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    open(path, Rules { field: "path", names: true, allowed_mode: CHECKPOINT_MODE, writable: true, create: true })
}

/// As [`directory_to_load`], with the directory open, as in [`open_to_save`].
pub fn open_to_load(path: &Path) -> Result<(PathBuf, OwnedFd)> {
    open(path, Rules { field: "path", names: true, allowed_mode: CHECKPOINT_MODE, writable: false, create: false })
}

/// Check a user's `ssd_dir`: it must exist, be writable by the caller and by nobody else. Returns the absolute path.
///
/// Errors: `Kind::Path` (length, `..`, symbolic link, missing, not a directory), `Kind::Permission` (group or others may write,
/// another owner, not writable, a parent that others may write to).
pub fn directory_for_ssd(path: &Path) -> Result<PathBuf> {
    check(path, Rules { field: "ssd_dir", names: false, allowed_mode: SSD_DIR_MODE, writable: true, create: false })
}

fn check(given: &Path, rules: Rules) -> Result<PathBuf> {
    checked(given, rules).map(|(path, _)| path)
}

/// The directory itself, readable, whatever happened to the path since it was checked.
fn open(given: &Path, rules: Rules) -> Result<(PathBuf, OwnedFd)> {
    let (path, directory) = checked(given, rules)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let readable = rustix::fs::openat(&directory, ".", flags, Mode::empty()).map_err(|e| os("open", &path, e))?;
    Ok((path, readable))
}

fn checked(given: &Path, rules: Rules) -> Result<(PathBuf, OwnedFd)> {
    let refuse = |why: String| Error::new(Kind::Path, format!("{} '{}' {why}", rules.field, given.display())).at(given);
    let bytes = given.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH_BYTES {
        return Err(refuse(format!("has {} bytes: use 1 to {MAX_PATH_BYTES}", bytes.len())));
    }
    if bytes.contains(&0) {
        return Err(refuse("contains a null byte".into()));
    }
    if given.components().any(|component| component == Component::ParentDir) {
        return Err(refuse("contains '..': name the directory itself".into()));
    }
    // Joining drops single dots and doubled slashes.
    let path: PathBuf = std::path::absolute(given).map_err(|e| Error::io("resolve", given, &e))?.components().collect();
    if rules.names {
        if let Some(word) = path.components().find_map(sensitive_word) {
            return Err(refuse(format!(
                "contains the word {word:?}, which names a place for secrets: choose another path"
            )));
        }
        if let Some(system) = system_directory(&path) {
            return Err(refuse(format!("lies in the system directory {system}: choose another path")));
        }
    }
    let directory = walk(&path, rules, &refuse)?;
    let stat = rustix::fs::fstat(&directory).map_err(|e| os("inspect", &path, e))?;
    let mode = stat.st_mode & 0o777;
    if mode & !rules.allowed_mode != 0 {
        let cure = mode & rules.allowed_mode;
        return Err(Error::new(
            Kind::Permission,
            format!(
                "{} {} has mode {mode:04o}, which allows more than {:04o}: chmod {cure:o} {}",
                rules.field,
                path.display(),
                rules.allowed_mode,
                path.display()
            ),
        )
        .at(&path));
    }
    let caller = rustix::process::geteuid().as_raw();
    if stat.st_uid != caller {
        return Err(Error::new(
            Kind::Permission,
            format!(
                "{} {} belongs to user {} and the caller is user {caller}: use a directory of your own",
                rules.field,
                path.display(),
                stat.st_uid
            ),
        )
        .at(&path));
    }
    let access = Access::EXEC_OK | if rules.writable { Access::WRITE_OK } else { Access::READ_OK };
    rustix::fs::accessat(&directory, ".", access, AtFlags::EACCESS)
        .map_err(|e| os(if rules.writable { "write to" } else { "read" }, &path, e).context(rules.field))?;
    Ok((path, directory))
}

/// Open `path` (absolute, without dots) component by component, checking each parent before anything below it is touched.
fn walk(path: &Path, rules: Rules, refuse: &dyn Fn(String) -> Error) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here = PathBuf::from("/");
    let mut directory = rustix::fs::openat(CWD, "/", flags, Mode::empty()).map_err(|e| os("open", &here, e))?;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        check_parent(&directory, &here)?;
        here.push(name);
        let found = match rustix::fs::openat(&directory, name, flags, Mode::empty()) {
            Err(Errno::NOENT) if rules.create => {
                make(&directory, name, &here)?;
                rustix::fs::openat(&directory, name, flags, Mode::empty())
            }
            Err(Errno::NOENT) => {
                return Err(refuse(format!("is missing: there is no directory {}", here.display())));
            }
            found => found,
        };
        directory = found.map_err(|e| match e {
            Errno::NAMETOOLONG => refuse(format!("has a component that no file system takes: {}", shortened(&here))),
            e => os("open", &here, e),
        })?;
        let stat = rustix::fs::fstat(&directory).map_err(|e| os("inspect", &here, e))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => {
                return Err(refuse(format!("passes the symbolic link {}: name its target", here.display())));
            }
            _ => return Err(refuse(format!("is no directory: {} is a file", here.display()))),
        }
    }
    Ok(directory)
}

/// A path for a message about its last component, which may be of any length.
fn shortened(path: &Path) -> String {
    path.display().to_string().chars().take(200).collect()
}

fn check_parent(directory: &OwnedFd, path: &Path) -> Result<()> {
    let mode = rustix::fs::fstat(directory).map_err(|e| os("inspect", path, e))?.st_mode;
    let (others_write, sticky) = (0o002, 0o1000);
    if mode & others_write != 0 && mode & sticky == 0 {
        return Err(Error::new(
            Kind::Permission,
            format!(
                "any user may exchange what lies in {} (mode {:04o}): chmod o-w {}",
                path.display(),
                mode & 0o7777,
                path.display()
            ),
        )
        .at(path));
    }
    Ok(())
}

/// Make `name` in `parent`, durably. Another rank that makes it at the same time is fine.
fn make(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<()> {
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(CHECKPOINT_MODE)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(os("make", path, e)),
    }
    rustix::fs::openat(parent, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(rustix::fs::fsync)
        .map_err(|e| os("sync the parent of", path, e))
}

fn os(what: &str, path: &Path, errno: Errno) -> Error {
    Error::io(what, path, &errno.into())
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

/// Longest encoded name, in bytes: leaves room for a suffix within the 255 that file systems take.
const MAX_NAME_BYTES: usize = 100;

/// A file name for a user's name (of a module, of a table): letters, digits, `_`, `-` and `.` as they are, other bytes as `%XX`, so
/// that distinct names stay distinct; no name is empty, starts with a dot or is longer than 100 bytes (long ones end in a hash).
pub fn encode_name(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len());
    for (position, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-' || (byte == b'.' && position > 0) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}"); // a String takes everything
        }
    }
    if encoded.is_empty() {
        return "%".into();
    }
    if encoded.len() > MAX_NAME_BYTES {
        let hash = format!("%~{:016x}", xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
        encoded.truncate(MAX_NAME_BYTES - hash.len());
        encoded.push_str(&hash);
    }
    encoded
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    /// A directory of mode 0750 below one of mode 0700.
    fn private() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::Builder::new().prefix("embcache").tempdir().expect("a temporary directory");
        let dir = root.path().join("checkpoint");
        std::fs::create_dir(&dir).expect("made");
        chmod(&dir, 0o750);
        (root, dir)
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
    }

    fn kind<T: std::fmt::Debug>(result: Result<T>) -> Kind {
        result.expect_err("refused").kind()
    }

    #[test]
    fn words_are_matched_whole_and_without_case() {
        let (root, _) = private();
        for (name, allowed) in [
            ("api_key", false),
            ("Key", false),
            ("my-KEY.d", false),
            ("PassWord", false),
            ("privatekey", false),
            ("private_key", false),
            ("a key b", false),
            ("keyboard", true),
            ("MonKey", true),
            ("keys", true),
            ("key2", true),
            ("passwords", true),
            ("clé", true),
        ] {
            let result = directory_to_save(&root.path().join(name));
            assert_eq!(result.is_ok(), allowed, "{name}: {result:?}");
            if !allowed {
                assert_eq!(kind(result), Kind::Path);
                assert!(!root.path().join(name).exists(), "{name} was made");
            }
        }
    }

    #[test]
    fn system_directories_are_matched_by_component() {
        for path in
            ["/", "/usr", "/usr/local/x", "/etc/embcache", "/bin", "/lib64/x", "/proc/self", "/dev/x", "//etc/./x"]
        {
            assert!(system_directory(&Path::new(path).components().collect::<PathBuf>()).is_some(), "{path}");
            assert_eq!(kind(directory_to_save(Path::new(path))), Kind::Path, "{path}");
        }
        for path in ["/etcetera", "/usrlocal/x", "/home/usr/etc", "/dev/shm/x", "/library", "/data/bin"] {
            assert_eq!(system_directory(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn length_and_dots_are_checked() {
        assert_eq!(kind(directory_to_save(Path::new(""))), Kind::Path);
        let (root, dir) = private();
        let long = ["x", "y", "z", "w"].iter().fold(dir.clone(), |path, letter| path.join(letter.repeat(200)));
        let pad = MAX_PATH_BYTES - long.as_os_str().len() - 1;
        assert!(directory_to_save(&long.join("u".repeat(pad))).is_ok());
        assert_eq!(kind(directory_to_save(&long.join("u".repeat(pad + 1)))), Kind::Path);
        for dots in ["checkpoint/../checkpoint", "checkpoint/..", "..", "missing/../checkpoint"] {
            assert_eq!(kind(directory_to_save(&root.path().join(dots))), Kind::Path, "{dots}");
        }
        assert_eq!(directory_to_save(&root.path().join("./checkpoint//.")).expect("plain dots do no harm"), dir);
        assert!(directory_to_save(&root.path().join("a..b")).is_ok());
    }

    #[test]
    fn no_component_may_be_a_symbolic_link() {
        let (root, dir) = private();
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).expect("linked");
        std::fs::create_dir(dir.join("below")).expect("made");
        chmod(&dir.join("below"), 0o700);
        for path in [link.clone(), link.join("below"), link.join("new")] {
            for check in [directory_to_save, directory_to_load, directory_for_ssd] {
                assert_eq!(kind(check(&path)), Kind::Path, "{}", path.display());
            }
        }
        assert!(!dir.join("new").exists());
        let dangling = root.path().join("dangling");
        std::os::unix::fs::symlink(root.path().join("nowhere"), &dangling).expect("linked");
        assert_eq!(kind(directory_to_save(&dangling)), Kind::Path);
    }

    #[test]
    fn modes_are_compared_as_bits() {
        let (_root, dir) = private();
        for (mode, allowed) in [
            (0o750, true),
            (0o700, true),
            (0o740, true),
            (0o707, false),
            (0o755, false),
            (0o770, false),
            (0o751, false),
            (0o702, false),
        ] {
            chmod(&dir, mode);
            for check in [directory_to_save, directory_to_load] {
                let result = check(&dir);
                assert_eq!(result.is_ok(), allowed, "{mode:o}: {result:?}");
                if !allowed {
                    let error = result.expect_err("refused");
                    assert_eq!(error.kind(), Kind::Permission);
                    let cure = format!("chmod {:o} {}", mode & 0o750, dir.display());
                    assert!(error.to_string().ends_with(&cure), "{error}");
                }
            }
        }
        for (mode, allowed) in [(0o755, true), (0o700, true), (0o775, false), (0o757, false), (0o777, false)] {
            chmod(&dir, mode);
            assert_eq!(directory_for_ssd(&dir).is_ok(), allowed, "{mode:o}");
        }
    }

    #[test]
    fn parents_are_refused_only_when_others_may_write_and_it_is_not_sticky() {
        let (root, dir) = private();
        for (mode, allowed) in [(0o755, true), (0o775, true), (0o1777, true), (0o777, false), (0o702, false)] {
            chmod(root.path(), mode);
            for check in [directory_to_save, directory_to_load, directory_for_ssd] {
                let result = check(&dir);
                assert_eq!(result.is_ok(), allowed, "{mode:o}: {result:?}");
                if !allowed {
                    assert_eq!(kind(result), Kind::Permission);
                }
            }
        }
        assert_eq!(kind(directory_to_save(&root.path().join("new"))), Kind::Permission);
        assert!(!root.path().join("new").exists());
    }

    #[test]
    fn a_missing_directory_is_made_for_a_save_only() {
        let (root, _) = private();
        let new = root.path().join("a/b");
        assert_eq!(kind(directory_to_load(&new)), Kind::Path);
        assert_eq!(kind(directory_for_ssd(&new)), Kind::Path);
        assert_eq!(directory_to_save(&new).expect("made"), new);
        for made in [&new, &root.path().join("a")] {
            let mode = std::fs::metadata(made).expect("there").mode() & 0o777;
            assert_eq!(mode & !CHECKPOINT_MODE, 0, "{mode:o}");
        }
        let file = root.path().join("file");
        std::fs::write(&file, "").expect("written");
        assert_eq!(kind(directory_to_save(&file)), Kind::Path);
        assert_eq!(kind(directory_to_save(&file.join("below"))), Kind::Path);
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        let (_root, dir) = private();
        if std::os::unix::fs::chown(&dir, Some(12345), None).is_err() {
            return; // only root may give a directory away
        }
        for check in [directory_to_save, directory_to_load, directory_for_ssd] {
            assert_eq!(kind(check(&dir)), Kind::Permission);
        }
    }

    #[test]
    fn encoded_names_are_distinct_and_fit_a_file_name() {
        let names = [
            "",
            ".",
            "..",
            "a",
            "A",
            "a/b",
            "a%2Fb",
            "a.b",
            "a b",
            "ü",
            "x+y",
            &"n".repeat(300),
            &"n".repeat(301),
            "~",
            "%",
        ];
        let encoded: std::collections::BTreeSet<String> = names.iter().map(|name| encode_name(name)).collect();
        assert_eq!(encoded.len(), names.len());
        for name in encoded {
            assert!(!name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.starts_with('.'), "{name}");
            assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.%~".contains(&b)), "{name}");
        }
        assert_eq!(encode_name("t_cat-1.w"), "t_cat-1.w");
    }
}
