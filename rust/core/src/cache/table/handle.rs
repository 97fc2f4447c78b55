//! The handle of one table shard: opening, closing, counters and flushes.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::base::TableContext;
use crate::cache::locks::{TableGuard, TableInner};
use crate::cache::residency::{Residency, TableStats, check_metadata_space};
use crate::cache::watch::BaseCheckpoint;
use crate::config::{AdmissionRule, EvictionRule, MissingRead, OnFull, TableConfig};
use crate::device::{DeviceRowReader, DeviceTier};
use crate::error::{Error, Kind, Result};
use crate::host::{HostBudget, HostTier};
use crate::io::IoEngine;
use crate::lifecycle::admission::{self, RowAdmitter};
use crate::lifecycle::{OovRow, StepClock};
use crate::memory;
use crate::rows::{RowInitializer, ScoreDecay};
use crate::ssd::{LinkedSegments, PinnedSegments, ShardIdentity, SsdTier, StateCounters};

/// One table shard. A clone is another handle of the same table. The rows are freed with the last handle, plan and
/// snapshot.
#[derive(Clone)]
pub struct Table {
    pub(crate) inner: Arc<TableInner>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("name", &self.inner.config.name).finish_non_exhaustive()
    }
}

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
        let birth = RowInitializer::new(config.initializer, config.seed, config.key)?;
        let decay = ScoreDecay::new(config.score_half_life_steps)?;
        let budget = HostBudget::new(config.host_bytes, config.shared_budget.clone());
        let host = HostTier::new(&config.name, layout, config.policy, budget, device_rows.is_some())?;
        let device = config.device_rows.map(|rows| DeviceTier::new(rows, config.policy));
        let (mut counters, mut note) = (StateCounters::default(), None);
        let ssd = match (&config.ssd, source) {
            (None, _) => None,
            (Some(ssd), Some((files, saved))) => {
                counters = saved;
                Some(SsdTier::open_from(ssd, &ShardIdentity::of(&config), layout, engine, files)?)
            }
            (Some(ssd), None) => {
                let (tier, resumed) = SsdTier::open(ssd, &ShardIdentity::of(&config), layout, engine)?;
                counters = resumed.unwrap_or_default();
                note = Some(tier.take_metadata());
                Some(tier)
            }
        };
        let admitter = RowAdmitter::of(&config);
        let base = Arc::new(TableContext::new(config, (birth, decay), device_rows, ssd));
        let mut residency = Residency::new(Arc::clone(&base), host, device, counters, admitter);
        if let Some(note) = note {
            residency.resume_metadata(&note)?;
        }
        Ok(Self { inner: Arc::new(TableInner::new(base, residency)) })
    }

    /// Returns the configuration of the table.
    pub fn config(&self) -> &TableConfig {
        &self.inner.config
    }

    /// Returns the number of rows in all tiers.
    pub fn len(&self) -> Result<u64> {
        Ok(self.inner.lock_after_sweep()?.rows())
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
        Ok(self.inner.lock()?.counters().step)
    }

    /// Sets the step counter, as a load does.
    ///
    /// Errors: `Input` for more than 2^53; `State` if it would decrease while batches in flight use deferred rows;
    /// those of finishing a sweep in progress.
    pub fn set_step(&self, step: u64) -> Result<()> {
        self.inner.during_sweeps(|| self.inner.lock_any(), |held| held.set_step(step))
    }

    /// Returns a copy of the OOV row; `None` if the table has none.
    pub fn oov_row(&self) -> Result<Option<OovRow>> {
        Ok(self.inner.lock()?.oov_row().cloned())
    }

    /// Replaces the OOV row with a saved one, as a load does; `None` resets it. Resets its optimizer slots if they
    /// belong to another optimizer. Does nothing if the table has no OOV row.
    pub fn set_oov_row(&self, saved: Option<&OovRow>) -> Result<()> {
        self.inner.lock_any()?.set_oov_row(saved);
        Ok(())
    }

    /// Like [`Table::set_oov_row`], with the OOV row of a checkpoint. Logs if the checkpoint has none.
    pub fn load_oov_row(&self, saved: Option<&OovRow>) -> Result<()> {
        let mut held = self.inner.lock_any()?;
        if saved.is_none() {
            held.log_new_oov_row("the checkpoint that it is loaded from");
        }
        held.set_oov_row(saved);
        Ok(())
    }

    /// Returns the checkpoint epoch of rows that are trained at present.
    pub fn epoch(&self) -> Result<u32> {
        Ok(self.inner.lock()?.counters().epoch)
    }

    /// Sets the checkpoint epoch. It increases with the saves; after a load it is the checkpoint's `next_epoch`.
    pub fn set_epoch(&self, epoch: u32) -> Result<()> {
        self.inner.lock_any()?.begin_epoch(epoch);
        Ok(())
    }

    /// Applies the table's eviction rule to the current rows: matching rows are missing for every batch placed
    /// afterwards, and are removed from the tiers gradually. Does nothing if the table has no rule.
    ///
    /// Errors: those of the SSD tier, if a previous sweep that matches other rows is not finished; `State` if the table
    /// takes a rule per sweep.
    pub fn sweep(&self) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.begin_sweep(None))
    }

    /// Like [`Table::sweep`], by the rule of this sweep, if the table's rule is [`EvictionRule::PerSweep`].
    ///
    /// Errors: those of [`Table::prepare_sweep`]. None after that with the same rule, until the next step.
    pub fn sweep_with_rule(&self, rule: &EvictionRule) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.begin_sweep(Some(rule)))
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
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.prepare_sweep(rule))
    }

    /// Returns the times of the table's steps, as far as they are known. Works for a table that waits for a load too.
    pub fn clock(&self) -> Result<StepClock> {
        Ok(self.inner.lock_any()?.clock().clone())
    }

    /// Replaces the times of the table's steps, as a load does. Steps of unknown times count as made at the time of the
    /// next step.
    pub fn restore_clock(&self, clock: &StepClock) -> Result<()> {
        self.inner.lock_any()?.restore_clock(clock);
        Ok(())
    }

    /// Adopts the time source of `before`, whose rows were replaced with those of a checkpoint in this table: if its
    /// user set the time, this table's user does too. `before` may be closed.
    pub fn adopt_time_source(&self, before: &Self) -> Result<()> {
        let time = before.inner.lock_always().event_time();
        self.inner.lock_any()?.adopt_time_source(time);
        Ok(())
    }

    /// Returns the table's time, in milliseconds: the time set last, else the system's since 1970. Never before the
    /// time of the last step.
    pub fn now(&self) -> Result<u64> {
        Ok(self.inner.lock()?.now())
    }

    /// Returns the largest step known to have been made by this time, in milliseconds; `None` if no such step is known.
    pub fn step_at(&self, time: u64) -> Result<Option<u64>> {
        Ok(self.inner.lock()?.clock().step_at(time))
    }

    /// Sets the table's time, in milliseconds, until the next call.
    ///
    /// Errors: `Input` if the time would decrease.
    pub fn set_time(&self, time: u64) -> Result<()> {
        self.inner.lock()?.set_time(time)
    }

    /// Checks the arguments of [`Table::set_time`] without a change.
    pub fn check_time(&self, time: u64) -> Result<()> {
        self.inner.lock()?.check_time(time)
    }

    /// Removes all rows that the sweep in progress matches, except rows of batches between their forward and their
    /// backward.
    pub(super) fn finish_sweep(&self) -> Result<()> {
        self.inner.lock_after_sweep().map(drop)
    }

    /// Returns the number of training steps and the checkpoint epoch. Works for a table that waits for a load too.
    pub fn counters(&self) -> Result<(u64, u32)> {
        let StateCounters { step, epoch } = self.inner.lock_any()?.counters();
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
        self.with_all_on_ssd(|ssd, held| {
            ssd.publish_with_metadata(commit_id, held.counters(), held.encoded_metadata(ssd.max_metadata_bytes()))
        })
        .map(drop)
    }

    /// Writes every row to SSD and pins the durable segments of the SSD tier, which then contain all rows of the table;
    /// `None` without an SSD tier. Returns the table's counters and OOV row at that time. Published states are not
    /// affected.
    ///
    /// Errors: as [`Table::flush`].
    pub fn pin_segments(&self) -> Result<Option<(PinnedSegments, StateCounters, Option<OovRow>)>> {
        self.with_all_on_ssd(|ssd, held| Ok((ssd.pin_segments()?, held.counters(), held.oov_row().cloned())))
    }

    /// Writes every dirty row to SSD and does `work` while the SSD tier has all rows; `None` without an SSD tier.
    fn with_all_on_ssd<T>(&self, work: impl FnOnce(&SsdTier, &Residency) -> Result<T>) -> Result<Option<T>> {
        let table = &self.inner;
        let Some(ssd) = &table.ssd else { return Ok(None) };
        memory::check()?;
        let rows = table.reading_rows()?;
        let mut next = 0;
        let written_down = |held: &mut TableGuard<'_>| {
            held.finish_loads();
            held.finish_sweep()?;
            held.write_back_all(rows.no_kernel_writes(), &mut next)
        };
        let (held, ()) = table.with_device_rows(&rows, || table.lock(), written_down)?;
        work(ssd, &held).map(Some).map_err(|error| table.in_table(error))
    }

    /// Checks that [`Table::open_from`] can open a table of this configuration from `files`.
    ///
    /// Errors: `Mismatch` without an SSD tier; `Config` if it is too small.
    pub fn check_opens_from(&self, files: &LinkedSegments) -> Result<()> {
        let _open = self.inner.lock_any()?;
        match (&self.inner.ssd, &self.inner.config.ssd) {
            (Some(ssd), Some(config)) => ssd.check_space(config, files.rows(), files.bytes()),
            _ => Err(Error::new(
                Kind::Mismatch,
                format!("table {:?} has no SSD tier to take segments: give it ssd_bytes", self.inner.config.name),
            )),
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
        self.inner.lock_any()?.saved_as(base);
        Ok(())
    }

    /// Like [`Table::saved_as`], for the rows of a [`Table::snapshot`] that started with this `next_epoch`; `None` if
    /// its save failed. If not all tombstones since then are known, the checkpoint does not become a base. Does nothing
    /// for a closed table.
    pub fn finish_background_save(&self, next_epoch: u32, base: Option<BaseCheckpoint>) {
        if let Ok(mut held) = self.inner.lock_any() {
            held.finish_background_save(next_epoch, base);
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
    let refuse = |message: String| Err(Error::new(Kind::Config, format!("table {:?}: {message}", config.name)));
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
        return refuse("evaluation cannot read a shared row without not_admitted=\"oov\"".into());
    }
    if config.shared_budget.is_some() && (config.ssd.is_some() || config.on_full == OnFull::Evict) {
        return refuse("only a table without an SSD tier and with on_full=\"error\" can share a budget".into());
    }
    check_metadata_space(config)?;
    let eviction = config.eviction.as_ref().map_or(Ok(()), |eviction| eviction.rule.check());
    admission::check(&config.admission).and(eviction).map_err(|error| error.context(format!("table {:?}", config.name)))
}
