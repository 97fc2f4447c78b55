//! The pins of one plan on one table while it is in flight, and its ids that were not admitted.

use std::sync::Arc;

use super::loads::HostLoad;
use crate::config::{MissingRead, TableConfig};
use crate::lifecycle::admission::AdmissionCandidate;
use crate::slots::{PinGroup, RowState};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// The value that an evaluation reads for ids without a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingMode {
    /// Their initial values.
    #[default]
    Initial,
    /// Zeros.
    Zeros,
    /// The value that training reads for ids that are not admitted: [`TableConfig::not_admitted`].
    NotAdmitted,
}

/// The value that a plan reads for ids of a table that have no row and are not admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AbsentRead {
    /// Their initial values.
    Initial,
    /// This number in every column.
    Value(f32),
    /// The table's OOV row.
    OovRow,
}

/// Treatment of the ids of a plan's batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanMode {
    /// If true, a backward follows and missing ids may be inserted. Otherwise they are discarded with the plan.
    pub train: bool,
    /// If true, loads only rows that fit the budget, without overflow. [`Plan::wait`](crate::cache::Plan::wait) loads
    /// the others.
    pub is_prefetch: bool,
    /// The value that an evaluation reads for ids without a row.
    pub missing: MissingMode,
    /// Maximum number of threads for the plan. Its results do not depend on it.
    pub threads: usize,
}

impl PlanMode {
    /// Returns the value that a plan for a table reads for ids that have no row and are not admitted.
    pub(crate) fn absent_read(self, config: &TableConfig) -> AbsentRead {
        let not_admitted = match config.not_admitted {
            MissingRead::Zeros => AbsentRead::Value(0.0),
            MissingRead::Value(value) => AbsentRead::Value(value),
            MissingRead::Initial => AbsentRead::Initial,
            MissingRead::OovRow => AbsentRead::OovRow,
        };
        match self.missing {
            _ if self.train => not_admitted,
            MissingMode::Initial => AbsentRead::Initial,
            MissingMode::Zeros => AbsentRead::Value(0.0),
            MissingMode::NotAdmitted => not_admitted,
        }
    }

    /// True if ids that have no row and are not admitted read their initial values.
    pub(crate) fn reads_initial(self, config: &TableConfig) -> bool {
        self.absent_read(config) == AbsentRead::Initial
    }

    /// A batch that is trained immediately.
    pub const TRAIN: Self = Self { train: true, is_prefetch: false, missing: MissingMode::Initial, threads: 1 };
    /// A batch that is prefetched and trained later.
    pub const TRAIN_PREFETCH: Self = Self { is_prefetch: true, ..Self::TRAIN };
    /// A batch that is read immediately and not trained.
    pub const EVALUATE: Self = Self { train: false, ..Self::TRAIN };
}

/// The pins of a plan on one table's rows, and the reads that the plan waits for. Only `Placement` and `Residency`
/// modify it, together with the rows' state bits. It has no reference to the table, so that it can be dropped with an
/// unused table.
#[derive(Default)]
pub(crate) struct PlanPins {
    /// The distinct ids of the plan: `[U]`. Positions below are positions in this list.
    pub(crate) ids: Arc<Vec<Id>>,
    /// The pinned host slot of each id, `NO_SLOT` if there is none: `[U]`.
    pub(crate) host: Arc<Vec<CacheSlot>>,
    /// The pin group of the slots of `host` that were pinned together, if any. The others were pinned one by one.
    pub(crate) group: Option<PinGroup>,
    /// True if rows were added to the group that were to be initialized or read. Otherwise all rows of the group are
    /// inserted and current.
    pub(crate) group_grew: bool,
    /// The pinned device slot of each id, `NO_SLOT` if there is none: `[U]` for a table with a device tier, else empty.
    pub(crate) device: Vec<CacheSlot>,
    /// Reads that rows of this plan wait for.
    pub(crate) loads: Vec<Arc<HostLoad>>,
    /// True if the plan has started. Its deferred rows are placed with the plan.
    pub(crate) has_begun: bool,
    /// True if all new rows of the plan fitted the table when the plan started, with all of the table's rows kept.
    pub(crate) has_space: bool,
    /// Positions that a prefetch plan has left for its placement.
    pub(crate) unplaced: Vec<u32>,
    /// Positions of ids without a row that are deferred until the plan is placed, because other rows must be evicted
    /// for theirs.
    pub(crate) deferred: Vec<u32>,
    /// Ids that are predicted not to be admitted.
    pub(crate) waiting: WaitingIds,
    /// Inputs of the admission rule, if the table has one.
    pub(crate) demand: PlanDemand,
    /// The ids that are not admitted, once decided.
    pub(crate) not_admitted: Option<NotAdmittedIds>,
    /// Positions of the ids that are not admitted.
    pub(crate) not_admitted_positions: Vec<u32>,
    /// Number of provisional rows that this plan has pledged to train; see [`super::capacity::RowCounts`].
    pub(crate) pledged: u64,
    /// Value of `Placement::absent_reads` when `pledged` was counted.
    pub(crate) absent_reads_before: u64,
    /// Rows that have a device slot and were not scattered into it yet.
    pub(crate) arriving: Vec<ArrivingRow>,
    /// Tiers in which the rows of a device plan were found. Counted when the rows are promoted.
    pub(crate) found: FoundCounts,
    /// Positions of ids without a device slot, once all others are pinned for the placement of the plan.
    pub(crate) slotless: Option<Vec<u32>>,
}

/// A row that has a device slot and has not arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivingRow {
    pub(crate) position: u32,
    /// State of the row on the device. For a row from a host slot, the state of that slot is used instead.
    pub(crate) state: RowState,
}

/// Tiers in which the rows of a device plan were found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FoundCounts {
    pub(crate) on_device: u64,
    pub(crate) in_host: u64,
    /// Not on the device and not in the host tier.
    pub(crate) elsewhere: u64,
    /// Read from SSD when the plan was placed.
    pub(crate) on_ssd: u64,
    /// In no tier.
    pub(crate) absent: u64,
}

/// Rows to scatter into the device tensors before the forward.
#[derive(Clone, Debug, Default)]
pub struct FetchedRows {
    /// Device slots: `[M]`.
    pub slots: Vec<CacheSlot>,
    /// Vector parts: `[M, V]`; `None` if they are the first ones in the caller's buffer.
    pub vectors: Option<Vec<f32>>,
    /// Scalar slots: `[M]`, zeros if the layout has none.
    pub scalars: Vec<f32>,
}

impl PlanPins {
    /// A plan for these distinct ids, without pins.
    pub(crate) fn new(ids: Vec<Id>, demand: PlanDemand) -> Self {
        Self { host: Arc::new(vec![NO_SLOT; ids.len()]), ids: Arc::new(ids), demand, ..Self::default() }
    }

    /// For each id, true if it is not admitted in this batch: `[U]`, or empty if all are admitted.
    pub(crate) fn not_admitted_bits(&self) -> Vec<bool> {
        if self.not_admitted_positions.is_empty() {
            return Vec::new();
        }
        let mut bits = vec![false; self.ids.len()];
        self.not_admitted_positions.iter().for_each(|&position| bits[position as usize] = true);
        bits
    }

    /// Number of rows inserted if the plan is trained.
    pub(crate) fn pledged(&self) -> u64 {
        self.pledged + self.deferred.len() as u64
    }

    /// Positions, ascending, of ids without a row that are predicted not to be admitted at the start of the plan.
    /// Excludes deferred ids.
    pub(crate) fn without_row(&self, train: bool) -> Vec<u32> {
        if train {
            let mut waiting = self.waiting.positions.clone();
            waiting.sort_unstable();
            return waiting;
        }
        let has_slot = |slots: &[CacheSlot], at: usize| slots.get(at).is_some_and(|&slot| slot != NO_SLOT);
        let mut left_out: Vec<u32> = (0..self.ids.len())
            .filter(|&at| !has_slot(&self.host, at) && !has_slot(&self.device, at))
            .map(|at| at as u32)
            .collect();
        let mut later = self.unplaced.clone();
        later.sort_unstable();
        left_out.retain(|position| later.binary_search(position).is_err());
        left_out
    }

    /// True if every id has a slot or a read in progress, or is deferred.
    pub(crate) fn is_complete(&self) -> bool {
        self.unplaced.is_empty()
    }

    /// True if no read remains to wait for.
    pub(crate) fn is_read(&self) -> bool {
        self.loads.iter().all(|load| load.is_done())
    }

    /// The ids of reads in progress that the plan has not waited for.
    pub(crate) fn reading(&self) -> Vec<Id> {
        self.loads.iter().flat_map(|load| load.ids()).collect()
    }

    /// Takes all pins, to release them.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::take(self)
    }
}

/// Inputs of the admission rule for the ids of a training plan.
#[derive(Debug, Default)]
pub(crate) struct PlanDemand {
    /// Number of occurrences of each distinct id of the plan: `[U]`.
    pub(crate) occurrences: Vec<u32>,
    /// Clicks of each distinct id: `[U]`, or empty if there are none.
    pub(crate) clicks: Vec<u32>,
}

impl PlanDemand {
    /// The admission candidate of the id at a position.
    pub(crate) fn candidate(&self, ids: &[Id], position: u32) -> AdmissionCandidate {
        let at = position as usize;
        let clicks = self.clicks.get(at).copied().unwrap_or(0);
        AdmissionCandidate::new(ids[at], self.occurrences[at], clicks)
    }
}

/// Ids without a row that were predicted not to be admitted, so no slot was reserved for them.
#[derive(Debug, Default)]
pub(crate) struct WaitingIds {
    /// Positions in the plan's distinct ids: `[n]`.
    pub(crate) positions: Vec<u32>,
    /// Their admission candidates: `[n]`.
    pub(crate) candidates: Vec<AdmissionCandidate>,
    /// The table's version at the prediction.
    pub(crate) version: u64,
    /// The admitter's change number at the prediction; `None` if the ids were predicted at different change numbers.
    decided_at: Option<u64>,
}

impl WaitingIds {
    /// Adds ids that were predicted not to be admitted at table version `version` and admitter change number `changes`.
    pub(crate) fn add(
        &mut self,
        mut positions: Vec<u32>,
        mut candidates: Vec<AdmissionCandidate>,
        version: u64,
        changes: u64,
    ) {
        self.version = version;
        self.decided_at = (self.positions.is_empty() || self.decided_at == Some(changes)).then_some(changes);
        if self.positions.is_empty() {
            (self.positions, self.candidates) = (positions, candidates);
        } else {
            self.positions.append(&mut positions);
            self.candidates.append(&mut candidates);
        }
    }

    /// True if the prediction still holds because the admitter has not changed since.
    pub(crate) fn still_wait(&self, changes: u64) -> bool {
        self.positions.is_empty() || self.decided_at == Some(changes)
    }
}

/// The ids of a plan that are not admitted.
#[derive(Debug)]
pub(crate) struct NotAdmittedIds {
    pub(crate) candidates: Vec<AdmissionCandidate>,
    /// The table's version at the decision.
    pub(crate) version: u64,
}
