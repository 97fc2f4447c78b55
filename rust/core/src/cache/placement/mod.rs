//! Placement of a table's rows in its tiers. Only [`Placement`] moves rows between tiers, and only it updates their
//! state bits and the table's counters.
//!
//! Rows are *promoted* to the device; they are *demoted* from the device, *evicted* from RAM, *written back* to SSD,
//! *dropped* when the table is full. Each operation notifies the [`ChangeTracker`] before a row changes or leaves its
//! slot, and records moves in it afterwards. Operations that also depend on admission or on sweeps are in [`residency`](super::residency).
//!
//! Fallible work precedes moves. The docs of an operation state the changes that remain after an error, mostly none.

mod active_plans;
mod admission;
mod capacity;
mod demote;
mod device_copies;
mod evict_listener;
mod find;
mod loads;
mod newest;
mod plan_pins;
mod promote;
mod rule_match;

use std::sync::Arc;

pub(super) use admission::TableAdmission;
pub(super) use device_copies::DeviceCopies;
pub(crate) use find::{RowLocation, is_in_ram};
pub use newest::ChangeCounts;
pub(super) use newest::ExportStart;
pub(crate) use plan_pins::{AbsentRead, FoundCounts, PlanDemand, PlanPins};
pub use plan_pins::{FetchedRows, MissingMode, PlanMode};
pub(crate) use promote::{StagedRow, StagedRows};
pub(super) use rule_match::{ExpiredRow, SweepMatcher};

use self::active_plans::ActivePlans;
use self::capacity::RowCounts;
use self::evict_listener::EvictionNotifier;
use self::loads::HostLoad;
use super::changes::ChangeTracker;
use super::table_context::TableContext;
use crate::config::PolicyKind;
use crate::error::Result;
use crate::lifecycle::AdmissionCounters;
use crate::lifecycle::admission::RowAdmitter;
use crate::rows::{RowArena, RowHeader, RowLayout};
use crate::slots::{RowState, SlotMap};
use crate::ssd::SsdTier;
use crate::stats::{AdmissionStats, SsdStats, TierStats};
use crate::tiers::{DeviceTier, HostTier};
use crate::types::{CacheSlot, NO_SLOT};

/// Distance, in slots, at which a pass over the slots prefetches slot state into the CPU cache.
pub(super) const SLOTS_AHEAD: usize = 24;
/// Maximum number of rows in one read from the device.
const ROWS_PER_GATHER: usize = 4096;

/// The rows of one table in RAM and on the device, and the state of its rows on SSD.
pub(crate) struct Placement {
    pub(super) context: Arc<TableContext>,
    pub(super) host: HostTier,
    pub(super) device: Option<DeviceTier>,
    pub(super) counts: RowCounts,
    /// Unfinished reads into host slots.
    pub(super) loads: Vec<Arc<HostLoad>>,
    /// Number of reads since the table was opened that found no row where the SSD index had named one.
    pub(super) absent_reads: u64,
    pub(super) active_plans: ActivePlans,
    /// Copies of device rows for the operation that holds the table's lock.
    pub(super) copies: DeviceCopies,
    /// Delivers evicted rows; `None` if there is no consumer.
    pub(super) notifier: Option<Box<EvictionNotifier>>,
    pub(super) changes: ChangeTracker,
    pub(super) traffic: PlanTraffic,
}

/// Hits and misses of plans by tier since the table was opened.
#[derive(Debug, Default)]
pub(crate) struct PlanTraffic {
    pub(super) host: TierStats,
    pub(super) device: TierStats,
    pub(super) ssd_hits: u64,
    pub(super) ssd_misses: u64,
    pub(super) ssd_time_ns: u64,
    pub(super) overflow_plans: u64,
    pub(super) admitted: u64,
    pub(super) not_admitted: u64,
}

impl Placement {
    /// The placement of a table that was just opened, with all its rows on SSD. `host` and `device` are empty.
    pub(crate) fn new(
        context: Arc<TableContext>,
        host: HostTier,
        device: Option<DeviceTier>,
        changes: ChangeTracker,
    ) -> Self {
        let mut placement = Self {
            counts: RowCounts::of(context.ssd.as_ref().map_or(0, SsdTier::rows)),
            context,
            host,
            device,
            loads: Vec::new(),
            absent_reads: 0,
            active_plans: ActivePlans::default(),
            copies: DeviceCopies::default(),
            notifier: None,
            changes,
            traffic: PlanTraffic::default(),
        };
        placement.fit_host_to_index();
        placement
    }

    /// Number of rows in all tiers.
    pub(crate) fn rows(&self) -> u64 {
        self.counts.rows()
    }

    /// Number of pinned slots.
    pub(crate) fn pinned(&mut self) -> u32 {
        self.host.slots.pinned() + self.device.as_mut().map_or(0, |device| device.slots.pinned())
    }

    /// Memory of the rows that kernels use; `None` if kernels run on the device tier.
    pub(crate) fn kernel_arena(&self) -> Option<&Arc<RowArena>> {
        self.device.is_none().then(|| self.host.arena())
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
    pub(crate) fn is_provisional(slots: &SlotMap, slot: CacheSlot) -> bool {
        slot != NO_SLOT && slots.state(slot).has(RowState::PROVISIONAL)
    }

    pub(crate) fn admission_stats(&self, admitter: &RowAdmitter) -> AdmissionStats {
        let PlanTraffic { admitted, not_admitted, .. } = self.traffic;
        let pending = admitter.counters();
        AdmissionStats {
            admitted,
            not_admitted,
            pending: pending.map_or(0, AdmissionCounters::len),
            pending_bytes: pending.map_or(0, AdmissionCounters::bytes),
            forgotten: pending.map_or(0, AdmissionCounters::forgotten),
        }
    }

    pub(crate) fn ssd_stats(&self, ssd: &SsdTier) -> SsdStats {
        let mut stats = ssd.stats();
        // These three count rows of plans only. The tier also counts reads outside of plans.
        stats.tier.hits = self.traffic.ssd_hits;
        stats.tier.misses = self.traffic.ssd_misses;
        stats.tier.time_ns = self.traffic.ssd_time_ns;
        stats
    }
}

/// Bytes of the host budget per row.
pub fn host_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    HostTier::bytes_per_row(layout, policy)
}

/// Bytes of the device budget per row: its values on the device, and its header, index entry and policy entry in RAM.
pub fn device_row_bytes(layout: &RowLayout, policy: PolicyKind) -> u64 {
    (layout.floats() * 4 + size_of::<RowHeader>() + SlotMap::bytes_per_slot(policy)) as u64
}
