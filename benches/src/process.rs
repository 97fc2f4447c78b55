//! What this process has, as the system sees it.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;

/// Bytes of RAM of a process.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// Resident now.
    pub now: u64,
    /// The most that were resident at once since the process began.
    pub peak: u64,
}

/// This process's resident bytes.
///
/// # Panics
/// Without `/proc`.
pub fn resident() -> Resident {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux with /proc");
    let bytes = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of every process");
        line.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).expect("a number of KiB") << 10
    };
    Resident { now: bytes("VmRSS:"), peak: bytes("VmHWM:") }
}

/// Let [`Resident::peak`] count from now on.
///
/// # Panics
/// Without `/proc`.
pub fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux with /proc");
}

/// User and system seconds of this process so far.
///
/// # Panics
/// Never: `getrusage` of the process itself cannot fail.
pub fn cpu_seconds() -> f64 {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` outlives the call.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) }, 0);
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Let the page cache forget a file that is synced.
pub fn forget_cached(file: &File) {
    // SAFETY: an open descriptor and plain integers; advice that the system may ignore.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// From now on this process dies when the one that started it does.
pub fn die_with_parent() {
    // SAFETY: plain integers; it fails on no Linux, and elsewhere the bench only lives a little longer.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}
