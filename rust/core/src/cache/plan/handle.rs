//! A batch in flight: from planned ids to placed rows, to a commit or a release. Its kernels are in `kernels`.

use std::sync::Arc;

use super::table_plan::{LookupShape, PlanStage, PlanState, PlanThreads, TablePlan, for_each_table};
use crate::cache::lock::{RowUseGuard, TableInner};
use crate::cache::placement::{FetchedRows, PlanMode};
use crate::cache::plan_lock::{PlanGuard, PlanLock};
use crate::error::{Kind, Result};
use crate::runtime::sync::{Mutex, MutexGuard, lock};
use crate::ssd::FetchBatch;
use crate::tiers::DeviceTier;
use crate::types::{CacheSlot, Id};

/// A planned batch. Its rows are pinned until the backward, `release`, or its drop.
pub struct Plan {
    pub(super) shape: Arc<LookupShape>,
    /// Start of the ids of each feature, and the end of the last one: `[F + 1]`.
    pub(super) splits: Vec<usize>,
    pub(super) mode: PlanMode,
    threads: PlanThreads,
    access: PlanLock<PlanState>,
}

opaque_debug!(Plan, self, shape = self.shape, mode = self.mode);

impl Plan {
    /// `mode.threads` is the number of threads per table.
    pub(super) fn new(
        shape: Arc<LookupShape>,
        splits: Vec<usize>,
        mode: PlanMode,
        threads: PlanThreads,
        tables: Vec<TablePlan>,
    ) -> Self {
        let access =
            PlanLock::new(PlanState { tables, stage: PlanStage::Started, has_space: !mode.train, pooled: None });
        Self { shape, splits, mode, threads, access }
    }

    pub(super) fn start(&self) -> Result<()> {
        let plan_guard = self.access.lock();
        let mut state = plan_guard.state();
        // One submission for all tables if a single thread starts them. It is submitted on an error too, because other
        // plans may wait for rows that it loads.
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
        // A prefetched batch is checked in [`Plan::wait`].
        if self.mode.is_prefetch { Ok(()) } else { state.check_space() }
    }

    /// Checks that the rows of a training batch fit every table. [`Plan::wait`] checks it too, and then full tables
    /// drop rows. A caller that waits for several plans of one batch first calls this for each of them, so that no row
    /// is dropped for a batch that is rejected.
    ///
    /// Errors: `Capacity`; those of the SSD tier. The plan is released then.
    pub fn check_space(&self) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = plan_guard.state();
        if state.stage == PlanStage::Started { state.check_space() } else { Ok(()) }
    }

    /// Waits for the reads started for this plan. [`Plan::wait`] does so too. A caller that takes exclusive access to
    /// rows of a table calls this first, so that no other thread waits for these reads. [`Plan::wait`] reads the rows
    /// that a device tier lacks then.
    ///
    /// Errors: as [`Plan::wait`], and the plan is released then.
    pub fn wait_for_reads(&self) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = plan_guard.state();
        if state.stage != PlanStage::Started {
            return Ok(());
        }
        let read = state.tables.iter_mut().try_for_each(TablePlan::wait_for_reads);
        if read.is_err() {
            state.release();
        }
        read
    }

    /// Places every row in a slot of the tier that kernels run on. Idempotent. Rows bound for a device tier get their
    /// slots here and are in [`Plan::fetched`]; [`Plan::scattered`] moves them. If a table has a device tier, waits for
    /// kernels and for threads that copy its rows.
    ///
    /// `buffers` may contain, for each table, a caller's buffer `[n, V]` for the rows bound for its device tier, with n
    /// from [`Plan::max_arriving_rows`]. If they do not fit, they are stored elsewhere. Pass the same buffer to
    /// [`Plan::fetched`].
    ///
    /// Errors: `Storage` and `Corruption` of reads; `Capacity`; `ReadOnly`. The plan is released then, and no row of it
    /// has moved.
    pub fn wait(&self, buffers: &mut [Option<&mut [f32]>]) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = plan_guard.state();
        if state.stage != PlanStage::Started {
            return Ok(());
        }
        state.check_space()?;
        let buffers = buffers.iter_mut().map(Option::as_deref_mut).chain(std::iter::repeat_with(|| None));
        let place = |(table, buffer): (&mut TablePlan, _)| table.place(self.mode, &plan_guard, buffer);
        if let Err(error) = for_each_table(state.tables.iter_mut().zip(buffers), self.threads.tables, place) {
            state.release();
            return Err(error);
        }
        let any_device = self.shape.tables.iter().any(|table| table.has_device());
        state.stage = if any_device { PlanStage::Fetched } else { PlanStage::Placed };
        Ok(())
    }

    /// Records that the rows of [`Plan::fetched`] are in the device tensors of all tables, which makes these their
    /// current copies. Idempotent. A plan that is released before leaves every row where it was.
    ///
    /// Errors: `State` before [`Plan::wait`], and if a table was closed or poisoned. The plan is released then.
    pub fn scattered(&self) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = plan_guard.state();
        match state.stage {
            PlanStage::Fetched => {}
            PlanStage::Placed => return Ok(()),
            _ => return Err(Kind::State.error("scattered comes after Plan.wait, before the forward")),
        }
        // All fallible work is done. Each table on its own is consistent before and after.
        let moved = for_each_table(state.tables.iter_mut(), self.threads.tables, |table| table.promote(&plan_guard));
        if moved.is_err() {
            state.release();
        } else {
            state.stage = PlanStage::Placed;
        }
        moved
    }

    /// Runs `work`, which changes device tensors outside of the Rust core, while no other thread forwards, updates or
    /// copies rows of this lookup's tables. `work` may wait, scatter the fetched rows and call [`Plan::scattered`]; it
    /// may call [`Plan::begin_update`], update rows and commit. It may use this plan, including its kernels, and no
    /// other plan of these tables. It is not reentrant.
    ///
    /// However `work` ends, no intermediate state remains: rows that were fetched and not scattered are where they were
    /// before, and the plan is released; if an update was started and not committed, the tables are poisoned.
    ///
    /// Errors: `State` from within such work, from code that reads device rows, and in a forked child.
    pub fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let tables = &self.shape.tables;
        tables.iter().try_for_each(|table| table.check_rows())?;
        let plan_guard = self.access.lock();
        // Lookups may share tables, so every thread that locks the rows of several tables uses one order.
        let mut order: Vec<usize> = (0..tables.len()).collect();
        order.sort_unstable_by_key(|&table| Arc::as_ptr(&tables[table]));
        let exclude = |table: usize| Ok((table, tables[table].writing_rows(&plan_guard)?));
        let row_guards: Vec<(usize, RowUseGuard<'_>)> = order.into_iter().map(exclude).collect::<Result<_>>()?;
        let changes = row_guards.iter().map(|(table, rows)| tables[*table].begin_changing_device(rows));
        let _changes: Vec<_> = changes.collect();
        let _end = ExclusiveEndGuard(&plan_guard);
        Ok(plan_guard.run(work))
    }

    /// Starts an update of device rows, which lasts until [`Plan::commit`], a table at a time. Keeps copies of the rows
    /// that a snapshot needs.
    pub fn begin_update(&self) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = self.trainable(&plan_guard)?;
        state.check_oov_step()?;
        for table in &state.tables {
            table.keep_pre_images(&table.table.reading_rows_or_exclusive(&plan_guard)?, None);
        }
        state.stage = PlanStage::Updating;
        Ok(())
    }

    /// Returns true if the reads started for this plan have finished. Errors: as [`Plan::reading`].
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.peek()?.tables.iter().all(|table| table.pins.is_read()))
    }

    /// Returns, for each table, the ids whose rows are being read from SSD for this plan, without those that
    /// [`Plan::wait`] has waited for.
    ///
    /// Errors: `State` from code that reads rows from the device, perhaps for this plan; and in a forked child.
    pub fn reading(&self) -> Result<Vec<Vec<Id>>> {
        Ok(self.peek()?.tables.iter().map(|table| table.pins.reading()).collect())
    }

    /// Returns true if a prefetch plan has loaded all rows. Errors: as [`Plan::reading`].
    pub fn is_prefetched(&self) -> Result<bool> {
        Ok(self.peek()?.tables.iter().all(|table| table.pins.is_complete()))
    }

    /// Returns true if every row is in its slot. Errors: as [`Plan::reading`].
    pub fn is_placed(&self) -> Result<bool> {
        Ok(matches!(self.peek()?.stage, PlanStage::Placed | PlanStage::Updating))
    }

    /// Returns, for each table, the number of rows that did not fit the tier that kernels run on. Errors: as
    /// [`Plan::reading`].
    pub fn overflow_rows(&self) -> Result<Vec<u32>> {
        Ok(self.peek()?.tables.iter().map(|table| table.overflow_rows).collect())
    }

    /// Returns the number of slots that the device tensors of a table must have.
    pub fn required_slots(&self, table: usize) -> Result<u32> {
        self.table(table)?;
        let plan_guard = self.lock_plan()?;
        let state = state_after_wait(&plan_guard, "required_slots")?;
        let row_guards = state.tables[table].table.lock_any()?;
        Ok(row_guards.placement.device.as_ref().map_or(0, DeviceTier::required_slots))
    }

    /// Returns, for each table, the approximate number of rows bound for its device tier, rarely exceeded. 0 for a
    /// table without one.
    pub fn max_arriving_rows(&self) -> Result<Vec<usize>> {
        let plan_guard = self.lock_plan()?;
        let state = plan_guard.state();
        state.tables.iter().map(|table| Ok(table.table.lock_any()?.placement.max_arriving_rows(&table.pins))).collect()
    }

    /// Returns the rows to scatter into a table's device tensors. They are returned once. `buffer` is the one that was
    /// passed to [`Plan::wait`], empty if there was none.
    ///
    /// Errors: `Input` if the rows are in a buffer other than `buffer`.
    pub fn fetched(&self, table: usize, buffer: &mut [f32]) -> Result<FetchedRows> {
        self.table(table)?;
        let plan_guard = self.lock_plan()?;
        let mut state = state_after_wait(&plan_guard, "fetched")?;
        state.tables[table].take_fetched(buffer)
    }

    /// Returns the number of floats in the vector part of a table's rows.
    pub fn vector_floats(&self, table: usize) -> Result<usize> {
        Ok(self.table(table)?.floats())
    }

    /// Commits a step whose backward ran outside of the Rust core: the rows become dirty, provisional rows are
    /// inserted, the step counters advance, and the rows are unpinned. Call [`Plan::begin_update`] before changing rows
    /// on the device.
    pub fn commit(&self) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = self.trainable(&plan_guard)?;
        state.check_oov_step()?;
        state.commit(&plan_guard, self.threads.tables)
    }

    /// Unpins every row without training. Idempotent. Waits for a thread that is using this plan, never for a table
    /// lock. Under a table lock it does not wait at all: the unpinning is then left to the thread that is using the
    /// plan, or to the drop.
    pub fn release(&self) {
        let tables = &self.shape.tables;
        // In a forked child the pins belong to the parent.
        if tables.iter().any(|table| table.check_process().is_err()) {
            return;
        }
        if let Ok(plan_guard) = self.lock_plan() {
            plan_guard.state().release();
        } else if let Some(plan_guard) = self.access.try_lock()
            && let Some(mut state) = plan_guard.try_state()
        {
            state.release();
        }
    }

    /// Locks the plan for exclusive access.
    ///
    /// Errors: `State` if the caller would deadlock: code that reads rows from the device, perhaps for this plan; the
    /// work of another plan's [`Plan::exclusively`] on the same tables. Also in a forked child, where locks held at the
    /// fork stay locked.
    pub(super) fn lock_plan(&self) -> Result<PlanGuard<'_, PlanState>> {
        self.check_not_reentrant()?;
        if let Some(guard) = self.access.reenter() {
            return Ok(guard);
        }
        self.shape.tables.iter().try_for_each(|table| table.check_not_exclusive())?;
        Ok(self.access.lock())
    }

    /// The state, for a short read. The caller must not take a table lock while it holds the guard.
    fn peek(&self) -> Result<MutexGuard<'_, PlanState>> {
        self.check_not_reentrant()?;
        Ok(self.access.peek())
    }

    /// Rejects code that reads rows from the device, perhaps for this plan, and a forked child, where locks held at the
    /// fork stay locked.
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

    /// The state of a plan that is ready for a backward.
    pub(super) fn trainable<'a>(&self, guard: &'a PlanGuard<'_, PlanState>) -> Result<MutexGuard<'a, PlanState>> {
        let state = guard.state();
        match state.stage {
            PlanStage::Placed | PlanStage::Updating if self.mode.train => Ok(state),
            PlanStage::Started | PlanStage::Fetched | PlanStage::Placed | PlanStage::Updating => Err(Kind::State.error("a backward needs a plan made with train=True whose rows are in their slots",
            )),
            PlanStage::Trained => Err(Kind::State.error("this batch was trained already: the update happens in the first backward, so a second backward of one forward is \
                 not possible; run the forward again",
            )),
            PlanStage::Released => {
                Err(Kind::State.error("this batch was released before its backward: run the forward again"))
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
        PlanStage::Started => Err(Kind::State.error(format!("{call} comes after Plan.wait"))),
        PlanStage::Trained | PlanStage::Released => {
            Err(Kind::State.error(format!("{call}: this plan's rows were released; plan the batch again")))
        }
    }
}

/// The state of a plan whose rows are all in their slots.
pub(super) fn placed_state<'a>(guard: &'a PlanGuard<'_, PlanState>, call: &str) -> Result<MutexGuard<'a, PlanState>> {
    let state = state_after_wait(guard, call)?;
    if state.stage == PlanStage::Fetched {
        return Err(Kind::State.error(format!(
            "{call} comes after Plan.scattered: put what Plan.fetched gives into the device tensors first"
        )));
    }
    Ok(state)
}

/// Ends the period in which device tensors are changed outside of the Rust core.
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
        self.access.get_mut().release();
        #[cfg(loom)]
        self.release();
    }
}

pub(super) fn check_len(name: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Kind::Input.error(format!("{name} has {got} elements and needs {expected}")))
}

pub(super) fn check_index(name: &str, index: usize, count: usize) -> Result<()> {
    if index < count {
        return Ok(());
    }
    Err(Kind::Input.error(format!("{name} {index} is out of range: the lookup has {count}")))
}
