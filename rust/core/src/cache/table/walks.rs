//! Walks over the rows of a table: all of them, those that changed, those of a moment.

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

/// About how many counts are held beside while they are sorted into other buckets, at 24 bytes each.
const IDS_AT_ONCE: usize = 1 << 20;

impl Table {
    /// Hand every row of every tier to `sink` once, in chunks of at most `chunk_rows`. The table may be read meanwhile. A training step, an
    /// import or a removal ends the walk with `State`.
    pub fn for_each_chunk(&self, chunk_rows: usize, sink: &mut dyn FnMut(RowChunk) -> Result<()>) -> Result<()> {
        self.finish_sweep()?;
        all_chunks(&self.inner, self.version(), chunk_rows.max(1), None, sink)
    }

    /// As [`Table::for_each_chunk`], in groups. Rows in RAM are handed over where they lie: the table waits while the sink takes a group,
    /// and not while the sink makes room for one.
    pub fn for_each_group(&self, sink: &mut dyn GroupSink) -> Result<()> {
        self.finish_sweep()?;
        all_groups(&self.inner, sink)
    }

    /// As [`Table::for_each_chunk`], as a stream: a thread reads ahead by at most two chunks. A stream whose taker keeps it waiting ends
    /// with `State` also where the table needs the room on SSD of files that the stream is still to read.
    pub fn export(&self, chunk_rows: usize) -> Result<ExportStream> {
        self.finish_sweep()?;
        ExportStream::start(&self.inner, chunk_rows)
    }

    /// As [`Table::for_each_chunk`], of the rows whose `modified_epoch` is at least `since`, at the cost of those rows. In RAM a byte is
    /// looked at for each row where `since` is the epoch of now, else a header. On SSD the footers of segments that have such rows are
    /// read.
    pub fn for_each_modified(
        &self,
        since: u32,
        chunk_rows: usize,
        sink: &mut dyn FnMut(RowChunk) -> Result<()>,
    ) -> Result<()> {
        self.finish_sweep()?;
        modified_chunks(&self.inner, since, chunk_rows.max(1), sink)
    }

    /// As [`Table::for_each_modified`], in groups, as [`Table::for_each_group`] hands over all rows.
    pub fn for_each_modified_group(&self, since: u32, sink: &mut dyn GroupSink) -> Result<()> {
        self.finish_sweep()?;
        modified_groups(&self.inner, since, sink)
    }

    /// The ids that left the table since `base`, each once, in rising order, but those that [sweeps](Table::sweeps_since) took and that
    /// were not modified since. Some of them may be back, as rows modified since.
    ///
    /// Errors: `State` where that is not known, so that a full save is wanted.
    pub fn tombstones_since(&self, base: &BaseCheckpoint) -> Result<Vec<Id>> {
        self.inner.lock_after_sweep()?.tombstones_since(base)
    }

    /// The sweeps since `base`, which took rows that [`Table::tombstones_since`] does not name.
    pub fn sweeps_since(&self, base: &BaseCheckpoint) -> Result<Vec<ExpirySweep>> {
        Ok(self.inner.lock()?.sweeps_since(base))
    }

    /// Count what changed since `base`, so that it can be told whether a load of a delta on it would find the rows that are here.
    ///
    /// Errors: those of [`Table::tombstones_since`].
    pub fn count_changes(&self, base: &BaseCheckpoint) -> Result<ChangeCounts> {
        self.inner.lock_after_sweep()?.count_changes(base)
    }

    /// Count the rows by where they stand in the order of a sweep after `step`, which is the present one: see [`Census`](crate::lifecycle::Census). What a
    /// sweep under way takes goes first. The table's lock is held meanwhile, and rows on SSD are read. With `version` nothing is counted
    /// (`None`) where the table's [version](Table::version) is another one by then. Returns also the version of what was counted.
    ///
    /// Errors: `Memory`, those of the SSD tier, and `State` where the table is at another step.
    pub fn score_histogram(
        &self,
        step: u64,
        spans: &[RankKeyRange],
        version: Option<u64>,
    ) -> Result<Option<(u64, ScoreHistogram)>> {
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.score_histogram(step, spans, version))
    }

    /// Whether nothing has changed since the last sweep but what that sweep took: no step, no import, no removal. A state of the SSD tier
    /// that is resumed knows it; a checkpoint that is loaded does not.
    pub fn is_unchanged_since_sweep(&self) -> Result<bool> {
        Ok(self.inner.lock()?.is_unchanged_since_sweep())
    }

    /// Hand the counts of the ids that wait for rows to `sink`, bucket by bucket in rising order; with `since` those of the ids that were
    /// counted in that epoch or later, and perhaps of a few others. Nothing where the table counts nothing.
    pub fn for_each_bucket(&self, since: Option<u32>, sink: &mut dyn FnMut(BucketCounts) -> Result<()>) -> Result<()> {
        current_counts(&self.inner, since, sink)
    }

    /// For each of the shard's buckets, how many generations of its counts have ended. `None` where the table counts nothing.
    pub fn generations(&self) -> Result<Option<Vec<u32>>> {
        Ok(self.inner.lock()?.generations())
    }

    /// Put the counts of ids that wait for rows into a bucket that has none, as a load does. A table that counts nothing leaves them.
    ///
    /// Errors: `Memory`.
    pub fn restore_bucket(&self, counts: &BucketCounts) -> Result<()> {
        self.inner.lock_any()?.restore_counts(counts, 0)
    }

    /// Take over the shared row of `from`, the counts of the ids that fall into buckets of this shard, when its steps were made, and what
    /// time it is; this shard knows nothing of them so far. `from` may be closed, and its ids may fall into other buckets there.
    ///
    /// Errors: `Memory`, and some of the counts are here.
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

    /// Each bucket of this shard gets the ids of several buckets of `from`, and is at its first generation. The buckets are filled some at a
    /// time, so that about [`IDS_AT_ONCE`] ids are held beside.
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

    /// Take over the shared row of a table, which may be closed: its slots only where both tables have the same optimizer.
    fn take_oov_row(&self, from: &Self) -> Result<()> {
        let Some(shared) = from.inner.lock_always().oov_row().cloned() else { return Ok(()) };
        let (here, there) = (self.config(), from.config());
        let same = here.optimizer == there.optimizer;
        self.set_oov_row(Some(&if same { shared } else { shared.without_slots(here.layout()) }))
    }

    /// Hold the rows of now. Rows that are trained from now on are of `next_epoch`. Rows that training changes before they are handed
    /// over are kept in `images`, which the tables of one save share.
    ///
    /// Errors: `State` while another moment of the table is held.
    pub fn snapshot(&self, images: &Arc<PreImages>, next_epoch: u32) -> Result<TableSnapshot> {
        TableSnapshot::begin(&self.inner, images, next_epoch, None)
    }

    /// As [`Table::moment`], of the rows that were modified since `base`, and the ids that left.
    ///
    /// Errors: `State` also where those are not known.
    pub fn snapshot_of_changes(
        &self,
        images: &Arc<PreImages>,
        next_epoch: u32,
        base: &BaseCheckpoint,
    ) -> Result<TableSnapshot> {
        TableSnapshot::begin(&self.inner, images, next_epoch, Some(base))
    }
}
