//! State of a plan and of its lookup: the stage, the part of each table, and parallel work on the tables. Each table
//! has its own locks, so with enough threads a plan of many tables takes little longer than a plan of one.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::lock::{PoisonCause, RowUseGuard, TableGuard, TableInner};
use crate::cache::placement::{AbsentRead, FetchedRows, PlanDemand, PlanMode, PlanPins};
use crate::cache::plan_lock::PlanGuard;
use crate::cache::row_blocks::DeviceTensors;
use crate::error::{Error, Kind, Result};
use crate::index::DedupedIds;
use crate::kernels::thread_pool::for_each_that_waits;
use crate::kernels::{Hyperparameters, OptimizerStep, TransposedIndex};
use crate::runtime::call_context::CallContext;
use crate::runtime::sync::{Mutex, lock};
use crate::ssd::FetchBatch;
use crate::types::{CacheSlot, NO_SLOT};

/// With fewer ids than this per thread, a further thread costs more time than it saves.
const IDS_PER_THREAD: usize = 4096;

/// Progress of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlanStage {
    /// Rows are pinned, and reads are in progress.
    Started,
    /// Rows are to be copied to the device. Until [`Plan::scattered`](super::Plan::scattered), their current copies are
    /// where they were.
    Fetched,
    /// Every row is in its slot.
    Placed,
    /// Code outside of the Rust core changes rows on the device. Unless a commit follows, the tables are poisoned.
    Updating,
    Trained,
    Released,
}

/// Arguments of a pooled forward, kept for its backward.
pub(super) struct PooledArgs {
    /// `[F × B + 1]`
    pub(super) offsets: Vec<i64>,
    /// `[N]`
    pub(super) weights: Option<Vec<f32>>,
    /// `[F]`
    pub(super) mean: Vec<bool>,
}

/// State guarded by the plan's lock.
pub(super) struct PlanState {
    pub(super) tables: Vec<TablePlan>,
    pub(super) stage: PlanStage,
    /// True if the batch fits every table.
    pub(super) has_space: bool,
    pub(super) pooled: Option<PooledArgs>,
}

opaque_debug!(PlanState, self, stage = self.stage);

impl PlanState {
    /// Commits a step whose rows were updated outside of the Rust core. The rows of all tables are updated already: if
    /// a table was closed concurrently and has no rows, the others complete the step, and the error reports the closed
    /// table.
    pub(super) fn commit(&mut self, guard: &PlanGuard<'_, Self>, at_once: usize) -> Result<()> {
        let ended = for_each_table(self.tables.iter_mut(), at_once, |table| table.end_step(guard));
        self.stage = PlanStage::Trained;
        ended
    }

    /// Checks that a training batch fits every table, before rows of any table are dropped for it.
    ///
    /// Errors: `Capacity`; those of the SSD tier. The plan is released then.
    pub(super) fn check_space(&mut self) -> Result<()> {
        let mut doubtful = self.tables.iter().filter(|table| !table.pins.has_space);
        if !self.has_space
            && let Err(error) = doubtful.try_for_each(|table| table.table.lock()?.check_space(&table.pins))
        {
            self.release();
            return Err(error);
        }
        self.has_space = true;
        Ok(())
    }

    /// Unpins the plan's rows without waiting for a table's lock.
    pub(super) fn release(&mut self) {
        if matches!(self.stage, PlanStage::Trained | PlanStage::Released) {
            return;
        }
        if self.stage == PlanStage::Updating {
            self.tables.iter().for_each(|table| table.table.poison(PoisonCause::Update));
        }
        self.stage = PlanStage::Released;
        for table in &mut self.tables {
            table.table.defer_release(table.pins.take());
        }
    }

    /// Returns the optimizer's parameters of the next step for each table.
    pub(super) fn next_steps(&self, hyperparameters: &[Hyperparameters]) -> Result<Vec<OptimizerStep>> {
        self.check_oov_step()?;
        let tables = self.tables.iter().zip(hyperparameters);
        tables.map(|(table, &hyperparameters)| table.next_step(hyperparameters)).collect()
    }
}

/// The update of a table's OOV row by a batch.
pub(super) struct OovStep {
    /// `[D]`; `None` if the batch has no id that is not admitted.
    pub(super) gradient: Option<Vec<f32>>,
    pub(super) hyperparameters: Hyperparameters,
}

/// A plan's part for one table.
pub(super) struct TablePlan {
    pub(super) table: Arc<TableInner>,
    /// The pins of the plan on the table.
    pub(super) pins: PlanPins,
    /// The occurrences of each distinct id. Built only if a backward will need it; its slots are filled when the rows
    /// are placed.
    pub(super) index: TransposedIndex,
    /// For each occurrence, the position of its id among the distinct ids: `[N]`.
    inverse: Vec<u32>,
    /// For each occurrence, its slot on the tier that kernels run on: `[N]`. Filled when the rows are placed.
    pub(super) occurrence_slots: Vec<CacheSlot>,
    /// Number of rows that did not fit the budget of the tier that kernels run on.
    pub(super) overflow_rows: u32,
    /// The value that ids read if they have no row and are not admitted: `[D]`, or `None` for zeros.
    absent: Option<Vec<f32>>,
    /// Rows to scatter into the device tensors.
    fetched: FetchedRows,
    /// Address of the caller's buffer for these rows; 0 if there is none.
    buffer_address: usize,
    /// Time spent waiting for reads before the second stage.
    read_wait: Duration,
    is_placed: bool,
    /// The update of the table's OOV row by this batch, once it is set.
    pub(super) oov_step: Option<OovStep>,
}

impl TablePlan {
    /// `clicks` are those of the occurrences: `[N]`, or empty for none.
    pub(super) fn new(table: Arc<TableInner>, ids: DedupedIds, mode: PlanMode, clicks: &[u32]) -> Self {
        let DedupedIds { unique, inverse } = ids;
        // A prefetch plan would wait for threads that work on the previous batch.
        let threads = if mode.is_prefetch { 1 } else { mode.threads };
        let transposed = || TransposedIndex::from_inverse(&inverse, unique.len(), threads);
        let index = if mode.train { transposed() } else { TransposedIndex::default() };
        let refuses = mode.train && table.config.admission.is_selective();
        let demand = if refuses { count_demand(&index, clicks) } else { PlanDemand::default() };
        Self {
            table,
            pins: PlanPins::new(unique, demand),
            index,
            inverse,
            occurrence_slots: Vec::new(),
            overflow_rows: 0,
            absent: None,
            fetched: FetchedRows::default(),
            buffer_address: 0,
            read_wait: Duration::ZERO,
            is_placed: false,
            oov_step: None,
        }
    }

    /// Stage 1: pins rows in RAM, and adds reads of rows on SSD to `batch`. On an error the pins taken before it are
    /// kept until the release.
    pub(super) fn start(&mut self, mode: PlanMode, batch: &mut FetchBatch) -> Result<()> {
        self.table.lock()?.begin_plan(&mut self.pins, mode, batch)?;
        if self.table.sizing.is_on() {
            self.table.sizing.record(&self.pins.ids, &self.pins.without_row(mode.train), self.pins.pledged());
        }
        Ok(())
    }

    /// Waits for the reads started in stage 1.
    pub(super) fn wait_for_reads(&mut self) -> Result<()> {
        let started = Instant::now();
        let read = self.wait_for_loads();
        self.read_wait += started.elapsed();
        read
    }

    /// Stage 2: every row gets its slot on the tier that kernels run on.
    pub(super) fn place(
        &mut self,
        mode: PlanMode,
        guard: &PlanGuard<'_, PlanState>,
        buffer: Option<&mut [f32]>,
    ) -> Result<()> {
        if self.is_placed {
            return Ok(());
        }
        let started = Instant::now();
        let placed = self.place_rows(mode, guard, buffer);
        self.table.row_wait.record(self.read_wait + started.elapsed());
        placed
    }

    fn place_rows(
        &mut self,
        mode: PlanMode,
        guard: &PlanGuard<'_, PlanState>,
        buffer: Option<&mut [f32]>,
    ) -> Result<()> {
        self.wait_for_loads()?;
        let mode = PlanMode { is_prefetch: false, ..mode };
        if self.table.has_device() {
            self.place_on_device(mode, guard, buffer)?;
        } else {
            self.place_in_host(mode)?;
        }
        let absent = mode.absent_read(&self.table.config);
        let slots_of = |slots: &[CacheSlot]| self.inverse.iter().map(|&id| slots[id as usize]).collect();
        // Ids that are not admitted read the absent row or their initial value. They are not updated in either case.
        let all_slots = (absent == AbsentRead::Initial).then(|| slots_of(&self.index.slots));
        for &position in &self.pins.not_admitted_positions {
            self.index.slots[position as usize] = NO_SLOT;
        }
        self.occurrence_slots = all_slots.unwrap_or_else(|| slots_of(&self.index.slots));
        self.absent = match absent {
            AbsentRead::Value(value) if value != 0.0 => Some(vec![value; self.table.layout.dim]),
            // The OOV row at the time of the admission decision. The backward uses the same values.
            AbsentRead::OovRow => self
                .table
                .lock()?
                .lifecycle
                .admission
                .oov_row()
                .map(|shared| shared.weights(self.table.layout).to_vec()),
            AbsentRead::Value(_) | AbsentRead::Initial => None,
        };
        self.is_placed = true;
        Ok(())
    }

    /// The value that ids read if they have no row and are not admitted: `[D]`, or `None` for zeros.
    pub(super) fn absent(&self) -> Option<&[f32]> {
        self.absent.as_deref()
    }

    fn place_on_device(
        &mut self,
        mode: PlanMode,
        guard: &PlanGuard<'_, PlanState>,
        mut buffer: Option<&mut [f32]>,
    ) -> Result<()> {
        self.buffer_address = buffer.as_deref().map_or(0, |buffer| buffer.as_ptr().addr());
        let (table, pins) = (&*self.table, &mut self.pins);
        let rows = table.writing_rows_or_exclusive(guard)?;
        table.with_device_rows(&rows, || table.lock(), |locked| locked.activate_plan(pins))?;
        table.with_device_rows(&rows, || table.lock(), |locked| locked.make_space_on_device(pins, mode))?;
        let place = |locked: &mut TableGuard<'_>| locked.place_on_device(pins, mode, buffer.as_deref_mut());
        let (locked, fetched) = table.with_device_rows(&rows, || table.lock(), place)?;
        self.fetched = fetched;
        self.overflow_rows = locked.placement.overflow_of(&self.pins);
        self.index.slots.clear();
        self.index.slots.extend_from_slice(&self.pins.device);
        if !mode.train && !mode.reads_initial(&self.table.config) {
            locked.placement.leave_out_provisional(&self.pins, &mut self.index.slots);
        }
        Ok(())
    }

    fn place_in_host(&mut self, mode: PlanMode) -> Result<()> {
        {
            let mut locked = self.table.lock()?;
            if mode.train {
                // Rows that an evaluation loaded, or that turned out to be absent on SSD, are pledged once training
                // uses them.
                locked.check_pledge(&mut self.pins)?;
            }
            locked.admit_rest(&mut self.pins, mode)?;
            self.overflow_rows = locked.placement.overflow_of(&self.pins);
            locked.placement.traffic.overflow_plans += u64::from(self.overflow_rows > 0);
        }
        if !self.pins.loads.is_empty() {
            self.wait_for_loads()?;
            if mode.train {
                self.table.lock()?.check_pledge(&mut self.pins)?;
            }
        }
        if mode.train && self.table.config.admission.is_selective() {
            self.decide_admission_in_host(mode)?;
        } else if self.table.config.eviction.is_some() {
            self.activate(mode)?;
        }
        self.index.slots.clear();
        self.index.slots.extend_from_slice(&self.pins.host);
        if !mode.train && !mode.reads_initial(&self.table.config) {
            self.table.lock()?.placement.leave_out_provisional(&self.pins, &mut self.index.slots);
        }
        Ok(())
    }

    /// Activates the plan once all rows have their slots: removes the rows that a sweep matches.
    fn activate(&mut self, mode: PlanMode) -> Result<()> {
        let mut locked = self.table.lock()?;
        locked.activate_plan(&self.pins)?;
        if mode.train { locked.check_pledge(&mut self.pins) } else { Ok(()) }
    }

    /// Decides which ids are not admitted, once all others have their slots.
    fn decide_admission_in_host(&mut self, mode: PlanMode) -> Result<()> {
        loop {
            {
                let mut locked = self.table.lock()?;
                // While this thread waited for reads, another batch may have counted waiting ids or inserted their
                // rows.
                locked.admit_rest(&mut self.pins, mode)?;
                if self.pins.loads.is_empty() {
                    locked.activate_plan(&self.pins)?;
                    locked.check_pledge(&mut self.pins)?;
                    locked.decide_admission_in_host(&mut self.pins)?;
                    return locked.check_pledge(&mut self.pins);
                }
            }
            self.wait_for_loads()?;
        }
    }

    /// Waits for every read that this plan depends on, and finishes it. Does not hold the table's lock while waiting.
    fn wait_for_loads(&mut self) -> Result<()> {
        let mut counted_until = Instant::now();
        let mut first_error = None;
        for load in std::mem::take(&mut self.pins.loads) {
            load.wait();
            let mut locked = self.table.lock_any()?;
            // A load that only other plans need may fail without affecting this plan's rows.
            if let Err(error) = locked.placement.finish_load(&load)
                && locked.placement.has_failed(&self.pins)
            {
                first_error.get_or_insert(error);
            }
            let now = Instant::now();
            locked.placement.traffic.ssd_time_ns += (now - counted_until).as_nanos() as u64;
            counted_until = now;
        }
        first_error.map_or(Ok(()), |error| Err(self.table.in_table(error)))
    }

    /// Returns the rows to scatter, once. `buffer` is the caller's buffer for the rows.
    ///
    /// Errors: `Input` if the rows are in a caller's buffer other than `buffer`.
    pub(super) fn take_fetched(&mut self, buffer: &mut [f32]) -> Result<FetchedRows> {
        let floats = self.table.floats() * self.fetched.slots.len();
        let is_theirs = buffer.as_ptr().addr() == self.buffer_address && buffer.len() >= floats;
        if self.fetched.vectors.is_none() && floats > 0 && !is_theirs {
            let message = "the rows are in memory that was lent to Plan.wait: give the same to Plan.fetched";
            return Err(Kind::Input.error(message));
        }
        let mut fetched = std::mem::take(&mut self.fetched);
        self.table.lock_any()?.placement.drop_arrived(&mut fetched, buffer);
        Ok(fetched)
    }

    /// Stage 3 of a table with a device tier: the rows were scattered, and the device has their current copies. Fails
    /// only if the table was closed or poisoned, and so has no rows that could be wrong.
    pub(super) fn promote(&mut self, guard: &PlanGuard<'_, PlanState>) -> Result<()> {
        let rows = self.table.has_device().then(|| self.table.writing_rows_or_exclusive(guard)).transpose()?;
        let mut locked = self.table.lock_any()?;
        locked.placement.promote(&mut self.pins);
        if rows.is_some() {
            locked.placement.traffic.overflow_plans += u64::from(self.overflow_rows > 0);
        }
        Ok(())
    }

    /// Called before the rows of the batch are updated: keeps copies of the rows that a snapshot needs. A kernel
    /// updates them in `tensors` if the rows of a device tier are in RAM.
    pub(super) fn keep_pre_images(&self, rows: &RowUseGuard<'_>, tensors: Option<&DeviceTensors<'_>>) {
        let (table, has_snapshot) = (&*self.table, self.table.has_snapshot(rows));
        let may_sweep = table.has_device() && table.config.eviction.is_some();
        if !has_snapshot && !may_sweep {
            return;
        }
        let keep = |locked: &mut TableGuard<'_>| {
            locked.prepare_sweep_after_step()?;
            match tensors {
                _ if !has_snapshot => {}
                Some(tensors) => locked.placement.keep_tensor_pre_images(&self.index.slots, tensors),
                None => locked.placement.keep_pre_images(&self.index.slots, rows.no_kernel_writes())?,
            }
            Ok(())
        };
        // A closed or poisoned table does not need the copies, and nothing else fails.
        drop(table.with_device_rows(rows, || table.lock_any(), keep));
    }

    /// Commits a step whose rows were updated outside of the Rust core, and unpins the rows.
    fn end_step(&mut self, guard: &PlanGuard<'_, PlanState>) -> Result<()> {
        let rows = self.table.reading_rows_or_exclusive(guard)?;
        let keep = |locked: &mut TableGuard<'_>| {
            locked.prepare_sweep_after_step()?;
            locked.placement.keep_pre_images(&self.index.slots, rows.no_kernel_writes())
        };
        let (mut locked, ()) = self.table.with_device_rows(&rows, || self.table.lock_any(), keep)?;
        self.train(&mut locked);
        locked.end_step(self.pins.take());
        Ok(())
    }

    /// Commits a step of the native kernels, and unpins the rows. `rows` excludes threads that copy rows from the first
    /// update until the rows' metadata and the table's step are updated too.
    pub(super) fn end_kernels_step(&mut self, rows: RowUseGuard<'_>) -> Result<()> {
        let mut locked = self.table.lock_any()?;
        self.train(&mut locked);
        drop(rows);
        locked.end_step(self.pins.take());
        Ok(())
    }

    /// Records the step in the rows of the batch, and updates the OOV row.
    fn train(&self, guard: &mut TableGuard<'_>) {
        guard.train(&self.pins, &self.index.slots, &self.index.starts);
        if let Some((gradient, step)) = self.oov_update(guard.placement.changes.step) {
            guard.lifecycle.admission.train_oov_row(gradient, &step);
        }
    }

    fn next_step(&self, hyperparameters: Hyperparameters) -> Result<OptimizerStep> {
        let step = self.table.lock_any()?.placement.changes.step + 1;
        Ok(OptimizerStep { kind: self.table.config.optimizer, hyperparameters, step })
    }

    /// Returns the slot after the highest one that kernels read or write for this plan.
    pub(super) fn slots_end(&self) -> CacheSlot {
        // These include the slots of the index. Ids that are not admitted may read slots that are not in the index.
        self.occurrence_slots.iter().filter(|&&slot| slot != NO_SLOT).max().map_or(0, |&slot| slot + 1)
    }
}

/// Counts the occurrences and the clicks of each distinct id of a batch. `clicks` are those of the occurrences: `[N]`,
/// or empty for none.
fn count_demand(index: &TransposedIndex, clicks: &[u32]) -> PlanDemand {
    let of_row = |pair: &[u32]| {
        let of_row = &index.occurrences[pair[0] as usize..pair[1] as usize];
        of_row.iter().fold(0_u32, |sum, &at| sum.saturating_add(clicks[at as usize]))
    };
    PlanDemand {
        occurrences: index.starts.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        clicks: if clicks.is_empty() { Vec::new() } else { index.starts.windows(2).map(of_row).collect() },
    }
}

/// The features of a lookup, over its tables.
pub(super) struct LookupShape {
    pub(super) tables: Vec<Arc<TableInner>>,
    /// The table of each feature.
    pub(super) feature_tables: Vec<usize>,
    /// The features of each table.
    pub(super) table_features: Vec<Range<usize>>,
    /// The first column of each feature in the pooled output.
    pub(super) columns: Vec<usize>,
    /// Number of columns of the pooled output: `C`.
    pub(super) total_columns: usize,
}

opaque_debug!(LookupShape, self, feature_tables = self.feature_tables);

impl LookupShape {
    /// Errors: `Input` unless every table is passed once and has features, which are adjacent and in the order of the
    /// tables.
    pub(super) fn new(tables: Vec<Arc<TableInner>>, feature_tables: &[usize]) -> Result<Self> {
        let table_features = features_by_table(tables.len(), feature_tables)?;
        for (second, table) in tables.iter().enumerate() {
            // One thread would take its locks twice and deadlock.
            if let Some(first) = tables[..second].iter().position(|other| Arc::ptr_eq(other, table)) {
                return Err(Kind::Input.error(format!(
                    "tables[{first}] and tables[{second}] are both table {:?}: give a table once, with all its features \
                     side by side in feature_tables={feature_tables:?}",
                    table.config.name
                )));
            }
        }
        let mut columns = Vec::with_capacity(feature_tables.len());
        let mut total_columns = 0;
        for &table in feature_tables {
            columns.push(total_columns);
            total_columns += tables[table].layout.dim;
        }
        Ok(Self { tables, feature_tables: feature_tables.to_vec(), table_features, columns, total_columns })
    }

    /// Number of features.
    pub(super) fn features(&self) -> usize {
        self.feature_tables.len()
    }
}

fn features_by_table(tables: usize, feature_tables: &[usize]) -> Result<Vec<Range<usize>>> {
    let refuse = |what: String| Err(Kind::Input.error(format!("feature_tables={feature_tables:?}{what}")));
    let mut table_features: Vec<Range<usize>> = Vec::with_capacity(tables);
    for (feature, &table) in feature_tables.iter().enumerate() {
        if table + 1 == table_features.len() {
            table_features[table].end = feature + 1;
        } else if table == table_features.len() && table < tables {
            table_features.push(feature..feature + 1);
        } else {
            return refuse(format!(": features must come in the order of their {tables} tables"));
        }
    }
    if table_features.len() != tables {
        return refuse(format!(" leaves some of the {tables} tables without a feature"));
    }
    Ok(table_features)
}

/// Thread counts of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanThreads {
    /// Number of tables processed at the same time.
    pub(super) tables: usize,
    /// Number of threads per table.
    pub(super) per_table: usize,
}

impl PlanThreads {
    /// Thread counts for a plan of tables with `ids` ids each. `all_on_device` is true if the kernels of all tables run
    /// on device tiers.
    pub(super) fn of(mode: PlanMode, ids: impl Iterator<Item = usize> + Clone, all_on_device: bool) -> Self {
        // A prefetch plan would take threads from kernels that work on the previous batch.
        let threads = if mode.is_prefetch && !all_on_device { 1 } else { mode.threads };
        let (all, most) = (ids.clone().sum::<usize>(), ids.max().unwrap_or(0));
        // If one table has most of the ids and uses all threads, few other tables are worth a thread.
        let at_once = threads.min(all / most.max(IDS_PER_THREAD)).max(1);
        Self { tables: at_once, per_table: (mode.threads / at_once).max(1) }
    }
}

/// Does `work` for each table of a plan, `at_once` of them at a time, on behalf of the calling thread. All tables are
/// processed, including those after a failed one, so that the effect on a table does not depend on the number of
/// threads.
///
/// Errors: that of the first failed table, in table order.
pub(super) fn for_each_table<T: Send>(
    tables: impl Iterator<Item = T>,
    at_once: usize,
    work: impl Fn(T) -> Result<()> + Sync,
) -> Result<()> {
    if at_once == 1 {
        let mut done = Ok(());
        for table in tables {
            let this = work(table);
            done = done.and(this);
        }
        return done;
    }
    let me = CallContext::current();
    let first: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    for_each_that_waits(at_once, tables.enumerate(), |(number, table)| {
        if let Err(error) = me.run(|| work(table)) {
            let mut first = lock(&first);
            if first.as_ref().is_none_or(|(other, _)| number < *other) {
                *first = Some((number, error));
            }
        }
    });
    let first = lock(&first).take();
    first.map_or(Ok(()), |(_, error)| Err(error))
}
