//! One batch: from planned ids to rows in place, to commit or release. Its kernels are in `compute`.

use std::sync::Arc;

use super::compute::Pooled;
use super::locks::Tear;
use super::lookup::Shape;
use super::place::{PlanMode, TablePlan};
use super::place_device::Fetched;
use super::table::Shared;
use crate::error::{Error, Kind, Result};
use crate::ssd::FetchBatch;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::types::{CacheSlot, Id};

/// One planned batch. Its rows are pinned until the backward, `release`, or its drop, none of which waits for a table's lock.
#[derive(Debug)]
pub struct Plan {
    pub(super) shape: Arc<Shape>,
    pub(super) splits: Vec<usize>,
    pub(super) mode: PlanMode,
    inner: Mutex<Inner>,
}

pub(super) struct Inner {
    pub(super) tables: Vec<TablePlan>,
    pub(super) stage: Stage,
    pub(super) pooled: Option<Pooled>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("stage", &self.stage).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Started,
    /// Rows are to be copied to the device; until [`Plan::scattered`] says that they were, their newest copies are where they were.
    Fetched,
    Placed,
    /// Code outside of the core changes rows on the device: [`Plan::commit`], or the tables are torn.
    Updating,
    Trained,
    Released,
}

impl Plan {
    pub(crate) fn new(shape: Arc<Shape>, splits: Vec<usize>, mode: PlanMode, tables: Vec<TablePlan>) -> Self {
        Self { shape, splits, mode, inner: Mutex::new(Inner { tables, stage: Stage::Started, pooled: None }) }
    }

    pub(crate) fn start(&self) -> Result<()> {
        let mut inner = lock(&self.inner);
        // One submission for all tables. It goes out on an error too: rows may be waiting for it that other plans found.
        let mut batch = FetchBatch::default();
        let started = inner.tables.iter_mut().try_for_each(|table| table.start(self.mode, &mut batch));
        batch.submit();
        started
    }

    /// Bring every row into its slot of the tier that kernels run on. Harmless twice. Rows that go to a device tier get their slots
    /// here and are in [`Plan::fetched`]; they move when [`Plan::scattered`] is called.
    ///
    /// Errors: `Storage` and `Corruption` of reads, `Capacity`, `ReadOnly`; the plan is released then, and no row has moved.
    pub fn wait(&self) -> Result<()> {
        let mut inner = self.inner()?;
        if inner.stage != Stage::Started {
            return Ok(());
        }
        for position in 0..inner.tables.len() {
            if let Err(error) = inner.tables[position].finish(self.mode) {
                inner.release();
                return Err(error);
            }
        }
        let any_device = inner.tables.iter().any(|table| table.shared.config.device_rows.is_some());
        inner.stage = if any_device { Stage::Fetched } else { Stage::Placed };
        Ok(())
    }

    /// What [`Plan::fetched`] gave is in the device tensors of all tables, so that the rows' newest copies are there. Harmless twice.
    /// A plan that is released before leaves every row where it was.
    ///
    /// Errors: `State` before [`Plan::wait`], and where a table was closed or torn; the plan is released then.
    pub fn scattered(&self) -> Result<()> {
        let mut inner = self.inner()?;
        match inner.stage {
            Stage::Fetched => {}
            Stage::Placed => return Ok(()),
            _ => return Err(Error::new(Kind::State, "scattered comes after Plan.wait, before the forward")),
        }
        // Each table by itself is right before and after. A table that was closed has no rows that could be wrong.
        let mut moved = Ok(());
        for table in &mut inner.tables {
            moved = moved.and(table.take_over());
        }
        if moved.is_err() {
            inner.release();
        } else {
            inner.stage = Stage::Placed;
        }
        moved
    }

    /// Do `work`, which changes device tensors outside of the core, while nobody else forwards, updates or copies rows of this lookup's
    /// tables: to wait, to scatter what was fetched and to say so, or to update rows and to commit. The core's kernels of this plan may
    /// run in it. Not from within itself.
    ///
    /// However `work` ends, nothing is left in between: rows that were fetched and not scattered are where they were before, and the
    /// plan is released; where an update was begun ([`Plan::begin_update`]) and not committed, the tables are torn.
    pub fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let mut tables: Vec<_> = self.shape.tables.iter().collect();
        // Two lookups may share tables: everybody who takes several takes them in one order.
        tables.sort_unstable_by_key(|table| Arc::as_ptr(table));
        let _writing = tables.iter().map(|table| table.writing_rows()).collect::<Result<Vec<_>>>()?;
        {
            let inner = self.inner()?;
            if inner.stage == Stage::Placed && self.mode.train {
                inner.tables.iter().for_each(|table| table.keep_rows(None));
            }
        }
        let _foreign: Vec<_> = tables.iter().map(|table| table.changing_device.begin()).collect();
        let _end = Exclusive(self);
        Ok(work())
    }

    /// From here to [`Plan::commit`] rows on the device change, a table at a time.
    pub fn begin_update(&self) -> Result<()> {
        self.trainable()?.stage = Stage::Updating;
        Ok(())
    }

    /// Whether `wait` would not wait for the SSD.
    pub fn is_ready(&self) -> bool {
        lock(&self.inner).tables.iter().all(|table| table.loads.iter().all(|load| load.fetch.is_done()))
    }

    /// Per table the ids whose rows are being read from SSD for this plan. Those that [`Plan::wait`] has waited for are no longer here.
    pub fn reading(&self) -> Vec<Vec<Id>> {
        let ids = |table: &TablePlan| table.loads.iter().flat_map(|load| load.rows.iter().map(|&(id, _)| id)).collect();
        lock(&self.inner).tables.iter().map(ids).collect()
    }

    /// Whether an `ahead` plan fetched everything.
    pub fn complete_ahead(&self) -> bool {
        lock(&self.inner).tables.iter().all(|table| table.unplaced.is_empty())
    }

    /// Per table the rows that did not fit the tier that kernels run on.
    pub fn overflow_rows(&self) -> Vec<u32> {
        lock(&self.inner).tables.iter().map(|table| table.overflow_rows).collect()
    }

    /// Slots that the device tensors of a table must have.
    pub fn required_slots(&self, table: usize) -> Result<u32> {
        self.table(table)?;
        let inner = self.waited_for("required_slots")?;
        let state = inner.tables[table].shared.lock_any()?;
        Ok(state.device.as_ref().map_or(0, crate::device::DeviceTier::required_slots))
    }

    /// The rows to scatter into a table's device tensors: slots `[M]`, vector parts `[M, V]`, scalar slots `[M]`. Handed out once.
    pub fn fetched(&self, table: usize) -> Result<(Vec<CacheSlot>, Vec<f32>, Vec<f32>)> {
        self.table(table)?;
        let mut inner = self.waited_for("fetched")?;
        let Fetched { slots, vectors, scalars } = inner.tables[table].take_fetched()?;
        Ok((slots, vectors, scalars))
    }

    /// Floats of the vector part of a table's rows.
    pub fn vector_floats(&self, table: usize) -> Result<usize> {
        Ok(self.table(table)?.layout.vector_floats())
    }

    /// The slot of each occurrence of a feature: `[N_f]`, `NO_SLOT` for a row of zeros.
    pub fn slots(&self, feature: usize) -> Result<Vec<CacheSlot>> {
        let inner = self.placed("slots")?;
        check_index("feature", feature, self.shape.feature_tables.len())?;
        Ok(self.feature_slots(&inner, feature).to_vec())
    }

    /// A table's transposed index: slots `[U]`, starts `[U + 1]`, occurrences as positions in the batch's ids.
    pub fn transposed(&self, table: usize) -> Result<(Vec<CacheSlot>, Vec<u32>, Vec<u32>)> {
        self.table(table)?;
        let inner = self.placed("transposed")?;
        let begin = self.splits[self.shape.table_features[table].start] as u32;
        let index = &inner.tables[table].index;
        let occurrences = index.occurrences.iter().map(|&position| position + begin).collect();
        Ok((index.slots.clone(), index.starts.clone(), occurrences))
    }

    /// Commit a step whose backward ran outside of the core: rows are dirty and born, the step counters advance, pins are taken back.
    pub fn commit(&self) -> Result<()> {
        let mut inner = self.trainable()?;
        inner.commit()
    }

    /// Take back every pin without training. Harmless twice, and never waits for a table's lock.
    pub fn release(&self) {
        // In a forked child the pins are its parent's.
        if self.shape.tables.iter().any(|table| table.check_process().is_err()) {
            return;
        }
        if self.shape.tables.iter().all(|table| table.check_not_reading_device().is_ok()) {
            lock(&self.inner).release();
        } else if let Ok(mut inner) = self.inner.try_lock() {
            // Called while rows are read from the device, for another plan: the one that has them read is locked.
            inner.release();
        }
    }

    /// Its state. `State` in a forked child, where whoever held the lock at the fork holds it for ever, and where it is asked for by the
    /// code that reads rows from the device, perhaps for this plan.
    pub(super) fn inner(&self) -> Result<MutexGuard<'_, Inner>> {
        for table in &self.shape.tables {
            table.check_process()?;
            table.check_not_reading_device()?;
        }
        Ok(lock(&self.inner))
    }

    fn table(&self, table: usize) -> Result<&Arc<Shared>> {
        check_index("table", table, self.shape.tables.len())?;
        Ok(&self.shape.tables[table])
    }

    /// The state after [`Plan::wait`].
    fn waited_for(&self, call: &str) -> Result<MutexGuard<'_, Inner>> {
        let inner = self.inner()?;
        match inner.stage {
            Stage::Fetched | Stage::Placed | Stage::Updating => Ok(inner),
            Stage::Started => Err(Error::new(Kind::State, format!("{call} comes after Plan.wait"))),
            Stage::Trained | Stage::Released => {
                Err(Error::new(Kind::State, format!("{call}: this plan's rows were released; plan the batch again")))
            }
        }
    }

    /// The state once every row is in its slot.
    pub(super) fn placed(&self, call: &str) -> Result<MutexGuard<'_, Inner>> {
        let inner = self.waited_for(call)?;
        if inner.stage == Stage::Fetched {
            return Err(Error::new(
                Kind::State,
                format!("{call} comes after Plan.scattered: put what Plan.fetched gives into the device tensors first"),
            ));
        }
        Ok(inner)
    }

    pub(super) fn trainable(&self) -> Result<MutexGuard<'_, Inner>> {
        let inner = self.inner()?;
        match inner.stage {
            Stage::Placed | Stage::Updating if self.mode.train => Ok(inner),
            Stage::Started | Stage::Fetched | Stage::Placed | Stage::Updating => Err(Error::new(
                Kind::State,
                "a backward needs a plan made with train=True whose rows are in their slots",
            )),
            Stage::Trained => Err(Error::new(
                Kind::State,
                "this batch was trained already: the update happens in the first backward, so a second backward of one forward is \
                 not possible; run the forward again",
            )),
            Stage::Released => {
                Err(Error::new(Kind::State, "this batch was released before its backward: run the forward again"))
            }
        }
    }

    pub(super) fn feature_slots<'a>(&self, inner: &'a Inner, feature: usize) -> &'a [CacheSlot] {
        let table = self.shape.feature_tables[feature];
        let begin = self.splits[self.shape.table_features[table].start];
        &inner.tables[table].occurrence_slots[self.splits[feature] - begin..self.splits[feature + 1] - begin]
    }
}

impl Inner {
    fn commit(&mut self) -> Result<()> {
        // The rows of all tables are updated. One that was closed meanwhile has no rows any more, and the others make the step.
        let mut ended = Ok(());
        for table in &mut self.tables {
            ended = ended.and(table.end_step());
        }
        self.stage = Stage::Trained;
        ended
    }

    fn release(&mut self) {
        if matches!(self.stage, Stage::Trained | Stage::Released) {
            return;
        }
        if self.stage == Stage::Updating {
            self.tables.iter().for_each(|table| table.shared.tear(Tear::Update));
        }
        self.stage = Stage::Released;
        for table in &mut self.tables {
            let pins = table.take_pins();
            table.shared.leave_pins(pins);
        }
    }
}

/// The time in which device tensors are changed outside of the core.
struct Exclusive<'a>(&'a Plan);

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        let mut inner = lock(&self.0.inner);
        if matches!(inner.stage, Stage::Fetched | Stage::Updating) {
            inner.release();
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        #[cfg(not(loom))]
        self.inner.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).release();
        #[cfg(loom)]
        self.release();
    }
}

pub(super) fn check_len(what: &str, got: usize, wanted: usize) -> Result<()> {
    if got == wanted {
        return Ok(());
    }
    Err(Error::new(Kind::Input, format!("{what} has {got} elements and needs {wanted}")))
}

pub(super) fn check_index(what: &str, index: usize, count: usize) -> Result<()> {
    if index < count {
        return Ok(());
    }
    Err(Error::new(Kind::Input, format!("{what} {index} is out of range: the lookup has {count}")))
}
