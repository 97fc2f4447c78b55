//! The SSD tier of one table: append-only segments of records, a compact index in RAM, background writing and compaction.
//!
//! Who calls what (all methods may be called from any thread; the cache calls 1–4 under its table's lock):
//!
//! 1. `maybe_contains` tells which ids may be here (one bit an id; a wrong yes is possible and found by the fetch, a wrong no is not).
//! 2. `fetch` reads rows in the background, one batched submission; the [`Fetch`] it returns is waited for outside any lock.
//! 3. `append` takes rows that leave RAM (dirty ones only). It copies them into a write buffer and returns; from then on a fetch
//!    finds them, in the buffer or on disk. It blocks only while every buffer waits for the disk.
//! 4. `remove` forgets ids, with a tombstone.
//! 5. `publish` makes the state durable as one: everything appended and removed so far, under a token.
//!
//! After a failed write or sync the tier is read-only: `append`, `remove` and `publish` return `Kind::ReadOnly` with the first cause,
//! and everything handed over so far can still be fetched (rows whose write failed stay in their buffers).
//!
//! The parts: `record` and `format` (bytes on disk), `segment` and `buffer` (files, open and sealed), `background` (the process's
//! threads), `space` (the cap), `shared` (the state and its locks), `append`, `evict`, `fetch`, `classes`, `compact`, `scan`, `tally` (what scans
//! have to find), `give_way`, `moment`, `publish`,
//! `manifest`, `footers`, `recover`, `open` (published states and the way back from them), `linked` (segments in checkpoints), and `root` (flushes of several tables).

mod append;
mod background;
mod buffer;
mod classes;
mod compact;
mod evict;
mod fetch;
mod footers;
mod format;
mod give_way;
mod home;
pub mod index;
mod linked;
mod manifest;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod moment;
mod open;
mod publish;
mod record;
mod recover;
mod root;
mod scan;
mod seal;
mod segment;
mod shards;
mod shared;
mod space;
mod tally;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::config::{SsdConfig, TableConfig};
use crate::error::{Error, Kind, Result};
use crate::io::IoEngine;
use crate::rows::{RowLayout, RowMut, RowRef};
use crate::stats::{SsdStats, TierStats};
use crate::sync::Ordering::Relaxed;
use crate::sync::lock;
use crate::types::{BucketHash, Id};

pub use fetch::{Fetch, FetchBatch, Places};
pub use give_way::GiveWay;
pub use linked::{HeldSegments, LinkedBytes, SegmentFiles, SegmentSet};
pub use manifest::Named;
pub use moment::{KeepRow, SsdMoment};
pub use root::Root;

use format::Entry;
use open::Tuning;
use shared::Shared;

/// The SSD tier of one table shard.
#[derive(Debug)]
pub struct SsdTier {
    shared: Arc<Shared>,
}

/// What is written into the directory's manifest beside the segments, and compared when it is opened again.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// Table name.
    pub table: String,
    /// Table key.
    pub key: u64,
    /// Embedding width.
    pub dim: u64,
    /// Optimizer name.
    pub optimizer: String,
    /// Seed of births.
    pub seed: u64,
    /// Rendering of the initializer.
    pub initializer: String,
    /// Buckets of the table.
    pub total_num_buckets: u32,
    /// How ids fall into them. States of format 1 do not say: [`BucketHash::Plain`].
    #[serde(default)]
    pub bucket_hash: BucketHash,
    /// First bucket of this shard.
    pub bucket_begin: u32,
    /// One past the last bucket of this shard.
    pub bucket_end: u32,
}

impl Identity {
    /// Of the table that `config` describes.
    pub fn of(config: &TableConfig) -> Self {
        Self {
            table: config.name.clone(),
            key: config.key,
            dim: config.dim as u64,
            optimizer: config.optimizer.name().to_owned(),
            seed: config.seed,
            initializer: format!("{:?}", config.initializer),
            total_num_buckets: config.total_num_buckets,
            bucket_hash: config.bucket_hash,
            bucket_begin: config.buckets.start,
            bucket_end: config.buckets.end,
        }
    }
}

/// Counters that belong to a published state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StateCounters {
    /// The table's step counter.
    pub step: u64,
    /// The table's checkpoint epoch.
    pub epoch: u32,
}

/// One row of a scan.
pub type ScanSink<'a> = dyn FnMut(RowRef<'_>) -> Result<()> + 'a;

impl SsdTier {
    /// Open or make the tier. With `Reopen::Resume` and a published state, returns that state's counters too.
    ///
    /// Errors: `Config` (cap too small), `Path`, `Permission`, `InUse` (names the pid), `Mismatch` (other identity, names the field),
    /// `State` (directory not empty and `Reopen::Never`; nothing published to resume; token not among the published), `Corruption`.
    pub fn open(
        config: &SsdConfig,
        identity: &Identity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
    ) -> Result<(Self, Option<StateCounters>)> {
        let (shared, counters) = Shared::open(config, identity, layout, engine, Tuning::default())?;
        Ok((Self { shared }, counters))
    }

    /// How ids fall into the table's buckets: as the state that was resumed says, else as the tier was opened with.
    pub fn bucket_hash(&self) -> BucketHash {
        self.shared.identity.bucket_hash
    }

    /// Open the tier with the rows of `source`, in place of whatever is in the directory: its segments are linked there, or copied.
    pub fn open_from(
        config: &SsdConfig,
        identity: &Identity,
        layout: RowLayout,
        engine: Arc<dyn IoEngine>,
        source: &SegmentFiles,
    ) -> Result<Self> {
        let tuning = Tuning::default();
        let (shared, _) = Shared::open_from(config, identity, layout, engine, tuning, Some(source))?;
        Ok(Self { shared })
    }

    /// Tokens of the states that are in a directory, oldest first, by their files' names: whether one is whole is found when it is
    /// resumed. Empty when there are none.
    pub fn published(dir: &std::path::Path, engine: &dyn IoEngine) -> Result<Vec<u64>> {
        open::published(dir, engine)
    }

    /// Remove the directory of a table shard that nobody uses, and all in it.
    ///
    /// Errors: `State` for a directory that holds anything but a tier's own files, `InUse` (names the pid) where a table has it open,
    /// `Path`, `Permission` and `Storage`. Nothing is removed then, but where the file system fails half-way.
    pub fn remove_shard(dir: &std::path::Path, engine: &dyn IoEngine) -> Result<()> {
        shards::remove(dir, engine)
    }

    /// Rows here, tombstones not counted.
    pub fn rows(&self) -> u64 {
        self.shared.view().index.len() as u64
    }

    /// How many rows the cap can hold, compaction's headroom subtracted.
    pub fn capacity_rows(&self) -> u64 {
        self.shared.home.geometry.capacity_rows
    }

    /// Bytes of RAM that grow with the rows here (index, live counts).
    pub fn index_bytes(&self) -> u64 {
        let state = self.shared.view();
        let entries: usize = state.open.iter().flatten().map(|open| open.entries.capacity()).sum();
        (state.index.bytes() + entries * size_of::<Entry>()) as u64
    }

    /// For each id whether it may be here.
    pub fn maybe_contains(&self, ids: &[Id], maybe: &mut [bool]) {
        if self.shared.check_usable().is_err() {
            // A wrong no would have rows born anew; the fetch of a yes says what is wrong.
            return maybe.fill(true);
        }
        let mut locations = [None; 256];
        let state = self.shared.view();
        for (ids, maybe) in ids.chunks(locations.len()).zip(maybe.chunks_mut(locations.len())) {
            let locations = &mut locations[..ids.len()];
            state.index.get_batch(ids, locations);
            for (maybe, location) in maybe.iter_mut().zip(locations) {
                *maybe = location.is_some();
            }
        }
    }

    /// Start reading rows into the places given; each place must stay valid and untouched until the fetch is done.
    pub fn fetch(&self, wanted: Vec<(Id, RowMut)>) -> Arc<Fetch> {
        let mut batch = FetchBatch::default();
        let fetch = self.shared.fetch_in(wanted, None, &mut batch);
        batch.submit();
        fetch
    }

    /// As `fetch`, but what is on disk is read when `batch` is submitted, together with what other tiers put into it, and nobody needs to
    /// wait: the fetch keeps `places`, in which the rows' memory lies.
    pub fn fetch_in(&self, wanted: Vec<(Id, RowMut)>, places: Places, batch: &mut FetchBatch) -> Arc<Fetch> {
        self.shared.fetch_in(wanted, Some(places), batch)
    }

    /// Take rows over. `known[i]` says that an older version of row `i` is here (the caller knows: it fetched or appended it);
    /// without it the id must not be here. `Capacity` when the rows do not fit the cap; then none was taken.
    ///
    /// Where a write fails amid it none of the new rows is here; of the others some are, newer than before, and the tier only reads.
    pub fn append(&self, rows: &[RowRef<'_>], known: &[bool]) -> Result<()> {
        self.shared.append(rows, known)
    }

    /// Forget ids that are known to be here, each once. On an error all of them are here as before; a write that fails when some are gone
    /// is said by the next call.
    pub fn remove(&self, ids: &[Id]) -> Result<()> {
        self.shared.remove(ids)
    }

    /// As [`SsdTier::remove`], of a tier that only reads: nothing is written.
    pub fn remove_unwritten(&self, ids: &[Id]) {
        self.shared.remove_unwritten(ids);
    }

    /// Forget everything (a load replaces the contents).
    pub fn clear(&self) -> Result<()> {
        self.shared.clear()
    }

    /// Drop about `rows` rows, oldest segments first and on from where the last call stopped, skipping those for which `keep` says true;
    /// returns their ids.
    pub fn evict(&self, rows: u64, keep: &dyn Fn(Id) -> bool) -> Result<Vec<Id>> {
        self.shared.evict(rows, keep)
    }

    /// Make everything appended and removed so far durable as one state named `token` (larger than every earlier one), keep the
    /// state before it, and free what neither needs.
    pub fn publish(&self, token: u64, counters: StateCounters) -> Result<()> {
        self.publish_with(Some(token), counters, Vec::new())
    }

    /// As `publish`, with a note of the caller's that a resume of the state finds: at most [`SsdTier::most_note_bytes`]. Without a `token`
    /// the state's is the next even one.
    pub fn publish_with(&self, token: Option<u64>, counters: StateCounters, note: Vec<u8>) -> Result<()> {
        if note.len() > self.most_note_bytes() {
            let message = format!("a note has at most {} bytes and this one {}", self.most_note_bytes(), note.len());
            return Err(Error::new(Kind::Input, message));
        }
        self.shared.publish(token, counters, note)
    }

    /// The note of the state that was resumed, the first time; empty where there is none.
    pub fn take_note(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.shared.note))
    }

    /// The most bytes of a note.
    pub fn most_note_bytes(&self) -> usize {
        self.shared.home.geometry.note_bytes
    }

    /// The most bytes of a note where the cap is `cap_bytes`.
    pub fn note_bytes_of(cap_bytes: u64) -> usize {
        space::note_bytes(cap_bytes)
    }

    /// Forget the state named `token`, if it is published: a flush of several tables that did not finish.
    pub fn forget_published(&self, token: u64) -> Result<()> {
        self.shared.forget_published(token)
    }

    /// Hand every row to `sink`, in no particular order, each once; rows appended meanwhile may or may not be among them. Rows
    /// that compaction moves meanwhile are not missed.
    pub fn scan(&self, sink: &mut ScanSink<'_>) -> Result<()> {
        self.shared.scan(sink)
    }

    /// As [`SsdTier::scan`], of the rows whose `modified_epoch` is at least `since`, without reading those that are not.
    pub fn scan_since(&self, since: u32, sink: &mut ScanSink<'_>) -> Result<()> {
        self.shared.scan_since(since, sink)
    }

    /// Token of the last state that was published or resumed, whether or not it is still there.
    pub fn last_token(&self) -> Option<u64> {
        self.shared.view().last_token
    }

    /// Whether the states that a resume could take were given up for space since the last `publish`.
    pub fn published_given_up(&self) -> bool {
        self.shared.view().given_up
    }

    /// Whether a write or sync failed, so that it only reads.
    pub fn is_read_only(&self) -> bool {
        self.shared.home.space.has_failed()
    }

    /// `ReadOnly`, with the first error, after a failed write or sync; `State` when closed or in a forked process.
    pub fn check_writable(&self) -> Result<()> {
        self.shared.check_writable()
    }

    /// Counters.
    pub fn stats(&self) -> SsdStats {
        let index_bytes = self.index_bytes();
        let (counters, space) = (&self.shared.counters, &self.shared.home.space);
        let state = self.shared.view();
        SsdStats {
            tier: TierStats {
                rows: state.index.len() as u64,
                bytes: space.used_bytes(),
                capacity_bytes: self.shared.home.geometry.cap_bytes,
                hits: counters.hits.load(Relaxed),
                misses: counters.misses.load(Relaxed),
                evictions: counters.dropped_rows.load(Relaxed),
                read_bytes: counters.read_bytes.load(Relaxed),
                written_bytes: space.written_bytes(),
                time_ns: counters.fetch_ns.load(Relaxed),
            },
            io_engine: self.shared.home.engine.name(),
            reads: counters.reads.load(Relaxed),
            row_bytes_given: counters.row_bytes_given.load(Relaxed),
            compaction_bytes: counters.compaction_bytes.load(Relaxed),
            live_share: Shared::live_share(&state),
            segments: state.current().count() as u64,
            index_bytes,
            dropped_rows: counters.dropped_rows.load(Relaxed),
            published_given_up: state.given_up,
        }
    }

    /// Stop the background work and write out the buffers, without publishing. Called by drop too.
    pub fn close(&self) -> Result<()> {
        self.shared.close()
    }
}

impl Drop for SsdTier {
    fn drop(&mut self) {
        if self.shared.home.background.check_process().is_err() {
            // In a forked child: its parent's files are not to be touched, nor its locks to be waited for.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        // What went wrong was reported by `close` if it was called, and nothing is promised that was not published.
        let _ = self.shared.close();
    }
}
