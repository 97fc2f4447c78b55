//! Walks over the rows of a table: all of them, those modified since a checkpoint, those of a snapshot. They differ in
//! the selected rows and in the guarantees about concurrent changes. The loop that passes on rows is common to all, in
//! [`chunker`].
//!
//! A snapshot marks every slot with the newest copy of a row. An operation that is about to change such a row, or to
//! move it out of its slot, first copies it to the [`PreImages`] and clears the mark, under the table's lock; so does
//! this walk when it passes on the row. The SSD tier keeps rows whose newest copy is on SSD ([`SsdSnapshot`]). They are
//! read first and without the table's lock, because the holder of that lock may wait for the space that they use.

mod chunker;
mod stream;

use std::ops::Range;
use std::sync::Arc;

pub use stream::ExportStream;

use self::chunker::{
    ChunkConsumer, GroupConsumer, IdSource, NextRows, RowChunkSink, RowChunker, WalkConsumer, WalkSource,
    check_version, hand_over, lock_unchanged,
};
use super::changes::{BaseCheckpoint, PreImages};
use super::lock::{RowUseGuard, TableGuard, TableInner};
use super::placement::ExportStart;
use super::row_blocks::{GroupGatherer, GroupSink, RowChunk};
use crate::config::TableConfig;
use crate::error::{Kind, Result};
use crate::lifecycle::{BucketCounts, ExpirySweep, OovRow, StepClock};
use crate::rows::{RowHeader, RowRef};
use crate::runtime::memory;
use crate::ssd::{EarlyRowSink, ScanConsumer, ScanSink, SsdSnapshot};
use crate::types::{CacheSlot, Id};

/// Bytes of the rows that are copied at a time for a group (at least one row). They stay in the CPU cache until they
/// are copied again.
const COPIED_BYTES: usize = 512 << 10;
/// Number of buckets copied under one hold of the table's lock.
const BUCKETS_AT_ONCE: u32 = 64;

/// A snapshot of the rows of a table and its step, or only of the rows modified since a checkpoint. Dropping it
/// releases its copies.
pub struct TableSnapshot {
    table: Arc<TableInner>,
    images: Arc<PreImages>,
    /// The table's number in `images`.
    number: usize,
    ssd: Option<SsdSnapshot>,
    rows: u64,
    step: u64,
    generations: Option<Vec<u32>>,
    /// Ids removed between the checkpoint and the snapshot; `None` for a snapshot of all rows.
    tombstones: Option<Vec<Id>>,
    /// The sweeps between the checkpoint and the snapshot.
    sweeps: Vec<ExpirySweep>,
    clock: StepClock,
    oov_row: Option<OovRow>,
}

opaque_debug!(TableSnapshot, self, table = self.table.config.name);

impl TableSnapshot {
    /// Takes a snapshot of the current rows, or of those modified since `base`, if it is set.
    pub(crate) fn begin(
        table: &Arc<TableInner>,
        images: &Arc<PreImages>,
        next_epoch: u32,
        base: Option<&BaseCheckpoint>,
    ) -> Result<Self> {
        memory::check()?;
        let rows = table.reading_rows()?;
        let swept = |guard: &mut TableGuard<'_>| {
            if guard.placement.changes.snapshot.is_some() {
                return Err(Kind::State.error(format!(
                    "table {:?} has a save in the background: wait until it is done",
                    table.config.name
                )));
            }
            guard.finish_sweep()
        };
        let (mut guard, ()) = table.with_device_rows(&rows, || table.lock(), swept)?;
        let left = base.map(|base| guard.tombstones_since(base)).transpose()?;
        let sweeps = base.map(|base| guard.placement.changes.history.sweeps_since(base)).unwrap_or_default();
        let since = base.map_or(0, |base| base.next_epoch);
        let marks = guard.placement.snapshot_marks(since)?;
        let number = images.add(&table.layout);
        let ssd = match &table.ssd {
            None => None,
            Some(ssd) => {
                let kept = Arc::clone(images);
                let keep: Box<EarlyRowSink> = Box::new(move |row: RowRef<'_>| {
                    kept.writer(number).copy_row(row.header, |to| to.copy_from_slice(row.vector));
                });
                Some(ssd.snapshot(&mut guard.placement.stale_on_ssd(), since, keep)?)
            }
        };
        let snapshot = Self {
            table: Arc::clone(table),
            images: Arc::clone(images),
            number,
            ssd,
            rows: guard.placement.rows(),
            step: guard.placement.changes.step,
            generations: guard.lifecycle.admission.generations(),
            tombstones: left,
            sweeps,
            clock: guard.lifecycle.clock.steps.clone(),
            oov_row: guard.lifecycle.admission.oov_row().cloned(),
        };
        let counted_since = base.map(|base| base.next_epoch);
        guard.begin_snapshot(marks, Arc::clone(images), number, next_epoch, counted_since);
        table.set_has_snapshot(&rows);
        Ok(snapshot)
    }

    /// Returns the table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.table.config
    }

    /// Returns the number of training steps at the snapshot.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the OOV row at the snapshot; `None` if the table has none.
    pub fn oov_row(&self) -> Option<&OovRow> {
        self.oov_row.as_ref()
    }

    /// Returns the number of rows at the snapshot, including those that did not change since the checkpoint.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the sweeps between the checkpoint and the snapshot, which removed rows that are not in
    /// [`TableSnapshot::tombstones`].
    pub fn sweeps(&self) -> &[ExpirySweep] {
        &self.sweeps
    }

    /// Returns the times of the steps up to the snapshot.
    pub fn clock(&self) -> &StepClock {
        &self.clock
    }

    /// For a snapshot of changes, returns the distinct ids removed since the checkpoint, in ascending order. Some of
    /// them may have been inserted again.
    pub fn tombstones(&self) -> Option<&[Id]> {
        self.tombstones.as_deref()
    }

    /// Returns, for each bucket, the number of generations of its counts that had ended at the snapshot. `None` if the
    /// table counts nothing.
    pub fn generations(&self) -> Option<Vec<u32>> {
        self.generations.clone()
    }

    /// Passes the admission counts of ids pending at the snapshot to `sink`, bucket by bucket in ascending order; for a
    /// snapshot of changes those of the ids counted since. Does nothing if the table counts nothing. Call it before
    /// [`TableSnapshot::for_each_chunk`].
    pub fn for_each_bucket(&self, sink: &mut dyn FnMut(BucketCounts) -> Result<()>) -> Result<()> {
        let table = &self.table;
        each_bucket(
            &table.config.buckets,
            &mut || table.lock_any(),
            &|guard, bucket| guard.lifecycle.admission.take_snapshot_counts(bucket),
            sink,
        )
    }

    /// Passes every row of the snapshot to `sink` once, in chunks of about `chunk_rows`. No lock is held while `sink`
    /// runs.
    ///
    /// Errors: those of `sink`; `Storage`, `Corruption` and `Memory`; the error that prevented the copy of a row before
    /// its change.
    pub fn for_each_chunk(mut self, chunk_rows: usize, sink: &mut dyn FnMut(RowChunk) -> Result<()>) -> Result<()> {
        let chunk_rows = chunk_rows.max(1);
        let mut rows = 0;
        let mut sink = |chunk: RowChunk| {
            rows += chunk.headers.len() as u64;
            sink(chunk)
        };
        if let Some(ssd) = self.ssd.take() {
            let mut chunker = RowChunker::new(chunk_rows, &mut sink);
            ssd.for_each_row(&mut |row| chunker.push(row))?;
            chunker.finish()?;
        }
        for tier in [SnapshotTier::Host, SnapshotTier::Device] {
            let mut wanted = SnapshotSource { images: &self.images, tier, next: 0 };
            hand_over(&self.table, &mut wanted, &mut ChunkConsumer::new(chunk_rows, &mut sink))?;
        }
        while let Some(chunk) = self.images.take(self.number)? {
            if !chunk.headers.is_empty() {
                sink(chunk)?;
            }
        }
        self.images.check()?;
        if self.tombstones.is_none() && rows != self.rows {
            return Err(Kind::State.error(format!(
                "table {:?} had {} rows when its save began and {rows} were found: a bug of torchrec-embcache to report",
                self.table.config.name, self.rows
            )));
        }
        Ok(())
    }
}

impl Drop for TableSnapshot {
    fn drop(&mut self) {
        // Drops the SSD tier's part first: another thread may wait for its space with the table's lock.
        drop(self.ssd.take());
        self.table.defer_snapshot_end();
    }
}

/// The tier whose rows are passed on.
#[derive(Clone, Copy)]
enum SnapshotTier {
    Host,
    Device,
}

/// The rows of a tier that the snapshot has not copied yet.
struct SnapshotSource<'m> {
    images: &'m PreImages,
    tier: SnapshotTier,
    next: CacheSlot,
}

impl WalkSource for SnapshotSource<'_> {
    /// Works for a table that has started to wait for a load: the rows of the snapshot are kept regardless of the
    /// table's state.
    fn lock<'a>(&self, table: &'a TableInner) -> Result<TableGuard<'a>> {
        let guard = table.lock_any()?;
        self.images.check()?;
        Ok(guard)
    }

    fn next(
        &mut self,
        guard: &mut TableGuard<'_>,
        rows: &RowUseGuard<'_>,
        most: usize,
        consumer: &mut dyn WalkConsumer,
    ) -> Result<NextRows> {
        match self.tier {
            SnapshotTier::Host => {
                let no_writes = rows.no_kernel_writes();
                let lent =
                    guard.placement.lend_pending(&mut self.next, most, no_writes, &mut |rows| consumer.lend(rows))?;
                Ok(if lent == 0 { NextRows::End } else { NextRows::Lent })
            }
            SnapshotTier::Device => {
                let chunk = guard.placement.read_pending_on_device(&mut self.next, most)?;
                Ok(if chunk.headers.is_empty() { NextRows::End } else { NextRows::Copied(chunk) })
            }
        }
    }
}

/// Number of rows that are copied at a time for a group.
fn rows_copied_at_once(table: &TableInner) -> usize {
    (COPIED_BYTES / (table.floats() * 4 + size_of::<RowHeader>())).max(1)
}

/// Passes on every row of the contents of this version, in chunks of at most `chunk_rows`. `consumer` is set if `sink`
/// may wait for a consumer of the chunks.
pub(crate) fn all_chunks(
    table: &TableInner,
    version: u64,
    chunk_rows: usize,
    consumer: Option<&Arc<dyn ScanConsumer>>,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    if table.has_device() {
        return all_by_id(table, version, chunk_rows, consumer, sink);
    }
    let mut slots = SlotSource::begin(table, version)?;
    hand_over(table, &mut slots, &mut ChunkConsumer::new(chunk_rows, &mut *sink))?;
    slots.rows_on_ssd(chunk_rows, consumer, sink)
}

/// Like [`all_chunks`], but in groups. Rows in RAM of a table without a device tier are passed in place.
pub(crate) fn all_groups(table: &TableInner, sink: &mut dyn GroupSink) -> Result<()> {
    let version = table.version();
    let chunk_rows = rows_copied_at_once(table);
    sink.expect_rows(table.lock()?.placement.rows() as usize);
    if table.has_device() {
        let mut gather = GroupGatherer::new(sink);
        all_by_id(table, version, chunk_rows, None, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
        return gather.finish();
    }
    let mut slots = SlotSource::begin(table, version)?;
    hand_over(table, &mut slots, &mut GroupConsumer(sink))?;
    let mut gather = GroupGatherer::new(sink);
    slots.rows_on_ssd(chunk_rows, None, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
    gather.finish()
}

/// An export in progress of a table without a device tier. It visits the host tier slot by slot, and no row moves to
/// another slot during it.
struct SlotSource<'t> {
    table: &'t TableInner,
    version: u64,
    start: ExportStart,
    /// Number of rows passed on from RAM.
    handed_over: u64,
    /// Ids of rows that were passed on and have an outdated copy on SSD.
    outdated: Vec<Id>,
}

impl Drop for SlotSource<'_> {
    fn drop(&mut self) {
        self.table.end_export(self.start.number);
    }
}

impl<'t> SlotSource<'t> {
    pub(super) fn begin(table: &'t TableInner, version: u64) -> Result<Self> {
        let begun = table.lock()?.placement.begin_export(version);
        Ok(Self { table, version, start: begun, handed_over: 0, outdated: Vec::new() })
    }

    /// Returns a predicate for ids on SSD: true if the row was passed on from RAM.
    fn were_handed_over(&mut self) -> impl Fn(Id) -> bool + '_ {
        self.outdated.sort_unstable();
        let (outdated, written_down) = (&self.outdated, &self.start.written_back);
        move |id| outdated.binary_search(&id).is_ok() || written_down.contains(id)
    }

    /// Passes on the rows that were on SSD after those in RAM were passed on, and checks that no row is missing.
    fn rows_on_ssd(
        &mut self,
        chunk_rows: usize,
        consumer: Option<&Arc<dyn ScanConsumer>>,
        sink: &mut RowChunkSink<'_>,
    ) -> Result<()> {
        let (table, version, rows, from_ram) = (self.table, self.version, self.start.rows, self.handed_over);
        let were_handed_over = self.were_handed_over();
        let from_ssd = rows_on_ssd(table, version, chunk_rows, consumer, were_handed_over, sink)?;
        check_all_handed_over(table, rows, from_ram + from_ssd)
    }
}

impl WalkSource for SlotSource<'_> {
    fn lock<'a>(&self, table: &'a TableInner) -> Result<TableGuard<'a>> {
        lock_unchanged(table, self.version)
    }

    fn next(
        &mut self,
        guard: &mut TableGuard<'_>,
        rows: &RowUseGuard<'_>,
        most: usize,
        consumer: &mut dyn WalkConsumer,
    ) -> Result<NextRows> {
        let no_writes = rows.no_kernel_writes();
        let lent = guard
            .placement
            .lend_next(self.start.number, most, no_writes, &mut self.outdated, &mut |rows| consumer.lend(rows))?;
        self.handed_over += lent as u64;
        Ok(if lent == 0 { NextRows::End } else { NextRows::Lent })
    }
}

/// Like [`all_chunks`], for a table with a device tier. Rows move between it and the host tier in both directions, so
/// the rows that were passed on are tracked by id.
fn all_by_id(
    table: &TableInner,
    version: u64,
    chunk_rows: usize,
    consumer: Option<&Arc<dyn ScanConsumer>>,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    let _wanted = table.lock()?.placement.changes.exports.pin_contents(version);
    let (mut in_ram, rows) = table.lock()?.placement.newest_in_ram()?;
    let ids = in_ram.as_slice();
    hand_over(table, &mut IdSource { version, ids }, &mut ChunkConsumer::new(chunk_rows, &mut *sink))?;
    in_ram.sort_unstable();
    let were_handed_over = |id| in_ram.binary_search(&id).is_ok();
    let from_ssd = rows_on_ssd(table, version, chunk_rows, consumer, were_handed_over, sink)?;
    check_all_handed_over(table, rows, in_ram.len() as u64 + from_ssd)
}

/// Passes on the rows on SSD, except those that `were_handed_over` from RAM. Returns their number.
fn rows_on_ssd(
    table: &TableInner,
    version: u64,
    chunk_rows: usize,
    taker: Option<&Arc<dyn ScanConsumer>>,
    were_handed_over: impl Fn(Id) -> bool,
    sink: &mut RowChunkSink<'_>,
) -> Result<u64> {
    let mut unchanged = |chunk: RowChunk| {
        check_version(table, version)?;
        sink(chunk)
    };
    let mut chunker = RowChunker::new(chunk_rows, &mut unchanged);
    scan(table, taker, &mut |row| if were_handed_over(row.header.id) { Ok(()) } else { chunker.push(row) })?;
    let rows = chunker.finish()?;
    check_version(table, version)?;
    Ok(rows)
}

/// Passes every row on SSD to `sink`, which waits for `consumer`, if there is one.
fn scan(table: &TableInner, consumer: Option<&Arc<dyn ScanConsumer>>, sink: &mut ScanSink<'_>) -> Result<()> {
    match (&table.ssd, consumer) {
        (None, _) => Ok(()),
        (Some(ssd), None) => ssd.scan(sink),
        (Some(ssd), Some(taker)) => ssd.scan_cancellable(taker, sink),
    }
}

/// Errors: `State` if rows are missing.
fn check_all_handed_over(table: &TableInner, rows: u64, handed_over: u64) -> Result<()> {
    if handed_over >= rows {
        return Ok(());
    }
    Err(Kind::State.error(format!(
        "table {:?} has {rows} rows and {handed_over} were found: a bug of torchrec-embcache to report",
        table.config.name
    )))
}

/// Passes on the rows that were modified in epoch `since` or later, in chunks of at most `chunk_rows`.
fn modified_chunks(table: &TableInner, since: u32, chunk_rows: usize, sink: &mut RowChunkSink<'_>) -> Result<()> {
    let version = table.version();
    let mut in_ram = table.lock()?.placement.modified_in_ram(since)?;
    let ids = in_ram.as_slice();
    hand_over(table, &mut IdSource { version, ids }, &mut ChunkConsumer::new(chunk_rows, &mut *sink))?;
    in_ram.sort_unstable();
    modified_on_ssd(table, version, since, chunk_rows, |id| in_ram.binary_search(&id).is_ok(), sink)
}

/// Like [`modified_chunks`], but in groups. Rows in RAM of a table without a device tier are passed in place.
pub(crate) fn modified_groups(table: &TableInner, since: u32, sink: &mut dyn GroupSink) -> Result<()> {
    let chunk_rows = rows_copied_at_once(table);
    if table.has_device() {
        let mut gather = GroupGatherer::new(sink);
        modified_chunks(table, since, chunk_rows, &mut |chunk| gather.add(&chunk.headers, &chunk.vectors))?;
        return gather.finish();
    }
    let version = table.version();
    let mut export = SlotSource::begin(table, version)?;
    let slots = table.lock()?.placement.modified_slots(since)?;
    sink.expect_rows(slots.len());
    let mut modified = ModifiedSource { export: &mut export, version, since, slots: &slots };
    hand_over(table, &mut modified, &mut GroupConsumer(sink))?;
    drop(slots);
    sink.expect_rows(usize::MAX);
    let mut gather = GroupGatherer::new(sink);
    modified_on_ssd(table, version, since, chunk_rows, export.were_handed_over(), &mut |chunk| {
        gather.add(&chunk.headers, &chunk.vectors)
    })?;
    gather.finish()
}

/// The rows in some slots, in ascending order, that were modified and whose newest copy is still there.
struct ModifiedSource<'s, 't> {
    export: &'s mut SlotSource<'t>,
    version: u64,
    since: u32,
    slots: &'s [CacheSlot],
}

impl WalkSource for ModifiedSource<'_, '_> {
    fn lock<'a>(&self, table: &'a TableInner) -> Result<TableGuard<'a>> {
        lock_unchanged(table, self.version)
    }

    fn next(
        &mut self,
        guard: &mut TableGuard<'_>,
        rows: &RowUseGuard<'_>,
        most: usize,
        consumer: &mut dyn WalkConsumer,
    ) -> Result<NextRows> {
        if self.slots.is_empty() {
            return Ok(NextRows::End);
        }
        let (now, later) = self.slots.split_at(self.slots.len().min(most));
        let (number, no_writes) = (self.export.start.number, rows.no_kernel_writes());
        let outdated = &mut self.export.outdated;
        guard.placement.lend_modified(number, now, self.since, no_writes, outdated, &mut |rows| consumer.lend(rows))?;
        self.slots = later;
        Ok(NextRows::Lent)
    }
}

/// Passes on the rows on SSD that were modified in epoch `since` or later, except those that `were_handed_over` from
/// RAM.
fn modified_on_ssd(
    table: &TableInner,
    version: u64,
    since: u32,
    chunk_rows: usize,
    were_handed_over: impl Fn(Id) -> bool,
    sink: &mut RowChunkSink<'_>,
) -> Result<()> {
    let Some(ssd) = &table.ssd else { return Ok(()) };
    let mut later = Vec::new();
    let mut now_or_later = |chunk: RowChunk| {
        check_version(table, version)?;
        // The holder of the lock may wait for free space on SSD, and so for the end of this scan.
        if let Some(guard) = table.try_lock()? {
            return sink(newest_on_ssd(table, guard, chunk));
        }
        later.push(chunk);
        Ok(())
    };
    let mut chunker = RowChunker::new(chunk_rows, &mut now_or_later);
    ssd.scan_since(since, &mut |row| if were_handed_over(row.header.id) { Ok(()) } else { chunker.push(row) })?;
    chunker.finish()?;
    for chunk in later {
        check_version(table, version)?;
        sink(newest_on_ssd(table, table.lock()?, chunk))?;
    }
    check_version(table, version)
}

/// Keeps the rows read from SSD that have no newer copy in another tier. (The modified epoch of an imported row may be
/// later than its training.)
fn newest_on_ssd(table: &TableInner, guard: TableGuard<'_>, mut chunk: RowChunk) -> RowChunk {
    let newer: Vec<bool> = chunk.headers.iter().map(|header| guard.placement.is_newer_than_on_ssd(header.id)).collect();
    drop(guard);
    if newer.contains(&true) {
        let floats = table.floats();
        let mut at = newer.iter().flat_map(|&newer| std::iter::repeat_n(newer, floats));
        chunk.vectors.retain(|_| !at.next().unwrap_or(false));
        let mut at = newer.iter();
        chunk.headers.retain(|_| !at.next().copied().unwrap_or(false));
    }
    chunk
}

/// Passes the counts of each of `buckets` to `sink`, in ascending order. `sink` runs without the lock that `lock`
/// takes. Does nothing if the table counts nothing.
fn each_bucket<'a>(
    buckets: &Range<u32>,
    lock: &mut dyn FnMut() -> Result<TableGuard<'a>>,
    counts: &dyn Fn(&mut TableGuard<'a>, u32) -> BucketCounts,
    sink: &mut dyn FnMut(BucketCounts) -> Result<()>,
) -> Result<()> {
    let mut next = buckets.start;
    while next < buckets.end {
        let end = next.saturating_add(BUCKETS_AT_ONCE).min(buckets.end);
        let mut guard = lock()?;
        if !guard.lifecycle.admission.keeps_counts() {
            return Ok(());
        }
        let copied: Vec<BucketCounts> = (next..end).map(|bucket| counts(&mut guard, bucket)).collect();
        drop(guard);
        copied.into_iter().try_for_each(&mut *sink)?;
        next = end;
    }
    Ok(())
}

/// Passes the current counts of every bucket to `sink`; with `since` those of the ids counted in that epoch or later.
pub(crate) fn current_counts(
    table: &TableInner,
    since: Option<u32>,
    sink: &mut dyn FnMut(BucketCounts) -> Result<()>,
) -> Result<()> {
    each_bucket(
        &table.config.buckets,
        &mut || table.lock(),
        &|guard, bucket| guard.lifecycle.admission.counts_of(bucket, since),
        sink,
    )
}

/// Like [`current_counts`], but for all counts of a table that may be closed.
pub(crate) fn remaining_counts(table: &TableInner, sink: &mut dyn FnMut(BucketCounts) -> Result<()>) -> Result<()> {
    each_bucket(
        &table.config.buckets,
        &mut || Ok(table.lock_always()),
        &|guard, bucket| guard.lifecycle.admission.counts_of(bucket, None),
        sink,
    )
}
