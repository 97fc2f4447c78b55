//! One batch: from planned ids to rows in place, through the kernels, to commit or release.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::lookup::Shape;
use super::place::{PlanMode, TablePlan};
use super::place_device::Fetched;
use crate::error::{Error, Kind, Result};
use crate::kernels::{
    ArenaRows, Gradient, Hyperparameters, OptimizerStep, PooledFeature, PooledGradient, TensorRows, backward,
    forward_pooled, forward_sequence, weight_gradient,
};
use crate::rows::{Arena, RowLayout};
use crate::ssd::FetchBatch;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::types::{CacheSlot, Id, NO_SLOT};

/// One planned batch. Its rows are pinned until the backward, `release`, or its drop.
#[derive(Debug)]
pub struct Plan {
    shape: Arc<Shape>,
    splits: Vec<usize>,
    mode: PlanMode,
    inner: Mutex<Inner>,
}

struct Inner {
    tables: Vec<TablePlan>,
    stage: Stage,
    pooled: Option<Pooled>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("stage", &self.stage).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Started,
    Placed,
    Trained,
    Released,
}

/// What a pooled forward was given: its backward needs it again.
struct Pooled {
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
    mean: Vec<bool>,
}

/// A device tier's tensors as slices of RAM, for the core's kernels. `S` slots.
#[derive(Debug)]
pub struct DeviceTensors<'a> {
    /// `[S, D]`
    pub weights: &'a mut [f32],
    /// Each `[S, D]`
    pub vector_slots: Vec<&'a mut [f32]>,
    /// `[S]` where the layout has a scalar slot.
    pub scalars: Option<&'a mut [f32]>,
}

impl DeviceTensors<'_> {
    fn rows(&mut self, layout: RowLayout, slots: u32) -> Result<TensorRows> {
        let wanted = slots as usize * layout.dim;
        let fits = self.weights.len() >= wanted
            && self.vector_slots.len() == layout.vector_slots
            && self.vector_slots.iter().all(|slot| slot.len() >= wanted)
            && self.scalars.is_some() == layout.scalar_slot
            && self.scalars.as_ref().is_none_or(|scalars| scalars.len() >= slots as usize);
        if !fits {
            return Err(Error::new(
                Kind::Input,
                format!("the device tensors must hold {slots} slots of {layout:?}: grow them to Plan.required_slots"),
            ));
        }
        let mut vector_slots = [std::ptr::null_mut(); 2];
        for (address, slot) in vector_slots.iter_mut().zip(&mut self.vector_slots) {
            *address = slot.as_mut_ptr();
        }
        Ok(TensorRows {
            layout,
            weights: self.weights.as_mut_ptr(),
            vector_slots,
            scalars: self.scalars.as_mut().map_or(std::ptr::null_mut(), |scalars| scalars.as_mut_ptr()),
        })
    }
}

/// Where one table's kernels find its rows.
enum Rows {
    Arena(Arc<Arena>, RowLayout),
    Tensors(TensorRows),
}

impl Rows {
    /// The tensors of a device tier.
    fn tensors(&self) -> Option<&TensorRows> {
        match self {
            Self::Arena(..) => None,
            Self::Tensors(tensors) => Some(tensors),
        }
    }
}

/// Runs `$body` with `$rows` bound to the row store in `$where`.
macro_rules! with_rows {
    ($where:expr, $rows:ident => $body:expr) => {
        match $where {
            Rows::Arena(arena, layout) => {
                let $rows = &ArenaRows { arena, layout: *layout };
                $body
            }
            Rows::Tensors($rows) => $body,
        }
    };
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

    /// Bring every row into its slot of the tier that kernels run on. Harmless twice.
    ///
    /// Errors: `Storage` and `Corruption` of reads, `Capacity`, `ReadOnly`; the plan is released then.
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
        inner.stage = Stage::Placed;
        Ok(())
    }

    /// Do `work`, which changes device tensors outside of the core, while nobody else forwards, updates or copies rows of this lookup's
    /// tables: to wait and to scatter what was fetched, or to update rows and to commit. Not from within itself, and without kernels of
    /// the core in it.
    pub fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let mut tables: Vec<_> = self.shape.tables.iter().collect();
        // Two lookups may share tables: everybody who takes several takes them in one order.
        tables.sort_unstable_by_key(|table| Arc::as_ptr(table));
        let _writing = tables.into_iter().map(|table| table.writing_rows()).collect::<Result<Vec<_>>>()?;
        {
            let inner = self.inner()?;
            if inner.stage == Stage::Placed && self.mode.train {
                inner.tables.iter().for_each(|table| table.keep_rows(None));
            }
        }
        Ok(work())
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
        let inner = self.placed("required_slots")?;
        let state = inner.tables[table].shared.lock_any()?;
        Ok(state.device.as_ref().map_or(0, crate::device::DeviceTier::required_slots))
    }

    /// The rows to scatter into a table's device tensors: slots `[M]`, vector parts `[M, V]`, scalar slots `[M]`. Handed out once.
    pub fn fetched(&self, table: usize) -> Result<(Vec<CacheSlot>, Vec<f32>, Vec<f32>)> {
        self.table(table)?;
        let mut inner = self.placed("fetched")?;
        let Fetched { slots, vectors, scalars } = std::mem::take(&mut inner.tables[table].fetched);
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

    /// Sum (or average) the rows of each bag.
    ///
    /// - `offsets`: `[F × B + 1]` into the batch's ids, feature-major.
    /// - `weights`: `[N]` or `None`.
    /// - `mean`: `[F]`.
    /// - `out`: `[B, C]`, `C` the sum of the features' widths, in feature order.
    /// - `device`: for each table its tensors where it has a device tier.
    pub fn forward_pooled(
        &self,
        offsets: &[i64],
        weights: Option<&[f32]>,
        mean: &[bool],
        out: &mut [f32],
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let mut inner = self.placed("forward_pooled")?;
        let bags = self.check_offsets(offsets, weights, mean)?;
        let columns = self.shape.total_columns;
        check_len("out", out.len(), bags * columns)?;
        let stores = inner.stores(device)?;
        let mut local = Vec::with_capacity(bags + 1);
        for (feature, &table) in self.shape.feature_tables.iter().enumerate() {
            let begin = self.splits[feature];
            local.clear();
            local.extend(offsets[feature * bags..=(feature + 1) * bags].iter().map(|&offset| offset - begin as i64));
            let weights = weights.map(|weights| &weights[begin..self.splits[feature + 1]]);
            let slots = self.feature_slots(&inner, feature);
            let _reading = self.shape.tables[table].reading_rows()?;
            with_rows!(&stores[table], rows => {
                // SAFETY: the plan pins every slot, so all are valid, and the guard keeps every backward out.
                unsafe {
                    forward_pooled(
                        rows, slots, &local, weights, mean[feature], out, columns, self.shape.columns[feature], threads,
                    );
                }
            });
        }
        if self.mode.train {
            inner.pooled =
                Some(Pooled { offsets: offsets.to_vec(), weights: weights.map(<[f32]>::to_vec), mean: mean.to_vec() });
        }
        Ok(())
    }

    /// Copy the row of each occurrence: `out` is `[N, D]`, all tables of width `D`.
    pub fn forward_sequence(
        &self,
        out: &mut [f32],
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let inner = self.placed("forward_sequence")?;
        let dim = self.one_dim()?;
        check_len("out", out.len(), self.splits[self.splits.len() - 1] * dim)?;
        let stores = inner.stores(device)?;
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
            let _reading = self.shape.tables[table].reading_rows()?;
            with_rows!(&stores[table], rows => {
                // SAFETY: as in forward_pooled.
                unsafe { forward_sequence(rows, &inner.tables[table].occurrence_slots, &mut out[range], threads) }
            });
        }
        Ok(())
    }

    /// The backward of `forward_pooled` with the optimizer fused, then commit. `grad` is `[B, C]`, `hyperparameters` one a table;
    /// `weight_grad` (`[N]`) receives the gradient of the per-sample weights, from the rows before the update.
    pub fn backward_pooled(
        &self,
        grad: &[f32],
        hyperparameters: &[Hyperparameters],
        mut weight_grad: Option<&mut [f32]>,
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let mut inner = self.trainable()?;
        check_len("hyperparameters", hyperparameters.len(), self.shape.tables.len())?;
        let Some(pooled) = &inner.pooled else {
            return Err(Error::new(Kind::State, "backward_pooled comes after forward_pooled of the same plan"));
        };
        let features = self.shape.feature_tables.len();
        let bags = (pooled.offsets.len() - 1) / features.max(1);
        let columns = self.shape.total_columns;
        check_len("grad", grad.len(), bags * columns)?;
        let total = self.splits[features];
        if let Some(weight_grad) = &weight_grad {
            check_len("weight_grad", weight_grad.len(), total)?;
        }
        let stores = inner.stores(device)?;
        // What can fail comes before the first update: a step is made on all tables or on none.
        let places = self
            .shape
            .table_features
            .iter()
            .map(|features| self.gradient_places(pooled, bags, features.clone(), threads));
        let places = places.collect::<Result<Vec<_>>>()?;
        let steps = inner.next_steps(hyperparameters)?;
        let _step = Step(&self.shape.tables);
        for (table, table_features) in self.shape.table_features.iter().enumerate() {
            let plan = &mut inner.tables[table];
            let range = self.splits[table_features.start]..self.splits[table_features.end];
            let (places, step) = (&places[table], &steps[table]);
            let writing = self.shape.tables[table].writing_rows()?;
            plan.keep_rows(stores[table].tensors());
            with_rows!(&stores[table], rows => {
                if let Some(weight_grad) = &mut weight_grad {
                    // SAFETY: as in forward_pooled; the guard keeps every other kernel out.
                    unsafe { weight_gradient(rows, &plan.occurrence_slots, &places.of_weights(grad), &mut weight_grad[range], threads) }
                }
                // SAFETY: the plan pins every slot, they are distinct, and the guard keeps every other kernel out.
                unsafe { backward(rows, &plan.index, &places.of_rows(grad), step, threads) }
            });
            plan.end_step(Some(writing))?;
        }
        inner.stage = Stage::Trained;
        Ok(())
    }

    /// The backward of `forward_sequence` with the optimizer fused, then commit. `grad` is `[N, D]`.
    pub fn backward_sequence(
        &self,
        grad: &[f32],
        hyperparameters: &[Hyperparameters],
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let mut inner = self.trainable()?;
        let dim = self.one_dim()?;
        check_len("hyperparameters", hyperparameters.len(), self.shape.tables.len())?;
        check_len("grad", grad.len(), self.splits[self.splits.len() - 1] * dim)?;
        let stores = inner.stores(device)?;
        let steps = inner.next_steps(hyperparameters)?;
        let _step = Step(&self.shape.tables);
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let plan = &mut inner.tables[table];
            let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
            let gradient = Gradient::Sequence { grad: &grad[range] };
            let step = &steps[table];
            let writing = self.shape.tables[table].writing_rows()?;
            plan.keep_rows(stores[table].tensors());
            with_rows!(&stores[table], rows => {
                // SAFETY: as in backward_pooled.
                unsafe { backward(rows, &plan.index, &gradient, step, threads) }
            });
            plan.end_step(Some(writing))?;
        }
        inner.stage = Stage::Trained;
        Ok(())
    }

    /// Take back every pin without training. Harmless twice.
    pub fn release(&self) {
        // In a forked child the pins are its parent's.
        if let Ok(mut inner) = self.inner() {
            inner.release();
        }
    }

    /// Its state. `State` in a forked child, where whoever held the lock at the fork holds it for ever.
    fn inner(&self) -> Result<MutexGuard<'_, Inner>> {
        for table in &self.shape.tables {
            table.check_process()?;
        }
        Ok(lock(&self.inner))
    }

    fn table(&self, table: usize) -> Result<&Arc<super::table::Shared>> {
        check_index("table", table, self.shape.tables.len())?;
        Ok(&self.shape.tables[table])
    }

    fn placed(&self, call: &str) -> Result<MutexGuard<'_, Inner>> {
        let inner = self.inner()?;
        match inner.stage {
            Stage::Placed => Ok(inner),
            Stage::Started => Err(Error::new(Kind::State, format!("{call} comes after Plan.wait"))),
            Stage::Trained | Stage::Released => {
                Err(Error::new(Kind::State, format!("{call}: this plan's rows were released; plan the batch again")))
            }
        }
    }

    fn trainable(&self) -> Result<MutexGuard<'_, Inner>> {
        let inner = self.inner()?;
        match inner.stage {
            Stage::Placed if self.mode.train => Ok(inner),
            Stage::Placed | Stage::Started => {
                Err(Error::new(Kind::State, "a backward needs a plan made with train=True that was waited for"))
            }
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

    fn feature_slots<'a>(&self, inner: &'a Inner, feature: usize) -> &'a [CacheSlot] {
        let table = self.shape.feature_tables[feature];
        let begin = self.splits[self.shape.table_features[table].start];
        &inner.tables[table].occurrence_slots[self.splits[feature] - begin..self.splits[feature + 1] - begin]
    }

    fn one_dim(&self) -> Result<usize> {
        let mut dims = self.shape.tables.iter().map(|table| table.layout.dim);
        let first = dims.next().unwrap_or(0);
        if dims.all(|dim| dim == first) {
            Ok(first)
        } else {
            Err(Error::new(Kind::Input, "a sequence lookup needs tables of one embedding_dim: make one lookup a width"))
        }
    }

    /// Where the occurrences of some features, those of one table, find their gradients in the pooled output's.
    fn gradient_places(
        &self,
        pooled: &Pooled,
        bags: usize,
        features: Range<usize>,
        threads: usize,
    ) -> Result<PooledGradient> {
        let offsets: Vec<Vec<i64>> = features
            .clone()
            .map(|feature| {
                let own = &pooled.offsets[feature * bags..=(feature + 1) * bags];
                own.iter().map(|offset| offset - own[0]).collect()
            })
            .collect();
        let features: Vec<PooledFeature<'_>> = features
            .zip(&offsets)
            .map(|(feature, offsets)| PooledFeature {
                column: self.shape.columns[feature],
                offsets,
                weights: pooled.weights.as_ref().map(|all| &all[self.splits[feature]..self.splits[feature + 1]]),
                mean: pooled.mean[feature],
            })
            .collect();
        PooledGradient::new(self.shape.total_columns, &features, threads)
    }

    fn check_offsets(&self, offsets: &[i64], weights: Option<&[f32]>, mean: &[bool]) -> Result<usize> {
        let features = self.shape.feature_tables.len();
        check_len("mean", mean.len(), features)?;
        let total = self.splits[features];
        if let Some(weights) = weights {
            check_len("weights", weights.len(), total)?;
        }
        let bags = offsets.len().saturating_sub(1) / features.max(1);
        if offsets.is_empty() || offsets.len() != features * bags + 1 {
            return Err(Error::new(
                Kind::Input,
                format!("offsets has {} entries; {features} features need a multiple of that and one", offsets.len()),
            ));
        }
        let splits_fit = (0..=features).all(|feature| offsets[feature * bags] == self.splits[feature] as i64);
        if !splits_fit || offsets.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(Error::new(
                Kind::Input,
                format!(
                    "offsets must not decrease, start at 0, end at the number of ids ({total}) and meet the features' splits"
                ),
            ));
        }
        Ok(bags)
    }
}

impl Inner {
    fn stores(&self, device: &mut [Option<DeviceTensors<'_>>]) -> Result<Vec<Rows>> {
        let mut device: Vec<Option<&mut DeviceTensors<'_>>> = device.iter_mut().map(Option::as_mut).collect();
        device.resize_with(self.tables.len(), || None);
        self.tables
            .iter()
            .zip(device)
            .map(|(plan, tensors)| {
                let shared = &plan.shared;
                match (shared.config.device_rows.is_some(), tensors) {
                    (false, None) => Ok(Rows::Arena(Arc::clone(shared.lock_any()?.host.arena()), shared.layout)),
                    (true, Some(tensors)) => {
                        let highest = plan.index.slots.iter().filter(|&&slot| slot != NO_SLOT).max();
                        tensors.rows(shared.layout, highest.map_or(0, |&slot| slot + 1)).map(Rows::Tensors)
                    }
                    (wants, _) => Err(Error::new(
                        Kind::Input,
                        format!(
                            "table {:?} {} a device tier: give its tensors exactly then",
                            shared.config.name,
                            if wants { "has" } else { "has not" }
                        ),
                    )),
                }
            })
            .collect()
    }

    /// For each table what its update needs.
    fn next_steps(&self, hyperparameters: &[Hyperparameters]) -> Result<Vec<OptimizerStep>> {
        let tables = self.tables.iter().zip(hyperparameters);
        tables.map(|(table, &hyperparameters)| table.next_step(hyperparameters)).collect()
    }

    fn commit(&mut self) -> Result<()> {
        for table in &mut self.tables {
            table.end_step(None)?;
        }
        self.stage = Stage::Trained;
        Ok(())
    }

    fn release(&mut self) {
        if matches!(self.stage, Stage::Trained | Stage::Released) {
            return;
        }
        self.stage = Stage::Released;
        for table in &mut self.tables {
            let shared = Arc::clone(&table.shared);
            // A closed table, or another process's, has no pins to take back.
            if let Ok(mut state) = shared.lock_any() {
                table.release(&mut state);
            }
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

/// A training step under way over some tables. Dropped by a panic it leaves them torn: rows may be updated that are not marked so.
struct Step<'a>(&'a [Arc<super::table::Shared>]);

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|table| table.tear());
        }
    }
}

fn check_len(what: &str, got: usize, wanted: usize) -> Result<()> {
    if got == wanted {
        return Ok(());
    }
    Err(Error::new(Kind::Input, format!("{what} has {got} elements and needs {wanted}")))
}

fn check_index(what: &str, index: usize, count: usize) -> Result<()> {
    if index < count {
        return Ok(());
    }
    Err(Error::new(Kind::Input, format!("{what} {index} is out of range: the lookup has {count}")))
}
