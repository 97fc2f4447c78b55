//! The text of a path from the user.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use super::path_error;
use crate::error::Result;

/// Maximum length of a user's path, in characters.
pub const MAX_PATH_CHARS: usize = 1024;
/// Maximum length of a directory's absolute path, in bytes. The OS accepts 4,095 bytes, and files in the directory have
/// up to 512 more.
pub const MAX_ABSOLUTE_BYTES: usize = 4095 - 512;

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

/// Like [`checked_user_path`], but an absolute path may have any length that the OS accepts, because a path derived
/// from a user's path is longer.
pub(super) fn absolute(user_path: &Path, field: &str) -> Result<PathBuf> {
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
