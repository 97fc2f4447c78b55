//! One table shard: opening, budgets, counters.

use std::sync::Arc;
use std::time::Duration;

use super::export::Export;
use super::lineage::Lineage;
use super::load::Loading;
use super::locks::{Left, Torn};
use super::moment::Pending;
use crate::config::{PolicyKind, TableConfig};
use crate::device::{DeviceRows, DeviceTier};
use crate::error::{Error, Kind, Result};
use crate::host::HostTier;
use crate::io::IoEngine;
use crate::logical_thread::ForeignCode;
use crate::memory;
use crate::rows::{RowBirth, RowLayout};
use crate::ssd::{Identity, SegmentFiles, SsdTier, StateCounters};
use crate::stats::{SsdStats, TierStats};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock, lock};

/// Ids that left a table (see `lineage`) may take this part of `host_bytes`, 1/64, within the two bounds below.
const LINEAGE_SHARE: u64 = 64;
/// The least bytes for ids that left a table, however small it is. They count as part of a table's fixed overhead.
const LEAST_LINEAGE_BYTES: u64 = 64 << 10;
/// The most bytes for ids that left a table, however large it is.
const MOST_LINEAGE_BYTES: u64 = 128 << 20;

/// One table shard. Cheap to clone; the rows go with the last clone and the last plan.
#[derive(Clone)]
pub struct Table {
    pub(crate) shared: Arc<Shared>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("name", &self.shared.config.name).finish_non_exhaustive()
    }
}

/// What plans and the table share.
pub(crate) struct Shared {
    pub(crate) config: TableConfig,
    pub(crate) layout: RowLayout,
    pub(crate) birth: RowBirth,
    pub(crate) ssd: Option<SsdTier>,
    pub(crate) device_rows: Option<Arc<dyn DeviceRows>>,
    /// Held for writing by a backward, for reading by a forward and by whoever copies pinned rows.
    pub(crate) rows_in_use: RwLock<()>,
    pub(crate) state: Mutex<State>,
    /// Whether the state has a moment; changes while `rows_in_use` is held for reading.
    pub(crate) has_moment: AtomicBool,
    /// What was let go of while the table's lock could not be had.
    pub(super) left: Left,
    /// Whether the holder of the table's lock is running the code that reads device rows.
    pub(super) reading_device: ForeignCode,
    /// Whether the holder of `rows_in_use` is running the code of [`Plan::exclusively`](super::Plan::exclusively).
    pub(super) changing_device: ForeignCode,
    /// Changes with every change of contents; moves between tiers do not count.
    version: AtomicU64,
    pub(super) closed: AtomicBool,
    /// Whether a training step, or a change of the state, ended half-way.
    pub(super) torn: Torn,
    pub(super) pid: u32,
}

/// Everything that the table's lock protects.
pub(crate) struct State {
    pub(crate) host: HostTier,
    pub(crate) device: Option<DeviceTier>,
    /// Rows of the table in all tiers: born and not removed.
    pub(crate) rows: u64,
    /// Rows planned and not yet born.
    pub(crate) provisional: u64,
    /// How many of them training plans in flight hold, each plan's counted by itself: they may be born, those of evaluations not.
    pub(crate) pledged: u64,
    /// Rows that the SSD index took for others' and that turned out not to be there: ever so many.
    pub(crate) absent_reads: u64,
    pub(crate) step: u64,
    pub(crate) epoch: u32,
    /// Of the rows modified in this epoch or later, those that are newest in RAM are marked `MODIFIED`.
    pub(crate) marked_since: u32,
    pub(crate) lineage: Lineage,
    pub(crate) loading: Vec<Arc<Loading>>,
    pub(crate) unusable: Option<String>,
    pub(crate) host_stats: TierStats,
    pub(crate) device_stats: TierStats,
    pub(crate) ssd_hits: u64,
    pub(crate) ssd_misses: u64,
    pub(crate) ssd_time_ns: u64,
    pub(crate) dropped_rows: u64,
    pub(crate) overflow_plans: u64,
    /// What is to be handed over of the moment of a save beside training.
    pub(crate) moment: Option<Box<Pending>>,
    pub(crate) exports: Vec<Export>,
    pub(crate) next_export: u64,
}

/// Counters of a table and its tiers.
#[derive(Clone, Debug, Default)]
pub struct TableStats {
    /// Rows in all tiers.
    pub rows: u64,
    /// Training steps.
    pub step: u64,
    /// Slots that plans in flight hold.
    pub pinned_rows: u64,
    /// Plans whose working set did not fit the tier that kernels run on.
    pub overflow_plans: u64,
    /// Rows dropped by `on_full = evict`.
    pub dropped_rows: u64,
    /// The device tier, if any.
    pub device: Option<TierStats>,
    /// The host tier.
    pub host: TierStats,
    /// The SSD tier, if any.
    pub ssd: Option<SsdStats>,
}

impl Table {
    /// Check the configuration and open the tiers. `device_rows` is wanted exactly when the configuration has a device tier.
    ///
    /// Errors: `Config` for values out of range; those of [`SsdTier::open`].
    pub fn open(
        config: TableConfig,
        device_rows: Option<Arc<dyn DeviceRows>>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        Self::open_from(config, device_rows, engine, None)
    }

    /// As [`Table::open`]; with `source` its rows and counters are the contents, in place of whatever the SSD tier's directory has.
    pub fn open_from(
        mut config: TableConfig,
        device_rows: Option<Arc<dyn DeviceRows>>,
        engine: Arc<dyn IoEngine>,
        source: Option<(&SegmentFiles, StateCounters)>,
    ) -> Result<Self> {
        check(&config, device_rows.is_some())?;
        let layout = config.layout();
        let birth = RowBirth::new(config.initializer, config.seed, config.key)?;
        let host = HostTier::new(&config.name, layout, config.policy, config.host_bytes)?;
        let device = config.device_rows.map(|rows| DeviceTier::new(rows, config.policy));
        let mut counters = StateCounters::default();
        let mut lineage = Lineage::new(lineage_bytes(&config));
        let ssd = match &config.ssd {
            None => None,
            Some(ssd) if source.is_some() => source
                .map(|(files, saved)| {
                    counters = saved;
                    SsdTier::open_from(ssd, &Identity::of(&config), layout, engine, files)
                })
                .transpose()?,
            Some(ssd) => {
                let (tier, resumed) = SsdTier::open(ssd, &Identity::of(&config), layout, engine)?;
                counters = resumed.unwrap_or_default();
                lineage.decode(&tier.take_note());
                config.bucket_hash = tier.bucket_hash();
                Some(tier)
            }
        };
        let state = State {
            host,
            device,
            rows: ssd.as_ref().map_or(0, SsdTier::rows),
            provisional: 0,
            pledged: 0,
            absent_reads: 0,
            step: counters.step,
            epoch: counters.epoch,
            marked_since: counters.epoch,
            lineage,
            loading: Vec::new(),
            unusable: None,
            host_stats: TierStats::default(),
            device_stats: TierStats::default(),
            ssd_hits: 0,
            ssd_misses: 0,
            ssd_time_ns: 0,
            dropped_rows: 0,
            overflow_plans: 0,
            moment: None,
            exports: Vec::new(),
            next_export: 0,
        };
        let shared = Shared {
            config,
            layout,
            birth,
            ssd,
            device_rows,
            rows_in_use: RwLock::new(()),
            state: Mutex::new(state),
            has_moment: AtomicBool::new(false),
            left: Left::default(),
            reading_device: ForeignCode::default(),
            changing_device: ForeignCode::default(),
            version: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            torn: Torn::default(),
            pid: std::process::id(),
        };
        let table = Self { shared: Arc::new(shared) };
        table.shared.fit_host_to_index(&mut *table.shared.lock()?);
        Ok(table)
    }

    /// The configuration it was opened with.
    pub fn config(&self) -> &TableConfig {
        &self.shared.config
    }

    /// Rows of the table, in all tiers.
    pub fn len(&self) -> Result<u64> {
        Ok(self.shared.lock()?.rows)
    }

    /// Whether the table has no row.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Changes with every change of the rows: a training step, an import, a removal. Moves between tiers do not count.
    pub fn version(&self) -> u64 {
        self.shared.version()
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Training steps so far.
    pub fn step(&self) -> Result<u64> {
        Ok(self.shared.lock()?.step)
    }

    /// Set the step counter (a load).
    pub fn set_step(&self, step: u64) -> Result<()> {
        self.shared.lock_any()?.step = step;
        self.shared.contents_changed();
        Ok(())
    }

    /// Count a training step that used no id of this table.
    pub fn advance_step(&self) -> Result<()> {
        let mut state = self.shared.lock()?;
        state.step += 1;
        self.shared.contents_changed();
        Ok(())
    }

    /// The checkpoint epoch that rows trained now are marked with.
    pub fn epoch(&self) -> Result<u32> {
        Ok(self.shared.lock()?.epoch)
    }

    /// Set the checkpoint epoch. It rises with the saves; after a load it is the checkpoint's `next_epoch`.
    pub fn set_epoch(&self, epoch: u32) -> Result<()> {
        self.shared.lock_any()?.begin_epoch(epoch);
        Ok(())
    }

    /// Refuse every use until a load succeeds (`None`): its contents are incomplete.
    pub fn set_unusable(&self, reason: Option<String>) -> Result<()> {
        self.shared.lock_any()?.unusable = reason;
        Ok(())
    }

    /// Why every use is refused; `None` where it is not.
    pub fn unusable(&self) -> Result<Option<String>> {
        Ok(self.shared.lock_any()?.unusable.clone())
    }

    /// Write every dirty row down and publish one state named `token`, which is larger than every earlier one. Without an SSD tier there is
    /// nothing to do.
    pub fn flush(&self, token: u64) -> Result<()> {
        self.flush_with(Some(token))
    }

    /// As [`Table::flush`], under the next even token: threads that do so at once take one after the other.
    pub fn flush_next(&self) -> Result<()> {
        self.flush_with(None)
    }

    fn flush_with(&self, token: Option<u64>) -> Result<()> {
        let Some(ssd) = &self.shared.ssd else { return Ok(()) };
        memory::check()?;
        let _rows = self.shared.reading_rows()?;
        let mut state = self.shared.lock()?;
        self.shared.finish_loads(&mut state);
        self.shared.write_down_all(&mut state)?;
        let counters = StateCounters { step: state.step, epoch: state.epoch };
        let lineage = state.lineage.encode(ssd.most_note_bytes());
        ssd.publish_with(token, counters, lineage)
            .map_err(|error| error.context(format!("table {:?}", self.shared.config.name)))
    }

    /// Forget the published state named `token`, so that the next flush does not push out the state before it.
    pub fn forget_published(&self, token: u64) -> Result<()> {
        let _open = self.shared.lock_any()?;
        self.shared.ssd.as_ref().map_or(Ok(()), |ssd| ssd.forget_published(token))
    }

    /// Token of the last state that was flushed or resumed, whether or not it is still there: the next one is larger.
    pub fn last_token(&self) -> Option<u64> {
        self.shared.ssd.as_ref().and_then(SsdTier::last_token)
    }

    /// Whether the SSD tier gave up, for space, the states that a resume could take since the last flush.
    pub fn published_given_up(&self) -> bool {
        self.shared.ssd.as_ref().is_some_and(SsdTier::published_given_up)
    }

    /// Whether a write of the SSD tier failed, so that rows can be read and saved elsewhere and no more.
    pub fn is_read_only(&self) -> bool {
        self.shared.ssd.as_ref().is_some_and(SsdTier::is_read_only)
    }

    /// The training steps so far and the checkpoint epoch, also of a table that waits for a load.
    pub fn counters(&self) -> Result<(u64, u32)> {
        let state = self.shared.lock_any()?;
        Ok((state.step, state.epoch))
    }

    /// Wait at most so long until no save beside training holds the table's rows; whether none does. In a forked child, whose parent
    /// has the table, none does.
    pub fn wait_for_save(&self, most: Duration) -> Result<bool> {
        if self.shared.check_process().is_err() {
            return Ok(true);
        }
        self.shared.wait_for_moment_at_most(most)
    }

    /// Stop background work, after a save beside training where one is under way. Rows in RAM that were not flushed are gone. Harmless
    /// twice, and in a forked child, whose parent has the table.
    pub fn close(&self) -> Result<()> {
        if self.shared.check_process().is_err() {
            return Ok(());
        }
        self.shared.wait_for_moment()?;
        if self.shared.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let mut state = lock(&self.shared.state);
        self.shared.finish_loads(&mut state);
        drop(state);
        self.shared.ssd.as_ref().map_or(Ok(()), SsdTier::close)
    }

    /// Counters of the table and its tiers.
    pub fn stats(&self) -> Result<TableStats> {
        let mut state = self.shared.lock_any()?;
        let on_device = state.device.as_mut().map_or(0, |device| device.slots.pinned());
        let pinned_rows = u64::from(state.host.slots.pinned() + on_device);
        let ssd = self.shared.ssd.as_ref().map(|ssd| {
            let mut stats = ssd.stats();
            stats.tier.hits = state.ssd_hits;
            stats.tier.misses = state.ssd_misses;
            stats.tier.time_ns = state.ssd_time_ns;
            stats
        });
        let host = &state.host;
        let charged =
            self.shared.ssd.as_ref().map_or(0, |ssd| {
                HostTier::charged_bytes(ssd.index_bytes(), ssd.rows()) + charged_lineage_bytes(&state)
            });
        let rows_here = u64::from(host.slots.used() + host.slots.overflow_used());
        let device = state.device.as_ref().map(|device| {
            let rows = u64::from(device.slots.used() + device.slots.overflow_used());
            let row_bytes = device_row_bytes(&self.shared.layout, self.shared.config.policy);
            TierStats {
                rows,
                bytes: rows * row_bytes,
                capacity_bytes: u64::from(device.slots.capacity()) * row_bytes,
                ..state.device_stats
            }
        });
        Ok(TableStats {
            rows: state.rows,
            step: state.step,
            pinned_rows,
            overflow_plans: state.overflow_plans,
            dropped_rows: state.dropped_rows,
            device,
            host: TierStats {
                rows: rows_here,
                bytes: rows_here * host.row_bytes() + charged,
                capacity_bytes: host.budget_bytes(),
                ..state.host_stats
            },
            ssd,
        })
    }
}

/// Ids that left since a save may take so many bytes of RAM, and as many with each flush.
fn lineage_bytes(config: &TableConfig) -> u64 {
    let most = (config.host_bytes / LINEAGE_SHARE).clamp(LEAST_LINEAGE_BYTES, MOST_LINEAGE_BYTES);
    config.ssd.as_ref().map_or(most, |ssd| most.min(SsdTier::note_bytes_of(ssd.bytes) as u64))
}

/// What the host budget counts of the ids that left, where rows in RAM can make room for them.
pub(super) fn charged_lineage_bytes(state: &State) -> u64 {
    state.lineage.bytes().saturating_sub(LEAST_LINEAGE_BYTES)
}

/// Bytes of the host budget that a row takes.
pub fn host_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    HostTier::bytes_per_row(layout, policy)
}

/// Bytes of the device budget that a row takes: values on the device; header, index and policy in RAM.
pub fn device_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    (layout.floats() * 4 + size_of::<crate::rows::RowHeader>() + crate::slots::SlotMap::bytes_per_slot(policy)) as u64
}

impl Shared {
    /// Note that the table's contents changed: a training step, an import, a removal.
    pub(crate) fn contents_changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Changes with every change of contents.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// How many rows the host budget holds beside the index of the rows on SSD.
    pub(crate) fn host_rows_beside_index(&self, state: &State) -> u64 {
        let Some(ssd) = &self.ssd else { return state.host.rows_beside_index(0, 0) };
        let lineage = charged_lineage_bytes(state).div_ceil(state.host.row_bytes());
        state.host.rows_beside_index(ssd.index_bytes(), ssd.rows()).saturating_sub(lineage)
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
    Ok(())
}
