//! Reserves some of the process's file descriptors. Every segment keeps a file open. If segments took the last
//! descriptors, nothing could be saved elsewhere, because that needs files too.
#![allow(unsafe_code)]

use std::path::Path;

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, Result};

/// Descriptors that segments leave free for everything else. A save of any number of tables needs about twenty at a
/// time.
const RESERVED_DESCRIPTORS: u64 = 64;

/// Returns `Kind::Storage` (`EMFILE`) if another file in `dir` that stays open would take a reserved descriptor of this
/// process.
pub(crate) fn check_reserve(dir: &Path) -> Result<()> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // The kernel allocates the lowest free number. While the middle number is free, about half of all are.
    if limit > 4 * RESERVED_DESCRIPTORS && !is_open(limit / 2) {
        return Ok(());
    }
    let reserve = RESERVED_DESCRIPTORS.min(limit / 4);
    let open = match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries.count() as u64,
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => limit,
        // Without /proc the number of open files is unknown. Opening a file then fails at the limit.
        Err(_) => return Ok(()),
    };
    if open + reserve <= limit {
        return Ok(());
    }
    let source = std::io::Error::from_raw_os_error(libc::EMFILE);
    let kept = format!("the last {reserve} files are kept for saving the tables elsewhere");
    Err(Error::io("keep one more file open in", dir, &source).context(kept))
}

fn is_open(number: u64) -> bool {
    // SAFETY: F_GETFD changes nothing, and fails with EBADF for a number that is not an open descriptor.
    libc::c_int::try_from(number).is_ok_and(|number| unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0)
}
