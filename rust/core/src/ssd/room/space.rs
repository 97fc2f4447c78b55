//! Who holds the bytes of a table's cap, and what its threads tell each other about them.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::ssd::index::RecordLocation;
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait};

/// At most so many files of segments that are gone are kept, to be written again.
const MAX_REUSABLE_FILES: usize = 8;

#[derive(Debug, Default)]
struct SpaceUsage {
    used_bytes: u64,
    /// Bytes of files that could not be removed.
    unremovable_bytes: u64,
    /// Why the first of these files could not be removed.
    removal_error: Option<Error>,
    /// Files of `segment_bytes` that hold nothing. Their bytes count as free: a file is removed before a new one would not fit beside it.
    reusable_files: Vec<PathBuf>,
    /// Segment numbers that nobody has any more.
    free_slots: Vec<u32>,
    /// Segment numbers given out so far are below this.
    slots: u32,
    /// Jobs that the writers were given and have not done.
    pending: usize,
    /// It goes up whenever something has happened that a thread may be waiting for.
    generation: u64,
    /// The first error of a write or a sync. From then on the tier only reads.
    failed: Option<Error>,
}

impl SpaceUsage {
    /// Remember the first error, and say it: while the lock is held, so that it is said before anybody can see that the tier only reads.
    fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            tracing::warn!("an SSD tier only reads from now on, because a write failed: {error}");
            self.failed = Some(error);
        }
    }
}

/// The bytes of a table's cap and who holds them, the numbers of its segments, and whether a write has failed. Its lock is a leaf: who
/// holds it takes no other of the core.
#[derive(Debug)]
pub(crate) struct SpaceTracker {
    cap_bytes: u64,
    segment_bytes: u64,
    inner: Mutex<SpaceUsage>,
    changed: Condvar,
    written_bytes: AtomicU64,
    /// Whether the tier is closed. Then its directory may be another's, and no file in it is touched.
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

    /// Bytes that no file holds.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.cap_bytes.saturating_sub(lock(&self.inner).used_bytes)
    }

    /// Bytes that will be free when the readers of files that are gone are done, where files that stay hold `held_bytes` bytes.
    pub(crate) fn pending_free_bytes(&self, held_bytes: u64) -> u64 {
        let inner = lock(&self.inner);
        inner.used_bytes.saturating_sub(inner.unremovable_bytes + held_bytes)
    }

    /// Remove a file; whether it is gone. The file of a closed tier is left to whoever opens the directory next.
    pub(crate) fn remove(&self, file: impl FnOnce() -> Result<()>) -> bool {
        let closed = lock(&self.closed);
        if *closed {
            return false;
        }
        let removed = file();
        drop(closed);
        let error = removed.err().filter(|error| error.errno() != Some(libc::ENOENT));
        let gone = error.is_none();
        if let Some(error) = error {
            lock(&self.inner).removal_error.get_or_insert(error);
        }
        gone
    }

    /// As [`SpaceTracker::remove`], but a file that holds a whole segment may be kept, to be written again. Removing and making files slows a disk
    /// down that is told of free blocks. No file is kept that is not `is_sole_link`, under this one name, because somebody else may read it.
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

    /// A kept file to write a segment to, if there is one. It is to be renamed.
    pub(crate) fn take_reusable_file(&self) -> Option<PathBuf> {
        lock(&self.inner).reusable_files.pop()
    }

    /// Remove as many kept files as are in the way of `bytes` more, or all of them where `bytes` is `None`; whether nothing is in the way
    /// now. A file that could not be removed goes on holding its bytes.
    pub(crate) fn remove_reusable_files(&self, bytes: Option<u64>, remove: impl Fn(&Path) -> Result<()>) -> bool {
        loop {
            let spare = {
                let mut inner = lock(&self.inner);
                let held = inner.used_bytes + inner.reusable_files.len() as u64 * self.segment_bytes;
                let in_the_way = bytes.is_none_or(|bytes| held + bytes > self.cap_bytes);
                if !in_the_way {
                    return true;
                }
                inner.reusable_files.pop()
            };
            let Some(path) = spare else { return bytes.is_none() };
            if !self.remove(|| remove(&path)) {
                let mut inner = lock(&self.inner);
                inner.used_bytes += self.segment_bytes;
                inner.unremovable_bytes += self.segment_bytes;
            }
        }
    }

    /// Why a file could not be removed, if one could not. Then there is less room than there should be.
    pub(crate) fn removal_error(&self) -> Option<Error> {
        lock(&self.inner).removal_error.clone()
    }

    /// From now on no file is removed.
    pub(crate) fn close(&self) {
        *lock(&self.closed) = true;
    }

    /// Count bytes written to files.
    pub(crate) fn count_written(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        lock(&self.inner).used_bytes
    }

    /// Hold `bytes` for a file; the number of its segment, which no other segment has.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<u32> {
        let mut inner = lock(&self.inner);
        let slot = match inner.free_slots.pop() {
            Some(slot) => slot,
            None if inner.slots < RecordLocation::MAX_SEGMENTS => {
                inner.slots += 1;
                inner.slots - 1
            }
            None => {
                return Err(Error::new(Kind::Capacity, "the SSD tier has as many segments as its index can number"));
            }
        };
        inner.used_bytes += bytes;
        Ok(slot)
    }

    /// A file holds `now` bytes instead of `before`.
    pub(crate) fn resize(&self, before: u64, now: u64) {
        let mut inner = lock(&self.inner);
        inner.used_bytes = inner.used_bytes.saturating_sub(before) + now;
        self.notify_change(inner);
    }

    /// A segment is gone. Where its file is `gone` too its `bytes` are free again; where it could not be removed they are lost.
    pub(crate) fn release(&self, slot: u32, bytes: u64, gone: bool) {
        let mut inner = lock(&self.inner);
        if gone {
            inner.used_bytes = inner.used_bytes.saturating_sub(bytes);
        } else {
            inner.unremovable_bytes += bytes;
        }
        inner.free_slots.push(slot);
        self.notify_change(inner);
    }

    /// The writers were given a job.
    pub(crate) fn begin_job(&self) {
        lock(&self.inner).pending += 1;
    }

    /// The writers have done a job.
    pub(crate) fn end_job(&self, result: Result<()>) {
        let mut inner = lock(&self.inner);
        inner.pending -= 1;
        if let Err(error) = result {
            inner.fail(error);
        }
        self.notify_change(inner);
    }

    /// A write or a sync has failed.
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

    /// A number to hand to [`SpaceTracker::wait_change`]. It is read before what is waited for is looked at, so that no change is missed.
    pub(crate) fn generation(&self) -> u64 {
        lock(&self.inner).generation
    }

    /// Wake those who wait.
    pub(crate) fn notify_waiters(&self) {
        self.notify_change(lock(&self.inner));
    }

    fn notify_change(&self, mut inner: MutexGuard<'_, SpaceUsage>) {
        inner.generation += 1;
        drop(inner);
        self.changed.notify_all();
    }

    /// Wait until something has changed since `generation` was read.
    pub(crate) fn wait_change(&self, generation: u64) {
        let mut inner = lock(&self.inner);
        while inner.generation == generation {
            // The second is there for a holder of a segment that ends without a word, such as a reader that panics.
            let waited = self.changed.wait_timeout(inner, Duration::from_secs(1));
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            inner = guard;
            if timeout.timed_out() {
                return;
            }
        }
    }

    /// Wait until the writers have nothing left to do for this table.
    pub(crate) fn wait_idle(&self) {
        let mut inner = lock(&self.inner);
        while inner.pending > 0 {
            inner = wait(&self.changed, inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reusable_file_that_cannot_be_removed_keeps_its_bytes() {
        let space = SpaceTracker::new(10 << 12, 1 << 12);
        space.reserve(7 << 12).unwrap();
        for name in ["a", "b", "c"] {
            let kept = space.remove_or_reuse(
                Path::new(name),
                1 << 12,
                || true,
                || unreachable!("a file of a whole segment is kept"),
            );
            assert!(kept);
        }
        let mut removed = false;
        let linked = || {
            removed = true;
            Ok(())
        };
        assert!(space.remove_or_reuse(Path::new("linked"), 1 << 12, || false, linked) && removed);
        assert!(space.remove_reusable_files(Some(0), |_| unreachable!("nothing is in the way")));
        assert_eq!(space.free_bytes(), 3 << 12, "kept files count as free");
        let refused = || Error::io("remove", Path::new("c"), &std::io::Error::from_raw_os_error(libc::EPERM));
        assert!(space.remove_reusable_files(Some(1 << 12), |path| if path == Path::new("c") {
            Err(refused())
        } else {
            Ok(())
        }));
        assert_eq!(space.free_bytes(), 2 << 12, "c is still there");
        assert_eq!(space.removal_error().and_then(|error| error.errno()), Some(libc::EPERM));
        assert!(!space.remove_reusable_files(Some(3 << 12), |_| Err(refused())), "nothing makes room for as much");
        assert_eq!(
            (space.free_bytes(), space.pending_free_bytes(7 << 12)),
            (1 << 12, 0),
            "nobody will let go of what is lost"
        );
    }
}
