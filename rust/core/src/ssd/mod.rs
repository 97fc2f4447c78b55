//! The SSD tier of one table: append-only segments of records, a compact index in RAM, background writing and compaction.
//!
//! All methods may be called from any thread; the cache calls 1 to 4 under its table's lock:
//!
//! 1. `maybe_contains` tells which ids may be here. Its answer may be yes for an id that is not here, which the fetch finds out, and is
//!    never no for one that is.
//! 2. `fetch` reads rows in the background, in one batched submission. The [`Fetch`] that it returns is waited for outside any lock.
//! 3. `append` takes rows that leave RAM, dirty ones only. It copies them into a write buffer and returns. From then on a fetch finds them,
//!    in the buffer or on disk. It waits only where all buffers wait for the disk, or where there is no room.
//! 4. `remove` forgets ids, with a tombstone each.
//! 5. `publish` makes everything appended and removed so far durable as one state, under a token.
//!
//! After a failed write or sync the tier only reads: `append`, `remove` and `publish` return `Kind::ReadOnly` with the first cause.
//! Everything handed over before can still be fetched, because rows whose write failed stay in their buffers.
//!
//! Where to look, from the bytes up; each folder imports from those before it:
//!
//! | folder or file | what it does |
//! | --- | --- |
//! | `index` | says where the newest record of an id is, without the ids |
//! | `format` | the bytes on disk |
//! | `classes`, `room` | decisions without locks or files: which rows lie together, what compaction takes, who gets room |
//! | `workers`, `directory` | the process's threads; how a directory is held |
//! | `segment` | files of records, open and sealed, and their write buffers |
//! | `tier` | the state of one tier and its locks |
//! | `work` | append, fetch, remove, evict, bury, scan, publish, compact, wait for room |
//! | `resume` | open a directory, restore a published state, read a linked checkpoint's segments |
//! | `root` | flushes of several tables |

mod classes;
mod directory;
mod format;
mod identity;
pub mod index;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod resume;
mod room;
mod root;
mod segment;
#[cfg(test)]
mod tests;
mod tier;
mod work;
mod workers;

use std::path::Path;
use std::sync::Arc;

use crate::config::SsdConfig;
use crate::error::{Error, Kind, Result};
use crate::io::IoEngine;
use crate::rows::{RowLayout, RowMut, RowRef};
use crate::stats::{SsdStats, TierStats};
use crate::sync::Ordering::Relaxed;
use crate::types::Id;

pub use format::state::{SegmentDescriptor, SegmentSet};
pub use identity::{ShardIdentity, StateCounters};
pub use resume::segment_files::LinkedSegments;
pub use root::CommitDirectory;
pub use tier::moment::EarlyRowSink;
pub use tier::reads::{FetchBatch, FetchKeepAlive, RowFetch};
pub use tier::takers::ScanConsumer;
pub use work::bury::{RowExpiryPredicate, SsdExpiredRows, SsdExpiryCursor, SsdExpiryRule};
pub use work::copies::EvictedRowsSink;
pub use work::held::{LinkedBytes, PinnedSegments};
pub use work::moment::SsdSnapshot;
pub use work::scan::ScanSink;

use resume::open::{self, SsdTuning};
use resume::shards;
use room::geometry;
use tier::inner::TierInner;
use work::{append, bury, evict, fetch, held, moment, publish, remove, scan, states};

/// The SSD tier of one table shard.
#[derive(Debug)]
pub struct SsdTier {
    inner: Arc<TierInner>,
}

impl SsdTier {
    /// Open or make the tier. Where a published state is resumed, returns that state's counters too.
    ///
    /// Errors: `Config` (the cap is too small), `Path`, `Permission`, `InUse` (names the pid), `Mismatch` (another identity; names the
    /// field), `State` (the directory is not empty and `reopen` is `Reopen::Never`; nothing was published; the token is not among those
    /// published), `Corruption`.
    pub fn open(
        config: &SsdConfig,
        identity: &ShardIdentity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
    ) -> Result<(Self, Option<StateCounters>)> {
        let (inner, counters) = open::open(config, identity, layout, engine, SsdTuning::default(), None)?;
        Ok((Self { inner }, counters))
    }

    /// Open the tier with the rows of `source`, in place of whatever is in the directory. Its segments are linked there, or copied.
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

    /// Tokens of the states in a directory, oldest first. They are those of the files' names: whether a state is whole is found when it is
    /// resumed.
    pub fn published_commit_ids(dir: &Path, engine: &dyn IoEngine) -> Result<Vec<u64>> {
        open::published_commit_ids(dir, engine)
    }

    /// Remove the directory of a table shard that nobody uses, and all in it.
    ///
    /// Errors: `State` for a directory that holds anything but a tier's own files, `InUse` (names the pid) where a table has it open,
    /// `Path`, `Permission` and `Storage`. After an error nothing was removed, except where the file system failed half-way.
    pub fn remove_shard(dir: &Path, engine: &dyn IoEngine) -> Result<()> {
        shards::remove_shard(dir, engine)
    }

    /// Rows here.
    pub fn rows(&self) -> u64 {
        self.inner.view().rows()
    }

    /// Rows that the cap can hold, with compaction's headroom subtracted.
    pub fn capacity_rows(&self) -> u64 {
        self.inner.context.sizing.capacity_rows
    }

    /// Bytes of RAM that grow with the rows here (index, live counts).
    pub fn index_bytes(&self) -> u64 {
        let state = self.inner.view();
        let entries: usize = state.open().iter().map(segment::open::OpenSegment::entries_bytes).sum();
        (state.index().bytes() + entries) as u64
    }

    /// For each id whether it may be here.
    pub fn maybe_contains(&self, ids: &[Id], maybe: &mut [bool]) {
        if self.inner.check_usable().is_err() {
            // After a wrong no a row would be born anew. The fetch of a yes says what is wrong.
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

    /// Start reading rows into the memory given, which must stay valid and untouched until the fetch is done.
    pub fn fetch(&self, requested: Vec<(Id, RowMut)>) -> Arc<RowFetch> {
        let mut batch = FetchBatch::default();
        let fetch = fetch::fetch_in(&self.inner, requested, None, &mut batch);
        batch.submit();
        fetch
    }

    /// As [`SsdTier::fetch`], but what is on disk is read when `batch` is submitted, together with what other tiers put into it. Nobody
    /// needs to wait for it: the fetch keeps `keep_alive`, in which the rows' memory lies.
    pub fn fetch_in(
        &self,
        requested: Vec<(Id, RowMut)>,
        keep_alive: FetchKeepAlive,
        batch: &mut FetchBatch,
    ) -> Arc<RowFetch> {
        fetch::fetch_in(&self.inner, requested, Some(keep_alive), batch)
    }

    /// Take rows over. `known[i]` says that an older version of row `i` is here, which the caller knows because it fetched or appended it.
    /// Where it is false the id must not be here. `Capacity` where the rows do not fit the cap; then none was taken.
    ///
    /// Where a write fails amid it, none of the new rows is here. Some of the others are here in their new version, and the tier only
    /// reads.
    pub fn append(&self, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        append::append(&self.inner, rows, known)
    }

    /// Forget ids that are known to be here, each once. After an error all of them are here as before. Where a write fails when some are
    /// gone, all go, and the next call returns the error.
    pub fn remove(&self, ids: &[Id]) -> Result<()> {
        remove::remove(&self.inner, ids)
    }

    /// As [`SsdTier::remove`], from a tier that only reads. Nothing is written.
    pub fn remove_without_tombstones(&self, ids: &[Id]) {
        remove::remove_without_tombstones(&self.inner, ids);
    }

    /// Forget all rows, as when a load replaces the contents.
    pub fn clear(&self) -> Result<()> {
        remove::clear(&self.inner)
    }

    /// Drop `rows` rows, or as many as can go, and return their ids. The oldest segments come first, and the call goes on where the last
    /// one stopped. Rows for which `keep` says true stay.
    pub fn evict(&self, rows: u64, keep: &dyn Fn(Id) -> bool) -> Result<Vec<Id>> {
        evict::evict(&self.inner, rows, keep, None)
    }

    /// As [`SsdTier::evict`], and hand the rows that left to `on_evicted`, whose records are read for that.
    ///
    /// Errors: `Corruption` too, where a record cannot be read. Its row stays, and so do those that were read with it, until the next round.
    pub fn evict_and_notify(
        &self,
        rows: u64,
        keep: &dyn Fn(Id) -> bool,
        on_evicted: &mut EvictedRowsSink<'_>,
    ) -> Result<Vec<Id>> {
        evict::evict(&self.inner, rows, keep, Some(on_evicted))
    }

    /// Remove the rows that die by `rule`, in slices: a call looks at `max_records` records at most, and goes on where `cursor` stopped. It reads
    /// footers of about 16 × `max_records` entries, each as a whole. It comes to every row, also to those that are appended or moved while the burial
    /// is under way. Rows for which `keep` says true stay, because they are in RAM: their records here are stale, or they are judged there.
    ///
    /// Errors: as [`SsdTier::remove`], and `Corruption` where a row that is to be judged cannot be read. Where an error comes when some rows
    /// are gone, these are returned, and the next call returns the error.
    pub fn expire(
        &self,
        cursor: &mut SsdExpiryCursor,
        rule: &SsdExpiryRule<'_>,
        keep: &dyn Fn(Id) -> bool,
        max_records: usize,
    ) -> Result<SsdExpiredRows> {
        bury::expire(&self.inner, cursor, rule, keep, max_records, None)
    }

    /// As [`SsdTier::bury`], and hand the rows that are gone to `on_evicted`, whose records are read for that.
    ///
    /// Errors: `Corruption` too, where the record of a row that dies cannot be read. The row stays.
    pub fn expire_and_notify(
        &self,
        cursor: &mut SsdExpiryCursor,
        rule: &SsdExpiryRule<'_>,
        keep: &dyn Fn(Id) -> bool,
        max_records: usize,
        on_evicted: &mut EvictedRowsSink<'_>,
    ) -> Result<SsdExpiredRows> {
        bury::expire(&self.inner, cursor, rule, keep, max_records, Some(on_evicted))
    }

    /// Make everything appended and removed so far durable as one state named `commit_id`, which is larger than every earlier one. The state
    /// before it is kept, and what neither needs is freed.
    pub fn publish(&self, commit_id: u64, counters: StateCounters) -> Result<()> {
        self.publish_with_metadata(Some(commit_id), counters, Vec::new())
    }

    /// As [`SsdTier::publish`], with a note of the caller's that a resume of the state finds. It has at most [`SsdTier::max_metadata_bytes`].
    /// Without a `commit_id` the state has the next even one.
    pub fn publish_with_metadata(
        &self,
        commit_id: Option<u64>,
        counters: StateCounters,
        metadata: Vec<u8>,
    ) -> Result<()> {
        if metadata.len() > self.max_metadata_bytes() {
            let message =
                format!("a note has at most {} bytes and this one has {}", self.max_metadata_bytes(), metadata.len());
            return Err(Error::new(Kind::Input, message));
        }
        publish::publish(&self.inner, commit_id, counters, metadata)
    }

    /// The note of the state that was resumed. It is given once, and is empty where there is none.
    pub fn take_metadata(&self) -> Vec<u8> {
        self.inner.take_metadata()
    }

    /// The most bytes of a note.
    pub fn max_metadata_bytes(&self) -> usize {
        self.inner.context.sizing.max_metadata_bytes
    }

    /// The most bytes of the record of a row. Files have room for more, which compaction needs.
    pub fn record_bytes(layout: &RowLayout) -> u64 {
        format::record::max_record_bytes(layout) as u64
    }

    /// The most bytes of a note where the cap is `cap_bytes`.
    pub fn max_metadata_bytes_of(cap_bytes: u64) -> usize {
        geometry::max_metadata_bytes(cap_bytes)
    }

    /// The least cap whose notes may have so many bytes.
    pub fn cap_for_metadata(metadata_bytes: usize) -> u64 {
        geometry::cap_for_metadata(metadata_bytes)
    }

    /// Forget the state named `commit_id`, if it is published, as after a flush of several tables that did not finish.
    pub fn forget_published(&self, commit_id: u64) -> Result<()> {
        states::forget_published(&self.inner, commit_id)
    }

    /// Hand every row to `sink` once, in no particular order. Rows that are appended meanwhile may or may not be among them. Rows that
    /// compaction moves meanwhile are.
    pub fn scan(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan(&self.inner, sink)
    }

    /// As [`SsdTier::scan`], for a `sink` that may keep the scan waiting. Where somebody needs the room of files that the scan keeps,
    /// `consumer` is asked to end it. It calls [`SsdTier::notify_space_waiters`] whenever it begins to keep the scan waiting.
    pub fn scan_cancellable(&self, consumer: &Arc<dyn ScanConsumer>, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan_cancellable(&self.inner, consumer, sink)
    }

    /// Let those who wait for room look again at what stands in their way.
    pub fn notify_space_waiters(&self) {
        self.inner.context.space.notify_waiters();
    }

    /// As [`SsdTier::scan`], of the rows whose `modified_epoch` is at least `since`. Segments without any are not read.
    pub fn scan_since(&self, since: u32, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan_since(&self.inner, since, sink)
    }

    /// Token of the last state that was published or resumed, whether or not it is still there.
    pub fn last_commit_id(&self) -> Option<u64> {
        self.inner.view().states().last_commit_id()
    }

    /// Whether the states that a resume could take were given up for room since the last `publish`.
    pub fn published_given_up(&self) -> bool {
        self.inner.view().states().is_last_dropped()
    }

    /// Whether a write or a sync failed, so that the tier only reads.
    pub fn is_read_only(&self) -> bool {
        self.inner.context.space.has_failed()
    }

    /// `ReadOnly`, with the first error, after a failed write or sync; `State` when closed or in a forked process.
    pub fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    /// Hold the rows of now that were modified in epoch `since` or later, except those of the `stale` ids, which are here and whose newest
    /// version is in another tier. `early_rows` takes rows that have to be read before their turn. It may be called from any thread until
    /// [`SsdSnapshot::for_each_row`] has returned.
    ///
    /// Errors: `State` while another moment is held.
    pub fn snapshot(
        &self,
        stale: &mut dyn Iterator<Item = Id>,
        since: u32,
        early_rows: Box<EarlyRowSink>,
    ) -> Result<SsdSnapshot> {
        moment::begin_snapshot(&self.inner, stale, since, early_rows)
    }

    /// Hold the rows of now, appended and removed so far, as durable segments. Published states stay as they are.
    pub fn pin_segments(&self) -> Result<PinnedSegments> {
        held::pin_segments(&self.inner)
    }

    /// `Config` unless `rows` in segments of `bytes` fit a tier of this configuration.
    pub fn check_space(&self, config: &SsdConfig, rows: u64, bytes: u64) -> Result<()> {
        self.inner.context.sizing.check_space(config, rows, bytes)
    }

    /// Counters.
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

    /// Stop the background work and write out the buffers, without publishing. Dropping the tier does that too.
    pub fn close(&self) -> Result<()> {
        publish::close(&self.inner)
    }
}

impl Drop for SsdTier {
    fn drop(&mut self) {
        if self.inner.context.workers.check_process().is_err() {
            // In a forked child its parent's files are not to be touched, nor its locks to be waited for.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        // Nothing is promised that was not published. Who wants to know what goes wrong here calls `close`.
        let _ = publish::close(&self.inner);
    }
}

/// Bytes of live records in sealed segments, for each byte of their records.
fn live_share(state: &tier::state::TierState) -> f64 {
    let (mut live, mut all) = (0, 0);
    for segment in state.segments().iter().filter(|segment| segment.sealed().is_some()) {
        live += u64::from(segment.live()) * segment.record_bytes as u64;
        all += u64::from(segment.records()) * segment.record_bytes as u64;
    }
    if all == 0 { 1.0 } else { live as f64 / all as f64 }
}
