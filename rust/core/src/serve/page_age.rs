//! Page generation of a table, and the page faults that end it. See [`super::resident_pages`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::data_files::RowFileSet;

/// Minimum duration of a generation.
const GENERATION: Duration = Duration::from_secs(1);

/// Page generation of one table, shared by all its versions.
#[derive(Debug)]
pub(super) struct PageGeneration {
    generation: AtomicUsize,
    start: Mutex<Instant>,
}

impl PageGeneration {
    pub(super) fn new() -> Self {
        Self { generation: AtomicUsize::new(0), start: Mutex::new(Instant::now()) }
    }

    pub(super) fn generation(&self) -> usize {
        self.generation.load(Ordering::Relaxed)
    }

    /// Runs `work`, which reads pages that are assumed resident, and starts a generation if some had to be read from
    /// disk.
    pub(super) fn advance_on_faults<T>(&self, files: &RowFileSet, work: impl FnOnce() -> T) -> T {
        let before = major_faults();
        let done = work();
        if major_faults() != before {
            self.begin(files);
        }
        done
    }

    fn begin(&self, files: &RowFileSet) {
        // If another thread holds the lock, it starts the generation. In a forked process that thread may not exist, so
        // this does not wait.
        let Ok(mut start) = self.start.try_lock() else { return };
        if start.elapsed() < GENERATION {
            return;
        }
        *start = Instant::now();
        let next = self.generation().wrapping_add(1);
        files.all().iter().for_each(|file| file.pages.begin_generation(next));
        self.generation.store(next, Ordering::Relaxed);
    }
}

/// Major page faults of the calling thread (read from disk) since it was started.
#[allow(unsafe_code)]
pub(super) fn major_faults() -> u64 {
    // SAFETY: `rusage` contains only integers, for which zeros are valid, and the call writes only to this value.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    u64::try_from(usage.ru_majflt).unwrap_or(0)
}
