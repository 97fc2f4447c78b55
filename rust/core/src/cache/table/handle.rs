//! One table shard: how it is opened and closed, its counters, its flushes.

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

/// One table shard. A clone is another handle of the same table. The rows go with the last handle, plan and moment.
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
    /// Check the configuration and open the tiers. `device_rows` is given exactly when the configuration has a device tier.
    ///
    /// Errors: `Config` for values out of range; those of [`SsdTier::open`].
    pub fn open(
        config: TableConfig,
        device_rows: Option<Arc<dyn DeviceRowReader>>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        Self::open_from(config, device_rows, engine, None)
    }

    /// As [`Table::open`]. With `source`, its rows and counters are the contents of the table, in place of whatever the directory of the
    /// SSD tier has.
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

    /// The configuration that the table was opened with.
    pub fn config(&self) -> &TableConfig {
        &self.inner.config
    }

    /// Rows of the table, in all tiers.
    pub fn len(&self) -> Result<u64> {
        Ok(self.inner.lock_after_sweep()?.rows())
    }

    /// Whether the table has no row.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// A number that changes with every change of the rows, such as a training step, an import, a removal or a sweep, and with those of
    /// the step counter and the shared row. Moves between tiers do not change it.
    pub fn version(&self) -> u64 {
        self.inner.version()
    }

    /// Whether the table was closed.
    pub fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Training steps so far.
    pub fn step(&self) -> Result<u64> {
        Ok(self.inner.lock()?.counters().step)
    }

    /// Set the step counter, as a load does.
    ///
    /// Errors: `Input` for more than 2^53; `State` where it is to be set back while a sweep spares rows that batches in flight use; those of the end of a sweep that is
    /// under way.
    pub fn set_step(&self, step: u64) -> Result<()> {
        self.inner.during_sweeps(|| self.inner.lock_any(), |held| held.set_step(step))
    }

    /// The row that ids share which are refused one, as it is now; `None` where the table has none.
    pub fn oov_row(&self) -> Result<Option<OovRow>> {
        Ok(self.inner.lock()?.oov_row().cloned())
    }

    /// Replace the shared row by a saved one, as a load does; `None` begins it anew. Its slots begin anew where they are of another
    /// optimizer. Nothing where the table has no shared row.
    pub fn set_oov_row(&self, saved: Option<&OovRow>) -> Result<()> {
        self.inner.lock_any()?.set_oov_row(saved);
        Ok(())
    }

    /// As [`Table::set_oov_row`], with that of a checkpoint. Where it has none, a line of the log says so.
    pub fn load_oov_row(&self, saved: Option<&OovRow>) -> Result<()> {
        let mut held = self.inner.lock_any()?;
        if saved.is_none() {
            held.log_new_oov_row("the checkpoint that it is loaded from");
        }
        held.set_oov_row(saved);
        Ok(())
    }

    /// The checkpoint epoch of rows that are trained now.
    pub fn epoch(&self) -> Result<u32> {
        Ok(self.inner.lock()?.counters().epoch)
    }

    /// Set the checkpoint epoch. It rises with the saves; after a load it is the checkpoint's `next_epoch`.
    pub fn set_epoch(&self, epoch: u32) -> Result<()> {
        self.inner.lock_any()?.begin_epoch(epoch);
        Ok(())
    }

    /// Apply the table's rule of eviction to the rows of now: those that it takes are gone for every batch that is placed from now on, and
    /// leave the tiers little by little. Nothing where the table has no rule.
    ///
    /// Errors: those of the SSD tier, where a sweep that took other rows is not done; `State` where the rule is one that is given with each
    /// sweep.
    pub fn sweep(&self) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.begin_sweep(None))
    }

    /// As [`Table::sweep`], by the rule that is given with this sweep, where the table's is [`EvictionRule::PerSweep`].
    ///
    /// Errors: those of [`Table::prepare_sweep`]. There are none after that with the same rule, until the next step.
    pub fn sweep_with_rule(&self, rule: &EvictionRule) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.begin_sweep(Some(rule)))
    }

    /// Sweep tables one after the other: each as [`Table::sweep_with_rule`] with the rule beside it, or as [`Table::sweep`] without one.
    ///
    /// Errors: as there. None where all of them were prepared; else the tables before the one that fails are swept.
    pub fn sweep_all(tables: &[(Self, Option<&EvictionRule>)]) -> Result<()> {
        tables
            .iter()
            .try_for_each(|(table, given)| given.map_or_else(|| table.sweep(), |given| table.sweep_with_rule(given)))
    }

    /// Do what can fail of [`Table::sweep`], or of [`Table::sweep_with_rule`], so that the ranks that share the table sweep together, or none of them
    /// does.
    ///
    /// Errors: `State` where a rule is given and should not be, or the other way round; `Config` for a rule that is out of range; those of
    /// the SSD tier, where a sweep that took other rows is not done.
    pub fn prepare_sweep(&self, rule: Option<&EvictionRule>) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.during_sweeps(|| self.inner.lock(), |held| held.prepare_sweep(rule))
    }

    /// When the table's steps were made, as far as that is known, also of a table that waits for a load.
    pub fn clock(&self) -> Result<StepClock> {
        Ok(self.inner.lock_any()?.clock().clone())
    }

    /// Replace what is known of when the table's steps were made, as a load does. Steps of unknown times count as made when the next one is.
    pub fn restore_clock(&self, clock: &StepClock) -> Result<()> {
        self.inner.lock_any()?.restore_clock(clock);
        Ok(())
    }

    /// The rows of a checkpoint were opened in the place of those of `before`, which may be closed: where its user gave the time, this
    /// table's user does too.
    pub fn adopt_time_source(&self, before: &Self) -> Result<()> {
        let time = before.inner.lock_always().event_time();
        self.inner.lock_any()?.adopt_time_source(time);
        Ok(())
    }

    /// The table's time, in milliseconds: what was set last, else the system's since 1970. It is never before that of the last step.
    pub fn now(&self) -> Result<u64> {
        Ok(self.inner.lock()?.now())
    }

    /// The greatest step that is known to have been made by this time, in milliseconds; `None` where that is known of no step.
    pub fn step_at(&self, time: u64) -> Result<Option<u64>> {
        Ok(self.inner.lock()?.clock().step_at(time))
    }

    /// From now on the table's time is the one that is given, in milliseconds, until the next is.
    ///
    /// Errors: `Input` where time would go back.
    pub fn set_time(&self, time: u64) -> Result<()> {
        self.inner.lock()?.set_time(time)
    }

    /// As [`Table::set_time`], and nothing changes.
    pub fn check_time(&self, time: u64) -> Result<()> {
        self.inner.lock()?.check_time(time)
    }

    /// Bury all rows that the sweep under way takes, but those of batches that are between their forward and their backward.
    pub(super) fn finish_sweep(&self) -> Result<()> {
        self.inner.lock_after_sweep().map(drop)
    }

    /// The training steps so far and the checkpoint epoch, also of a table that waits for a load.
    pub fn counters(&self) -> Result<(u64, u32)> {
        let StateCounters { step, epoch } = self.inner.lock_any()?.counters();
        Ok((step, epoch))
    }

    /// Refuse every use with this reason until a load succeeds (`None`), because the contents are incomplete.
    pub fn set_unusable(&self, reason: Option<String>) -> Result<()> {
        self.inner.lock_any()?.set_unusable(reason);
        Ok(())
    }

    /// Why every use is refused; `None` where it is not.
    pub fn unusable(&self) -> Result<Option<String>> {
        Ok(self.inner.lock_any()?.unusable().map(str::to_owned))
    }

    /// Write every dirty row down and publish one state named `commit_id`, which is larger than every earlier one. Without an SSD tier there is
    /// nothing to do.
    pub fn flush(&self, commit_id: u64) -> Result<()> {
        self.flush_with(Some(commit_id))
    }

    /// As [`Table::flush`], under the next even token: threads that do so at once take one after the other.
    pub fn flush_next(&self) -> Result<()> {
        self.flush_with(None)
    }

    fn flush_with(&self, commit_id: Option<u64>) -> Result<()> {
        self.with_all_on_ssd(|ssd, held| {
            ssd.publish_with_metadata(commit_id, held.counters(), held.encoded_metadata(ssd.max_metadata_bytes()))
        })
        .map(drop)
    }

    /// Write every row down and hold the segments of the SSD tier, durable, which then have all rows of the table; `None` without an SSD
    /// tier. The table's counters and its shared row are as of then. The states that a resume could take are not touched.
    ///
    /// Errors as [`Table::flush`].
    pub fn pin_segments(&self) -> Result<Option<(PinnedSegments, StateCounters, Option<OovRow>)>> {
        self.with_all_on_ssd(|ssd, held| Ok((ssd.pin_segments()?, held.counters(), held.oov_row().cloned())))
    }

    /// Write every dirty row down and do `work` while the SSD tier has all rows; `None` without an SSD tier.
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

    /// Whether [`Table::open_from`] can open a table of this configuration from `files`.
    ///
    /// Errors: `Mismatch` without an SSD tier, `Config` where that is too small.
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

    /// Forget the published state named `commit_id`, so that the next flush does not push out the state before it.
    pub fn forget_published(&self, commit_id: u64) -> Result<()> {
        let _open = self.inner.lock_any()?;
        self.inner.ssd.as_ref().map_or(Ok(()), |ssd| ssd.forget_published(commit_id))
    }

    /// The token of the last state that was flushed or resumed, whether or not it is still there. The next one is larger.
    pub fn last_commit_id(&self) -> Option<u64> {
        self.inner.ssd.as_ref().and_then(SsdTier::last_commit_id)
    }

    /// Whether the SSD tier gave up, for want of room, the states that a resume could take since the last flush.
    pub fn published_given_up(&self) -> bool {
        self.inner.ssd.as_ref().is_some_and(SsdTier::published_given_up)
    }

    /// Errors: `ReadOnly` where a write of the SSD tier failed, so that no row may be changed.
    pub fn check_writable(&self) -> Result<()> {
        self.inner.check_writable()
    }

    /// Whether a write of the SSD tier failed. Rows can be read and saved elsewhere then, and not changed.
    pub fn is_read_only(&self) -> bool {
        self.inner.ssd.as_ref().is_some_and(SsdTier::is_read_only)
    }

    /// The checkpoints that a delta of this table can build on, oldest first.
    pub fn base_checkpoints(&self) -> Result<Vec<BaseCheckpoint>> {
        Ok(self.inner.lock_after_sweep()?.base_checkpoints().to_vec())
    }

    /// Note that the contents, as of the end of the epoch before `base.next_epoch`, are those of this checkpoint: the table was saved
    /// as it, or loaded from it. This is called once the checkpoint is published on all ranks. Rows that are modified from now on must be
    /// of `next_epoch` or a later one (see [`Table::set_epoch`]).
    pub fn saved_as(&self, base: BaseCheckpoint) -> Result<()> {
        self.inner.lock_any()?.saved_as(base);
        Ok(())
    }

    /// As [`Table::saved_as`], of the rows of a [`Table::moment`] that began with this `next_epoch`; `None` where its save failed. Where
    /// ids left since that are not all remembered, the checkpoint is no ancestor. A closed table has no use for it.
    pub fn finish_background_save(&self, next_epoch: u32, base: Option<BaseCheckpoint>) {
        if let Ok(mut held) = self.inner.lock_any() {
            held.finish_background_save(next_epoch, base);
        }
    }

    /// Wait until no save beside training holds the table's rows, for about `most` at most. Returns whether none does. In a forked child,
    /// whose parent has the table, none does.
    pub fn wait_for_save(&self, most: Duration) -> Result<bool> {
        if self.inner.check_process().is_err() {
            return Ok(true);
        }
        self.inner.wait_for_snapshot_end_at_most(most)
    }

    /// Stop background work, once a save beside training is over where one is under way. Rows in RAM that were not flushed are gone. It is
    /// harmless to call this twice, or in a forked child, whose parent has the table.
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

    /// Counters of the table and its tiers.
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
