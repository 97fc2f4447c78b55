//! The kernels of a plan: forwards, and backwards that include the optimizer's update.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::handle::{Plan, check_len, placed_state};
use super::state::{PlanStage, PlanState, PooledArgs};
use super::tensors::{KernelRows, tensor_addresses, with_rows};
use crate::cache::locks::{PoisonCause, TableInner};
use crate::cache::rows::DeviceTensors;
use crate::error::{Error, Kind, Result};
use crate::kernels::{
    ArenaRows, GradientView, Hyperparameters, PooledFeature, PooledGradient, backward, forward_pooled,
    forward_sequence, weight_gradient,
};

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
        let turn = self.lock_plan()?;
        let mut state = placed_state(&turn, "forward_pooled")?;
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
            let _reading = self.shape.tables[table].reading_rows_or_exclusive(&turn)?;
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
        let turn = self.lock_plan()?;
        let state = placed_state(&turn, "forward_sequence")?;
        let dim = self.common_dim()?;
        check_len("out", out.len(), self.splits[self.splits.len() - 1] * dim)?;
        let mut stores = KernelRows::of(&state.tables, device)?;
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
            let plan = &state.tables[table];
            let _reading = self.shape.tables[table].reading_rows_or_exclusive(&turn)?;
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
        let turn = self.lock_plan()?;
        let mut state = self.trainable(&turn)?;
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
            let writing = self.shape.tables[table].writing_rows_or_exclusive(&turn)?;
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
        let turn = self.lock_plan()?;
        let mut state = self.trainable(&turn)?;
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
            let writing = self.shape.tables[table].writing_rows_or_exclusive(&turn)?;
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
    pub(super) fn pooled_args<'a>(&self, state: &'a PlanState, grad: &[f32]) -> Result<(&'a PooledArgs, usize)> {
        let Some(pooled) = &state.pooled else {
            return Err(Error::new(
                Kind::State,
                "what uses a pooled gradient comes after forward_pooled of the same plan",
            ));
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
            Err(Error::new(Kind::Input, "a sequence lookup needs tables of one embedding_dim: make one lookup a width"))
        }
    }

    /// Maps the occurrences of one table's features to their gradients in the gradient of the pooled output.
    pub(super) fn gradient_sources(
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
