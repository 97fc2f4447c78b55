//! How many pages this thread had to wait for.
#![allow(unsafe_code)]

/// Page faults of the calling thread that had to be read from a disk, since it began.
pub(super) fn major_faults() -> u64 {
    // SAFETY: a `rusage` is plain numbers, for which zeros are valid, and the call writes to this one only.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    u64::try_from(usage.ru_majflt).unwrap_or(0)
}
