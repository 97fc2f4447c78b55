//! Residency of a table's rows: the operations on rows that depend both on their placement in the tiers and on their
//! lifecycle. The type is defined in `expiry`, whose operations these use.
//!
//! All of it runs under the table's lock. A plan *admits* rows to the host tier, *trains* and *releases* them; calls by
//! id *read*, *import* and *forget* rows. An operation that needs rows or space first finishes the sweep in progress.

mod import;
mod plan_rows;
mod state_blob;

use std::sync::Arc;

pub(super) use state_blob::check_metadata_space;

use super::changes::{BaseCheckpoint, ChangeTracker, FREE_HISTORY_BYTES, PreImages, SlotMarks, SnapshotRows};
use super::expiry::{Lifecycle, Residency};
use super::placement::{ChangeCounts, Placement, PlanMode, PlanPins, TableAdmission, device_row_bytes};
use super::row_blocks::FoundRows;
use super::table_context::TableContext;
use crate::config::{OnFull, SsdConfig, TableConfig};
use crate::error::{Kind, Result};
use crate::lifecycle::StepClock;
use crate::lifecycle::admission::RowAdmitter;
use crate::ssd::{SsdTier, StateCounters};
use crate::stats::{AdmissionStats, EvictionStats, HistogramSnapshot, SsdStats, TierStats};
use crate::tiers::{DeviceTier, HostTier, NoKernelWrites};
use crate::types::{Id, NO_SLOT};

/// The largest step of a table that can be set. Training can count on from it without an overflow.
const MOST_STEPS: u64 = 1 << 53;
/// The tombstones of a table may use `host_bytes / HISTORY_SHARE`, within the two bounds below.
const HISTORY_SHARE: u64 = 64;
/// Lower bound of the bytes for tombstones, for small tables.
const LEAST_HISTORY_BYTES: u64 = FREE_HISTORY_BYTES;
/// Upper bound of the bytes for tombstones, for large tables.
const MOST_HISTORY_BYTES: u64 = 128 << 20;

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
    /// The residency of a table that was just opened, with all its rows on SSD. `host` and `device` are empty.
    pub(crate) fn new(
        context: &Arc<TableContext>,
        host: HostTier,
        device: Option<DeviceTier>,
        counters: StateCounters,
        admitter: Option<RowAdmitter>,
    ) -> Self {
        let changes = ChangeTracker::new(counters, history_bytes(&context.config));
        Self {
            placement: Placement::new(Arc::clone(context), host, device, changes),
            lifecycle: Lifecycle::new(TableAdmission::new(Arc::clone(context), admitter)),
        }
    }

    /// Sets the step counter. Finishes the sweep in progress first, because it does not match rows trained later.
    ///
    /// Errors: `Input` if `step` exceeds [`MOST_STEPS`]; those of [`Residency::finish_sweep`]; `State` if the step
    /// would decrease while batches in flight use deferred rows, because rows trained at a lower step would count as
    /// trained before the sweep. On an error nothing has changed.
    pub(crate) fn set_step(&mut self, step: u64) -> Result<()> {
        if step > MOST_STEPS {
            let name = &self.placement.context.config.name;
            return Err(Kind::Input
                .error(format!("table {name:?}: step={step} is out of range: give at most 2^53 ({MOST_STEPS})")));
        }
        self.finish_sweep()?;
        if step < self.placement.changes.step && self.has_deferred() {
            return Err(self.placement.in_use_error(
                "the step is to be set back, and rows that a sweep has deferred are used by batches in flight",
            ));
        }
        self.placement.changes.step = step;
        self.lifecycle.clock.steps.forget_from(step + 1);
        self.lifecycle.last_sweep = None;
        self.placement.context.bump_version();
        Ok(())
    }

    /// Removes every row and keeps the admission counts of pending ids. Requires that no plan uses a row and no read is
    /// in progress.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.notify_rest()?;
        // Cancels exports that could miss some of the rows.
        self.placement.context.bump_version();
        if let Some(ssd) = &self.placement.context.ssd {
            ssd.clear()?;
        }
        let policy = self.placement.context.config.policy;
        self.placement.host.clear(policy);
        if let Some(device) = &mut self.placement.device {
            device.clear(policy);
        }
        self.placement.counts.cleared();
        self.placement.changes.history.forget();
        self.drop_sweep();
        // Rows added later may belong to other steps.
        self.lifecycle.clock.restore(&StepClock::default());
        Ok(())
    }

    /// Returns copies of the rows of `ids` from all tiers, and initial values for ids without a row.
    pub(crate) fn read(&mut self, ids: &[Id], no_writes: NoKernelWrites<'_>) -> Result<FoundRows> {
        self.finish_sweep()?;
        self.placement.read_unswept(ids, no_writes)
    }

    /// Checks that a started training batch fits. Drops no row yet, even if the table may drop rows for it.
    ///
    /// Errors: `Capacity`; those of [`Residency::finish_sweep`].
    pub(crate) fn check_space(&mut self, pins: &PlanPins) -> Result<()> {
        let slotless: Vec<u32> = match &self.placement.device {
            None => pins.deferred.iter().chain(&pins.unplaced).copied().collect(),
            Some(_) => (0..).zip(&pins.device).filter(|(_, slot)| **slot == NO_SLOT).map(|(at, _)| at).collect(),
        };
        let more = self.placement.new_rows_among(&self.lifecycle.admission, pins, &slotless, true).1 as u64;
        if self.placement.make_fit(more) {
            return Ok(());
        }
        match self.placement.context.config.on_full {
            OnFull::Evict => self.placement.check_droppable(more, &pins.ids),
            // Finishing the sweep may require reads from the device. That happens when the batch is placed.
            OnFull::Error if self.placement.device.is_some() && self.has_sweep() => Ok(()),
            OnFull::Error => self.check_capacity(more, &pins.ids),
        }
    }

    /// Checks that `more` rows can be inserted in addition to those that batches in flight may insert. If the table may
    /// drop rows, drops rows not in `needed` by policy. Drops none if the space would not suffice even without all of
    /// them.
    ///
    /// Errors: `Capacity`; those of the SSD tier when rows are dropped; those of [`Residency::finish_sweep`].
    pub(super) fn check_capacity(&mut self, more: u64, needed: &[Id]) -> Result<()> {
        if self.placement.make_fit(more) {
            return Ok(());
        }
        // Expired rows free space first.
        self.finish_sweep()?;
        if self.placement.make_fit(more) {
            return Ok(());
        }
        match self.placement.context.config.on_full {
            OnFull::Error if self.placement.is_index_full(more) => Err(self.placement.index_full_error()),
            OnFull::Error => Err(self.placement.table_full_error(more)),
            OnFull::Evict => {
                self.placement.check_droppable(more, needed)?;
                let before = self.placement.counts.dropped();
                self.placement.drop_until_fits(more, needed).map_err(|error| self.placement.after_drops(before, error))
            }
        }
    }

    /// Finishes the sweep, so that its rows are queued before all rows are removed for another reason. Logs other
    /// errors.
    ///
    /// Errors: the one that [`Placement::needs_device_reads`] reports.
    pub(crate) fn notify_rest(&mut self) -> Result<()> {
        if self.placement.has_notifier()
            && let Err(error) = self.finish_sweep()
        {
            if self.placement.needs_device_reads() {
                return Err(error);
            }
            let table = &self.placement.context.config.name;
            tracing::warn!(
                "table {table:?}: a sweep could not be finished, and its remaining rows are not delivered: {error}"
            );
        }
        Ok(())
    }

    /// The base checkpoints of a possible delta, oldest first. Empty while rows are deferred, because a delta that
    /// records the sweep could not contain them.
    pub(crate) fn base_checkpoints(&self) -> &[BaseCheckpoint] {
        if self.has_deferred() { &[] } else { self.placement.changes.history.bases() }
    }

    /// The distinct ids removed from the table since `base`, in ascending order. Some of them may have been inserted
    /// again.
    ///
    /// Errors: `State` if they are not known, so that a full save is required.
    pub(crate) fn tombstones_since(&self, base: &BaseCheckpoint) -> Result<Vec<Id>> {
        let left = if self.has_deferred() { None } else { self.placement.changes.history.tombstones_since(base) };
        left.ok_or_else(|| {
            Kind::State.error(format!(
                "table {:?}: what changed since the checkpoint {} is not known (it was saved too long ago or by another run, or \
                 more rows left or more sweeps came since than are remembered, or a sweep came between the forward and the backward of a batch that \
                 is not trained yet): save a full checkpoint",
                self.placement.context.config.name, base.name
            ))
        })
    }

    /// Counts the changes since `base`. Reads row headers if there were sweeps since.
    ///
    /// Errors: those of [`Residency::tombstones_since`].
    pub(crate) fn count_changes(&mut self, base: &BaseCheckpoint) -> Result<ChangeCounts> {
        let left = self.tombstones_since(base)?.len() as u64;
        let expiring = self.placement.count_expiring(base);
        Ok(ChangeCounts {
            rows: self.placement.rows(),
            tombstones: left,
            expired: self.placement.changes.history.expired_since(base),
            expiring,
        })
    }

    /// Starts a snapshot of the current rows: those of `marks`, which must be taken under the same hold of the table's
    /// lock. `table` is the table's number in `images`. Rows trained afterwards belong to `next_epoch`. Admission
    /// counts are part of the snapshot: if `since` is set, only those of ids counted in that epoch or later.
    pub(crate) fn begin_snapshot(
        &mut self,
        marks: (SlotMarks, SlotMarks),
        images: Arc<PreImages>,
        table: usize,
        next_epoch: u32,
        since: Option<u32>,
    ) {
        self.placement.begin_epoch(next_epoch);
        if let Some(admitter) = &mut self.lifecycle.admission.admitter {
            admitter.begin_snapshot(since);
        }
        self.placement.changes.history.await_save(next_epoch);
        self.placement.changes.snapshot = Some(Box::new(SnapshotRows::new(marks.0, marks.1, images, table)));
    }

    /// Ends a snapshot and releases its remaining rows.
    pub(crate) fn end_snapshot(&mut self) {
        self.placement.changes.snapshot = None;
        if let Some(admitter) = &mut self.lifecycle.admission.admitter {
            admitter.end_snapshot();
        }
    }

    /// Returns counters of the table and its tiers.
    pub(crate) fn stats(&mut self) -> TableStats {
        let pinned_rows = u64::from(self.placement.pinned());
        let ssd = self.placement.context.ssd.as_ref();
        let charged = ssd.map_or(0, |ssd| {
            HostTier::charged_bytes(ssd.index_bytes(), ssd.rows()) + self.placement.changes.charged_history_bytes()
        });
        let device = self.placement.device.as_ref().map(|device| {
            let rows = device.row_count();
            let row_bytes = device_row_bytes(&self.placement.context.layout, self.placement.context.config.policy);
            TierStats {
                rows,
                bytes: rows * row_bytes,
                capacity_bytes: u64::from(device.slots.capacity()) * row_bytes,
                ..self.placement.traffic.device
            }
        });
        let rows = self.placement.host.row_count();
        TableStats {
            rows: self.placement.counts.rows(),
            step: self.placement.changes.step,
            pinned_rows,
            overflow_plans: self.placement.traffic.overflow_plans,
            dropped_rows: self.placement.counts.dropped(),
            row_wait: self.placement.context.row_wait.snapshot(),
            lock_held: self.placement.context.lock_held.snapshot(),
            admission: self
                .lifecycle
                .admission
                .admitter
                .as_ref()
                .map(|admitter| self.placement.admission_stats(admitter)),
            eviction: self.eviction_stats(),
            device,
            host: TierStats {
                rows,
                bytes: rows * self.placement.host.row_bytes() + charged,
                capacity_bytes: self.placement.host.budget().with_share_of_free(),
                ..self.placement.traffic.host
            },
            ssd: ssd.map(|ssd| self.placement.ssd_stats(ssd)),
        }
    }

    /// Starts stage 2 of a plan: see [`Placement::make_space_on_device`].
    pub(crate) fn make_space_on_device(&mut self, pins: &mut PlanPins, mode: PlanMode) -> Result<()> {
        self.placement.make_space_on_device(&self.lifecycle.admission, pins, mode)
    }
}

/// Maximum bytes of RAM for the tombstones since a save. Each flush may write as many bytes.
fn history_bytes(config: &TableConfig) -> u64 {
    let most = (config.expected_host_bytes() / HISTORY_SHARE).clamp(LEAST_HISTORY_BYTES, MOST_HISTORY_BYTES);
    let in_blob = |ssd: &SsdConfig| state_blob::rest_bytes(config, SsdTier::max_metadata_bytes_of(ssd.bytes)) as u64;
    config.ssd.as_ref().map_or(most, |ssd| most.min(in_blob(ssd)))
}
