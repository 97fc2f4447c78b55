//! The SSD tier of one table: append-only segments of records, a compact index in RAM, background writing and
//! compaction.
//!
//! All methods may be called from any thread; the cache calls 1 to 4 under its table's lock:
//!
//! 1. `maybe_contains` returns the ids that may be here. It has no false negatives; the fetch detects its false
//!    positives.
//! 2. `fetch` reads rows in the background, in one batched submission. Callers wait for the returned [`RowFetch`]
//!    outside any lock.
//! 3. `append` accepts rows that are evicted from RAM, dirty ones only. It copies them into a write buffer and returns.
//!    After it, a fetch finds them in the buffer or on disk. It waits only if all buffers are being written, or if
//!    there is no free space.
//! 4. `remove` removes ids, with a tombstone each.
//! 5. `publish` makes all earlier appends and removals durable as one state with a commit id.
//!
//! After a failed write or sync the tier is read-only: `append`, `remove` and `publish` return `Kind::ReadOnly` with
//! the first cause. All earlier appends can still be fetched, because rows whose write failed stay in their buffers.
//!
//! The layers, bottom up; each folder imports only from those above it in this table:
//!
//! | folder or file | contents |
//! | --- | --- |
//! | `bucket_sort` | the sort of hashes |
//! | `index` | the location of the latest record of an id, without the ids |
//! | `workers`, `directory` | the process's threads; a directory's lock and identity |
//! | `format` | the bytes on disk |
//! | `hotness`, `space` | decisions without locks or files: hotness groups, choice of segments to compact, free space |
//! | `segment` | files of records, open and sealed, and their write buffers |
//! | `store` | the state of one tier and its locks |
//! | `ops` | append, fetch, remove, evict, expire, scan, publish, compact, wait for free space |
//! | `recover` | open a directory, restore a published state, read a linked checkpoint's segments |
//! | `two_phase` | two-phase commit of flushes of several tables |

mod bucket_sort;
mod directory;
mod format;
mod hotness;
pub mod index;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod ops;
mod recover;
mod segment;
mod space;
mod store;
#[cfg(test)]
mod tests;
mod two_phase;
mod workers;

use std::sync::Arc;

use crate::config::SsdConfig;
use crate::error::Result;
use crate::io::IoEngine;
use crate::rows::{RowLayout, RowRef};
use crate::runtime::sync::Ordering::Relaxed;
use crate::stats::{SsdStats, TierStats};
use crate::types::Id;

pub use directory::{ShardIdentity, StateCounters};
pub use format::state_file::{SegmentDescriptor, SegmentSet};
pub use ops::commit::{LinkedBytes, PinnedSegments};
pub use ops::evict::EvictedRowsSink;
pub use ops::expire::{RowExpiryPredicate, SsdExpiredRows, SsdExpiryCursor, SsdExpiryRule};
pub use ops::scan::{ScanSink, SsdSnapshot};
pub use recover::linked_segments::LinkedSegments;
pub use store::reads::{FetchBatch, FetchKeepAlive, RowFetch};
pub use store::scan_state::ScanConsumer;
pub use store::snapshot::EarlyRowSink;
pub use two_phase::CommitDirectory;

use ops::{append, evict, make_space, scan};
use recover::open::{self, SsdTuning};
use segment::open_segment::OpenSegment;
use space::sizing;
use store::TierInner;
use store::state::TierState;

/// The SSD tier of one table shard.
#[derive(Debug)]
pub struct SsdTier {
    inner: Arc<TierInner>,
}

impl SsdTier {
    /// Opens or creates the tier. Returns the counters of the published state if it resumes one.
    ///
    /// Errors: `Config` (the cap is too small), `Path`, `Permission`, `InUse` (names the pid), `Mismatch` (another
    /// identity; names the field), `State` (the directory is not empty and `reopen` is `ReopenMode::Never`; nothing is
    /// published; the commit id is not published), `Corruption`.
    pub fn open(
        config: &SsdConfig,
        identity: &ShardIdentity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
    ) -> Result<(Self, Option<StateCounters>)> {
        let (inner, counters) = open::open(config, identity, layout, engine, SsdTuning::default(), None)?;
        Ok((Self { inner }, counters))
    }

    /// Opens the tier with the rows of `source`, which replace the contents of the directory. Links the segments, or
    /// copies them.
    pub fn open_from(
        config: &SsdConfig,
        identity: &ShardIdentity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
        source: &LinkedSegments,
    ) -> Result<Self> {
        let (inner, _) = open::open(config, identity, layout, engine, SsdTuning::default(), Some(source))?;
        Ok(Self { inner })
    }

    /// Number of rows in this tier.
    pub fn rows(&self) -> u64 {
        self.inner.view().rows()
    }

    /// Number of rows that fit the cap, minus compaction's headroom.
    pub fn capacity_rows(&self) -> u64 {
        self.inner.context.sizing.capacity_rows
    }

    /// Bytes of RAM that grow with the number of rows (index, live counts).
    pub fn index_bytes(&self) -> u64 {
        let state = self.inner.view();
        let entries: usize = state.open().iter().map(OpenSegment::entries_bytes).sum();
        (state.index().bytes() + entries) as u64
    }

    /// Sets `maybe[i]` if `ids[i]` may be in this tier.
    pub fn maybe_contains(&self, ids: &[Id], maybe: &mut [bool]) {
        if self.inner.check_usable().is_err() {
            // A false negative would initialize an existing row again. The fetch of a positive reports the error.
            return maybe.fill(true);
        }
        let mut locations = [None; 256];
        let state = self.inner.view();
        for (ids, maybe) in ids.chunks(locations.len()).zip(maybe.chunks_mut(locations.len())) {
            let locations = &mut locations[..ids.len()];
            state.index().get_batch(ids, locations);
            for (maybe, location) in maybe.iter_mut().zip(locations) {
                *maybe = location.is_some();
            }
        }
    }

    /// Appends rows. `known[i]` states that an older version of row `i` is in this tier, which the caller knows because
    /// it fetched or appended it. If it is false the id must be absent. `Capacity` if the rows do not fit the cap; then
    /// none was appended.
    ///
    /// If a write fails during the call, none of the new rows is in the tier. Some of the others are, in their new
    /// version, and the tier is read-only.
    pub fn append(&self, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        append::append(&self.inner, rows, known)
    }

    /// Like [`SsdTier::remove`], for a read-only tier. Writes nothing.
    pub fn remove_without_tombstones(&self, ids: &[Id]) {
        evict::remove_without_tombstones(&self.inner, ids);
    }

    /// Takes the metadata blob of the resumed state. Empty if there is none, and after the first call.
    pub fn take_metadata(&self) -> Vec<u8> {
        self.inner.take_metadata()
    }

    /// Maximum bytes of a metadata blob.
    pub fn max_metadata_bytes(&self) -> usize {
        self.inner.context.sizing.max_metadata_bytes
    }

    /// Maximum bytes of a row's record. Files have space for more, which compaction needs.
    pub fn record_bytes(layout: &RowLayout) -> u64 {
        format::record::max_record_bytes(layout) as u64
    }

    /// Maximum bytes of a metadata blob for a cap of `cap_bytes`.
    pub fn max_metadata_bytes_of(cap_bytes: u64) -> usize {
        sizing::max_metadata_bytes(cap_bytes)
    }

    /// Smallest cap that allows metadata blobs of `metadata_bytes`.
    pub fn cap_for_metadata(metadata_bytes: usize) -> u64 {
        sizing::cap_for_metadata(metadata_bytes)
    }

    /// Discards the published state named `commit_id`, if any, for example after an incomplete flush of several tables.
    pub fn forget_published(&self, commit_id: u64) -> Result<()> {
        make_space::forget_published(&self.inner, commit_id)
    }

    /// Passes every row to `sink` once, in unspecified order. Rows that are appended concurrently may be missing. Rows
    /// that compaction moves concurrently are not.
    pub fn scan(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan(&self.inner, 0, sink)
    }

    /// Like [`SsdTier::scan`], for a `sink` that may block the scan. If another thread needs the space of files that
    /// the scan pins, `consumer` is asked to cancel it. A consumer calls [`SsdTier::notify_space_waiters`] whenever it
    /// starts to block the scan.
    pub fn scan_cancellable(&self, consumer: &Arc<dyn ScanConsumer>, sink: &mut ScanSink<'_>) -> Result<()> {
        // Unregistered after the scan, which has released its files before.
        let _registered = self.inner.scan_consumers.register(consumer);
        self.scan(sink)
    }

    /// Makes the threads that wait for free space check again.
    pub fn notify_space_waiters(&self) {
        self.inner.context.space.notify_waiters();
    }

    /// Like [`SsdTier::scan`], for the rows whose `modified_epoch` is at least `since`. Does not read segments without
    /// any.
    pub fn scan_since(&self, since: u32, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan(&self.inner, since, sink)
    }

    /// Commit id of the last state that was published or resumed, even if that state was removed since.
    pub fn last_commit_id(&self) -> Option<u64> {
        self.inner.view().states().last_commit_id()
    }

    /// True if all states that a resume could use were discarded for space since the last `publish`.
    pub fn published_given_up(&self) -> bool {
        self.inner.view().states().is_last_dropped()
    }

    /// True if a write or a sync failed, so that the tier is read-only.
    pub fn is_read_only(&self) -> bool {
        self.inner.context.space.has_failed()
    }

    /// Returns `ReadOnly`, with the first error, after a failed write or sync; `State` if closed or in a forked
    /// process.
    pub fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    /// Returns `Config` unless `rows` in segments of `bytes` fit a tier of this configuration.
    pub fn check_space(&self, config: &SsdConfig, rows: u64, bytes: u64) -> Result<()> {
        self.inner.context.sizing.check_space(config, rows, bytes)
    }

    /// Returns the counters.
    pub fn stats(&self) -> SsdStats {
        let index_bytes = self.index_bytes();
        let (counters, reads) = (&self.inner.counters, self.inner.reads.counters());
        let space = &self.inner.context.space;
        let state = self.inner.view();
        SsdStats {
            tier: TierStats {
                rows: state.rows(),
                bytes: space.used_bytes(),
                capacity_bytes: self.inner.context.sizing.cap_bytes,
                hits: reads.hits.load(Relaxed),
                misses: reads.misses.load(Relaxed),
                evictions: counters.dropped_rows.load(Relaxed),
                read_bytes: reads.read_bytes.load(Relaxed),
                written_bytes: space.written_bytes(),
                time_ns: reads.fetch_ns.load(Relaxed),
            },
            io_engine: self.inner.context.engine.name(),
            reads: reads.reads.load(Relaxed),
            read_latency: reads.latency.snapshot(),
            logical_written_bytes: counters.row_bytes_given.load(Relaxed),
            compaction_bytes: counters.compaction_bytes.load(Relaxed),
            live_share: live_share(&state),
            segments: state.segments().iter().count() as u64,
            index_bytes,
            dropped_rows: counters.dropped_rows.load(Relaxed),
            has_lost_flush: state.states().is_last_dropped(),
            space_waits: counters.space_waits.count(),
            read_only: space.has_failed(),
        }
    }
}

impl Drop for SsdTier {
    fn drop(&mut self) {
        if self.inner.context.workers.check_process().is_err() {
            // A forked child must not touch its parent's files, nor wait for its locks.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        // Only published rows are guaranteed to persist. To see errors, call `close`.
        let _ = self.close();
    }
}

/// Ratio of live record bytes to all record bytes in sealed segments.
fn live_share(state: &TierState) -> f64 {
    let (mut live, mut all) = (0, 0);
    for segment in state.segments().iter().filter(|segment| segment.sealed().is_some()) {
        live += u64::from(segment.live()) * segment.record_bytes as u64;
        all += u64::from(segment.records()) * segment.record_bytes as u64;
    }
    if all == 0 { 1.0 } else { live as f64 / all as f64 }
}
