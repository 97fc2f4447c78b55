//! One batch: from planned ids to rows in their slots, to a commit or a release. Its kernels are in `compute`.

use std::sync::Arc;

use super::shape::LookupShape;
use super::side_by_side::{PlanThreads, for_each_table};
use super::state::{PlanStage, PlanState, TablePlan};
use crate::cache::locks::{PlanGuard, PlanLock, RowUseGuard, TableInner};
use crate::cache::residency::{FetchedRows, PlanMode};
use crate::error::{Error, Kind, Result};
use crate::ssd::FetchBatch;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::types::{CacheSlot, Id};

/// One planned batch. Its rows are pinned until the backward, `release`, or its drop.
pub struct Plan {
    pub(super) shape: Arc<LookupShape>,
    /// Where the ids of each feature begin: `[F + 1]`.
    pub(super) splits: Vec<usize>,
    pub(super) mode: PlanMode,
    threads: PlanThreads,
    plan_lock: PlanLock<PlanState>,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan").field("shape", &self.shape).field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl Plan {
    /// `mode` has the threads for one table.
    pub(super) fn new(
        shape: Arc<LookupShape>,
        splits: Vec<usize>,
        mode: PlanMode,
        threads: PlanThreads,
        tables: Vec<TablePlan>,
    ) -> Self {
        let turns =
            PlanLock::new(PlanState { tables, stage: PlanStage::Started, has_space: !mode.train, pooled: None });
        Self { shape, splits, mode, threads, plan_lock: turns }
    }

    pub(super) fn start(&self) -> Result<()> {
        let turn = self.plan_lock.lock();
        let mut state = turn.state();
        // One submission for all tables, where one thread begins them. It goes out on an error too, because other plans may have found rows
        // that wait for it.
        let batch = Mutex::new(FetchBatch::default());
        let started = for_each_table(state.tables.iter_mut(), self.threads.tables, |table| {
            if self.threads.tables == 1 {
                return table.start(self.mode, &mut lock(&batch));
            }
            let mut own = FetchBatch::default();
            let started = table.start(self.mode, &mut own);
            own.submit();
            started
        });
        drop(batch);
        started?;
        // A batch that is fetched ahead is checked when it is waited for.
        if self.mode.is_prefetch { Ok(()) } else { state.check_space() }
    }

    /// Checks that every table has room for the rows of a training batch. [`Plan::wait`] does so too, and then full tables drop rows. A caller
    /// that waits for several plans of one batch calls this for each of them first, so that no row is dropped for a batch that is refused.
    ///
    /// Errors: `Capacity`; those of the SSD tier. The plan is released then.
    pub fn check_space(&self) -> Result<()> {
        let turn = self.lock_plan()?;
        let mut state = turn.state();
        if state.stage == PlanStage::Started { state.check_space() } else { Ok(()) }
    }

    /// Wait for the reads that were begun for this plan. [`Plan::wait`] does that too. Whoever will hold rows of a table exclusively calls this
    /// before, so that nobody else waits for these reads. Those that a device tier lacks then are read by [`Plan::wait`].
    ///
    /// Errors: as [`Plan::wait`], and the plan is released then.
    pub fn wait_for_reads(&self) -> Result<()> {
        let turn = self.lock_plan()?;
        let mut state = turn.state();
        if state.stage != PlanStage::Started {
            return Ok(());
        }
        let read = state.tables.iter_mut().try_for_each(TablePlan::wait_for_reads);
        if read.is_err() {
            state.release();
        }
        read
    }

    /// Bring every row into its slot of the tier that kernels run on. It is harmless to call this twice. Rows that go to a device tier get
    /// their slots here and are in [`Plan::fetched`]; they move when [`Plan::scattered`] is called. Where a table has a device tier, this waits
    /// for kernels and for whoever copies rows of it.
    ///
    /// Errors: `Storage` and `Corruption` of reads, `Capacity`, `ReadOnly`. The plan is released then, and no row of it has moved.
    pub fn wait(&self) -> Result<()> {
        self.wait_into(&mut [])
    }

    /// As [`Plan::wait`]. For each table `lent` may have memory `[n, V]` for the rows that go to its device tier, with n as
    /// [`Plan::max_arriving_rows`] says. Where they do not fit they lie elsewhere. Give the same memory to [`Plan::fetched_into`].
    pub fn wait_into(&self, lent: &mut [Option<&mut [f32]>]) -> Result<()> {
        let turn = self.lock_plan()?;
        let mut state = turn.state();
        if state.stage != PlanStage::Started {
            return Ok(());
        }
        state.check_space()?;
        let lent = lent.iter_mut().map(Option::as_deref_mut).chain(std::iter::repeat_with(|| None));
        let place = |(table, lent): (&mut TablePlan, _)| table.place(self.mode, &turn, lent);
        if let Err(error) = for_each_table(state.tables.iter_mut().zip(lent), self.threads.tables, place) {
            state.release();
            return Err(error);
        }
        let any_device = self.shape.tables.iter().any(|table| table.has_device());
        state.stage = if any_device { PlanStage::Fetched } else { PlanStage::Placed };
        Ok(())
    }

    /// Say that what [`Plan::fetched`] gave is in the device tensors of all tables, so that the newest copies of the rows are there. It is
    /// harmless to call this twice. A plan that is released before leaves every row where it was.
    ///
    /// Errors: `State` before [`Plan::wait`], and where a table was closed or torn. The plan is released then.
    pub fn scattered(&self) -> Result<()> {
        let turn = self.lock_plan()?;
        let mut state = turn.state();
        match state.stage {
            PlanStage::Fetched => {}
            PlanStage::Placed => return Ok(()),
            _ => return Err(Error::new(Kind::State, "scattered comes after Plan.wait, before the forward")),
        }
        // All that can fail is behind. Each table by itself is right before and after.
        let moved = for_each_table(state.tables.iter_mut(), self.threads.tables, |table| table.promote(&turn));
        if moved.is_err() {
            state.release();
        } else {
            state.stage = PlanStage::Placed;
        }
        moved
    }

    /// Do `work`, which changes device tensors outside of the core, while nobody else forwards, updates or copies rows of this lookup's
    /// tables. It may wait, scatter what was fetched and say so; it may say that it begins to update rows ([`Plan::begin_update`]), update
    /// them and commit. It may use this plan, its kernels too, and no other plan of these tables. It cannot be called from within itself.
    ///
    /// However `work` ends, nothing is left in between: rows that were fetched and not scattered are where they were before, and the
    /// plan is released; where an update was begun and not committed, the tables are torn.
    ///
    /// Errors: `State` from within such work, by code that reads device rows, and in a forked child.
    pub fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let tables = &self.shape.tables;
        tables.iter().try_for_each(|table| table.check_rows())?;
        let turn = self.plan_lock.lock();
        // Two lookups may share tables, so everybody who takes the rows of several takes them in one order.
        let mut order: Vec<usize> = (0..tables.len()).collect();
        order.sort_unstable_by_key(|&table| Arc::as_ptr(&tables[table]));
        let exclude = |table: usize| Ok((table, tables[table].writing_rows(&turn)?));
        let held: Vec<(usize, RowUseGuard<'_>)> = order.into_iter().map(exclude).collect::<Result<_>>()?;
        let changes = held.iter().map(|(table, rows)| tables[*table].begin_changing_device(rows));
        let _changes: Vec<_> = changes.collect();
        let _end = ExclusiveEndGuard(&turn);
        Ok(turn.run(work))
    }

    /// Say that from here to [`Plan::commit`] rows on the device change, a table at a time. What a moment wants of them is copied now.
    pub fn begin_update(&self) -> Result<()> {
        let turn = self.lock_plan()?;
        let mut state = self.trainable(&turn)?;
        state.check_oov_step()?;
        for table in &state.tables {
            table.keep_pre_images(&table.table.reading_rows_or_exclusive(&turn)?, None);
        }
        state.stage = PlanStage::Updating;
        Ok(())
    }

    /// Whether the reads that were begun for this plan have ended. Errors as [`Plan::reading`].
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.peek()?.tables.iter().all(|table| table.pins().is_read()))
    }

    /// For each table the ids whose rows are being read from SSD for this plan. Those that [`Plan::wait`] has waited for are no longer
    /// here.
    ///
    /// Errors: `State` by code that reads rows from the device, perhaps for this plan; and in a forked child.
    pub fn reading(&self) -> Result<Vec<Vec<Id>>> {
        Ok(self.peek()?.tables.iter().map(|table| table.pins().reading()).collect())
    }

    /// Whether an `ahead` plan has fetched everything. Errors as [`Plan::reading`].
    pub fn is_prefetched(&self) -> Result<bool> {
        Ok(self.peek()?.tables.iter().all(|table| table.pins().is_complete()))
    }

    /// Whether every row is in its slot. Errors as [`Plan::reading`].
    pub fn is_placed(&self) -> Result<bool> {
        Ok(matches!(self.peek()?.stage, PlanStage::Placed | PlanStage::Updating))
    }

    /// For each table how many rows did not fit the tier that kernels run on. Errors as [`Plan::reading`].
    pub fn overflow_rows(&self) -> Result<Vec<u32>> {
        Ok(self.peek()?.tables.iter().map(|table| table.overflow_rows).collect())
    }

    /// How many slots the device tensors of a table must have.
    pub fn required_slots(&self, table: usize) -> Result<u32> {
        self.table(table)?;
        let turn = self.lock_plan()?;
        let state = state_after_wait(&turn, "required_slots")?;
        let held = state.tables[table].table.lock_any()?;
        Ok(held.required_device_slots())
    }

    /// For each table about how many rows go to its device tier: mostly no more than this. 0 for a table that has no such tier.
    pub fn max_arriving_rows(&self) -> Result<Vec<usize>> {
        let turn = self.lock_plan()?;
        let state = turn.state();
        state.tables.iter().map(|table| Ok(table.table.lock_any()?.max_arriving_rows(table.pins()))).collect()
    }

    /// The rows to scatter into a table's device tensors: slots `[M]`, vector parts `[M, V]`, scalar slots `[M]`. They are handed out once.
    pub fn fetched(&self, table: usize) -> Result<(Vec<CacheSlot>, Vec<f32>, Vec<f32>)> {
        let FetchedRows { slots, vectors, scalars } = self.fetched_into(table, &mut [])?;
        Ok((slots, vectors.unwrap_or_default(), scalars))
    }

    /// As [`Plan::fetched`], where `lent` was lent for the rows.
    pub fn fetched_into(&self, table: usize, lent: &mut [f32]) -> Result<FetchedRows> {
        self.table(table)?;
        let turn = self.lock_plan()?;
        let mut state = state_after_wait(&turn, "fetched")?;
        state.tables[table].take_fetched(lent)
    }

    /// Floats of the vector part of a table's rows.
    pub fn vector_floats(&self, table: usize) -> Result<usize> {
        Ok(self.table(table)?.floats())
    }

    /// Commit a step whose backward ran outside of the core: rows are dirty and born, the step counters advance, and the pins are given
    /// back. Whoever changes rows on the device says so before ([`Plan::begin_update`]).
    pub fn commit(&self) -> Result<()> {
        let turn = self.lock_plan()?;
        let mut state = self.trainable(&turn)?;
        state.check_oov_step()?;
        state.commit(&turn, self.threads.tables)
    }

    /// Give back every pin without training. It is harmless to call this twice. It waits for another thread that uses this plan, and for no
    /// lock of a table. Code that runs under a lock of one of its tables does not wait for anything: what another call of the plan uses
    /// then, that call or the drop gives back.
    pub fn release(&self) {
        let tables = &self.shape.tables;
        // In a forked child the pins are its parent's.
        if tables.iter().any(|table| table.check_process().is_err()) {
            return;
        }
        if let Ok(turn) = self.lock_plan() {
            turn.state().release();
        } else if let Some(turn) = self.plan_lock.try_lock()
            && let Some(mut state) = turn.try_state()
        {
            state.release();
        }
    }

    /// The turn to use the plan.
    ///
    /// Errors: `State` where the caller would wait for itself: by code that reads rows from the device, perhaps for this plan; by the
    /// work of another plan's [`Plan::exclusively`] on the same tables. And in a forked child, where whoever had a lock at the fork has
    /// it for ever.
    pub(super) fn lock_plan(&self) -> Result<PlanGuard<'_, PlanState>> {
        self.check_not_reentrant()?;
        if let Some(mine) = self.plan_lock.reenter() {
            return Ok(mine);
        }
        self.shape.tables.iter().try_for_each(|table| table.check_not_exclusive())?;
        Ok(self.plan_lock.lock())
    }

    /// The state, to look at it briefly. No lock of a table may be taken meanwhile.
    fn peek(&self) -> Result<MutexGuard<'_, PlanState>> {
        self.check_not_reentrant()?;
        Ok(self.plan_lock.peek())
    }

    /// Refuse code that reads rows from the device, perhaps for this plan, and a forked child, where whoever had a lock at the fork has it
    /// for ever.
    fn check_not_reentrant(&self) -> Result<()> {
        for table in &self.shape.tables {
            table.check_process()?;
            table.check_not_reading_device()?;
        }
        Ok(())
    }

    pub(super) fn table(&self, table: usize) -> Result<&Arc<TableInner>> {
        check_index("table", table, self.shape.tables.len())?;
        Ok(&self.shape.tables[table])
    }

    /// The state once a backward may come.
    pub(super) fn trainable<'a>(&self, guard: &'a PlanGuard<'_, PlanState>) -> Result<MutexGuard<'a, PlanState>> {
        let state = guard.state();
        match state.stage {
            PlanStage::Placed | PlanStage::Updating if self.mode.train => Ok(state),
            PlanStage::Started | PlanStage::Fetched | PlanStage::Placed | PlanStage::Updating => Err(Error::new(
                Kind::State,
                "a backward needs a plan made with train=True whose rows are in their slots",
            )),
            PlanStage::Trained => Err(Error::new(
                Kind::State,
                "this batch was trained already: the update happens in the first backward, so a second backward of one forward is \
                 not possible; run the forward again",
            )),
            PlanStage::Released => {
                Err(Error::new(Kind::State, "this batch was released before its backward: run the forward again"))
            }
        }
    }

    /// The slot of each occurrence of a feature: `[N_f]`.
    pub(super) fn feature_slots<'a>(&self, state: &'a PlanState, feature: usize) -> &'a [CacheSlot] {
        let table = self.shape.feature_tables[feature];
        let begin = self.splits[self.shape.table_features[table].start];
        &state.tables[table].occurrence_slots[self.splits[feature] - begin..self.splits[feature + 1] - begin]
    }
}

/// The state after [`Plan::wait`].
fn state_after_wait<'a>(guard: &'a PlanGuard<'_, PlanState>, call: &str) -> Result<MutexGuard<'a, PlanState>> {
    let state = guard.state();
    match state.stage {
        PlanStage::Fetched | PlanStage::Placed | PlanStage::Updating => Ok(state),
        PlanStage::Started => Err(Error::new(Kind::State, format!("{call} comes after Plan.wait"))),
        PlanStage::Trained | PlanStage::Released => {
            Err(Error::new(Kind::State, format!("{call}: this plan's rows were released; plan the batch again")))
        }
    }
}

/// The state once every row is in its slot.
pub(super) fn placed_state<'a>(guard: &'a PlanGuard<'_, PlanState>, call: &str) -> Result<MutexGuard<'a, PlanState>> {
    let state = state_after_wait(guard, call)?;
    if state.stage == PlanStage::Fetched {
        return Err(Error::new(
            Kind::State,
            format!("{call} comes after Plan.scattered: put what Plan.fetched gives into the device tensors first"),
        ));
    }
    Ok(state)
}

/// The end of the time in which device tensors are changed outside of the core.
struct ExclusiveEndGuard<'a>(&'a PlanGuard<'a, PlanState>);

impl Drop for ExclusiveEndGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if matches!(state.stage, PlanStage::Fetched | PlanStage::Updating) {
            state.release();
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        #[cfg(not(loom))]
        self.plan_lock.get_mut().release();
        #[cfg(loom)]
        self.release();
    }
}

pub(super) fn check_len(name: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::new(Kind::Input, format!("{name} has {got} elements and needs {expected}")))
}

pub(super) fn check_index(name: &str, index: usize, count: usize) -> Result<()> {
    if index < count {
        return Ok(());
    }
    Err(Error::new(Kind::Input, format!("{name} {index} is out of range: the lookup has {count}")))
}
