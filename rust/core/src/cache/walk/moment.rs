//! Snapshots of the rows of a table, saved while training continues.
//!
//! The snapshot marks every slot with the newest copy of a row. An operation that is about to change such a row, or to
//! move it out of its slot, first copies it to the [`PreImages`] and clears the mark, under the table's lock; so does
//! this walk when it passes on the row. The SSD tier keeps rows whose newest copy is on SSD ([`SsdSnapshot`]). They are
//! read first and without the table's lock, because the holder of that lock may wait for the space that they use.

use std::sync::Arc;

use super::chunker::{ChunkConsumer, NextRows, RowChunker, WalkConsumer, WalkSource, hand_over};
use super::counts::each_bucket;
use crate::cache::locks::{RowUseGuard, TableGuard, TableInner};
use crate::cache::rows::RowChunk;
use crate::cache::watch::{BaseCheckpoint, PreImages};
use crate::config::TableConfig;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::{BucketCounts, ExpirySweep, OovRow, StepClock};
use crate::memory;
use crate::rows::RowRef;
use crate::ssd::{EarlyRowSink, SsdSnapshot};
use crate::types::{CacheSlot, Id};

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

impl std::fmt::Debug for TableSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TableSnapshot").field("table", &self.table.config.name).finish_non_exhaustive()
    }
}

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
        let swept = |held: &mut TableGuard<'_>| {
            if held.has_snapshot() {
                return Err(Error::new(
                    Kind::State,
                    format!(
                        "table {:?} is being saved beside training: wait until that save is done",
                        table.config.name
                    ),
                ));
            }
            held.finish_sweep()
        };
        let (mut held, ()) = table.with_device_rows(&rows, || table.lock(), swept)?;
        let left = base.map(|ancestor| held.tombstones_since(ancestor)).transpose()?;
        let sweeps = base.map(|ancestor| held.sweeps_since(ancestor)).unwrap_or_default();
        let since = base.map_or(0, |ancestor| ancestor.next_epoch);
        let marks = held.snapshot_marks(since)?;
        let number = images.add(&table.layout);
        let ssd = match &table.ssd {
            None => None,
            Some(ssd) => {
                let kept = Arc::clone(images);
                let keep: Box<EarlyRowSink> = Box::new(move |row: RowRef<'_>| {
                    kept.writer(number).copy_row(row.header, |to| to.copy_from_slice(row.vector));
                });
                Some(ssd.snapshot(&mut held.stale_on_ssd(), since, keep)?)
            }
        };
        let moment = Self {
            table: Arc::clone(table),
            images: Arc::clone(images),
            number,
            ssd,
            rows: held.rows(),
            step: held.counters().step,
            generations: held.generations(),
            tombstones: left,
            sweeps,
            clock: held.clock().clone(),
            oov_row: held.oov_row().cloned(),
        };
        let counted_since = base.map(|ancestor| ancestor.next_epoch);
        held.begin_snapshot(marks, Arc::clone(images), number, next_epoch, counted_since);
        table.set_has_snapshot(&rows);
        Ok(moment)
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
            &|held, bucket| held.take_snapshot_counts(bucket),
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
            return Err(Error::new(
                Kind::State,
                format!(
                    "table {:?} had {} rows when its save began and {rows} were found: a bug of torchrec-embcache to report",
                    self.table.config.name, self.rows
                ),
            ));
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
        let held = table.lock_any()?;
        self.images.check()?;
        Ok(held)
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
                let lent = guard.lend_pending(&mut self.next, most, no_writes, &mut |rows| consumer.lend(rows))?;
                Ok(if lent == 0 { NextRows::End } else { NextRows::Lent })
            }
            SnapshotTier::Device => {
                let chunk = guard.read_pending_on_device(&mut self.next, most)?;
                Ok(if chunk.headers.is_empty() { NextRows::End } else { NextRows::Copied(chunk) })
            }
        }
    }
}
