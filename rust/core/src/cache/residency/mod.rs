//! Placement of a table's rows in its tiers. Only [`Residency`] moves rows between tiers, and only it updates their
//! state bits and the table's counters.
//!
//! All of it runs under the table's lock. The other modules call named operations: a plan *admits* rows to the host
//! tier, *promotes* them to the device, *trains* and *releases* them; rows are *demoted* from the device, *evicted*
//! from RAM, *written back* to SSD, *dropped* when the table is full; calls by id *find*, *read*, *import* and *forget*
//! rows. Each operation notifies the watchers ([`watch`](super::watch)) before a row changes or leaves its slot.
//!
//! Fallible work precedes moves. The docs of an operation state the changes that remain after an error, mostly none.

mod admit;
mod begin_sweep;
mod bury;
mod capacity;
mod census;
mod changes;
mod copies;
mod counts;
mod demand;
mod device;
mod find;
mod hold;
mod import;
mod in_place;
mod judge;
mod loads;
mod newest;
mod note;
mod pace;
mod promote;
mod refuse;
mod room;
mod shared;
mod spared;
mod stage;
mod sweep;
mod time;
mod told;
mod train;
mod under_way;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use changes::ChangeCounts;
pub(super) use copies::DeviceCopies;
pub(super) use demand::PlanDemand;
pub(super) use hold::{AbsentRead, PlanPins};
pub use hold::{FetchedRows, MissingMode, PlanMode};
pub(super) use newest::ExportStart;
pub(super) use note::check_metadata_space;

use self::counts::RowCounts;
use self::in_place::ActivePlans;
use self::loads::HostLoad;
use self::refuse::NewRowLog;
use self::spared::DeferredRows;
use self::told::EvictionNotifier;
use self::under_way::SweepProgress;
use super::base::TableContext;
use super::watch::{BaseCheckpoint, CheckpointHistory, ExportSet, SnapshotRows};
use crate::config::{PolicyKind, SsdConfig, TableConfig};
use crate::device::DeviceTier;
use crate::error::{Error, Kind, Result};
use crate::host::HostTier;
use crate::lifecycle::admission::RowAdmitter;
use crate::lifecycle::{AdmissionCounters, ExpirySweep, OovRow, StepClock};
use crate::rows::{RowArena, RowHeader, RowLayout};
use crate::slots::{RowState, SlotMap};
use crate::ssd::{SsdTier, StateCounters};
use crate::stats::{AdmissionStats, EvictionStats, HistogramSnapshot, SsdStats, TierStats};
use crate::types::{CacheSlot, NO_SLOT};

/// The largest step of a table that can be set. Training can count on from it without an overflow.
const MOST_STEPS: u64 = 1 << 53;
/// Distance, in slots, at which a pass over the slots prefetches slot state into the CPU cache.
const SLOTS_AHEAD: usize = 24;
/// Maximum number of rows in one read from the device.
const ROWS_PER_GATHER: usize = 4096;

/// The tombstones of a table may use `host_bytes / HISTORY_SHARE`, within the two bounds below.
const HISTORY_SHARE: u64 = 64;
/// Lower bound of the bytes for tombstones, for small tables.
const LEAST_HISTORY_BYTES: u64 = capacity::FREE_HISTORY_BYTES;
/// Upper bound of the bytes for tombstones, for large tables.
const MOST_HISTORY_BYTES: u64 = 128 << 20;

/// The rows of one table in RAM and on the device, the state of its rows on SSD, and the watchers of both.
pub(crate) struct Residency {
    context: Arc<TableContext>,
    host: HostTier,
    device: Option<DeviceTier>,
    counts: RowCounts,
    traffic: PlanTraffic,
    /// Unfinished reads into host slots.
    loads: Vec<Arc<HostLoad>>,
    /// Number of reads since the table was opened that found no row where the SSD index had named one.
    absent_reads: u64,
    /// Number of training steps.
    step: u64,
    /// The epoch of rows that are trained at present.
    epoch: u32,
    /// Rows modified in this epoch or later whose newest copy is in RAM are marked `MODIFIED`.
    marked_since: u32,
    history: CheckpointHistory,
    exports: ExportSet,
    snapshot: Option<Box<SnapshotRows>>,
    /// Decides which ids are admitted and counts the others. `None` if every id is admitted.
    admitter: Option<RowAdmitter>,
    new_rows: NewRowLog,
    active_plans: ActivePlans,
    /// The sweep that has not removed all of its expired rows yet.
    sweep: Option<SweepProgress>,
    /// Rows deferred by earlier sweeps because active plans use them.
    deferred: DeferredRows,
    /// The last finished sweep, if no rows were added to the table since it started.
    last_sweep: Option<ExpirySweep>,
    /// Times of the training steps, as far as they are known.
    clock: StepClock,
    /// The time set by the user, in milliseconds.
    user_time: Option<u64>,
    /// The time set by the user before a load. It is the current time if the load brought no times. Times set later may
    /// precede it.
    time_before_load: u64,
    /// Delivers evicted rows; `None` if there is no consumer.
    notifier: Option<Box<EvictionNotifier>>,
    /// Number of rows expired by sweeps, by rule name.
    evicted_by_rule: BTreeMap<&'static str, u64>,
    /// The table's version, if nothing has changed since the last sweep except by that sweep.
    version_after_sweep: Option<u64>,
    /// The OOV row: the row shared by ids that are not admitted, if the table has one.
    oov_row: Option<OovRow>,
    /// Copies of device rows for the operation that holds the table's lock.
    copies: DeviceCopies,
}

/// Hits and misses of plans by tier since the table was opened.
#[derive(Debug, Default)]
struct PlanTraffic {
    host: TierStats,
    device: TierStats,
    ssd_hits: u64,
    ssd_misses: u64,
    ssd_time_ns: u64,
    overflow_plans: u64,
    admitted: u64,
    not_admitted: u64,
}

/// Counters of a table and its tiers.
#[derive(Clone, Debug, Default)]
pub struct TableStats {
    /// Number of rows in all tiers.
    pub rows: u64,
    /// Number of training steps.
    pub step: u64,
    /// Number of slots pinned by plans in flight.
    pub pinned_rows: u64,
    /// Number of plans whose working set did not fit the tier that kernels run on.
    pub overflow_plans: u64,
    /// Number of rows dropped because of `on_full = evict`.
    pub dropped_rows: u64,
    /// Time that training waited for each batch until all of its rows had slots: for reads, free space and the table's
    /// lock.
    pub row_wait: HistogramSnapshot,
    /// Durations of holding the table's lock.
    pub lock_held: HistogramSnapshot,
    /// Admission statistics, if the table has an admission rule.
    pub admission: Option<AdmissionStats>,
    /// Eviction statistics, if the table has an eviction rule or a consumer of evicted rows.
    pub eviction: Option<EvictionStats>,
    /// The device tier, if there is one.
    pub device: Option<TierStats>,
    /// The host tier.
    pub host: TierStats,
    /// The SSD tier, if there is one.
    pub ssd: Option<SsdStats>,
}

impl Residency {
    /// The placement of a table that was just opened, with all its rows on SSD. `host` and `device` are empty.
    pub(crate) fn new(
        context: Arc<TableContext>,
        host: HostTier,
        device: Option<DeviceTier>,
        counters: StateCounters,
        admitter: Option<RowAdmitter>,
    ) -> Self {
        let mut residency = Self {
            host,
            device,
            counts: RowCounts::of(context.ssd.as_ref().map_or(0, SsdTier::rows)),
            traffic: PlanTraffic::default(),
            loads: Vec::new(),
            absent_reads: 0,
            step: counters.step,
            epoch: counters.epoch,
            marked_since: counters.epoch,
            history: CheckpointHistory::new(history_bytes(&context.config)),
            exports: ExportSet::default(),
            snapshot: None,
            admitter,
            new_rows: NewRowLog::default(),
            active_plans: ActivePlans::default(),
            sweep: None,
            deferred: DeferredRows::default(),
            last_sweep: None,
            clock: StepClock::default(),
            user_time: None,
            time_before_load: 0,
            notifier: None,
            evicted_by_rule: BTreeMap::new(),
            version_after_sweep: None,
            copies: DeviceCopies::default(),
            oov_row: context.has_oov_row().then(|| OovRow::zeros(context.layout)),
            context,
        };
        residency.fit_host_to_index();
        residency
    }

    /// Number of rows in all tiers.
    pub(crate) fn rows(&self) -> u64 {
        self.counts.rows()
    }

    /// The training step and the epoch, as stored in the SSD tier's state and in checkpoints.
    pub(crate) fn counters(&self) -> StateCounters {
        StateCounters { step: self.step, epoch: self.epoch }
    }

    /// Sets the step counter. Finishes the sweep in progress first, because it does not match rows trained later.
    ///
    /// Errors: `Input` if `step` exceeds [`MOST_STEPS`]; those of [`Residency::finish_sweep`]; `State` if the step
    /// would decrease while batches in flight use deferred rows, because rows trained at a lower step would count as
    /// trained before the sweep. On an error nothing has changed.
    pub(crate) fn set_step(&mut self, step: u64) -> Result<()> {
        if step > MOST_STEPS {
            let name = &self.context.config.name;
            let message = format!("table {name:?}: step={step} is out of range: give at most 2^53 ({MOST_STEPS})");
            return Err(Error::new(Kind::Input, message));
        }
        self.finish_sweep()?;
        if step < self.step && self.has_deferred() {
            return Err(self.in_use_error(
                "the step is to be set back, and rows that a sweep spares are used by batches in flight",
            ));
        }
        self.step = step;
        self.clock.forget_from(step + 1);
        self.last_sweep = None;
        self.context.bump_version();
        Ok(())
    }

    /// Number of pinned slots.
    fn pinned(&mut self) -> u32 {
        self.host.slots.pinned() + self.device.as_mut().map_or(0, |device| device.slots.pinned())
    }

    /// Memory of the rows that kernels use; `None` if kernels run on the device tier.
    pub(crate) fn kernel_arena(&self) -> Option<&Arc<RowArena>> {
        self.device.is_none().then(|| self.host.arena())
    }

    /// Number of slots that the device tensors must have. 0 without a device tier.
    pub(crate) fn required_device_slots(&self) -> u32 {
        self.device.as_ref().map_or(0, DeviceTier::required_slots)
    }

    /// Allocates memory for `rows` more rows, as far as they fit the host budget.
    pub(crate) fn reserve(&mut self, rows: u64) -> Result<()> {
        self.host.reserve(rows.min(self.host.free_rows()) as usize)
    }

    /// Number of rows of a plan beyond the budget of the tier that kernels run on.
    pub(crate) fn overflow_of(&self, pins: &PlanPins) -> u32 {
        let (slots, capacity) = match &self.device {
            Some(device) => (&pins.device, device.slots.capacity()),
            None => (&*pins.host, self.host.slots.capacity()),
        };
        let past = |slot: &&CacheSlot| **slot != NO_SLOT && **slot >= capacity;
        let past = slots.iter().filter(past).count() as u32;
        // Without a device tier, slots of the host tier may exceed the budget shared by tables.
        if self.device.is_some() { past } else { (past + self.host.rows_past_budget()).min(slots.len() as u32) }
    }

    /// Counts a placed plan that has this many rows beyond the budget.
    pub(crate) fn count_overflow(&mut self, rows: u32) {
        self.traffic.overflow_plans += u64::from(rows > 0);
    }

    /// Replaces slots of provisional rows with `NO_SLOT`, for an evaluation that reads zeros for missing ids. `slots`
    /// are slots of the tier that kernels run on, one per id of the plan: `[U]`.
    pub(crate) fn leave_out_provisional(&self, pins: &PlanPins, slots: &mut [CacheSlot]) {
        for (slot, &host) in slots.iter_mut().zip(&*pins.host) {
            let on_device = self.device.as_ref().is_some_and(|tier| Self::is_provisional(&tier.slots, *slot));
            if on_device || Self::is_provisional(&self.host.slots, host) {
                *slot = NO_SLOT;
            }
        }
    }

    /// True if the slot has a provisional row. `NO_SLOT` has none.
    #[inline]
    fn is_provisional(slots: &SlotMap, slot: CacheSlot) -> bool {
        slot != NO_SLOT && slots.state(slot).has(RowState::PROVISIONAL)
    }

    /// Counts the time that a plan has waited for the SSD tier.
    pub(crate) fn record_ssd_wait(&mut self, nanoseconds: u64) {
        self.traffic.ssd_time_ns += nanoseconds;
    }

    /// Removes every row and keeps the admission counts of pending ids. Requires that no plan uses a row and no read is
    /// in progress.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.notify_rest()?;
        // Cancels exports that could miss some of the rows.
        self.context.bump_version();
        if let Some(ssd) = &self.context.ssd {
            ssd.clear()?;
        }
        let policy = self.context.config.policy;
        self.host.clear(policy);
        if let Some(device) = &mut self.device {
            device.clear(policy);
        }
        self.counts.cleared();
        self.history.forget();
        self.drop_sweep();
        // Rows added later may belong to other steps.
        self.restore_clock(&StepClock::default());
        Ok(())
    }

    /// Clears the admission counts of all pending ids.
    pub(crate) fn clear_counts(&mut self) {
        if let Some(admitter) = &mut self.admitter {
            admitter.clear();
        }
    }

    /// The base checkpoints of a possible delta, oldest first. Empty while rows are deferred, because a delta that
    /// records the sweep could not contain them.
    pub(crate) fn base_checkpoints(&self) -> &[BaseCheckpoint] {
        if self.has_deferred() { &[] } else { self.history.bases() }
    }

    /// The sweeps since `base`. They match exactly those rows of that checkpoint that they have removed.
    pub(crate) fn sweeps_since(&self, base: &BaseCheckpoint) -> Vec<ExpirySweep> {
        self.history.sweeps_since(base)
    }

    /// Records that the table was saved as this checkpoint, or loaded from it.
    pub(crate) fn saved_as(&mut self, base: BaseCheckpoint) {
        self.history.saved_as(base);
    }

    /// Records the end of the background save whose snapshot started with `next_epoch`. `base` is `None` if the save
    /// failed.
    pub(crate) fn finish_background_save(&mut self, next_epoch: u32, base: Option<BaseCheckpoint>) {
        self.history.finish_background_save(next_epoch, base);
    }

    /// Returns counters of the table and its tiers.
    pub(crate) fn stats(&mut self) -> TableStats {
        let pinned_rows = u64::from(self.pinned());
        let ssd = self.context.ssd.as_ref();
        let charged =
            ssd.map_or(0, |ssd| HostTier::charged_bytes(ssd.index_bytes(), ssd.rows()) + self.charged_history_bytes());
        let device = self.device.as_ref().map(|device| {
            let rows = device.row_count();
            let row_bytes = device_row_bytes(&self.context.layout, self.context.config.policy);
            TierStats {
                rows,
                bytes: rows * row_bytes,
                capacity_bytes: u64::from(device.slots.capacity()) * row_bytes,
                ..self.traffic.device
            }
        });
        let rows = self.host.row_count();
        TableStats {
            rows: self.counts.rows(),
            step: self.step,
            pinned_rows,
            overflow_plans: self.traffic.overflow_plans,
            dropped_rows: self.counts.dropped(),
            row_wait: self.context.row_wait.snapshot(),
            lock_held: self.context.lock_held.snapshot(),
            admission: self.admitter.as_ref().map(|admitter| self.admission_stats(admitter)),
            eviction: self.eviction_stats(),
            device,
            host: TierStats {
                rows,
                bytes: rows * self.host.row_bytes() + charged,
                capacity_bytes: self.host.budget().with_share_of_free(),
                ..self.traffic.host
            },
            ssd: ssd.map(|ssd| self.ssd_stats(ssd)),
        }
    }

    fn admission_stats(&self, admitter: &RowAdmitter) -> AdmissionStats {
        let PlanTraffic { admitted, not_admitted: refused, .. } = self.traffic;
        let pending = admitter.counters();
        AdmissionStats {
            admitted,
            not_admitted: refused,
            pending: pending.map_or(0, AdmissionCounters::len),
            pending_bytes: pending.map_or(0, AdmissionCounters::bytes),
            forgotten: pending.map_or(0, AdmissionCounters::forgotten),
        }
    }

    fn ssd_stats(&self, ssd: &SsdTier) -> SsdStats {
        let mut stats = ssd.stats();
        // These three count rows of plans only. The tier also counts reads outside of plans.
        stats.tier.hits = self.traffic.ssd_hits;
        stats.tier.misses = self.traffic.ssd_misses;
        stats.tier.time_ns = self.traffic.ssd_time_ns;
        stats
    }

    /// Resident bytes of the rows in RAM, as reported by the operating system.
    #[cfg(test)]
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.host.arena().resident_bytes() as u64
    }
}

/// Maximum bytes of RAM for the tombstones since a save. Each flush may write as many bytes.
fn history_bytes(config: &TableConfig) -> u64 {
    let most = (config.expected_host_bytes() / HISTORY_SHARE).clamp(LEAST_HISTORY_BYTES, MOST_HISTORY_BYTES);
    let in_note = |ssd: &SsdConfig| note::rest_bytes(config, SsdTier::max_metadata_bytes_of(ssd.bytes)) as u64;
    config.ssd.as_ref().map_or(most, |ssd| most.min(in_note(ssd)))
}

/// Bytes of the host budget per row.
pub fn host_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    HostTier::bytes_per_row(layout, policy)
}

/// Bytes of the device budget per row: its values on the device, and its header, index entry and policy entry in RAM.
pub fn device_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    (layout.floats() * 4 + size_of::<RowHeader>() + SlotMap::bytes_per_slot(policy)) as u64
}
