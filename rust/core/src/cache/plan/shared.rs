//! The gradient of the OOV row. It is returned as exact sums, so that the ranks that share a table can add theirs up,
//! and is passed back before the update.
#![allow(unsafe_code)]

use super::handle::{Plan, check_len};
use super::state::{OovStep, PlanState, TablePlan};
use crate::error::{Error, Kind, Result};
use crate::kernels::{EXACT_PLACES, GradientView, Hyperparameters, OptimizerStep, add_up_exactly, rounded_row};

impl Plan {
    /// Returns the sums of the gradients of the batch's ids that are not admitted, for each table with an OOV row: the
    /// exact sum of each column (`[D × EXACT_PLACES]`), and the number of these ids. Sums of several ranks are added
    /// element by element. `grad` is as for [`Plan::backward_pooled`].
    pub fn oov_gradient_sums_pooled(&self, grad: &[f32], threads: usize) -> Result<Vec<i64>> {
        let turn = self.lock_plan()?;
        let state = self.trainable(&turn)?;
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
        let turn = self.lock_plan()?;
        let state = self.trainable(&turn)?;
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
        let turn = self.lock_plan()?;
        let mut state = self.trainable(&turn)?;
        check_len("hyperparameters", hyperparameters.len(), state.tables.len())?;
        let wanted = state.tables.iter().filter(|plan| plan.has_oov_row()).map(TablePlan::oov_sums_len);
        check_len("sums", sums.len(), wanted.sum())?;
        let mut rest = sums;
        for (plan, &hyperparameters) in state.tables.iter_mut().zip(hyperparameters) {
            if plan.has_oov_row() {
                let (sums, later) = rest.split_at(plan.oov_sums_len());
                rest = later;
                let (columns, refused) = sums.split_at(sums.len() - 1);
                let gradient = (refused[0] != 0).then(|| rounded_row(columns));
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
            plan.has_oov_row() && plan.oov_step.is_none() && !plan.pins().not_admitted_positions().is_empty()
        };
        match self.tables.iter().find(missing) {
            None => Ok(()),
            Some(plan) => Err(Error::new(
                Kind::State,
                format!(
                    "table {:?} has not_admitted = \"shared\": say Plan.train_shared before the update",
                    plan.table.config.name
                ),
            )),
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
        let refused = self.pins().not_admitted_positions();
        // SAFETY: the index is of this table's occurrences in the batch, and the gradient has `D` floats for each of
        // them.
        sums.extend(unsafe { add_up_exactly(&self.index, refused, gradient, self.table.layout.dim, threads) });
        sums.push(refused.len() as i64);
    }

    /// Returns the commit's update of the OOV row: its gradient and the optimizer step. `step` is the table's,
    /// including this one.
    pub(super) fn oov_update(&self, step: u64) -> Option<(&[f32], OptimizerStep)> {
        let &OovStep { ref gradient, hyperparameters } = self.oov_step.as_ref()?;
        let kind = self.table.config.optimizer;
        gradient.as_deref().map(|gradient| (gradient, OptimizerStep { kind, hyperparameters, step }))
    }
}
