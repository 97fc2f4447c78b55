//! The cap: how a table's bytes are divided into segments, and who holds how many of them now.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use super::classes::MOST_CLASSES;
use super::format::{Content, MAX_HEADER_BYTES, MOST_ENTRY_BYTES, Schema, TRAILER_BYTES, most_entry_bytes};
use super::index::{Location, TagIndex};
use crate::error::{Error, Kind, Result};
use crate::io::ALIGNMENT;
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait};

const LARGEST_SEGMENT: u64 = 64 << 20;
const SMALLEST_SEGMENT: u64 = 8 << 10;
/// Segments that a cap is divided into, where the segments are neither the largest nor the smallest. Many, because some of them are
/// kept free or are half full; segments below [`WORTHWHILE_SEGMENT`] cost too much each.
const SEGMENTS_A_CAP: u64 = 512;
const FEWEST_SEGMENTS_A_CAP: u64 = 64;
const WORTHWHILE_SEGMENT: u64 = 4 << 20;
/// Classes of rows where segments are few.
const FEW_CLASSES: u8 = 2;
/// Segments kept beside the open ones of rows: that of tombstones, one for compaction to write into and one to be opened.
const SPARE_SEGMENTS: u64 = 3;
/// One part in this many of the cap is kept for records that are dead and not yet compacted, and for tombstones; and no less than the
/// second segment that compaction needs.
const DEAD_SHARE: u64 = 16;
/// Bytes of a state file: those of its fields, and those for each segment it names.
const STATE_BYTES: u64 = 1024;
const STATE_BYTES_A_SEGMENT: u64 = 64;

/// The caller's note in a state file takes at most this part of the cap: 1/2048.
const NOTE_SHARE: u64 = 2048;
/// The caller's note in a state file takes at most 128 MiB, however large the cap is.
const MOST_NOTE_BYTES: u64 = 128 << 20;

/// The most bytes of a note.
pub(super) fn note_bytes(cap_bytes: u64) -> usize {
    (cap_bytes / NOTE_SHARE).min(MOST_NOTE_BYTES) as usize
}

fn spare_segments(classes: u8) -> u64 {
    SPARE_SEGMENTS + u64::from(classes)
}

/// How a table's files are laid out. `segment_bytes` is the most a segment file takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) cap_bytes: u64,
    pub(super) segment_bytes: u64,
    pub(super) header_bytes: usize,
    pub(super) row_bytes: usize,
    /// Rows that a segment has room for at least.
    pub(super) rows_per_segment: u32,
    /// Classes of rows; see `classes`.
    pub(super) classes: u8,
    /// Rows that fit with the headroom left free.
    pub(super) capacity_rows: u64,
    /// The most bytes of the caller's note in a state.
    pub(super) note_bytes: usize,
}

impl Geometry {
    /// Divide `cap_bytes`. `segment_bytes` overrides the usual size (for tests).
    pub(super) fn new(cap_bytes: u64, schema: &Schema, segment_bytes: Option<u64>) -> Result<Self> {
        let row_bytes = schema.record_bytes(Content::Rows);
        let header_bytes = schema.header_bytes();
        debug_assert!(header_bytes <= MAX_HEADER_BYTES);
        let frame = header_bytes + TRAILER_BYTES;
        let one_row = (frame + row_bytes + MOST_ENTRY_BYTES).next_multiple_of(ALIGNMENT) as u64;
        let target = segment_bytes
            .unwrap_or_else(|| {
                let few = (cap_bytes / FEWEST_SEGMENTS_A_CAP).min(WORTHWHILE_SEGMENT);
                (cap_bytes / SEGMENTS_A_CAP).max(few).clamp(SMALLEST_SEGMENT, LARGEST_SEGMENT)
            })
            .max(one_row)
            .next_multiple_of(ALIGNMENT as u64);
        let fit = (target - frame as u64) / (row_bytes + MOST_ENTRY_BYTES) as u64;
        let rows_per_segment = fit.min(u64::from(Location::MAX_RECORDS)) as u32;
        // Where a segment is full of records before it is full of bytes, it is smaller.
        let full = frame as u64 + u64::from(rows_per_segment) * (row_bytes + MOST_ENTRY_BYTES) as u64;
        let segment_bytes = full.next_multiple_of(ALIGNMENT as u64);
        let segments = cap_bytes / segment_bytes;
        let note_bytes = note_bytes(cap_bytes);
        let state = STATE_BYTES + STATE_BYTES_A_SEGMENT * (segments + 64) + note_bytes as u64;
        // Two states and the one being published; the lock file.
        let fixed = 3 * state.next_multiple_of(ALIGNMENT as u64) + ALIGNMENT as u64;
        let classes = if segments < 2 * FEWEST_SEGMENTS_A_CAP { FEW_CLASSES } else { MOST_CLASSES };
        let spare = spare_segments(classes);
        let usable = cap_bytes.saturating_sub(fixed + spare * segment_bytes);
        let usable = u128::from(usable.saturating_sub(segment_bytes.max(usable / DEAD_SHARE)));
        let capacity_rows = (usable * u128::from(rows_per_segment) / u128::from(segment_bytes)) as u64;
        let capacity_rows = capacity_rows.min(TagIndex::MOST_IDS);
        if segments > u64::from(Location::MAX_SEGMENTS) {
            let most = segment_bytes * u64::from(Location::MAX_SEGMENTS);
            return Err(Error::new(
                Kind::Config,
                format!(
                    "ssd_bytes = {cap_bytes} is more than an SSD tier can number: set it to {most} or less, or use more ranks"
                ),
            ));
        }
        if capacity_rows == 0 {
            let rows_bytes = segment_bytes.div_ceil(u64::from(rows_per_segment));
            let least = (fixed + (spare + 1) * segment_bytes + 2 * rows_bytes).next_multiple_of(64 << 10);
            return Err(Error::new(
                Kind::Config,
                format!(
                    "ssd_bytes = {cap_bytes} is too small for one row of {row_bytes} bytes and the room that compaction needs: \
                     set it to {least} or more, or to 0 for no SSD tier"
                ),
            ));
        }
        Ok(Self {
            cap_bytes: cap_bytes - fixed.min(cap_bytes),
            segment_bytes,
            header_bytes,
            row_bytes,
            rows_per_segment,
            classes,
            capacity_rows,
            note_bytes,
        })
    }

    /// Bytes that no row can count on: those of open segments, and those kept free.
    pub(super) fn spare_bytes(&self) -> u64 {
        spare_segments(self.classes) * self.segment_bytes
    }

    /// Rows that a file of `room` bytes takes at least, where none has a larger `write_seq` or epoch than these.
    pub(super) fn rows_in(&self, room: u64, highest_seq: u64, highest_epoch: u32) -> u64 {
        let most = (room / self.row_bytes as u64).min(u64::from(Location::MAX_RECORDS));
        let each = self.row_bytes + most_entry_bytes(most as u32, highest_seq, highest_epoch);
        most.min(room.saturating_sub((self.header_bytes + TRAILER_BYTES) as u64) / each as u64)
    }
}

/// Files of segments that are gone, kept to be written again.
const MOST_SPARES: usize = 8;

#[derive(Debug, Default)]
struct Use {
    used_bytes: u64,
    /// Bytes of files that could not be removed.
    lost_bytes: u64,
    /// Why the first of these files could not be removed.
    lost: Option<Error>,
    /// Files of `segment_bytes` that hold nothing. Their bytes are free: they go before a new file would not fit beside them.
    spares: Vec<PathBuf>,
    free_slots: Vec<u32>,
    slots: u32,
    /// Writes and seals handed to the flusher and not done.
    pending: usize,
    /// Goes up whenever something happened that a waiting thread may wait for.
    generation: u64,
    failed: Option<Error>,
}

impl Use {
    /// Remember the first error.
    fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            tracing::warn!("an SSD tier only reads from now on, because a write failed: {error}");
            self.failed = Some(error);
        }
    }
}

/// Who holds the bytes of a table's cap; the segment numbers; and what its threads tell each other. A leaf in the lock order.
#[derive(Debug)]
pub(super) struct Space {
    cap_bytes: u64,
    segment_bytes: u64,
    inner: Mutex<Use>,
    changed: Condvar,
    written_bytes: AtomicU64,
    /// Whether the tier is closed: its directory may be another's by now, and no file of it is touched.
    closed: Mutex<bool>,
}

impl Space {
    pub(super) fn new(cap_bytes: u64, segment_bytes: u64) -> Self {
        Self {
            cap_bytes,
            segment_bytes,
            inner: Mutex::default(),
            changed: Condvar::new(),
            written_bytes: AtomicU64::new(0),
            closed: Mutex::new(false),
        }
    }

    /// Bytes not held by any file.
    pub(super) fn free_bytes(&self) -> u64 {
        self.cap_bytes.saturating_sub(lock(&self.inner).used_bytes)
    }

    /// Bytes that will be free when those who read files that are gone are done with them, where `held` are those of files that stay.
    pub(super) fn leaving_bytes(&self, held: u64) -> u64 {
        let inner = lock(&self.inner);
        inner.used_bytes.saturating_sub(inner.lost_bytes + held)
    }

    /// Remove a file, whether it is gone. Files that outlive the tier are left to the next open.
    pub(super) fn remove(&self, file: impl FnOnce() -> Result<()>) -> bool {
        let closed = lock(&self.closed);
        if *closed {
            return false;
        }
        let removed = file();
        drop(closed);
        let error = removed.err().filter(|error| error.errno() != Some(libc::ENOENT));
        let gone = error.is_none();
        if let Some(error) = error {
            lock(&self.inner).lost.get_or_insert(error);
        }
        gone
    }

    /// As [`Space::remove`], but a file of a whole segment may be kept, to be written again: removing and making files makes a disk
    /// that is told of free blocks much slower. Nothing may read it any more: none is kept that is not `alone`, under this one name.
    pub(super) fn remove_or_keep(
        &self,
        path: &Path,
        held: u64,
        alone: impl FnOnce() -> bool,
        remove: impl FnOnce() -> Result<()>,
    ) -> bool {
        if held == self.segment_bytes && alone() {
            let closed = lock(&self.closed);
            let mut inner = lock(&self.inner);
            if !*closed && inner.failed.is_none() && inner.spares.len() < MOST_SPARES {
                inner.spares.push(path.to_owned());
                return true;
            }
        }
        self.remove(remove)
    }

    /// A file of a whole segment to write, which it is to be renamed for, if one is kept.
    pub(super) fn take_spare(&self) -> Option<PathBuf> {
        lock(&self.inner).spares.pop()
    }

    /// Remove files that are kept, as many as are in the way of `bytes` more (`None` for all); whether nothing is in their way now. What
    /// could not be removed goes on holding its bytes.
    pub(super) fn remove_spares(&self, bytes: Option<u64>, remove: impl Fn(&Path) -> Result<()>) -> bool {
        loop {
            let spare = {
                let mut inner = lock(&self.inner);
                let held = inner.used_bytes + inner.spares.len() as u64 * self.segment_bytes;
                let in_the_way = bytes.is_none_or(|bytes| held + bytes > self.cap_bytes);
                if !in_the_way {
                    return true;
                }
                inner.spares.pop()
            };
            let Some(path) = spare else { return bytes.is_none() };
            if !self.remove(|| remove(&path)) {
                let mut inner = lock(&self.inner);
                inner.used_bytes += self.segment_bytes;
                inner.lost_bytes += self.segment_bytes;
            }
        }
    }

    /// Why there is less room than there should be, if a file could not be removed.
    pub(super) fn lost(&self) -> Option<Error> {
        lock(&self.inner).lost.clone()
    }

    /// From now on no file is removed.
    pub(super) fn close(&self) {
        *lock(&self.closed) = true;
    }

    /// Count bytes written to files.
    pub(super) fn wrote(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn used_bytes(&self) -> u64 {
        lock(&self.inner).used_bytes
    }

    /// A segment number that no live segment has, for a file of `bytes`.
    pub(super) fn take(&self, bytes: u64) -> Result<u32> {
        let mut inner = lock(&self.inner);
        let slot = match inner.free_slots.pop() {
            Some(slot) => slot,
            None if inner.slots < Location::MAX_SEGMENTS => {
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

    /// A file takes `now` bytes instead of `before`.
    pub(super) fn resize(&self, before: u64, now: u64) {
        let mut inner = lock(&self.inner);
        inner.used_bytes = inner.used_bytes.saturating_sub(before) + now;
        self.change(inner);
    }

    /// A segment is gone, with its file (then its `bytes` are free again) or, when that could not be removed or the tier closes,
    /// without.
    pub(super) fn release(&self, slot: u32, bytes: u64, gone: bool) {
        let mut inner = lock(&self.inner);
        if gone {
            inner.used_bytes = inner.used_bytes.saturating_sub(bytes);
        } else {
            inner.lost_bytes += bytes;
        }
        inner.free_slots.push(slot);
        self.change(inner);
    }

    /// A job was handed to the flusher.
    pub(super) fn begin(&self) {
        lock(&self.inner).pending += 1;
    }

    /// A job of the flusher is done; the first error stays.
    pub(super) fn end(&self, result: Result<()>) {
        let mut inner = lock(&self.inner);
        inner.pending -= 1;
        if let Err(error) = result {
            inner.fail(error);
        }
        self.change(inner);
    }

    /// Remember the first error.
    pub(super) fn fail(&self, error: Error) {
        let mut inner = lock(&self.inner);
        inner.fail(error);
        self.change(inner);
    }

    /// The first error of a write or sync.
    pub(super) fn failed(&self) -> Option<Error> {
        lock(&self.inner).failed.clone()
    }

    pub(super) fn has_failed(&self) -> bool {
        lock(&self.inner).failed.is_some()
    }

    pub(super) fn generation(&self) -> u64 {
        lock(&self.inner).generation
    }

    /// Wake those who wait.
    pub(super) fn poke(&self) {
        self.change(lock(&self.inner));
    }

    fn change(&self, mut inner: MutexGuard<'_, Use>) {
        inner.generation += 1;
        drop(inner);
        self.changed.notify_all();
    }

    /// Wait until something has changed since `generation` was read.
    pub(super) fn wait_change(&self, generation: u64) {
        let mut inner = lock(&self.inner);
        while inner.generation == generation {
            // The limit only guards against a holder of a segment that dies without a word (a panicking reader).
            let waited = self.changed.wait_timeout(inner, Duration::from_secs(1));
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            inner = guard;
            if timeout.timed_out() {
                return;
            }
        }
    }

    /// Wait until the flusher has nothing left to do for this table.
    pub(super) fn wait_idle(&self) {
        let mut inner = lock(&self.inner);
        while inner.pending > 0 {
            inner = wait(&self.changed, inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimizerKind;

    fn geometry(cap: u64, dim: usize) -> Result<Geometry> {
        Geometry::new(cap, &Schema::new(1, "adam", &OptimizerKind::Adam.layout(dim)), None)
    }

    #[test]
    fn the_rows_of_the_capacity_and_the_headroom_fit_the_cap() {
        for dim in [1, 16, 64, 1000, 65_536] {
            for cap in [256 << 10, 1 << 20, 100 << 20, 16 << 30, 1 << 44] {
                let Ok(g) = geometry(cap, dim) else {
                    assert!(cap < 10 * (dim as u64 * 12 + 4096).max(8192) + (128 << 10), "{cap} refused for {dim}");
                    continue;
                };
                assert!(g.segment_bytes % ALIGNMENT as u64 == 0 && g.rows_per_segment >= 1);
                // What is full of live rows when compaction can do no more.
                let full = u128::from(g.cap_bytes - g.spare_bytes() - g.segment_bytes);
                let (rows, bytes) = (u128::from(g.rows_per_segment), u128::from(g.segment_bytes));
                assert!(u128::from(g.capacity_rows) * bytes <= full * rows, "{g:?}");
                assert!(g.rows_per_segment <= Location::MAX_RECORDS);
            }
        }
    }

    #[test]
    fn no_capacity_is_larger_than_what_the_index_takes() {
        let small = Schema::new(1, "sgd", &OptimizerKind::Sgd.layout(1));
        let g = Geometry::new(60 << 40, &small, None).unwrap();
        assert_eq!(g.capacity_rows, TagIndex::MOST_IDS);
        let error = Geometry::new(65 << 40, &small, None).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        let most = error.to_string().split("set it to ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        assert!(Geometry::new(most, &small, None).is_ok());
    }

    #[test]
    fn four_fifths_of_a_large_cap_can_be_live() {
        let schema = Schema::new(1, "rowwise_adagrad", &OptimizerKind::RowWiseAdagrad.layout(64));
        let g = Geometry::new(8 << 30, &schema, None).unwrap();
        assert!(g.capacity_rows * g.row_bytes as u64 > (8 << 30) / 5 * 4, "{g:?}");
    }

    #[test]
    fn a_kept_file_that_cannot_be_removed_goes_on_holding_its_bytes() {
        let space = Space::new(10 << 12, 1 << 12);
        space.take(7 << 12).unwrap();
        for name in ["a", "b", "c"] {
            let kept = space.remove_or_keep(
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
        assert!(space.remove_or_keep(Path::new("linked"), 1 << 12, || false, linked) && removed);
        assert!(space.remove_spares(Some(0), |_| unreachable!("nothing is in the way")));
        assert_eq!(space.free_bytes(), 3 << 12, "kept files count as free");
        let refused = || Error::io("remove", Path::new("c"), &std::io::Error::from_raw_os_error(libc::EPERM));
        assert!(space.remove_spares(Some(1 << 12), |path| if path == Path::new("c") {
            Err(refused())
        } else {
            Ok(())
        }));
        assert_eq!(space.free_bytes(), 2 << 12, "c is still there");
        assert_eq!(space.lost().and_then(|error| error.errno()), Some(libc::EPERM));
        assert!(!space.remove_spares(Some(3 << 12), |_| Err(refused())), "nothing makes room for as much");
        assert_eq!(
            (space.free_bytes(), space.leaving_bytes(7 << 12)),
            (1 << 12, 0),
            "nobody will let go of what is lost"
        );
    }

    #[test]
    fn a_cap_below_one_row_is_refused_with_the_least_that_works() {
        let error = geometry(100, 16).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        let least: u64 =
            error.to_string().split("set it to ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        assert!(geometry(least, 16).is_ok(), "{least}");
    }
}
