//! The names of a tier's files: `<serial>.seg` of a segment, `<commit id>.state` of a published state, each number in
//! 16 hexadecimal digits.

use std::path::{Path, PathBuf};

const SEGMENT_SUFFIX: &str = "seg";
const STATE_SUFFIX: &str = "state";

/// Returns the path of segment `serial` in `dir`.
pub(crate) fn segment_path(dir: &Path, serial: u64) -> PathBuf {
    dir.join(format!("{serial:016x}.{SEGMENT_SUFFIX}"))
}

/// Returns the serial of a segment's file; `None` for any other file.
pub(crate) fn segment_serial(path: &Path) -> Option<u64> {
    parse_number(path, SEGMENT_SUFFIX)
}

/// Returns the path of the state `commit_id` in `dir`.
pub(crate) fn state_path(dir: &Path, commit_id: u64) -> PathBuf {
    dir.join(format!("{commit_id:016x}.{STATE_SUFFIX}"))
}

/// Returns the commit id of a state's file; `None` for any other file.
pub(crate) fn state_commit_id(path: &Path) -> Option<u64> {
    parse_number(path, STATE_SUFFIX)
}

/// Returns the commit ids of the states in a directory's listing, ascending.
pub(crate) fn commit_ids(listing: &[PathBuf]) -> Vec<u64> {
    let mut tokens: Vec<u64> = listing.iter().filter_map(|path| state_commit_id(path)).collect();
    tokens.sort_unstable();
    tokens
}

/// True if a path is the temporary file of a state that was being published.
pub(crate) fn is_temporary(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_suffix(".tmp").is_some_and(|stem| state_commit_id(Path::new(stem)).is_some())
}

/// Parses the number in a file name of 16 lower-case hexadecimal digits and `suffix`; `None` for any other name.
fn parse_number(path: &Path, suffix: &str) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let number = u64::from_str_radix(name.split_once('.')?.0, 16).ok()?;
    (name == format!("{number:016x}.{suffix}")).then_some(number)
}
