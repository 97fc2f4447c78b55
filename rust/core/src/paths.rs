//! Checks of user-specified directories, before anything in them is read or written; and encoding of user names as file
//! names.
//!
//! A check walks the path from the root with one `openat` for each component, which follows no link. So the checked
//! directory is the one that is used: another user could only replace a directory whose parent is writable by others,
//! and such parents are rejected.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::{Error, Kind, Result};

/// Maximum permission bits of a checkpoint's directory, and its mode when it is created.
pub const CHECKPOINT_MODE: u32 = 0o750;
/// Maximum permission bits of an SSD tier's directory, and of a checkpoint's directory under [`PathChecks::Basic`]:
/// only the owner may write.
pub const SSD_DIR_MODE: u32 = 0o755;

/// Maximum length of a user's path, in characters.
pub const MAX_PATH_CHARS: usize = 1024;

/// Maximum length of a directory's absolute path, in bytes. The OS accepts 4,095 bytes, and files in the directory have
/// up to 512 more.
pub const MAX_ABSOLUTE_BYTES: usize = 4095 - 512;
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

/// Words that are not allowed in the path of a checkpoint.
const SENSITIVE_WORDS: [&str; 6] = ["key", "password", "passwd", "secret", "credential", "privatekey"];

/// Words that are sensitive together, with any separator.
const SENSITIVE_PAIRS: [(&str, &str); 4] = [("id", "rsa"), ("id", "dsa"), ("id", "ecdsa"), ("id", "ed25519")];

/// Complete names of directories.
const SENSITIVE_NAMES: [&str; 1] = [".ssh"];

/// Words that contain a sensitive one if they are written with an inner capital, as in `MonKey`.
const HARMLESS_WORDS: [&str; 9] =
    ["monkey", "donkey", "turkey", "hockey", "jockey", "keyboard", "keyword", "keypoint", "keyframe"];

/// Longest encoded name, in bytes. It leaves space for a suffix within the 255 bytes of file systems.
const MAX_NAME_BYTES: usize = 100;

/// Maximum number of links in one path: the limit of the kernel.
const MOST_LINKS: u32 = 40;

/// Directories that all users share. No message proposes to change their modes.
const SHARED_DIRS: [&str; 4] = ["/", "/tmp", "/var/tmp", "/dev/shm"];

const STEP_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

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
        resolve(path, self.rules(true))
    }

    /// Like [`PathChecks::resolve_to_save`], for a path that is only read.
    pub fn resolve_to_load(self, path: &Path) -> Result<PathBuf> {
        resolve(path, self.rules(false))
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

/// Checks the text of a user's path, and makes the path absolute. Its dots are kept. `field` is its name in messages.
///
/// Errors: `Kind::Path` if the path is empty or has more than [`MAX_PATH_CHARS`] characters; if the absolute path has
/// more than [`MAX_ABSOLUTE_BYTES`] bytes; if the path contains a null byte, starts with `~`, or has a scheme such as
/// `s3://`; and if it is relative and the current directory does not exist.
pub fn checked_user_path(field: &str, user_path: &Path) -> Result<PathBuf> {
    let chars = user_path.to_string_lossy().chars().count();
    if !(1..=MAX_PATH_CHARS).contains(&chars) {
        return Err(path_error(user_path, field, &format!("has {chars} characters: use 1 to {MAX_PATH_CHARS}")));
    }
    absolute(user_path, field)
}

/// Encodes a user's name (of a module, of a table) as a file name: letters, digits, `_`, `-` and `.` are kept, and
/// other bytes become `%XX`, so that distinct names stay distinct. No result is empty, starts with a dot or is longer
/// than 100 bytes (long ones end in a hash).
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

fn path_error(user_path: &Path, field: &str, why: &str) -> Error {
    Kind::Path.error(format!("{field} '{}' {why}", user_path.display())).at(user_path)
}

fn permission_error(path: &Path, why: String) -> Error {
    Kind::Permission.error(why).at(path)
}

/// Like [`checked_user_path`], but an absolute path may have any length that the OS accepts, because a path derived
/// from a user's path is longer.
fn absolute(user_path: &Path, field: &str) -> Result<PathBuf> {
    let bytes = user_path.as_os_str().as_bytes();
    if bytes.is_empty() {
        return Err(path_error(user_path, field, &format!("has 0 characters: use 1 to {MAX_PATH_CHARS}")));
    }
    if bytes.contains(&0) {
        return Err(path_error(user_path, field, "contains a null byte"));
    }
    if bytes.starts_with(b"~") {
        let why = "begins with '~', which only a shell replaces by a home directory: give \
                   pathlib.Path(...).expanduser() of it, or './~...' for a directory of that name";
        return Err(path_error(user_path, field, why));
    }
    if let Some(scheme) = scheme(user_path) {
        return Err(path_error(user_path, field, &local_only(&scheme)));
    }
    let absolute = std::path::absolute(user_path).map_err(|cause| {
        let why = format!("is relative, and the current directory is gone ({cause}): give an absolute path");
        path_error(user_path, field, &why)
    })?;
    let length = absolute.as_os_str().len();
    if length > MAX_ABSOLUTE_BYTES {
        let why = format!(
            "is an absolute path of {length} bytes, and the system takes {MAX_ABSOLUTE_BYTES}: use a shorter one"
        );
        return Err(path_error(user_path, field, &why));
    }
    Ok(absolute)
}

/// The scheme of a path that is a storage URL, such as `s3` of `s3://bucket/x`. At the start of a relative path one
/// slash is enough, because `pathlib` merges two into one.
fn scheme(user_path: &Path) -> Option<String> {
    let text = user_path.to_string_lossy();
    if let Some((before, _)) = text.split_once("://") {
        return Some(before.rsplit('/').next().unwrap_or(before).to_owned());
    }
    let Some(Component::Normal(first)) = user_path.components().next() else { return None };
    if text.starts_with("./") {
        return None;
    }
    let scheme = first.to_str()?.strip_suffix(':')?;
    let is_name = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+.-".contains(c));
    is_name.then(|| scheme.to_owned())
}

fn local_only(scheme: &str) -> String {
    let cure = if scheme.eq_ignore_ascii_case("file") {
        "give the path that follows it".to_owned()
    } else {
        format!(
            "give a directory of a file system, such as one where the storage is mounted; a directory of that name needs its absolute path, \
             with one slash after '{scheme}:'"
        )
    };
    format!("has the scheme {scheme:?}, and only paths of the local file systems are supported: {cure}")
}

/// Returns the sensitive word in a component of a path: in singular or plural, between characters that are neither
/// letters nor digits, or delimited by a capital, as in `apiKey`. Case is ignored.
fn sensitive_word(component: Component<'_>) -> Option<String> {
    let Component::Normal(name) = component else { return None };
    let name = name.to_string_lossy();
    if SENSITIVE_NAMES.iter().any(|sensitive| name.eq_ignore_ascii_case(sensitive)) {
        return Some(name.into_owned());
    }
    let mut words: Vec<String> = Vec::new();
    for run in name.split(|c: char| !c.is_alphanumeric()).filter(|run| !run.is_empty()) {
        let whole = run.to_lowercase();
        if is_one_of(&whole, &SENSITIVE_WORDS) {
            return Some(whole);
        }
        if is_one_of(&whole, &HARMLESS_WORDS) {
            words.push(whole);
        } else {
            words.extend(humps(run));
        }
    }
    if let Some(word) = words.iter().find(|word| is_one_of(word, &SENSITIVE_WORDS)) {
        return Some(word.clone());
    }
    let pairs = words.windows(2).find(|pair| SENSITIVE_PAIRS.contains(&(pair[0].as_str(), pair[1].as_str())))?;
    Some(pairs.join("_"))
}

/// True if `word` is one of `words`, or the plural of one.
fn is_one_of(word: &str, words: &[&str]) -> bool {
    words.iter().any(|one| word == *one || word.strip_suffix('s') == Some(one))
}

/// The words of a run of letters and digits, in lower case. A capital starts a word after a lower-case letter, and
/// before a lower-case letter.
fn humps(run: &str) -> Vec<String> {
    let letters: Vec<char> = run.chars().collect();
    let mut words = vec![String::new()];
    for (position, letter) in letters.iter().enumerate() {
        let after_small = position > 0 && !letters[position - 1].is_uppercase();
        let before_small = letters.get(position + 1).is_some_and(|next| next.is_lowercase());
        if letter.is_uppercase() && position > 0 && (after_small || before_small) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut() {
            word.extend(letter.to_lowercase());
        }
    }
    words
}

fn os_error(operation: &str, path: &Path, errno: Errno) -> Error {
    Error::io(operation, path, &errno.into())
}

fn file_system_root() -> Result<OwnedFd> {
    rustix::fs::openat(CWD, "/", STEP_FLAGS, Mode::empty()).map_err(|e| os_error("open", Path::new("/"), e))
}

fn stat_of(directory: &OwnedFd, path: &Path) -> Result<Stat> {
    rustix::fs::fstat(directory).map_err(|e| os_error("inspect", path, e))
}

/// A directory that a walk has reached.
struct WalkedDir {
    directory: OwnedFd,
    /// The special bits that it only has because its parent has them.
    inherited: u32,
}

/// Opens `path`, which is absolute and has no dots or links. Messages use `user_path`.
fn walk(path: &Path, rules: PathRules, user_path: &Path) -> Result<WalkedDir> {
    let mut current = PathBuf::from("/");
    let (mut directory, mut from_parent) = (file_system_root()?, 0);
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        let parent = stat_of(&directory, &current)?;
        check_parent(&parent, &current, rules)?;
        from_parent = inherited(&parent);
        current.push(name);
        let found = match rustix::fs::openat(&directory, name, STEP_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) if rules.create => {
                make(&directory, name, &current)?;
                rustix::fs::openat(&directory, name, STEP_FLAGS, Mode::empty())
            }
            Err(Errno::NOENT) => {
                let cure = if rules.writable {
                    format!("make it (mkdir -p -m 750 {})", path.display())
                } else {
                    "check the path".into()
                };
                let why = format!("is missing: there is not a directory {}: {cure}", current.display());
                return Err(path_error(user_path, rules.field, &why));
            }
            found => found,
        };
        directory = found.map_err(|errno| cannot_open(errno, &current, rules, user_path))?;
        match FileType::from_raw_mode(stat_of(&directory, &current)?.st_mode) {
            FileType::Directory => {}
            FileType::Symlink => {
                let or = if rules.check_words { format!(", or give Saver {BASIC}") } else { String::new() };
                let why = format!("passes the symbolic link {}: name its target{or}", current.display());
                return Err(path_error(user_path, rules.field, &why));
            }
            _ => {
                return Err(path_error(
                    user_path,
                    rules.field,
                    &format!("is not a directory: {} is a file: give another path", current.display()),
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

/// See [`PathChecks::resolve_to_save`].
fn resolve(user_path: &Path, rules: PathRules) -> Result<PathBuf> {
    let mut trail = PathTrail { root: file_system_root()?, below: Vec::new() };
    let mut todo = components(&absolute(user_path, rules.field)?);
    let mut links = 0;
    while let Some(name) = todo.pop_front() {
        if name == ".." {
            trail.below.pop();
            continue;
        }
        let current = trail.path().join(&name);
        let next = match rustix::fs::openat(trail.last(), &name, STEP_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => return missing(&current, &todo, rules, user_path),
            found => found.map_err(|errno| cannot_open(errno, &current, rules, user_path))?,
        };
        let stat = stat_of(&next, &current)?;
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
                check_link(&stat, &stat_of(trail.last(), &trail.path())?, &current, rules)?;
                let target =
                    rustix::fs::readlinkat(&next, "", Vec::new()).map_err(|e| os_error("read", &current, e))?;
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
                    &format!("is not a directory: {} is a file: give another path", current.display()),
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

fn others_may_write(stat: &Stat) -> bool {
    stat.st_mode & 0o002 != 0
}

/// True if users other than the owner may write by the group. A group whose number is the caller's user id, and which
/// is the caller's effective group, does not count: it contains only this user.
fn a_group_may_write(stat: &Stat) -> bool {
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
