//! Number of pages for which this thread had to wait.
#![allow(unsafe_code)]

/// Major page faults of the calling thread (read from disk) since it was started.
pub(super) fn major_faults() -> u64 {
    // SAFETY: `rusage` contains only integers, for which zeros are valid, and the call writes only to this value.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    u64::try_from(usage.ru_majflt).unwrap_or(0)
}
