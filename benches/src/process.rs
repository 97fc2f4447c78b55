//! Resource usage of this process, as counted by the OS.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;

/// The resident bytes of a process.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    /// Number of resident bytes.
    pub now: u64,
    /// Maximum number of resident bytes since the process started.
    pub peak: u64,
}

/// The resident bytes of this process.
///
/// # Panics
/// Panics without `/proc`.
pub fn resident() -> Resident {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux with /proc");
    let bytes = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of every process");
        line.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).expect("a number of KiB") << 10
    };
    Resident { now: bytes("VmRSS:"), peak: bytes("VmHWM:") }
}

/// Resets [`Resident::peak`].
///
/// # Panics
/// Panics without `/proc`.
pub fn forget_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux with /proc");
}

/// The user and system time of this process since its start, in seconds.
///
/// # Panics
/// Never, because `getrusage` of the process itself cannot fail.
pub fn cpu_seconds() -> f64 {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid rusage that outlives the call.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) }, 0);
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Removes a synced file from the page cache.
pub fn forget_cached(file: &File) {
    // SAFETY: the descriptor is open, and the advice, which the OS may ignore, touches no memory of this process.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Makes the OS kill this process when its parent exits.
pub fn die_with_parent() {
    // SAFETY: the call takes plain integers. If it fails, the bench only runs a little longer.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}
