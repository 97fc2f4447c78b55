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

pub use format::state::{Named, SegmentSet};
pub use identity::{Identity, StateCounters};
pub use resume::segment_files::SegmentFiles;
pub use root::Root;
pub use tier::moment::KeepRow;
pub use tier::reads::{Fetch, FetchBatch, Places};
pub use tier::takers::GiveWay;
pub use work::bury::{Burial, Buried, Dying, RowRule};
pub use work::copies::Tell;
pub use work::held::{HeldSegments, LinkedBytes};
pub use work::moment::SsdMoment;
pub use work::scan::ScanSink;

use resume::open::{self, Tuning};
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
        identity: &Identity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
    ) -> Result<(Self, Option<StateCounters>)> {
        let (inner, counters) = open::open(config, identity, layout, engine, Tuning::default(), None)?;
        Ok((Self { inner }, counters))
    }

    /// Open the tier with the rows of `source`, in place of whatever is in the directory. Its segments are linked there, or copied.
    pub fn open_from(
        config: &SsdConfig,
        identity: &Identity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
        source: &SegmentFiles,
    ) -> Result<Self> {
        let (inner, _) = open::open(config, identity, layout, engine, Tuning::default(), Some(source))?;
        Ok(Self { inner })
    }

    /// Tokens of the states in a directory, oldest first. They are those of the files' names: whether a state is whole is found when it is
    /// resumed.
    pub fn published(dir: &Path, engine: &dyn IoEngine) -> Result<Vec<u64>> {
        open::published(dir, engine)
    }

    /// Remove the directory of a table shard that nobody uses, and all in it.
    ///
    /// Errors: `State` for a directory that holds anything but a tier's own files, `InUse` (names the pid) where a table has it open,
    /// `Path`, `Permission` and `Storage`. After an error nothing was removed, except where the file system failed half-way.
    pub fn remove_shard(dir: &Path, engine: &dyn IoEngine) -> Result<()> {
        shards::remove(dir, engine)
    }

    /// Rows here.
    pub fn rows(&self) -> u64 {
        self.inner.view().rows()
    }

    /// Rows that the cap can hold, with compaction's headroom subtracted.
    pub fn capacity_rows(&self) -> u64 {
        self.inner.home.geometry.capacity_rows
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
    pub fn fetch(&self, wanted: Vec<(Id, RowMut)>) -> Arc<Fetch> {
        let mut batch = FetchBatch::default();
        let fetch = fetch::fetch_in(&self.inner, wanted, None, &mut batch);
        batch.submit();
        fetch
    }

    /// As [`SsdTier::fetch`], but what is on disk is read when `batch` is submitted, together with what other tiers put into it. Nobody
    /// needs to wait for it: the fetch keeps `places`, in which the rows' memory lies.
    pub fn fetch_in(&self, wanted: Vec<(Id, RowMut)>, places: Places, batch: &mut FetchBatch) -> Arc<Fetch> {
        fetch::fetch_in(&self.inner, wanted, Some(places), batch)
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
    pub fn remove_unwritten(&self, ids: &[Id]) {
        remove::remove_unwritten(&self.inner, ids);
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

    /// As [`SsdTier::evict`], and hand the rows that left to `tell`, whose records are read for that.
    ///
    /// Errors: `Corruption` too, where a record cannot be read. Its row stays, and so do those that were read with it, until the next round.
    pub fn evict_and_tell(&self, rows: u64, keep: &dyn Fn(Id) -> bool, tell: &mut Tell<'_>) -> Result<Vec<Id>> {
        evict::evict(&self.inner, rows, keep, Some(tell))
    }

    /// Remove the rows that die by `dying`, in slices: a call looks at `most` records at most, and goes on where `burial` stopped. It reads
    /// footers of about 16 × `most` entries, each as a whole. It comes to every row, also to those that are appended or moved while the burial
    /// is under way. Rows for which `keep` says true stay, because they are in RAM: their records here are stale, or they are judged there.
    ///
    /// Errors: as [`SsdTier::remove`], and `Corruption` where a row that is to be judged cannot be read. Where an error comes when some rows
    /// are gone, these are returned, and the next call returns the error.
    pub fn bury(
        &self,
        burial: &mut Burial,
        dying: &Dying<'_>,
        keep: &dyn Fn(Id) -> bool,
        most: usize,
    ) -> Result<Buried> {
        bury::bury(&self.inner, burial, dying, keep, most, None)
    }

    /// As [`SsdTier::bury`], and hand the rows that are gone to `tell`, whose records are read for that.
    ///
    /// Errors: `Corruption` too, where the record of a row that dies cannot be read. The row stays.
    pub fn bury_and_tell(
        &self,
        burial: &mut Burial,
        dying: &Dying<'_>,
        keep: &dyn Fn(Id) -> bool,
        most: usize,
        tell: &mut Tell<'_>,
    ) -> Result<Buried> {
        bury::bury(&self.inner, burial, dying, keep, most, Some(tell))
    }

    /// Make everything appended and removed so far durable as one state named `token`, which is larger than every earlier one. The state
    /// before it is kept, and what neither needs is freed.
    pub fn publish(&self, token: u64, counters: StateCounters) -> Result<()> {
        self.publish_with(Some(token), counters, Vec::new())
    }

    /// As [`SsdTier::publish`], with a note of the caller's that a resume of the state finds. It has at most [`SsdTier::most_note_bytes`].
    /// Without a `token` the state has the next even one.
    pub fn publish_with(&self, token: Option<u64>, counters: StateCounters, note: Vec<u8>) -> Result<()> {
        if note.len() > self.most_note_bytes() {
            let message =
                format!("a note has at most {} bytes and this one has {}", self.most_note_bytes(), note.len());
            return Err(Error::new(Kind::Input, message));
        }
        publish::publish(&self.inner, token, counters, note)
    }

    /// The note of the state that was resumed. It is given once, and is empty where there is none.
    pub fn take_note(&self) -> Vec<u8> {
        self.inner.take_note()
    }

    /// The most bytes of a note.
    pub fn most_note_bytes(&self) -> usize {
        self.inner.home.geometry.note_bytes
    }

    /// The most bytes of the record of a row. Files have room for more, which compaction needs.
    pub fn record_bytes(layout: &RowLayout) -> u64 {
        format::record::most_record_bytes(layout) as u64
    }

    /// The most bytes of a note where the cap is `cap_bytes`.
    pub fn note_bytes_of(cap_bytes: u64) -> usize {
        geometry::note_bytes(cap_bytes)
    }

    /// The least cap whose notes may have so many bytes.
    pub fn bytes_for_note(note_bytes: usize) -> u64 {
        geometry::cap_for_note(note_bytes)
    }

    /// Forget the state named `token`, if it is published, as after a flush of several tables that did not finish.
    pub fn forget_published(&self, token: u64) -> Result<()> {
        states::forget_token(&self.inner, token)
    }

    /// Hand every row to `sink` once, in no particular order. Rows that are appended meanwhile may or may not be among them. Rows that
    /// compaction moves meanwhile are.
    pub fn scan(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan(&self.inner, sink)
    }

    /// As [`SsdTier::scan`], for a `sink` that may keep the scan waiting. Where somebody needs the room of files that the scan keeps,
    /// `taker` is asked to end it. It calls [`SsdTier::look_again`] whenever it begins to keep the scan waiting.
    pub fn scan_giving_way(&self, taker: &Arc<dyn GiveWay>, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan_giving_way(&self.inner, taker, sink)
    }

    /// Let those who wait for room look again at what stands in their way.
    pub fn look_again(&self) {
        self.inner.home.space.poke();
    }

    /// As [`SsdTier::scan`], of the rows whose `modified_epoch` is at least `since`. Segments without any are not read.
    pub fn scan_since(&self, since: u32, sink: &mut ScanSink<'_>) -> Result<()> {
        scan::scan_since(&self.inner, since, sink)
    }

    /// Token of the last state that was published or resumed, whether or not it is still there.
    pub fn last_token(&self) -> Option<u64> {
        self.inner.view().states().last_token()
    }

    /// Whether the states that a resume could take were given up for room since the last `publish`.
    pub fn published_given_up(&self) -> bool {
        self.inner.view().states().was_given_up()
    }

    /// Whether a write or a sync failed, so that the tier only reads.
    pub fn is_read_only(&self) -> bool {
        self.inner.home.space.has_failed()
    }

    /// `ReadOnly`, with the first error, after a failed write or sync; `State` when closed or in a forked process.
    pub fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    /// Hold the rows of now that were modified in epoch `since` or later, except those of the `stale` ids, which are here and whose newest
    /// version is in another tier. `keep` takes rows that have to be read before their turn. It may be called from any thread until
    /// [`SsdMoment::for_each_row`] has returned.
    ///
    /// Errors: `State` while another moment is held.
    pub fn moment(&self, stale: &mut dyn Iterator<Item = Id>, since: u32, keep: Box<KeepRow>) -> Result<SsdMoment> {
        moment::begin(&self.inner, stale, since, keep)
    }

    /// Hold the rows of now, appended and removed so far, as durable segments. Published states stay as they are.
    pub fn hold_segments(&self) -> Result<HeldSegments> {
        held::hold(&self.inner)
    }

    /// `Config` unless `rows` in segments of `bytes` fit a tier of this configuration.
    pub fn check_room(&self, config: &SsdConfig, rows: u64, bytes: u64) -> Result<()> {
        self.inner.home.geometry.check_room(config, rows, bytes)
    }

    /// Counters.
    pub fn stats(&self) -> SsdStats {
        let index_bytes = self.index_bytes();
        let (counters, reads) = (&self.inner.counters, self.inner.reads.counters());
        let space = &self.inner.home.space;
        let state = self.inner.view();
        SsdStats {
            tier: TierStats {
                rows: state.rows(),
                bytes: space.used_bytes(),
                capacity_bytes: self.inner.home.geometry.cap_bytes,
                hits: reads.hits.load(Relaxed),
                misses: reads.misses.load(Relaxed),
                evictions: counters.dropped_rows.load(Relaxed),
                read_bytes: reads.read_bytes.load(Relaxed),
                written_bytes: space.written_bytes(),
                time_ns: reads.fetch_ns.load(Relaxed),
            },
            io_engine: self.inner.home.engine.name(),
            reads: reads.reads.load(Relaxed),
            read_latency: reads.latency.distribution(),
            row_bytes_given: counters.row_bytes_given.load(Relaxed),
            compaction_bytes: counters.compaction_bytes.load(Relaxed),
            live_share: live_share(&state),
            segments: state.segments().iter().count() as u64,
            index_bytes,
            dropped_rows: counters.dropped_rows.load(Relaxed),
            published_given_up: state.states().was_given_up(),
            room_waits: counters.room_waits.count(),
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
        if self.inner.home.workers.check_process().is_err() {
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
