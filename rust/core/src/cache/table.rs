//! The public table: one table shard, with calls for its rows by id, for walks over them, and for sweeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::changes::{BaseCheckpoint, PreImages};
use super::evicted_rows::{EvictedQueue, EvictedRows};
use super::expiry::Residency;
use super::lock::{TableGuard, TableInner};
use super::placement::{ChangeCounts, host_row_bytes};
use super::residency::{TableStats, check_metadata_space};
use super::row_blocks::{FoundRows, GroupSink, PickedRows, RowBlock, RowChunk};
use super::snapshot::{
    ExportStream, TableSnapshot, all_chunks, all_groups, current_counts, modified_groups, remaining_counts,
};
use super::table_context::TableContext;
use crate::config::{AdmissionRule, EvictionRule, MissingRead, OnFull, TableConfig};
use crate::error::{Kind, Result};
use crate::io::IoEngine;
use crate::lifecycle::admission::{self, RowAdmitter};
use crate::lifecycle::{BucketCounts, ExpirySweep, OovRow, RankKeyRange, ScoreHistogram, StepClock};
use crate::rows::{RowHeader, RowInitializer, ScoreDecay};
use crate::runtime::memory;
use crate::sizing::MissRatioCurve;
use crate::ssd::{LinkedSegments, PinnedSegments, ShardIdentity, SsdTier, StateCounters};
use crate::tiers::{DeviceRowReader, DeviceTier, HostBudget, HostTier};
use crate::types::Id;

/// Number of rows read under one hold of the table's lock.
const ROWS_PER_READ: usize = 4096;
/// Number of rows of columns imported under one hold of the table's lock.
const ROWS_PER_IMPORT: usize = 65_536;
/// Bytes per row that an import or a removal uses while it runs: ids, their table for the comparison, and locations of
/// rows. Requested in one piece, before any change.
const SPACE_PER_ROW: usize = 128;
/// Approximate number of counts kept in memory while they are hashed into other buckets, at 24 bytes each.
const IDS_AT_ONCE: usize = 1 << 20;

/// One table shard. A clone is another handle of the same table. The rows are freed with the last handle, plan and
/// snapshot.
#[derive(Clone)]
pub struct Table {
    pub(crate) inner: Arc<TableInner>,
}

opaque_debug!(Table, self, name = self.inner.config.name);

impl Table {
    /// Checks the configuration and opens the tiers. Pass `device_rows` exactly when the configuration has a device
    /// tier.
    ///
    /// Errors: `Config` for values out of range; those of [`SsdTier::open`].
    pub fn open(
        config: TableConfig,
        device_rows: Option<Arc<dyn DeviceRowReader>>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        Self::open_from(config, device_rows, engine, None)
    }

    /// Like [`Table::open`]. With `source`, the table has its rows and counters, and the contents of the SSD tier's
    /// directory are replaced.
    pub fn open_from(
        config: TableConfig,
        device_rows: Option<Arc<dyn DeviceRowReader>>,
        engine: Arc<dyn IoEngine>,
        source: Option<(&LinkedSegments, StateCounters)>,
    ) -> Result<Self> {
        check(&config, device_rows.is_some())?;
        let layout = config.layout();
        let initializer = RowInitializer::new(config.initializer, config.seed, config.key)?;
        let decay = ScoreDecay::new(config.score_half_life_steps)?;
        let budget = HostBudget::new(config.host_bytes, config.shared_budget.clone());
        let host = HostTier::new(&config.name, layout, config.policy, budget, device_rows.is_some())?;
        let device = config.device_rows.map(|rows| DeviceTier::new(rows, config.policy));
        let (mut counters, mut metadata) = (StateCounters::default(), None);
        let ssd = match (&config.ssd, source) {
            (None, _) => None,
            (Some(ssd), Some((files, saved))) => {
                counters = saved;
                Some(SsdTier::open_from(ssd, &ShardIdentity::of(&config), layout, engine, files)?)
            }
            (Some(ssd), None) => {
                let (tier, resumed) = SsdTier::open(ssd, &ShardIdentity::of(&config), layout, engine)?;
                counters = resumed.unwrap_or_default();
                metadata = Some(tier.take_metadata());
                Some(tier)
            }
        };
        let admitter = RowAdmitter::of(&config);
        let base = Arc::new(TableContext::new(config, (initializer, decay), device_rows, ssd));
        let mut residency = Residency::new(&base, host, device, counters, admitter);
        if let Some(metadata) = metadata {
            residency.resume_metadata(&metadata)?;
        }
        Ok(Self { inner: Arc::new(TableInner::new(base, residency)) })
    }

    /// Returns the configuration of the table.
    pub fn config(&self) -> &TableConfig {
        &self.inner.config
    }

    /// Returns the number of rows in all tiers.
    pub fn len(&self) -> Result<u64> {
        Ok(self.inner.lock_after_sweep()?.placement.rows())
    }

    /// Returns true if the table has no row.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Returns a version that changes with every change of the rows, such as a training step, an import, a removal or a
    /// sweep, and with changes of the step counter and the OOV row. Moves between tiers do not change it.
    pub fn version(&self) -> u64 {
        self.inner.version()
    }

    /// Returns true if the table was closed.
    pub fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Returns the number of training steps.
    pub fn step(&self) -> Result<u64> {
        Ok(self.inner.lock()?.placement.changes.step)
    }

    /// Sets the step counter, as a load does.
    ///
    /// Errors: `Input` for more than 2^53; `State` if it would decrease while batches in flight use deferred rows;
    /// those of finishing a sweep in progress.
    pub fn set_step(&self, step: u64) -> Result<()> {
        self.inner.during_sweeps(|| self.inner.lock_any(), |guard| guard.set_step(step))
    }

    /// Returns a copy of the OOV row; `None` if the table has none.
    pub fn oov_row(&self) -> Result<Option<OovRow>> {
        Ok(self.inner.lock()?.lifecycle.admission.oov_row().cloned())
    }

    /// Replaces the OOV row with a saved one, as a load does; `None` resets it. Resets its optimizer slots if they
    /// belong to another optimizer. Does nothing if the table has no OOV row.
    pub fn set_oov_row(&self, saved: Option<&OovRow>) -> Result<()> {
        self.inner.lock_any()?.lifecycle.admission.set_oov_row(saved);
        Ok(())
    }

    /// Like [`Table::set_oov_row`], with the OOV row of a checkpoint. Logs if the checkpoint has none.
    pub fn load_oov_row(&self, saved: Option<&OovRow>) -> Result<()> {
        let mut guard = self.inner.lock_any()?;
        if saved.is_none() {
            let step = guard.placement.changes.step;
            guard.lifecycle.admission.log_new_oov_row(step, "the checkpoint that it is loaded from");
        }
        guard.lifecycle.admission.set_oov_row(saved);
        Ok(())
    }

    /// Returns the checkpoint epoch of rows that are trained at present.
    pub fn epoch(&self) -> Result<u32> {
        Ok(self.inner.lock()?.placement.changes.counters().epoch)
    }

    /// Sets the checkpoint epoch. It increases with the saves; after a load it is the checkpoint's `next_epoch`.
    pub fn set_epoch(&self, epoch: u32) -> Result<()> {
        self.inner.lock_any()?.placement.begin_epoch(epoch);
        Ok(())
    }

    /// Applies the table's eviction rule to the current rows: matching rows are missing for every batch placed
    /// afterwards, and are removed from the tiers gradually. Does nothing if the table has no rule.
    ///
    /// Errors: those of the SSD tier, if a previous sweep that matches other rows is not finished; `State` if the table
    /// takes a rule per sweep.
    pub fn sweep(&self) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |guard| guard.begin_sweep(None))
    }

    /// Like [`Table::sweep`], by the rule of this sweep, if the table's rule is [`EvictionRule::PerSweep`].
    ///
    /// Errors: those of [`Table::prepare_sweep`]. None after that with the same rule, until the next step.
    pub fn sweep_with_rule(&self, rule: &EvictionRule) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |guard| guard.begin_sweep(Some(rule)))
    }

    /// Sweeps tables one after the other: like [`Table::sweep_with_rule`] with the rule of its pair, or like
    /// [`Table::sweep`] without one.
    ///
    /// Errors: as there. None if all tables were prepared; else the tables before the failed one are swept.
    pub fn sweep_all(tables: &[(Self, Option<&EvictionRule>)]) -> Result<()> {
        tables
            .iter()
            .try_for_each(|(table, given)| given.map_or_else(|| table.sweep(), |given| table.sweep_with_rule(given)))
    }

    /// Does the fallible part of [`Table::sweep`] or [`Table::sweep_with_rule`], so that either all ranks of a sharded
    /// table sweep or none does.
    ///
    /// Errors: `State` if a rule is passed and should not be, or is missing; `Config` for a rule that is out of range;
    /// those of the SSD tier, if a previous sweep that matches other rows is not finished.
    pub fn prepare_sweep(&self, rule: Option<&EvictionRule>) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |guard| guard.prepare_sweep(rule))
    }

    /// Returns the times of the table's steps, as far as they are known. Works for a table that waits for a load too.
    pub fn clock(&self) -> Result<StepClock> {
        Ok(self.inner.lock_any()?.lifecycle.clock.steps.clone())
    }

    /// Replaces the times of the table's steps, as a load does. Steps of unknown times count as made at the time of the
    /// next step.
    pub fn restore_clock(&self, clock: &StepClock) -> Result<()> {
        self.inner.lock_any()?.lifecycle.clock.restore(clock);
        Ok(())
    }

    /// Adopts the time source of `before`, whose rows were replaced with those of a checkpoint in this table: if its
    /// user set the time, this table's user does too. `before` may be closed.
    pub fn adopt_time_source(&self, before: &Self) -> Result<()> {
        let time = before.inner.lock_always().lifecycle.clock.event_time();
        self.inner.lock_any()?.lifecycle.clock.adopt_time_source(time);
        Ok(())
    }

    /// Returns the table's time, in milliseconds: the time set last, else the system's since 1970. Never before the
    /// time of the last step.
    pub fn now(&self) -> Result<u64> {
        Ok(self.inner.lock()?.lifecycle.clock.now())
    }

    /// Returns the largest step known to have been made by this time, in milliseconds; `None` if no such step is known.
    pub fn step_at(&self, time: u64) -> Result<Option<u64>> {
        Ok(self.inner.lock()?.lifecycle.clock.steps.step_at(time))
    }

    /// Sets the table's time, in milliseconds, until the next call.
    ///
    /// Errors: `Input` if the time would decrease.
    pub fn set_time(&self, time: u64) -> Result<()> {
        self.inner.lock()?.lifecycle.clock.set_time(self.config(), time)
    }

    /// Checks the arguments of [`Table::set_time`] without a change.
    pub fn check_time(&self, time: u64) -> Result<()> {
        self.inner.lock()?.lifecycle.clock.check_time(self.config(), time)
    }

    /// Removes all rows that the sweep in progress matches, except rows of batches between their forward and their
    /// backward.
    pub(super) fn finish_sweep(&self) -> Result<()> {
        self.inner.lock_after_sweep().map(drop)
    }

    /// Returns the number of training steps and the checkpoint epoch. Works for a table that waits for a load too.
    pub fn counters(&self) -> Result<(u64, u32)> {
        let StateCounters { step, epoch } = self.inner.lock_any()?.placement.changes.counters();
        Ok((step, epoch))
    }

    /// Rejects every use with this reason until a load succeeds (`None`), because the contents are incomplete.
    pub fn set_unusable(&self, reason: Option<String>) -> Result<()> {
        self.inner.lock_any()?.set_unusable(reason);
        Ok(())
    }

    /// Returns the reason why every use is rejected; `None` if the table is usable.
    pub fn unusable(&self) -> Result<Option<String>> {
        Ok(self.inner.lock_any()?.unusable().map(str::to_owned))
    }

    /// Writes every dirty row to SSD and publishes one state named `commit_id`, which must be larger than every earlier
    /// one. Does nothing without an SSD tier.
    pub fn flush(&self, commit_id: u64) -> Result<()> {
        self.flush_with(Some(commit_id))
    }

    /// Like [`Table::flush`], under the next even commit id. Concurrent callers get consecutive ones.
    pub fn flush_next(&self) -> Result<()> {
        self.flush_with(None)
    }

    fn flush_with(&self, commit_id: Option<u64>) -> Result<()> {
        self.with_all_on_ssd(|ssd, guard| {
            ssd.publish(commit_id, guard.placement.changes.counters(), guard.encoded_metadata(ssd.max_metadata_bytes()))
        })
        .map(drop)
    }

    /// Writes every row to SSD and pins the durable segments of the SSD tier, which then contain all rows of the table;
    /// `None` without an SSD tier. Returns the table's counters and OOV row at that time. Published states are not
    /// affected.
    ///
    /// Errors: as [`Table::flush`].
    pub fn pin_segments(&self) -> Result<Option<(PinnedSegments, StateCounters, Option<OovRow>)>> {
        self.with_all_on_ssd(|ssd, guard| {
            Ok((ssd.pin_segments()?, guard.placement.changes.counters(), guard.lifecycle.admission.oov_row().cloned()))
        })
    }

    /// Writes every dirty row to SSD and does `work` while the SSD tier has all rows; `None` without an SSD tier.
    fn with_all_on_ssd<T>(&self, work: impl FnOnce(&SsdTier, &Residency) -> Result<T>) -> Result<Option<T>> {
        let table = &self.inner;
        let Some(ssd) = &table.ssd else { return Ok(None) };
        memory::check()?;
        let rows = table.reading_rows()?;
        let mut next = 0;
        let written_down = |guard: &mut TableGuard<'_>| {
            guard.placement.finish_loads();
            guard.finish_sweep()?;
            guard.placement.write_back_all(rows.no_kernel_writes(), &mut next)
        };
        let (guard, ()) = table.with_device_rows(&rows, || table.lock(), written_down)?;
        work(ssd, &guard).map(Some).map_err(|error| table.in_table(error))
    }

    /// Checks that [`Table::open_from`] can open a table of this configuration from `files`.
    ///
    /// Errors: `Mismatch` without an SSD tier; `Config` if it is too small.
    pub fn check_opens_from(&self, files: &LinkedSegments) -> Result<()> {
        let _open = self.inner.lock_any()?;
        match (&self.inner.ssd, &self.inner.config.ssd) {
            (Some(ssd), Some(config)) => ssd.check_space(config, files.rows(), files.bytes()),
            _ => Err(Kind::Mismatch.error(format!(
                "table {:?} has no SSD tier to take segments: give it ssd_bytes",
                self.inner.config.name
            ))),
        }
    }

    /// Discards the published state named `commit_id`, so that the next flush does not discard the state before it.
    pub fn forget_published(&self, commit_id: u64) -> Result<()> {
        let _open = self.inner.lock_any()?;
        self.inner.ssd.as_ref().map_or(Ok(()), |ssd| ssd.forget_published(commit_id))
    }

    /// Returns the commit id of the last state that was flushed or resumed, even if that state was discarded. The next
    /// one is larger.
    pub fn last_commit_id(&self) -> Option<u64> {
        self.inner.ssd.as_ref().and_then(SsdTier::last_commit_id)
    }

    /// Returns true if the SSD tier discarded the resumable states for lack of free space since the last flush.
    pub fn published_given_up(&self) -> bool {
        self.inner.ssd.as_ref().is_some_and(SsdTier::published_given_up)
    }

    /// Errors: `ReadOnly` if a write of the SSD tier failed, so that no row may be changed.
    pub fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    /// Returns true if a write of the SSD tier failed. Rows can then be read and saved elsewhere, but not changed.
    pub fn is_read_only(&self) -> bool {
        self.inner.ssd.as_ref().is_some_and(SsdTier::is_read_only)
    }

    /// Returns the base checkpoints of a possible delta of this table, oldest first.
    pub fn base_checkpoints(&self) -> Result<Vec<BaseCheckpoint>> {
        Ok(self.inner.lock_after_sweep()?.base_checkpoints().to_vec())
    }

    /// Records that the contents at the end of the epoch before `base.next_epoch` are those of this checkpoint: the
    /// table was saved as it, or loaded from it. Call this once the checkpoint is published on all ranks. Rows modified
    /// afterwards must belong to `next_epoch` or a later epoch (see [`Table::set_epoch`]).
    pub fn saved_as(&self, base: BaseCheckpoint) -> Result<()> {
        self.inner.lock_any()?.placement.changes.history.saved_as(base);
        Ok(())
    }

    /// Like [`Table::saved_as`], for the rows of a [`Table::snapshot`] that started with this `next_epoch`; `None` if
    /// its save failed. If not all tombstones since then are known, the checkpoint does not become a base. Does nothing
    /// for a closed table.
    pub fn finish_background_save(&self, next_epoch: u32, base: Option<BaseCheckpoint>) {
        if let Ok(mut guard) = self.inner.lock_any() {
            guard.placement.changes.history.finish_background_save(next_epoch, base);
        }
    }

    /// Waits until no asynchronous save uses the table's rows, for about `most` at most. Returns true if none does.
    /// Returns true in a forked child, because the table belongs to the parent.
    pub fn wait_for_save(&self, most: Duration) -> Result<bool> {
        if self.inner.check_process().is_err() {
            return Ok(true);
        }
        self.inner.wait_for_snapshot_end_at_most(most)
    }

    /// Stops background work, after an asynchronous save in progress. Rows in RAM that were not flushed are lost.
    /// Idempotent. Does nothing in a forked child, because the table belongs to the parent.
    pub fn close(&self) -> Result<()> {
        if self.inner.check_process().is_err() {
            return Ok(());
        }
        self.inner.wait_for_snapshot_end()?;
        if !self.inner.close() {
            return Ok(());
        }
        self.inner.ssd.as_ref().map_or(Ok(()), SsdTier::close)
    }

    /// Returns counters of the table and its tiers.
    pub fn stats(&self) -> Result<TableStats> {
        Ok(self.inner.lock_any()?.stats())
    }
}

fn check(config: &TableConfig, gathers: bool) -> Result<()> {
    let refuse = |message: String| Err(Kind::Config.error(format!("table {:?}: {message}", config.name)));
    if config.name.is_empty() {
        return refuse("name is empty: give the table a name".into());
    }
    if config.dim == 0 || config.dim > 65_536 {
        return refuse(format!("embedding_dim={} is out of range: use 1 to 65536", config.dim));
    }
    if config.total_num_buckets == 0 {
        return refuse("total_num_buckets=0: use at least 1".into());
    }
    if config.buckets.start > config.buckets.end || config.buckets.end > config.total_num_buckets {
        return refuse(format!(
            "buckets {}..{} are not within 0..{} (total_num_buckets)",
            config.buckets.start, config.buckets.end, config.total_num_buckets
        ));
    }
    if config.device_rows == Some(0) {
        return refuse("device_bytes holds no row: raise it, or set it to 0 for no device tier".into());
    }
    if config.device_rows.is_some() != gathers {
        return refuse("a device tier needs a way to read its rows, and only then".into());
    }
    if config.not_admitted == MissingRead::OovRow && config.admission == AdmissionRule::All {
        return refuse("not_admitted=\"oov\" without admission has no effect: set admission, or leave it out".into());
    }
    if config.missing_read == MissingRead::OovRow && config.not_admitted != MissingRead::OovRow {
        return refuse("evaluation cannot read an OOV row without not_admitted=\"oov\"".into());
    }
    if config.shared_budget.is_some() && (config.ssd.is_some() || config.on_full == OnFull::Evict) {
        return refuse("only a table without an SSD tier and with on_full=\"error\" can share a budget".into());
    }
    check_metadata_space(config)?;
    let eviction = config.eviction.as_ref().map_or(Ok(()), |eviction| eviction.rule.check());
    admission::check(&config.admission).and(eviction).map_err(|error| error.context(format!("table {:?}", config.name)))
}

impl Table {
    /// Returns the current rows of `ids` (`[n]`, repetitions allowed), and initial values for ids that the table does
    /// not have.
    pub fn read_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        self.read_rows_if(ids, false)
    }

    /// Like [`Table::read_rows`], but works for a table that waits for a load too: for the load itself.
    pub fn read_incomplete_rows(&self, ids: &[Id]) -> Result<FoundRows> {
        self.read_rows_if(ids, true)
    }

    fn read_rows_if(&self, ids: &[Id], incomplete: bool) -> Result<FoundRows> {
        let table = &self.inner;
        let mut all = FoundRows::default();
        memory::reserve(&mut all.headers, "read rows", ids.len())?;
        memory::reserve(&mut all.vectors, "read rows", ids.len() * table.floats())?;
        for ids in ids.chunks(ROWS_PER_READ) {
            let rows = table.reading_rows()?;
            let lock = || if incomplete { table.lock_any() } else { table.lock() };
            let (_, mut some) =
                table.with_device_rows(&rows, lock, |guard| guard.read(ids, rows.no_kernel_writes()))?;
            all.found.append(&mut some.found);
            all.headers.append(&mut some.headers);
            all.vectors.append(&mut some.vectors);
        }
        Ok(all)
    }

    /// Checks that no batch in flight uses any row.
    ///
    /// Errors: `State` while one does.
    pub fn check_unused(&self) -> Result<()> {
        self.inner.lock_any()?.placement.check_unused()
    }

    /// Removes every row and the admission counts of pending ids, after an asynchronous save in progress.
    ///
    /// Errors: `State` while a batch in flight uses any row.
    pub fn clear(&self) -> Result<()> {
        self.clear_rows()?;
        self.inner.lock_any()?.lifecycle.admission.clear_counts();
        Ok(())
    }

    /// Like [`Table::clear`], but keeps the admission counts.
    pub fn clear_rows(&self) -> Result<()> {
        let table = &self.inner;
        loop {
            table.check_process()?;
            table.wait_for_snapshot_end()?;
            let rows = table.reading_rows()?;
            let clear = |guard: &mut TableGuard<'_>| {
                if guard.placement.changes.snapshot.is_some() {
                    return Ok(false);
                }
                // The slots will be reused for other rows: no read may end in one of them.
                guard.placement.finish_loads();
                guard.placement.check_unused()?;
                guard.clear().map(|()| true)
            };
            let (_, cleared) = table.with_device_rows(&rows, || table.lock_any(), clear)?;
            if cleared {
                return Ok(());
            }
        }
    }

    /// Allocates memory for `rows` more rows, as far as they fit the host budget.
    pub fn reserve_rows(&self, rows: u64) -> Result<()> {
        self.inner.lock_any()?.placement.reserve(rows)
    }

    /// Overwrites or adds rows.
    ///
    /// Errors: `State` if a batch in flight uses one of them; `Input` for repeated ids, ids of another shard's buckets,
    /// or arrays of wrong lengths; `Capacity`; `Storage` and `Corruption` of existing rows that cannot be read. Nothing
    /// has changed then, unless the error states how many of the rows were imported: a table that drops rows when it is
    /// full imports them in parts, and an allocation may fail after a write has failed.
    pub fn import_rows(&self, block: RowBlock<'_>) -> Result<()> {
        memory::check()?;
        let table = &self.inner;
        let ids = check_block(table, block)?;
        let rows = table.reading_rows()?;
        let mut done = 0;
        let import = |guard: &mut TableGuard<'_>| {
            guard.placement.finish_loads();
            let checked =
                table.check_writable().and_then(|()| guard.placement.check_rows_unused(ids[done..].iter().copied()));
            checked.map_err(|error| guard.placement.partial_error(error, done, ids.len(), "imported"))?;
            let imported = guard.import(block, &ids, rows.no_kernel_writes(), &mut done);
            guard.placement.give_back_unused();
            imported
        };
        table.with_device_rows(&rows, || table.lock_any(), import).map(drop)
    }

    /// Like [`Table::import_rows`], for the distinct rows of a load. Rows that are new to the table and fit the host
    /// budget are copied directly to their slots. After an error any prefix of the rows may be in the table.
    pub fn import_columns(&self, rows: PickedRows<'_>) -> Result<()> {
        let floats = self.inner.floats();
        let mut begin = 0;
        while begin < rows.len() {
            let end = rows.len().min(begin + ROWS_PER_IMPORT);
            let done = begin + self.put_new(rows, begin, end)?;
            if done < end {
                // Some row exists already, or the tier is full: the rest of this part is imported like other rows.
                let (headers, vectors) = rows.block(done..end, floats)?;
                self.import_rows(RowBlock { headers: &headers, vectors: &vectors })?;
            }
            begin = end;
        }
        Ok(())
    }

    /// Puts the longest possible prefix of new rows into free slots of the host tier. Returns its length.
    fn put_new(&self, rows: PickedRows<'_>, begin: usize, end: usize) -> Result<usize> {
        memory::check()?;
        let table = &self.inner;
        let no_writes = table.reading_rows()?;
        let put = |guard: &mut TableGuard<'_>| {
            table.check_writable()?;
            let put = guard.put_new(rows, begin, &rows.ids(begin..end));
            guard.placement.give_back_unused();
            put
        };
        table.with_device_rows(&no_writes, || table.lock_any(), put).map(|(_, put)| put)
    }

    /// Removes rows. Returns the number of rows removed. Errors: as [`Table::import_rows`].
    pub fn remove_rows(&self, ids: &[Id]) -> Result<u64> {
        let table = &self.inner;
        let rows = table.reading_rows()?;
        memory::check_available("remove rows", ids.len() * SPACE_PER_ROW)?;
        let distinct: Vec<Id> = crate::index::dedupe(ids).unique;
        let forget = |guard: &mut TableGuard<'_>| {
            table.check_writable()?;
            guard.placement.finish_loads();
            guard.placement.check_rows_unused(distinct.iter().copied())?;
            let forgotten = guard.forget(&distinct, rows.no_kernel_writes());
            guard.placement.give_back_unused();
            forgotten
        };
        table.with_device_rows(&rows, || table.lock(), forget).map(|(_, removed)| removed)
    }
}

/// Returns the ids of rows to import, after checking that they are distinct and belong to this shard.
fn check_block(table: &TableInner, block: RowBlock<'_>) -> Result<Vec<Id>> {
    let (floats, name) = (table.floats(), &table.config.name);
    let refuse = |message: String| Err(Kind::Input.error(format!("table {name:?}: {message}")));
    let rows = block.headers.len();
    if block.vectors.len() != rows * floats {
        return refuse(format!(
            "{rows} ids come with {} floats; {} are needed, {floats} a row",
            block.vectors.len(),
            rows * floats
        ));
    }
    let record_bytes = if table.ssd.is_some() { floats * 4 + size_of::<RowHeader>() } else { 0 };
    memory::check_available("import rows", rows * (SPACE_PER_ROW + record_bytes))?;
    let ids: Vec<Id> = block.headers.iter().map(|header| header.id).collect();
    let distinct = crate::index::dedupe(&ids);
    if distinct.unique.len() != ids.len() {
        // At the first repeated id, the number is not the next one.
        let twice = distinct.inverse.iter().enumerate().find(|&(position, &number)| position != number as usize);
        let id = twice.map_or(0, |(position, _)| ids[position]);
        return refuse(format!("id {id} is given twice"));
    }
    let (buckets, bucketing) = (&table.config.buckets, table.config.bucketing());
    if let Some(id) = ids.iter().copied().find(|&id| !buckets.contains(&bucketing.of(id))) {
        return refuse(format!(
            "id {id} is of bucket {}, this shard owns {buckets:?}; import it on its owner",
            bucketing.of(id)
        ));
    }
    Ok(ids)
}

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

    /// Like [`Table::for_each_group`], but for rows whose `modified_epoch` is at least `since`, at the cost of those
    /// rows. In RAM, reads a byte per row if `since` is the current epoch, else a header. On SSD, reads the footers of
    /// segments that have such rows.
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
        Ok(self.inner.lock()?.placement.changes.history.sweeps_since(base))
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
        ranges: &[RankKeyRange],
        version: Option<u64>,
    ) -> Result<Option<(u64, ScoreHistogram)>> {
        self.inner.during_sweeps(|| self.inner.lock(), |guard| guard.score_histogram(step, ranges, version))
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
        Ok(self.inner.lock()?.lifecycle.admission.generations())
    }

    /// Restores the admission counts of pending ids in a bucket that has none, as a load does. A table that counts
    /// nothing ignores them.
    ///
    /// Errors: `Memory`.
    pub fn restore_bucket(&self, counts: &BucketCounts) -> Result<()> {
        self.inner.lock_any()?.lifecycle.admission.restore_counts(counts, 0)
    }

    /// Adopts from `from` the OOV row, the admission counts of ids in buckets of this shard, the times of its steps,
    /// and its current time. This shard must have none of them. `from` may be closed and may use another bucketing.
    ///
    /// Errors: `Memory`; some of the counts are restored then.
    pub fn take_counts(&self, from: &Self) -> Result<()> {
        self.take_oov_row(from)?;
        let time = from.inner.lock_always().lifecycle.clock.clone();
        self.inner.lock_any()?.lifecycle.clock.join(&time);
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
        let (own_buckets, bucketing) = (self.config().buckets.clone(), self.config().bucketing());
        let mut ids = 0;
        remaining_counts(&from.inner, &mut |counts| {
            ids += counts.ids.len();
            Ok(())
        })?;
        let parts = ids.div_ceil(IDS_AT_ONCE).max(1);
        for part in own_buckets.clone().step_by(own_buckets.len().div_ceil(parts).max(1)) {
            let part = part..part.saturating_add(own_buckets.len().div_ceil(parts) as u32).min(own_buckets.end);
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
        let Some(shared) = from.inner.lock_always().lifecycle.admission.oov_row().cloned() else { return Ok(()) };
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

    /// Starts measuring the miss ratio as a function of the rows in RAM. A measurement in progress continues.
    ///
    /// Errors: `State` if the table is closed or poisoned.
    pub fn begin_sizing(&self) -> Result<()> {
        let _open = self.inner.lock_any()?;
        let config = &self.inner.config;
        let in_host = config.expected_host_bytes() / host_row_bytes(&self.inner.layout, config.policy);
        self.inner.sizing.begin(config.policy, in_host + u64::from(config.device_rows.unwrap_or(0)));
        Ok(())
    }

    /// Returns the measurement since its start or since the last call with `reset`: the curve of the table's policy,
    /// then that of `lru` if it is another. `None` if nothing is measured. With `reset`, restarts the counts from zero.
    ///
    /// Errors: as [`Table::begin_sizing`].
    pub fn miss_ratio_curves(&self, reset: bool) -> Result<Option<Vec<MissRatioCurve>>> {
        let _open = self.inner.lock_any()?;
        Ok(self.inner.sizing.curves(reset))
    }

    /// Starts keeping a copy of each row evicted by the table's rule or because the table is full, until it is taken
    /// from the queue. While many rows are queued, sweeps do not advance before batches. The queue ends when the table
    /// is closed. Its rows can still be taken then.
    pub fn start_evicted_queue(&self) -> Result<Arc<EvictedQueue>> {
        Ok(self.inner.lock_any()?.placement.start_evicted_queue())
    }

    /// Queues all rows that the sweep in progress matches, and ends the queue of [`Table::start_evicted_queue`], as
    /// closing the table does.
    pub fn end_evicted_queue(&self) -> Result<()> {
        self.inner.check_process()?;
        if !self.is_closed() {
            let is_whole = self.inner.during_sweeps(|| self.inner.lock_any(), |guard| guard.notify_rest());
            // A thread that waits for the queue must not block indefinitely, even if the table is unusable.
            self.inner.lock_always().placement.end_notifying();
            is_whole?;
        }
        Ok(())
    }

    /// Takes the next rows of the queue of [`Table::start_evicted_queue`]. If the queue has less than a full chunk,
    /// continues the sweep in progress until it has one or the sweep is done. So when this returns `None`, every row
    /// matched by a sweep has been taken, except rows of batches between their forward and their backward.
    ///
    /// Errors: those of the SSD tier and of reads of the device tier. No row is lost.
    pub fn next_evicted(&self) -> Result<Option<EvictedRows>> {
        let queue = self.start_evicted_queue()?;
        let sweep_on = || self.inner.during_sweeps(|| self.inner.lock(), |guard| guard.sweep_slice());
        while queue.rows() < queue.rows_of_chunk() && sweep_on()? {}
        Ok(queue.take())
    }
}
