//! Which generation of pages a table is in: see [`super::pages`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::faults::major_faults;
use super::files::RowFileSet;

/// A generation lasts at least this long.
const GENERATION: Duration = Duration::from_secs(1);

/// The generation of the pages of one table, in all versions of it.
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

    /// Do `work`, which reads pages that are taken to be near, and begin a generation where some had to be read from the disk.
    pub(super) fn advance_on_faults<T>(&self, files: &RowFileSet, work: impl FnOnce() -> T) -> T {
        let before = major_faults();
        let done = work();
        if major_faults() != before {
            self.begin(files);
        }
        done
    }

    fn begin(&self, files: &RowFileSet) {
        // Somebody else who begins one does so for this thread, too. In a forked process nobody may be left to give the lock up.
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
