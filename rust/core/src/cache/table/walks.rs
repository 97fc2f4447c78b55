//! Walks over the rows of a table: all of them, those that changed, those of a snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::handle::Table;
use crate::cache::groups::GroupSink;
use crate::cache::residency::ChangeCounts;
use crate::cache::rows::RowChunk;
use crate::cache::walk::{
    ExportStream, TableSnapshot, all_chunks, all_groups, current_counts, modified_chunks, modified_groups,
    remaining_counts,
};
use crate::cache::watch::{BaseCheckpoint, PreImages};
use crate::error::Result;
use crate::lifecycle::{BucketCounts, ExpirySweep, RankKeyRange, ScoreHistogram};
use crate::types::Id;

/// Approximate number of counts kept in memory while they are hashed into other buckets, at 24 bytes each.
const IDS_AT_ONCE: usize = 1 << 20;

impl Table {
    /// Passes every row of every tier to `sink` once, in chunks of at most `chunk_rows`. The table may be read
    /// concurrently. A training step, an import or a removal ends the walk with `State`.
    pub fn for_each_chunk(&self, chunk_rows: usize, sink: &mut dyn FnMut(RowChunk) -> Result<()>) -> Result<()> {
        self.finish_sweep()?;
        all_chunks(&self.inner, self.version(), chunk_rows.max(1), None, sink)
    }

    /// Like [`Table::for_each_chunk`], but in groups. Rows in RAM are passed in place: the table is locked while the
    /// sink accepts a group, but not while the sink waits for space.
    pub fn for_each_group(&self, sink: &mut dyn GroupSink) -> Result<()> {
        self.finish_sweep()?;
        all_groups(&self.inner, sink)
    }

    /// Like [`Table::for_each_chunk`], but as a stream: a background thread reads ahead by at most two chunks. A stream
    /// whose consumer is slow also ends with `State` if the table needs the SSD space of files that the stream has not
    /// read yet.
    pub fn export(&self, chunk_rows: usize) -> Result<ExportStream> {
        self.finish_sweep()?;
        ExportStream::start(&self.inner, chunk_rows)
    }

    /// Like [`Table::for_each_chunk`], but for rows whose `modified_epoch` is at least `since`, at the cost of those
    /// rows. In RAM, reads a byte per row if `since` is the current epoch, else a header. On SSD, reads the footers of
    /// segments that have such rows.
    pub fn for_each_modified(
        &self,
        since: u32,
        chunk_rows: usize,
        sink: &mut dyn FnMut(RowChunk) -> Result<()>,
    ) -> Result<()> {
        self.finish_sweep()?;
        modified_chunks(&self.inner, since, chunk_rows.max(1), sink)
    }

    /// Like [`Table::for_each_modified`], but in groups, as in [`Table::for_each_group`].
    pub fn for_each_modified_group(&self, since: u32, sink: &mut dyn GroupSink) -> Result<()> {
        self.finish_sweep()?;
        modified_groups(&self.inner, since, sink)
    }

    /// Returns the distinct ids removed from the table since `base`, in ascending order, except rows that
    /// [sweeps](Table::sweeps_since) removed and that were not modified since. Some of them may have been inserted
    /// again, as rows modified since.
    ///
    /// Errors: `State` if they are not known, so that a full save is required.
    pub fn tombstones_since(&self, base: &BaseCheckpoint) -> Result<Vec<Id>> {
        self.inner.lock_after_sweep()?.tombstones_since(base)
    }

    /// Returns the sweeps since `base`, which removed rows that are not in [`Table::tombstones_since`].
    pub fn sweeps_since(&self, base: &BaseCheckpoint) -> Result<Vec<ExpirySweep>> {
        Ok(self.inner.lock()?.sweeps_since(base))
    }

    /// Counts the changes since `base`, to check that loading a delta on it would restore the present rows.
    ///
    /// Errors: those of [`Table::tombstones_since`].
    pub fn count_changes(&self, base: &BaseCheckpoint) -> Result<ChangeCounts> {
        self.inner.lock_after_sweep()?.count_changes(base)
    }

    /// Counts the rows by rank key in the eviction order at `step`, which must be the present step: see
    /// [`ScoreHistogram`](crate::lifecycle::ScoreHistogram). Finishes the sweep in progress first. The table's lock is
    /// held for the duration, and rows on SSD are read. Returns the version of the counted contents too, or `None` if
    /// `version` is set and the table's [version](Table::version) differs.
    ///
    /// Errors: `Memory`; those of the SSD tier; `State` if the table is at another step.
    pub fn score_histogram(
        &self,
        step: u64,
        spans: &[RankKeyRange],
        version: Option<u64>,
    ) -> Result<Option<(u64, ScoreHistogram)>> {
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.score_histogram(step, spans, version))
    }

    /// Returns true if nothing has changed since the last sweep except by that sweep: no step, no import, no removal. A
    /// resumed state of the SSD tier has this flag; a loaded checkpoint does not.
    pub fn is_unchanged_since_sweep(&self) -> Result<bool> {
        Ok(self.inner.lock()?.is_unchanged_since_sweep())
    }

    /// Passes the admission counts of pending ids to `sink`, bucket by bucket in ascending order; with `since` those of
    /// ids counted in that epoch or later, and possibly of a few others. Does nothing if the table counts nothing.
    pub fn for_each_bucket(&self, since: Option<u32>, sink: &mut dyn FnMut(BucketCounts) -> Result<()>) -> Result<()> {
        current_counts(&self.inner, since, sink)
    }

    /// Returns, for each bucket of the shard, the number of generations of its counts that have ended. `None` if the
    /// table counts nothing.
    pub fn generations(&self) -> Result<Option<Vec<u32>>> {
        Ok(self.inner.lock()?.generations())
    }

    /// Restores the admission counts of pending ids in a bucket that has none, as a load does. A table that counts
    /// nothing ignores them.
    ///
    /// Errors: `Memory`.
    pub fn restore_bucket(&self, counts: &BucketCounts) -> Result<()> {
        self.inner.lock_any()?.restore_counts(counts, 0)
    }

    /// Adopts from `from` the OOV row, the admission counts of ids in buckets of this shard, the times of its steps,
    /// and its current time. This shard must have none of them. `from` may be closed and may use another bucketing.
    ///
    /// Errors: `Memory`; some of the counts are restored then.
    pub fn take_counts(&self, from: &Self) -> Result<()> {
        self.take_oov_row(from)?;
        let time = from.inner.lock_always().clock_state();
        self.inner.lock_any()?.join_clock(&time);
        if from.config().bucketing() != self.config().bucketing() {
            return self.take_counts_of_other_buckets(from);
        }
        remaining_counts(&from.inner, &mut |counts| {
            if self.config().buckets.contains(&counts.bucket) { self.restore_bucket(&counts) } else { Ok(()) }
        })
    }

    /// Each bucket of this shard gets the ids of several buckets of `from`, and is at its first generation. The buckets
    /// are filled in parts, so that about [`IDS_AT_ONCE`] ids are kept in memory.
    fn take_counts_of_other_buckets(&self, from: &Self) -> Result<()> {
        let (mine, bucketing) = (self.config().buckets.clone(), self.config().bucketing());
        let mut ids = 0;
        remaining_counts(&from.inner, &mut |counts| {
            ids += counts.ids.len();
            Ok(())
        })?;
        let parts = ids.div_ceil(IDS_AT_ONCE).max(1);
        for part in mine.clone().step_by(mine.len().div_ceil(parts).max(1)) {
            let part = part..part.saturating_add(mine.len().div_ceil(parts) as u32).min(mine.end);
            let mut found: BTreeMap<u32, BucketCounts> = BTreeMap::new();
            remaining_counts(&from.inner, &mut |counts| {
                for each in counts.ids {
                    let bucket = bucketing.of(each.id);
                    if part.contains(&bucket) {
                        let counts = found.entry(bucket).or_default();
                        counts.bucket = bucket;
                        counts.ids.push(each);
                    }
                }
                Ok(())
            })?;
            found.values().try_for_each(|counts| self.restore_bucket(counts))?;
        }
        Ok(())
    }

    /// Adopts the OOV row of a table, which may be closed: its optimizer slots only if both tables have the same
    /// optimizer.
    fn take_oov_row(&self, from: &Self) -> Result<()> {
        let Some(shared) = from.inner.lock_always().oov_row().cloned() else { return Ok(()) };
        let (here, there) = (self.config(), from.config());
        let same = here.optimizer == there.optimizer;
        self.set_oov_row(Some(&if same { shared } else { shared.without_slots(here.layout()) }))
    }

    /// Takes a snapshot of the current rows. Rows trained afterwards belong to `next_epoch`. Rows that training changes
    /// before they are saved are copied to `images`, which the tables of one save share.
    ///
    /// Errors: `State` while the table has another snapshot.
    pub fn snapshot(&self, images: &Arc<PreImages>, next_epoch: u32) -> Result<TableSnapshot> {
        TableSnapshot::begin(&self.inner, images, next_epoch, None)
    }

    /// Like [`Table::snapshot`], but only of the rows modified since `base`, and the removed ids.
    ///
    /// Errors: `State` also if these are not known.
    pub fn snapshot_of_changes(
        &self,
        images: &Arc<PreImages>,
        next_epoch: u32,
        base: &BaseCheckpoint,
    ) -> Result<TableSnapshot> {
        TableSnapshot::begin(&self.inner, images, next_epoch, Some(base))
    }
}
