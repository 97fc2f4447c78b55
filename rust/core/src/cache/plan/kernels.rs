//! The kernels of a plan: forwards, and backwards that include the optimizer's update.
//!
//! The gradient of the OOV row is returned as exact sums, so that the ranks that share a table can add theirs up, and
//! is passed back before the update.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::handle::{Plan, check_len, placed_state};
use super::table_plan::{OovStep, PlanStage, PlanState, PooledArgs, TablePlan};
use crate::cache::lock::{PoisonCause, TableInner};
use crate::cache::row_blocks::DeviceTensors;
use crate::error::{Kind, Result};
use crate::kernels::{
    ArenaRows, EXACT_PLACES, GradientView, Hyperparameters, OptimizerStep, PooledFeature, PooledGradient, TensorRows,
    add_up_exactly, backward, forward_pooled, forward_sequence, rounded_row, weight_gradient,
};
use crate::rows::{RowArena, RowLayout};
use crate::types::CacheSlot;

/// Runs `$body` with `$rows` bound to the row store in `$where`, a `&mut KernelRows`.
macro_rules! with_rows {
    ($where:expr, $rows:ident => $body:expr) => {
        match $where {
            KernelRows::Arena(arena, layout) => {
                let $rows = &ArenaRows { arena, layout: *layout };
                $body
            }
            KernelRows::Tensors(tensors, layout) => {
                let $rows = &tensor_addresses(tensors, *layout);
                $body
            }
        }
    };
}

impl Plan {
    /// Sums or averages the rows of each bag.
    ///
    /// - `offsets`: `[F × B + 1]` into the batch's ids, feature-major.
    /// - `weights`: `[N]` or `None`.
    /// - `mean`: `[F]`.
    /// - `out`: `[B, C]`, where `C` is the sum of the features' widths, in feature order.
    /// - `device`: the tensors of each table with a device tier, else `None`.
    pub fn forward_pooled(
        &self,
        offsets: &[i64],
        weights: Option<&[f32]>,
        mean: &[bool],
        out: &mut [f32],
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = placed_state(&plan_guard, "forward_pooled")?;
        // Another thread may modify the caller's buffers, so copies are checked and used.
        let (offsets, mean) = (offsets.to_vec(), mean.to_vec());
        let bags = self.check_offsets(&offsets, weights, &mean)?;
        let columns = self.shape.total_columns;
        check_len("out", out.len(), bags * columns)?;
        let mut stores = KernelRows::of(&state.tables, device)?;
        let mut local = Vec::with_capacity(bags + 1);
        for (feature, &table) in self.shape.feature_tables.iter().enumerate() {
            let begin = self.splits[feature];
            local.clear();
            local.extend(offsets[feature * bags..=(feature + 1) * bags].iter().map(|&offset| offset - begin as i64));
            let weights = weights.map(|weights| &weights[begin..self.splits[feature + 1]]);
            let (slots, absent) = (self.feature_slots(&state, feature), state.tables[table].absent());
            let _reading = self.shape.tables[table].reading_rows_or_exclusive(&plan_guard)?;
            with_rows!(&mut stores[table], rows => {
                // SAFETY: the plan has pinned every slot, so all are valid; `check_offsets` has checked the offsets
                // against them; and the guard excludes every kernel that writes.
                unsafe {
                    forward_pooled(
                        rows, slots, absent, &local, weights, mean[feature], out, columns, self.shape.columns[feature], threads,
                    );
                }
            });
        }
        if self.mode.train {
            state.pooled = Some(PooledArgs { offsets, weights: weights.map(<[f32]>::to_vec), mean });
        }
        Ok(())
    }

    /// Copies the row of each occurrence to `out` `[N, D]`. All tables must have width `D`.
    pub fn forward_sequence(
        &self,
        out: &mut [f32],
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let state = placed_state(&plan_guard, "forward_sequence")?;
        let dim = self.common_dim()?;
        check_len("out", out.len(), self.splits[self.splits.len() - 1] * dim)?;
        let mut stores = KernelRows::of(&state.tables, device)?;
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
            let plan = &state.tables[table];
            let _reading = self.shape.tables[table].reading_rows_or_exclusive(&plan_guard)?;
            with_rows!(&mut stores[table], rows => {
                // SAFETY: the plan has pinned every slot, so all are valid, and the guard excludes every kernel that
                // writes.
                unsafe { forward_sequence(rows, &plan.occurrence_slots, plan.absent(), &mut out[range], threads) }
            });
        }
        Ok(())
    }

    /// Runs the backward of `forward_pooled` with the optimizer's update, and commits. `grad` is `[B, C]`, and
    /// `hyperparameters` has one entry per table. `weight_grad` `[N]` receives the gradient of the per-sample weights,
    /// computed from the rows before the update.
    pub fn backward_pooled(
        &self,
        grad: &[f32],
        hyperparameters: &[Hyperparameters],
        mut weight_grad: Option<&mut [f32]>,
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = self.trainable(&plan_guard)?;
        check_len("hyperparameters", hyperparameters.len(), self.shape.tables.len())?;
        let (pooled, bags) = self.pooled_args(&state, grad)?;
        let total = self.splits[self.shape.feature_tables.len()];
        if let Some(weight_grad) = &weight_grad {
            check_len("weight_grad", weight_grad.len(), total)?;
        }
        let mut stores = KernelRows::of(&state.tables, device)?;
        // Fallible work precedes the first update, so that a step applies to all tables or to none.
        let sources = self
            .shape
            .table_features
            .iter()
            .map(|features| self.gradient_sources(pooled, bags, features.clone(), threads));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let steps = state.next_steps(hyperparameters)?;
        let _step = TrainingStepGuard(&self.shape.tables);
        // A table closed concurrently has no rows; the other tables complete the step.
        let mut ended = Ok(());
        for (table, table_features) in self.shape.table_features.iter().enumerate() {
            let plan = &mut state.tables[table];
            let range = self.splits[table_features.start]..self.splits[table_features.end];
            let (source, step) = (&sources[table], &steps[table]);
            let writing = self.shape.tables[table].writing_rows_or_exclusive(&plan_guard)?;
            plan.keep_pre_images(&writing, stores[table].tensors());
            with_rows!(&mut stores[table], rows => {
                if let Some(weight_grad) = &mut weight_grad {
                    // SAFETY: the plan has pinned every slot, so all are valid. The guard excludes every other kernel.
                    unsafe { weight_gradient(rows, &plan.occurrence_slots, plan.absent(), &source.of_weights(grad), &mut weight_grad[range], threads) }
                }
                // SAFETY: the plan has pinned every slot, so all are valid, and they are distinct, one for each id. The
                // guard excludes every other kernel.
                unsafe { backward(rows, &plan.index, &source.of_rows(grad), step, threads) }
            });
            ended = ended.and(plan.end_kernels_step(writing));
        }
        state.stage = PlanStage::Trained;
        ended
    }

    /// Runs the backward of `forward_sequence` with the optimizer's update, and commits. `grad` is `[N, D]`.
    pub fn backward_sequence(
        &self,
        grad: &[f32],
        hyperparameters: &[Hyperparameters],
        device: &mut [Option<DeviceTensors<'_>>],
        threads: usize,
    ) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = self.trainable(&plan_guard)?;
        let dim = self.common_dim()?;
        check_len("hyperparameters", hyperparameters.len(), self.shape.tables.len())?;
        check_len("grad", grad.len(), self.splits[self.splits.len() - 1] * dim)?;
        let mut stores = KernelRows::of(&state.tables, device)?;
        let steps = state.next_steps(hyperparameters)?;
        let _step = TrainingStepGuard(&self.shape.tables);
        // A table closed concurrently has no rows; the other tables complete the step.
        let mut ended = Ok(());
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let plan = &mut state.tables[table];
            let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
            let gradient = GradientView::Sequence { grad: &grad[range] };
            let step = &steps[table];
            let writing = self.shape.tables[table].writing_rows_or_exclusive(&plan_guard)?;
            plan.keep_pre_images(&writing, stores[table].tensors());
            with_rows!(&mut stores[table], rows => {
                // SAFETY: the plan has pinned every slot, so all are valid, and they are distinct, one for each id. The
                // guard excludes every other kernel.
                unsafe { backward(rows, &plan.index, &gradient, step, threads) }
            });
            ended = ended.and(plan.end_kernels_step(writing));
        }
        state.stage = PlanStage::Trained;
        ended
    }

    /// Returns the arguments of the forward whose backward has gradient `grad` `[B, C]`, and the number of bags of a
    /// feature: `B`.
    ///
    /// Errors: `State` without a forward; `Input` for a gradient of another length.
    fn pooled_args<'a>(&self, state: &'a PlanState, grad: &[f32]) -> Result<(&'a PooledArgs, usize)> {
        let Some(pooled) = &state.pooled else {
            return Err(Kind::State.error("what uses a pooled gradient comes after forward_pooled of the same plan"));
        };
        let bags = (pooled.offsets.len() - 1) / self.shape.feature_tables.len().max(1);
        check_len("grad", grad.len(), bags * self.shape.total_columns)?;
        Ok((pooled, bags))
    }

    /// Returns the number of columns of the pooled output.
    #[must_use]
    pub fn pooled_columns(&self) -> usize {
        self.shape.total_columns
    }

    /// Returns the width of a table's rows.
    ///
    /// Errors: `Input` if the lookup has no such table.
    pub fn dim(&self, table: usize) -> Result<usize> {
        Ok(self.table(table)?.layout.dim)
    }

    /// Returns the width of all tables.
    ///
    /// Errors: `Input` if the widths differ.
    pub fn common_dim(&self) -> Result<usize> {
        let mut dims = self.shape.tables.iter().map(|table| table.layout.dim);
        let first = dims.next().unwrap_or(0);
        if dims.all(|dim| dim == first) {
            Ok(first)
        } else {
            Err(Kind::Input.error("a sequence lookup needs tables of one embedding_dim: make one lookup a width"))
        }
    }

    /// Maps the occurrences of one table's features to their gradients in the gradient of the pooled output.
    fn gradient_sources(
        &self,
        pooled: &PooledArgs,
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

    /// Checks the arguments of a pooled forward. Returns the number of bags of a feature: `B`.
    fn check_offsets(&self, offsets: &[i64], weights: Option<&[f32]>, mean: &[bool]) -> Result<usize> {
        let features = self.shape.feature_tables.len();
        check_len("mean", mean.len(), features)?;
        let total = self.splits[features];
        if let Some(weights) = weights {
            check_len("weights", weights.len(), total)?;
        }
        let bags = offsets.len().saturating_sub(1) / features.max(1);
        if offsets.is_empty() || offsets.len() != features * bags + 1 {
            return Err(Kind::Input.error(format!(
                "offsets has {} entries; {features} features need a multiple of that and one",
                offsets.len()
            )));
        }
        let splits_fit = (0..=features).all(|feature| offsets[feature * bags] == self.splits[feature] as i64);
        if !splits_fit || offsets.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(Kind::Input.error(format!(
                "offsets must not decrease, start at 0, end at the number of ids ({total}) and meet the features' splits"
            )));
        }
        Ok(bags)
    }
}

/// Guards a training step over some tables. A panic during the step poisons them, because rows may be updated that are
/// not marked so.
struct TrainingStepGuard<'a>(&'a [Arc<TableInner>]);

impl Drop for TrainingStepGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|table| table.poison(PoisonCause::Panic));
        }
    }
}

/// The rows of one table, for kernels.
enum KernelRows<'a, 't> {
    Arena(Arc<RowArena>, RowLayout),
    /// The tensors have a row of the layout in each slot of the plan.
    Tensors(&'a mut DeviceTensors<'t>, RowLayout),
}

impl<'a, 't> KernelRows<'a, 't> {
    /// Returns the rows of each table. `device` has the tensors of tables with a device tier.
    ///
    /// Errors: `Input` if tensors are missing, too small, or passed for a table without a device tier.
    pub(super) fn of(tables: &[TablePlan], device: &'a mut [Option<DeviceTensors<'t>>]) -> Result<Vec<Self>> {
        let mut device: Vec<Option<&'a mut DeviceTensors<'t>>> = device.iter_mut().map(Option::as_mut).collect();
        device.resize_with(tables.len(), || None);
        tables.iter().zip(device).map(|(plan, tensors)| Self::of_table(plan, tensors)).collect()
    }

    fn of_table(plan: &TablePlan, tensors: Option<&'a mut DeviceTensors<'t>>) -> Result<Self> {
        let (table, layout) = (&plan.table, plan.table.layout);
        match (table.has_device(), tensors) {
            (true, Some(tensors)) => {
                check_tensors(tensors, layout, plan.slots_end())?;
                return Ok(Self::Tensors(tensors, layout));
            }
            (false, None) => {
                if let Some(arena) = table.lock_any()?.placement.kernel_arena() {
                    return Ok(Self::Arena(Arc::clone(arena), layout));
                }
            }
            _ => {}
        }
        let has = if table.has_device() { "has" } else { "has not" };
        Err(Kind::Input
            .error(format!("table {:?} {has} a device tier: give its tensors exactly then", table.config.name)))
    }

    /// The tensors, if the rows are on a device tier.
    pub(super) fn tensors(&self) -> Option<&DeviceTensors<'t>> {
        match self {
            Self::Arena(..) => None,
            Self::Tensors(tensors, _) => Some(tensors),
        }
    }
}

/// Errors: `Input` unless the tensors have a row of the layout in each slot below `slots`.
fn check_tensors(tensors: &DeviceTensors<'_>, layout: RowLayout, slots: CacheSlot) -> Result<()> {
    let wanted = slots as usize * layout.dim;
    let fits = tensors.weights.len() >= wanted
        && tensors.vector_slots.len() == layout.vector_slots
        && tensors.vector_slots.iter().all(|slot| slot.len() >= wanted)
        && tensors.scalars.is_some() == layout.scalar_slot
        && tensors.scalars.as_ref().is_none_or(|scalars| scalars.len() >= slots as usize);
    if fits {
        return Ok(());
    }
    Err(Kind::Input
        .error(format!("the device tensors must hold {slots} slots of {layout:?}: grow them to Plan.required_slots")))
}

/// The addresses of tensors with rows of this layout, for a kernel. They are valid as long as the tensors are borrowed.
fn tensor_addresses(tensors: &mut DeviceTensors<'_>, layout: RowLayout) -> TensorRows {
    let mut vector_slots = [std::ptr::null_mut(); 2];
    for (address, slot) in vector_slots.iter_mut().zip(&mut tensors.vector_slots) {
        *address = slot.as_mut_ptr();
    }
    TensorRows {
        layout,
        weights: tensors.weights.as_mut_ptr(),
        vector_slots,
        scalars: tensors.scalars.as_mut().map_or(std::ptr::null_mut(), |scalars| scalars.as_mut_ptr()),
    }
}

impl Plan {
    /// Returns the sums of the gradients of the batch's ids that are not admitted, for each table with an OOV row: the
    /// exact sum of each column (`[D × EXACT_PLACES]`), and the number of these ids. Sums of several ranks are added
    /// element by element. `grad` is as for [`Plan::backward_pooled`].
    pub fn oov_gradient_sums_pooled(&self, grad: &[f32], threads: usize) -> Result<Vec<i64>> {
        let plan_guard = self.lock_plan()?;
        let state = self.trainable(&plan_guard)?;
        let (pooled, bags) = self.pooled_args(&state, grad)?;
        let mut sums = Vec::new();
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let plan = &state.tables[table];
            if plan.has_oov_row() {
                let source = self.gradient_sources(pooled, bags, features.clone(), threads)?;
                plan.add_oov_gradient(&source.of_rows(grad), threads, &mut sums);
            }
        }
        Ok(sums)
    }

    /// Like [`Plan::oov_gradient_sums_pooled`], with the `grad` of [`Plan::backward_sequence`].
    pub fn oov_gradient_sums_sequence(&self, grad: &[f32], threads: usize) -> Result<Vec<i64>> {
        let plan_guard = self.lock_plan()?;
        let state = self.trainable(&plan_guard)?;
        let dim = self.common_dim()?;
        check_len("grad", grad.len(), self.splits[self.splits.len() - 1] * dim)?;
        let mut sums = Vec::new();
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let plan = &state.tables[table];
            if plan.has_oov_row() {
                let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
                plan.add_oov_gradient(&GradientView::Sequence { grad: &grad[range] }, threads, &mut sums);
            }
        }
        Ok(sums)
    }

    /// Sets the sums by which the commit of this plan trains the OOV rows: those of [`Plan::oov_gradient_sums_pooled`],
    /// added over all ranks. `hyperparameters` has one entry per table of the lookup. Nothing changes before the
    /// commit.
    pub fn train_oov_row(&self, sums: &[i64], hyperparameters: &[Hyperparameters]) -> Result<()> {
        let plan_guard = self.lock_plan()?;
        let mut state = self.trainable(&plan_guard)?;
        check_len("hyperparameters", hyperparameters.len(), state.tables.len())?;
        let wanted = state.tables.iter().filter(|plan| plan.has_oov_row()).map(TablePlan::oov_sums_len);
        check_len("sums", sums.len(), wanted.sum())?;
        let mut rest = sums;
        for (plan, &hyperparameters) in state.tables.iter_mut().zip(hyperparameters) {
            if plan.has_oov_row() {
                let (sums, later) = rest.split_at(plan.oov_sums_len());
                rest = later;
                let (columns, not_admitted) = sums.split_at(sums.len() - 1);
                let gradient = (not_admitted[0] != 0).then(|| rounded_row(columns));
                plan.oov_step = Some(OovStep { gradient, hyperparameters });
            }
        }
        Ok(())
    }
}

impl PlanState {
    /// Errors: `State` if ids of a table with an OOV row were not admitted and [`Plan::train_oov_row`] was not called.
    pub(super) fn check_oov_step(&self) -> Result<()> {
        let missing = |plan: &&TablePlan| {
            plan.has_oov_row() && plan.oov_step.is_none() && !plan.pins.not_admitted_positions.is_empty()
        };
        match self.tables.iter().find(missing) {
            None => Ok(()),
            Some(plan) => Err(Kind::State.error(format!(
                "table {:?} has not_admitted=\"oov\": call Plan.train_oov_row() before the update",
                plan.table.config.name
            ))),
        }
    }
}

impl TablePlan {
    /// True if ids that are not admitted share a row and train it.
    fn has_oov_row(&self) -> bool {
        self.table.has_oov_row()
    }

    /// Number of integers in the sums of this table.
    fn oov_sums_len(&self) -> usize {
        self.table.layout.dim * EXACT_PLACES + 1
    }

    fn add_oov_gradient(&self, gradient: &GradientView<'_>, threads: usize, sums: &mut Vec<i64>) {
        let not_admitted = &self.pins.not_admitted_positions;
        // SAFETY: the index is of this table's occurrences in the batch, and the gradient has `D` floats for each of
        // them.
        sums.extend(unsafe { add_up_exactly(&self.index, not_admitted, gradient, self.table.layout.dim, threads) });
        sums.push(not_admitted.len() as i64);
    }

    /// Returns the commit's update of the OOV row: its gradient and the optimizer step. `step` is the table's,
    /// including this one.
    pub(super) fn oov_update(&self, step: u64) -> Option<(&[f32], OptimizerStep)> {
        let &OovStep { ref gradient, hyperparameters } = self.oov_step.as_ref()?;
        let kind = self.table.config.optimizer;
        gradient.as_deref().map(|gradient| (gradient, OptimizerStep { kind, hyperparameters, step }))
    }
}
