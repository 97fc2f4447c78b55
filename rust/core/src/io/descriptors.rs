//! Room among a process's open files. Segments keep theirs open, and so many that none were left would take the way out as well: rows
//! are saved elsewhere through files too.
#![allow(unsafe_code)]

use std::path::Path;

use rustix::process::{Resource, getrlimit};

use crate::error::{Error, Result};

/// Files that segments leave to everything else. A save of any tables needs some twenty at a time.
const RESERVE: u64 = 64;

/// `Storage` (`EMFILE`) where another file that stays open, in `dir`, would be one of the last that this process may open.
pub(crate) fn check_reserve(dir: &Path) -> Result<()> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    // The system gives out low numbers first: while the middle one is free, half of all are, about.
    if limit > 4 * RESERVE && !is_open(limit / 2) {
        return Ok(());
    }
    let reserve = RESERVE.min(limit / 4);
    let open = match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries.count() as u64,
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => limit,
        // Without /proc nothing is known: the limit itself is met where a file is opened.
        Err(_) => return Ok(()),
    };
    if open + reserve <= limit {
        return Ok(());
    }
    let refused = std::io::Error::from_raw_os_error(libc::EMFILE);
    let kept = format!("the last {reserve} files are kept for saving the tables elsewhere");
    Err(Error::io("keep one more file open in", dir, &refused).context(kept))
}

fn is_open(number: u64) -> bool {
    // SAFETY: of a number that is no open descriptor the call says so (`EBADF`); it changes nothing.
    libc::c_int::try_from(number).is_ok_and(|number| unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0)
}
