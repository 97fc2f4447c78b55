//! Page generation of a table. See [`super::pages`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::faults::major_faults;
use super::files::RowFileSet;

/// Minimum duration of a generation.
const GENERATION: Duration = Duration::from_secs(1);

/// Page generation of one table, shared by all its versions.
#[derive(Debug)]
pub(super) struct PageGeneration {
    generation: AtomicUsize,
    began: Mutex<Instant>,
}

impl PageGeneration {
    pub(super) fn new() -> Self {
        Self { generation: AtomicUsize::new(0), began: Mutex::new(Instant::now()) }
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
        let Ok(mut began) = self.began.try_lock() else { return };
        if began.elapsed() < GENERATION {
            return;
        }
        *began = Instant::now();
        let next = self.generation().wrapping_add(1);
        files.all().iter().for_each(|file| file.pages.begin_generation(next));
        self.generation.store(next, Ordering::Relaxed);
    }
}
