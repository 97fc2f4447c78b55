//! What one plan holds of one table while it is in flight.

use std::sync::Arc;

use super::demand::{NotAdmittedIds, PlanDemand, WaitingIds};
use super::loads::HostLoad;
use crate::config::{MissingRead, TableConfig};
use crate::slots::PinGroup;
use crate::slots::RowState;
use crate::types::{CacheSlot, Id, NO_SLOT};

/// What an evaluation reads for ids without a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingMode {
    /// The rows that they would be born with.
    #[default]
    Initial,
    /// Zeros.
    Zeros,
    /// What training reads for ids that are not admitted: [`TableConfig::not_admitted`].
    NotAdmitted,
}

/// What a plan reads for ids of a table that have no row and get none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AbsentRead {
    /// The values that they would be born with.
    Initial,
    /// This number in every column.
    Value(f32),
    /// The table's shared row.
    OovRow,
}

/// How a plan treats the ids of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanMode {
    /// A backward will follow, so missing ids may be born. Otherwise they are forgotten with the plan.
    pub train: bool,
    /// Fetch only as far as the budget goes, without overflow. [`Plan::wait`](crate::cache::Plan::wait) does the rest.
    pub is_prefetch: bool,
    /// What an evaluation reads for ids without a row.
    pub missing: MissingMode,
    /// How many threads may work for the plan. Its results are the same for any number.
    pub threads: usize,
}

impl PlanMode {
    /// What a plan for a table reads for ids that have no row and get none.
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

    /// Whether ids that have no row and get none read the values that they would be born with.
    pub(crate) fn reads_initial(self, config: &TableConfig) -> bool {
        self.absent_read(config) == AbsentRead::Initial
    }

    /// A batch that is trained at once.
    pub const TRAIN: Self = Self { train: true, is_prefetch: false, missing: MissingMode::Initial, threads: 1 };
    /// A batch that is trained later.
    pub const TRAIN_PREFETCH: Self = Self { is_prefetch: true, ..Self::TRAIN };
    /// A batch that is read at once and not trained.
    pub const EVALUATE: Self = Self { train: false, ..Self::TRAIN };
}

/// The pins of a plan on one table's rows, and the reads that they wait for. Only the residency changes it, together with the rows' bits.
/// It does not refer to the table, so that it can be dropped with a table that nobody uses any more.
#[derive(Default)]
pub(crate) struct PlanPins {
    /// The distinct ids of the plan: `[U]`. Positions below are positions in this list.
    pub(super) ids: Arc<Vec<Id>>,
    /// The pinned host slot of each id, `NO_SLOT` where none is: `[U]`.
    pub(super) host: Arc<Vec<CacheSlot>>,
    /// Names the pins of slots of `host` that were taken together, where there are any. The others were pinned one by one.
    pub(super) group: Option<PinGroup>,
    /// Whether rows came into the group that were to be born or read then. The others in it are born and current.
    pub(super) group_grew: bool,
    /// The pinned device slot of each id, `NO_SLOT` where none is: `[U]` for a table with a device tier, else empty.
    pub(super) device: Vec<CacheSlot>,
    /// Reads that rows of this plan wait for.
    pub(super) loads: Vec<Arc<HostLoad>>,
    /// True if the plan has begun. What it has left for later is done when it is placed.
    pub(super) has_begun: bool,
    /// True if the table had room then for all new rows of the plan, while all of its own stay.
    pub(super) has_space: bool,
    /// Positions that an `ahead` plan has left for later.
    pub(super) unplaced: Vec<u32>,
    /// Positions of ids without a row that are deferred until the plan is placed, because other rows have to go for theirs.
    pub(super) deferred: Vec<u32>,
    /// Ids that are not admitted as far as was known.
    pub(super) waiting: WaitingIds,
    /// What the ids ask for, where the table refuses some.
    pub(super) demand: PlanDemand,
    /// The ids that get no row, once that is decided.
    pub(super) not_admitted: Option<NotAdmittedIds>,
    /// Their positions.
    pub(super) not_admitted_positions: Vec<u32>,
    /// How many provisional rows this plan has pledged to train; see [`super::counts::Counts`].
    pub(super) pledged: u64,
    /// How many reads had found rows absent when `pledged` was counted.
    pub(super) absent_reads_before: u64,
    /// Rows that have a slot on the device and were not scattered into it yet.
    pub(super) arriving: Vec<ArrivingRow>,
    /// Where the rows of a plan that goes to the device were found. They are counted once they are there.
    pub(super) found: FoundCounts,
    /// The positions of ids that have no slot on the device, once all others have pinned theirs for the plan to be placed.
    pub(super) slotless: Option<Vec<u32>>,
}

/// A row that has a slot on the device and is not there yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrivingRow {
    pub(super) position: u32,
    /// Its state once it is there. For a row that comes from a host slot, the state of that slot counts instead.
    pub(super) state: RowState,
}

/// Where the rows of a plan were that goes to the device tier.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FoundCounts {
    pub(super) on_device: u64,
    pub(super) in_host: u64,
    /// In neither of the two.
    pub(super) elsewhere: u64,
    /// Read from SSD for the plan when it was placed.
    pub(super) on_ssd: u64,
    /// In no tier.
    pub(super) absent: u64,
}

/// Rows to scatter into the device tensors before the forward.
#[derive(Clone, Debug, Default)]
pub struct FetchedRows {
    /// Device slots: `[M]`.
    pub slots: Vec<CacheSlot>,
    /// Vector parts: `[M, V]`; `None` where they are the first ones in memory that was lent.
    pub vectors: Option<Vec<f32>>,
    /// Scalar slots: `[M]`, zeros where the layout has none.
    pub scalars: Vec<f32>,
}

impl PlanPins {
    /// A plan for these distinct ids that holds nothing yet.
    pub(crate) fn new(ids: Vec<Id>, demand: PlanDemand) -> Self {
        Self { host: Arc::new(vec![NO_SLOT; ids.len()]), ids: Arc::new(ids), demand, ..Self::default() }
    }

    /// For each id whether it gets no row in this batch: `[U]`, or empty where all get one.
    pub(super) fn not_admitted_bits(&self) -> Vec<bool> {
        if self.not_admitted_positions.is_empty() {
            return Vec::new();
        }
        let mut bits = vec![false; self.ids.len()];
        self.not_admitted_positions.iter().for_each(|&position| bits[position as usize] = true);
        bits
    }

    /// The positions of the ids that get no row in this batch, once that is decided.
    pub(crate) fn not_admitted_positions(&self) -> &[u32] {
        &self.not_admitted_positions
    }

    /// The pinned host slot of each id, `NO_SLOT` where none is: `[U]`.
    pub(crate) fn host(&self) -> &[CacheSlot] {
        &self.host
    }

    /// The pinned device slot of each id, `NO_SLOT` where none is: `[U]`.
    pub(crate) fn device(&self) -> &[CacheSlot] {
        &self.device
    }

    /// The distinct ids of the plan: `[U]`.
    pub(crate) fn ids(&self) -> &[Id] {
        &self.ids
    }

    /// How many rows are born if the plan is trained.
    pub(crate) fn pledged(&self) -> u64 {
        self.pledged + self.deferred.len() as u64
    }

    /// The positions of ids that have no row and get none as far as is known when the plan has begun, rising. Ids that are left for later
    /// are not among them.
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

    /// Returns whether the table had room for the rows of the plan when it began, so that no other has to go for them.
    pub(crate) fn has_space(&self) -> bool {
        self.has_space
    }

    /// True if every id has its slot, or its read under way, or is deferred.
    pub(crate) fn is_complete(&self) -> bool {
        self.unplaced.is_empty()
    }

    /// Whether no read is left to wait for.
    pub(crate) fn is_read(&self) -> bool {
        self.loads.iter().all(|load| load.is_done())
    }

    /// The ids that are being read, of reads that the plan has not waited for.
    pub(crate) fn reading(&self) -> Vec<Id> {
        self.loads.iter().flat_map(|load| load.ids()).collect()
    }

    /// Take the reads that the plan waits for, to wait for them without the table's lock.
    pub(crate) fn take_loads(&mut self) -> Vec<Arc<HostLoad>> {
        std::mem::take(&mut self.loads)
    }

    /// Whether reads are left to wait for.
    pub(crate) fn has_loads(&self) -> bool {
        !self.loads.is_empty()
    }

    /// Take everything that is held, to give it back: this holds nothing from here on.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::take(self)
    }
}
