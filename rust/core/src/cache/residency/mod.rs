//! Where the rows of a table are. The [`Residency`] alone moves rows between the tiers, and it alone keeps their bits and the table's
//! counters.
//!
//! It exists behind the table's lock. Everybody else sees operations with names: a plan *admits* rows to the host tier, *promotes* them to
//! the device, *trains* and *releases* them; rows are *demoted* from the device, *evicted* from RAM, *written down* to SSD, *dropped* when
//! the table is full; calls by id *find*, *read*, *import* and *forget* rows. Before a row changes or leaves its slot each of these tells
//! whoever watches ([`watch`](super::watch)).
//!
//! What can fail comes before what moves: an operation that returns an error says what has changed by then, mostly nothing.

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

/// The largest step that a table may be set to. Training counts on from there without an overflow.
const MOST_STEPS: u64 = 1 << 53;
/// While slots are gone through, the state of the slot that comes this many slots later is fetched into the processor's cache.
const SLOTS_AHEAD: usize = 24;
/// Rows that are read from the device at once at most.
const ROWS_PER_GATHER: usize = 4096;

/// The share of `host_bytes` that the ids that left a table may take: one part in this many, within the two bounds below.
const HISTORY_SHARE: u64 = 64;
/// The ids that left a table may take these bytes, however small the table is.
const LEAST_HISTORY_BYTES: u64 = capacity::FREE_HISTORY_BYTES;
/// The ids that left a table take at most these bytes, however large the table is.
const MOST_HISTORY_BYTES: u64 = 128 << 20;

/// The rows of one table in RAM and on the device, what is known of those on SSD, and whoever watches them.
pub(crate) struct Residency {
    context: Arc<TableContext>,
    host: HostTier,
    device: Option<DeviceTier>,
    counts: RowCounts,
    traffic: PlanTraffic,
    /// Reads into host slots that are not finished.
    loads: Vec<Arc<HostLoad>>,
    /// How many reads found a row absent that the SSD index had named, since the table was opened.
    absent_reads: u64,
    /// Training steps.
    step: u64,
    /// The epoch of rows that are trained now.
    epoch: u32,
    /// Of the rows that were modified in this epoch or later, those that are newest in RAM are marked `MODIFIED`.
    marked_since: u32,
    history: CheckpointHistory,
    exports: ExportSet,
    snapshot: Option<Box<SnapshotRows>>,
    /// Decides which ids get rows, and counts the others. `None` where all get one.
    admitter: Option<RowAdmitter>,
    new_rows: NewRowLog,
    active_plans: ActivePlans,
    /// The sweep whose dead rows are not all buried yet.
    sweep: Option<SweepProgress>,
    /// Rows that sweeps before it have spared, because plans in place use them.
    deferred: DeferredRows,
    /// The last sweep that was finished, where no rows were put into the table since it began.
    last_sweep: Option<ExpirySweep>,
    /// When the steps were made, as far as that is known.
    clock: StepClock,
    /// The time that the user has set, in milliseconds.
    user_time: Option<u64>,
    /// The time that the user had set before a load. It is that of now where the load brought no times, and times that are set do not
    /// have to be after it.
    time_before_load: u64,
    /// Who is told of evicted rows; `None` where nobody is.
    notifier: Option<Box<EvictionNotifier>>,
    /// Why rows die by sweeps.
    /// How many rows have died by what is called so.
    evicted_by_rule: BTreeMap<&'static str, u64>,
    /// The table's version where nothing has changed since the last sweep but what that took.
    version_after_sweep: Option<u64>,
    /// What ids share that are refused a row, where the table has such a row.
    oov_row: Option<OovRow>,
    /// Copies of device rows that were made for the operation that holds the table's lock.
    copies: DeviceCopies,
}

/// What plans have found where, since the table was opened.
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
    /// Rows in all tiers.
    pub rows: u64,
    /// Training steps.
    pub step: u64,
    /// Slots that plans in flight have pinned.
    pub pinned_rows: u64,
    /// Plans whose working set did not fit the tier that kernels run on.
    pub overflow_plans: u64,
    /// Rows that were dropped because of `on_full = evict`.
    pub dropped_rows: u64,
    /// How long training waited for each batch until all of its rows had their slots: for reads, for room, and for the table's lock.
    pub row_wait: HistogramSnapshot,
    /// How long the table's lock was held each time.
    pub lock_held: HistogramSnapshot,
    /// Admission, where some ids get no row.
    pub admission: Option<AdmissionStats>,
    /// Eviction, where the table has a rule or somebody is told of evicted rows.
    pub eviction: Option<EvictionStats>,
    /// The device tier, if there is one.
    pub device: Option<TierStats>,
    /// The host tier.
    pub host: TierStats,
    /// The SSD tier, if there is one.
    pub ssd: Option<SsdStats>,
}

impl Residency {
    /// The residency of a table that was just opened, with all its rows on SSD. `host` and `device` are empty.
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

    /// Rows of the table in all tiers.
    pub(crate) fn rows(&self) -> u64 {
        self.counts.rows()
    }

    /// The training steps and the epoch, as the SSD tier's state and checkpoints have them.
    pub(crate) fn counters(&self) -> StateCounters {
        StateCounters { step: self.step, epoch: self.epoch }
    }

    /// Set the step counter. Rows that a sweep under way takes go first, because it takes no rows that were trained later.
    ///
    /// Errors: `Input` for more than [`MOST_STEPS`]; those of [`Residency::finish_sweep`], and `State` where the step would go back while batches
    /// in flight have rows that a sweep has spared: trained then, they would count as trained before the sweep. Nothing has changed then.
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

    /// Slots with pins.
    fn pinned(&mut self) -> u32 {
        self.host.slots.pinned() + self.device.as_mut().map_or(0, |device| device.slots.pinned())
    }

    /// The memory of the rows that kernels use; `None` where they run on the device tier.
    pub(crate) fn kernel_arena(&self) -> Option<&Arc<RowArena>> {
        self.device.is_none().then(|| self.host.arena())
    }

    /// Slots that the device tensors must have. 0 without a device tier.
    pub(crate) fn required_device_slots(&self) -> u32 {
        self.device.as_ref().map_or(0, DeviceTier::required_slots)
    }

    /// Ask the system now for the memory of so many more rows, as far as the host budget has room for them.
    pub(crate) fn reserve(&mut self, rows: u64) -> Result<()> {
        self.host.reserve(rows.min(self.host.free_rows()) as usize)
    }

    /// How many rows of a plan are past the budget of the tier that kernels run on.
    pub(crate) fn overflow_of(&self, pins: &PlanPins) -> u32 {
        let (slots, capacity) = match &self.device {
            Some(device) => (&pins.device, device.slots.capacity()),
            None => (&*pins.host, self.host.slots.capacity()),
        };
        let past = |slot: &&CacheSlot| **slot != NO_SLOT && **slot >= capacity;
        let past = slots.iter().filter(past).count() as u32;
        // Without a device tier, slots of the host tier may be past the budget that tables share.
        if self.device.is_some() { past } else { (past + self.host.rows_past_budget()).min(slots.len() as u32) }
    }

    /// Count a plan whose rows are in place, of which so many are past that budget.
    pub(crate) fn count_overflow(&mut self, rows: u32) {
        self.traffic.overflow_plans += u64::from(rows > 0);
    }

    /// Put `NO_SLOT` in the place of those of these slots, of the tier that kernels run on, whose rows are not born yet: an evaluation that
    /// reads zeros has no row for them. `slots` has one for each id of the plan: `[U]`.
    pub(crate) fn leave_out_provisional(&self, pins: &PlanPins, slots: &mut [CacheSlot]) {
        for (slot, &host) in slots.iter_mut().zip(&*pins.host) {
            let on_device = self.device.as_ref().is_some_and(|tier| Self::is_provisional(&tier.slots, *slot));
            if on_device || Self::is_provisional(&self.host.slots, host) {
                *slot = NO_SLOT;
            }
        }
    }

    /// Whether a slot has a provisional row. `NO_SLOT` has none.
    #[inline]
    fn is_provisional(slots: &SlotMap, slot: CacheSlot) -> bool {
        slot != NO_SLOT && slots.state(slot).has(RowState::PROVISIONAL)
    }

    /// Count the time that a plan has waited for the SSD tier.
    pub(crate) fn record_ssd_wait(&mut self, nanoseconds: u64) {
        self.traffic.ssd_time_ns += nanoseconds;
    }

    /// Forget every row, and no count of an id that waits for one. No plan uses any row, and none is being read.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.notify_rest()?;
        // An export that could miss some of the rows ends.
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
        // Rows that come in may be of other steps.
        self.restore_clock(&StepClock::default());
        Ok(())
    }

    /// Forget the counts of all ids that wait for rows.
    pub(crate) fn clear_counts(&mut self) {
        if let Some(admitter) = &mut self.admitter {
            admitter.clear();
        }
    }

    /// The checkpoints that a delta can build on, oldest first. None while rows are there that a sweep has spared, because a delta which says
    /// the sweep could not have them.
    pub(crate) fn base_checkpoints(&self) -> &[BaseCheckpoint] {
        if self.has_deferred() { &[] } else { self.history.bases() }
    }

    /// The sweeps since `base`. They take rows of that checkpoint which are not there any more, and no others.
    pub(crate) fn sweeps_since(&self, base: &BaseCheckpoint) -> Vec<ExpirySweep> {
        self.history.sweeps_since(base)
    }

    /// Note that the table was saved as this checkpoint, or loaded from it.
    pub(crate) fn saved_as(&mut self, base: BaseCheckpoint) {
        self.history.saved_as(base);
    }

    /// Note that the save of the moment that began with this `next_epoch` is over: the table was saved as `base`, or the save failed
    /// (`None`).
    pub(crate) fn finish_background_save(&mut self, next_epoch: u32, base: Option<BaseCheckpoint>) {
        self.history.finish_background_save(next_epoch, base);
    }

    /// Counters of the table and its tiers.
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
        // These three are what plans have met. The tier counts every row that it is asked for, those of reads outside of plans too.
        stats.tier.hits = self.traffic.ssd_hits;
        stats.tier.misses = self.traffic.ssd_misses;
        stats.tier.time_ns = self.traffic.ssd_time_ns;
        stats
    }

    /// Bytes of memory that rows in RAM take now, as the system says.
    #[cfg(test)]
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.host.arena().resident_bytes() as u64
    }
}

/// Bytes of RAM that the ids that left a table since a save may take. Each flush may write as many.
fn history_bytes(config: &TableConfig) -> u64 {
    let most = (config.expected_host_bytes() / HISTORY_SHARE).clamp(LEAST_HISTORY_BYTES, MOST_HISTORY_BYTES);
    let in_note = |ssd: &SsdConfig| note::rest_bytes(config, SsdTier::max_metadata_bytes_of(ssd.bytes)) as u64;
    config.ssd.as_ref().map_or(most, |ssd| most.min(in_note(ssd)))
}

/// Bytes of the host budget that a row takes.
pub fn host_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    HostTier::bytes_per_row(layout, policy)
}

/// Bytes of the device budget that a row takes: its values on the device, and its header, index entry and policy entry in RAM.
pub fn device_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    (layout.floats() * 4 + size_of::<RowHeader>() + SlotMap::bytes_per_slot(policy)) as u64
}
