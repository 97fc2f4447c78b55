//! The rows of a table as of one moment, handed over while training goes on.
//!
//! At the moment every slot that holds the newest copy of a row is marked. Whoever is about to change such a row, or to take it out of
//! its slot, copies it to the [`PreImages`] first and takes the mark back, under the table's lock; so does this walk when it hands the
//! row over. Rows whose newest copy is on SSD are the SSD tier's to keep ([`SsdSnapshot`]). They come first and without the table's lock,
//! because whoever has that lock may wait for the room that they take.

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

/// The rows of a table at one moment, with its step; or only those modified since a checkpoint. Dropping it lets go of what is kept for it.
pub struct TableSnapshot {
    table: Arc<TableInner>,
    images: Arc<PreImages>,
    /// The table's number in `images`.
    number: usize,
    ssd: Option<SsdSnapshot>,
    rows: u64,
    step: u64,
    generations: Option<Vec<u32>>,
    /// Ids that left between the checkpoint and the moment; `None` where all rows are handed over.
    tombstones: Option<Vec<Id>>,
    /// The sweeps between the checkpoint and the moment.
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
    /// Hold the rows of now; of those that were modified since `base`, where one is given.
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

    /// The table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.table.config
    }

    /// Training steps at the moment.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The shared row at the moment; `None` where the table has none.
    pub fn oov_row(&self) -> Option<&OovRow> {
        self.oov_row.as_ref()
    }

    /// Rows at the moment, also those that did not change since the checkpoint.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The sweeps between the checkpoint and the moment, which took rows that [`TableSnapshot::left`] does not name.
    pub fn sweeps(&self) -> &[ExpirySweep] {
        &self.sweeps
    }

    /// When the steps up to the moment were made.
    pub fn clock(&self) -> &StepClock {
        &self.clock
    }

    /// Of a moment of changes: the ids that left since the checkpoint, each once, in rising order. Some of them may be back.
    pub fn tombstones(&self) -> Option<&[Id]> {
        self.tombstones.as_deref()
    }

    /// For each bucket, how many generations of its counts had ended at the moment. `None` where the table counts nothing.
    pub fn generations(&self) -> Option<Vec<u32>> {
        self.generations.clone()
    }

    /// Hand the counts of the ids that waited for rows at the moment to `sink`, bucket by bucket in rising order; of a moment of changes
    /// those of the ids that were counted since. Nothing where the table counts nothing. Call it before
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

    /// Hand every row of the moment to `sink` once, in chunks of about `chunk_rows`. No lock is held while `sink` runs.
    ///
    /// Errors: those of `sink`; `Storage`, `Corruption` and `Memory`; what kept a row from being copied before it changed.
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
        // The SSD tier's part goes first: somebody may wait for its room with the table's lock.
        drop(self.ssd.take());
        self.table.defer_snapshot_end();
    }
}

/// The tier whose rows are handed over.
#[derive(Clone, Copy)]
enum SnapshotTier {
    Host,
    Device,
}

/// The rows of a tier that the moment still wants.
struct SnapshotSource<'m> {
    images: &'m PreImages,
    tier: SnapshotTier,
    next: CacheSlot,
}

impl WalkSource for SnapshotSource<'_> {
    /// Also of a table that waits for a load since: the rows of the moment are kept whatever became of the table.
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
