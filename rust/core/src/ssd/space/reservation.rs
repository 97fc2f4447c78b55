//! Accounts for the bytes of a table's cap, and notifies the table's threads of changes.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::runtime::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait};
use crate::ssd::index::RecordLocation;

/// Maximum number of files of removed segments that are kept for reuse.
const MAX_REUSABLE_FILES: usize = 8;

#[derive(Debug, Default)]
struct SpaceUsage {
    used_bytes: u64,
    /// Bytes of files that could not be removed.
    unremovable_bytes: u64,
    /// Error of the first of these files.
    removal_error: Option<Error>,
    /// Unused files of `segment_bytes`, kept for reuse. Their bytes count as free: a file is removed if otherwise a new
    /// one would not fit.
    reusable_files: Vec<PathBuf>,
    /// Segment numbers that are free again.
    free_slots: Vec<u32>,
    /// All segment numbers in use are below this.
    slots: u32,
    /// Jobs of the writers that are not done.
    pending: usize,
    /// Increased whenever something happens that a thread may wait for.
    generation: u64,
    /// The first error of a write or a sync. It makes the tier read-only.
    failed: Option<Error>,
}

impl SpaceUsage {
    /// Records the first error, and logs it while the lock is held, so that the log precedes any visible effect of the
    /// read-only tier.
    fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            tracing::warn!("an SSD tier only reads from now on, because a write failed: {error}");
            self.failed = Some(error);
        }
    }
}

/// The bytes of a table's cap, the numbers of its segments, and the error of a failed write. Its lock is a leaf: a
/// thread that holds it takes no other lock of the crate.
#[derive(Debug)]
pub(crate) struct SpaceTracker {
    cap_bytes: u64,
    segment_bytes: u64,
    inner: Mutex<SpaceUsage>,
    changed: Condvar,
    written_bytes: AtomicU64,
    /// True if the tier is closed. Then its directory may belong to another tier, and no file in it is touched.
    closed: Mutex<bool>,
}

impl SpaceTracker {
    pub(crate) fn new(cap_bytes: u64, segment_bytes: u64) -> Self {
        Self {
            cap_bytes,
            segment_bytes,
            inner: Mutex::default(),
            changed: Condvar::new(),
            written_bytes: AtomicU64::new(0),
            closed: Mutex::new(false),
        }
    }

    /// Bytes that no file occupies.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.cap_bytes.saturating_sub(lock(&self.inner).used_bytes)
    }

    /// Bytes that become free when readers of removed files are done, if the remaining files occupy `held_bytes` bytes.
    pub(crate) fn pending_free_bytes(&self, held_bytes: u64) -> u64 {
        let inner = lock(&self.inner);
        inner.used_bytes.saturating_sub(inner.unremovable_bytes + held_bytes)
    }

    /// Removes a file. Returns true if it is gone. Keeps the file of a closed tier, for the next open of the directory.
    pub(crate) fn remove(&self, file: impl FnOnce() -> Result<()>) -> bool {
        let closed = lock(&self.closed);
        if *closed {
            return false;
        }
        let removed = file();
        drop(closed);
        let error = removed.err().filter(|error| error.errno() != Some(libc::ENOENT));
        let is_removed = error.is_none();
        if let Some(error) = error {
            lock(&self.inner).removal_error.get_or_insert(error);
        }
        is_removed
    }

    /// Like [`SpaceTracker::remove`], but may keep a file of a full segment for reuse. Removing and creating files
    /// slows down a disk with discard enabled. Keeps no file with other links (`is_sole_link` returns false), because
    /// other processes may read it.
    pub(crate) fn remove_or_reuse(
        &self,
        path: &Path,
        held_bytes: u64,
        is_sole_link: impl FnOnce() -> bool,
        remove: impl FnOnce() -> Result<()>,
    ) -> bool {
        if held_bytes == self.segment_bytes && is_sole_link() {
            let closed = lock(&self.closed);
            let mut inner = lock(&self.inner);
            if !*closed && inner.failed.is_none() && inner.reusable_files.len() < MAX_REUSABLE_FILES {
                inner.reusable_files.push(path.to_owned());
                return true;
            }
        }
        self.remove(remove)
    }

    /// Returns a kept file for a new segment, if there is one. The caller renames it.
    pub(crate) fn take_reusable_file(&self) -> Option<PathBuf> {
        lock(&self.inner).reusable_files.pop()
    }

    /// Removes kept files until `bytes` more fit, or all of them if `bytes` is `None`. Returns true if `bytes` fit. A
    /// file that cannot be removed continues to occupy its bytes.
    pub(crate) fn remove_reusable_files(&self, bytes: Option<u64>, remove: impl Fn(&Path) -> Result<()>) -> bool {
        loop {
            let reusable = {
                let mut inner = lock(&self.inner);
                let held = inner.used_bytes + inner.reusable_files.len() as u64 * self.segment_bytes;
                let in_the_way = bytes.is_none_or(|bytes| held + bytes > self.cap_bytes);
                if !in_the_way {
                    return true;
                }
                inner.reusable_files.pop()
            };
            let Some(path) = reusable else { return bytes.is_none() };
            if !self.remove(|| remove(&path)) {
                let mut inner = lock(&self.inner);
                inner.used_bytes += self.segment_bytes;
                inner.unremovable_bytes += self.segment_bytes;
            }
        }
    }

    /// Error of a file that could not be removed, if any. Then less space is free than expected.
    pub(crate) fn removal_error(&self) -> Option<Error> {
        lock(&self.inner).removal_error.clone()
    }

    /// Disables the removal of files.
    pub(crate) fn close(&self) {
        *lock(&self.closed) = true;
    }

    /// Counts bytes written to files.
    pub(crate) fn count_written(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        lock(&self.inner).used_bytes
    }

    /// Reserves `bytes` for a file. Returns the number of its segment, which no other segment has.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<u32> {
        let mut inner = lock(&self.inner);
        let slot = match inner.free_slots.pop() {
            Some(slot) => slot,
            None if inner.slots < RecordLocation::MAX_SEGMENTS => {
                inner.slots += 1;
                inner.slots - 1
            }
            None => {
                return Err(Kind::Capacity.error("the SSD tier has as many segments as its index can number"));
            }
        };
        inner.used_bytes += bytes;
        Ok(slot)
    }

    /// Changes the bytes that a file occupies from `before` to `now`.
    pub(crate) fn resize(&self, before: u64, now: u64) {
        let mut inner = lock(&self.inner);
        inner.used_bytes = inner.used_bytes.saturating_sub(before) + now;
        self.notify_change(inner);
    }

    /// Releases a segment number. If its file is `gone` too its `bytes` are free again; if it could not be removed they
    /// are lost.
    pub(crate) fn release(&self, slot: u32, bytes: u64, is_removed: bool) {
        let mut inner = lock(&self.inner);
        if is_removed {
            inner.used_bytes = inner.used_bytes.saturating_sub(bytes);
        } else {
            inner.unremovable_bytes += bytes;
        }
        inner.free_slots.push(slot);
        self.notify_change(inner);
    }

    /// Counts a job that is passed to the writers.
    pub(crate) fn begin_job(&self) {
        lock(&self.inner).pending += 1;
    }

    /// Counts a job that the writers have done, with its result.
    pub(crate) fn end_job(&self, result: Result<()>) {
        let mut inner = lock(&self.inner);
        inner.pending -= 1;
        if let Err(error) = result {
            inner.fail(error);
        }
        self.notify_change(inner);
    }

    /// Records a failed write or sync.
    pub(crate) fn fail(&self, error: Error) {
        let mut inner = lock(&self.inner);
        inner.fail(error);
        self.notify_change(inner);
    }

    /// The first error of a write or sync.
    pub(crate) fn failed(&self) -> Option<Error> {
        lock(&self.inner).failed.clone()
    }

    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.inner).failed.is_some()
    }

    /// Returns a number for [`SpaceTracker::wait_change`]. Read it before checking the condition to wait for, so that
    /// no change is missed.
    pub(crate) fn generation(&self) -> u64 {
        lock(&self.inner).generation
    }

    /// Wakes the waiting threads.
    pub(crate) fn notify_waiters(&self) {
        self.notify_change(lock(&self.inner));
    }

    fn notify_change(&self, mut inner: MutexGuard<'_, SpaceUsage>) {
        inner.generation += 1;
        drop(inner);
        self.changed.notify_all();
    }

    /// Waits until something has changed since `generation` was read.
    pub(crate) fn wait_change(&self, generation: u64) {
        let mut inner = lock(&self.inner);
        while inner.generation == generation {
            // The timeout of a second covers a segment that is dropped without a notification, for example by a reader
            // that panics.
            let waited = self.changed.wait_timeout(inner, Duration::from_secs(1));
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            inner = guard;
            if timeout.timed_out() {
                return;
            }
        }
    }

    /// Waits until the writers have finished all jobs of this table.
    pub(crate) fn wait_idle(&self) {
        let mut inner = lock(&self.inner);
        while inner.pending > 0 {
            inner = wait(&self.changed, inner);
        }
    }
}

#[cfg(test)]
mod tests;
