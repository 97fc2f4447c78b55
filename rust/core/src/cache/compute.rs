//! The kernels of a plan: forwards, and backwards with the update in them.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::locks::Tear;
use super::plan::{Inner, Plan, Stage, check_len};
use super::table::Shared;
use crate::error::{Error, Kind, Result};
use crate::kernels::{
    ArenaRows, Gradient, Hyperparameters, OptimizerStep, PooledFeature, PooledGradient, TensorRows, backward,
    forward_pooled, forward_sequence, weight_gradient,
};
use crate::rows::{Arena, RowLayout};
use crate::types::NO_SLOT;

/// What a pooled forward was given: its backward needs it again.
pub(super) struct Pooled {
    offsets: Vec<i64>,
    weights: Option<Vec<f32>>,
    mean: Vec<bool>,
}

/// A device tier's tensors as slices of RAM, for the core's kernels. `S` slots. Where they may be replaced by longer ones meanwhile, they
/// are looked up and used within [`Plan::exclusively`].
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
        // Another thread of the caller's may change what it lent: what is checked is a copy, and nothing else is used.
        let (offsets, mean) = (offsets.to_vec(), mean.to_vec());
        let bags = self.check_offsets(&offsets, weights, &mean)?;
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
            let _reading = self.shape.tables[table].reading_rows_or_exclusive()?;
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
            inner.pooled = Some(Pooled { offsets, weights: weights.map(<[f32]>::to_vec), mean });
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
            let _reading = self.shape.tables[table].reading_rows_or_exclusive()?;
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
        // A table that is closed meanwhile has no rows any more; the others make the step.
        let mut ended = Ok(());
        for (table, table_features) in self.shape.table_features.iter().enumerate() {
            let plan = &mut inner.tables[table];
            let range = self.splits[table_features.start]..self.splits[table_features.end];
            let (places, step) = (&places[table], &steps[table]);
            let writing = self.shape.tables[table].writing_rows_or_exclusive()?;
            plan.keep_rows(stores[table].tensors());
            with_rows!(&stores[table], rows => {
                if let Some(weight_grad) = &mut weight_grad {
                    // SAFETY: as in forward_pooled; the guard keeps every other kernel out.
                    unsafe { weight_gradient(rows, &plan.occurrence_slots, &places.of_weights(grad), &mut weight_grad[range], threads) }
                }
                // SAFETY: the plan pins every slot, they are distinct, and the guard keeps every other kernel out.
                unsafe { backward(rows, &plan.index, &places.of_rows(grad), step, threads) }
            });
            ended = ended.and(plan.end_kernels_step(writing));
        }
        inner.stage = Stage::Trained;
        ended
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
        // A table that is closed meanwhile has no rows any more; the others make the step.
        let mut ended = Ok(());
        for (table, features) in self.shape.table_features.iter().enumerate() {
            let plan = &mut inner.tables[table];
            let range = self.splits[features.start] * dim..self.splits[features.end] * dim;
            let gradient = Gradient::Sequence { grad: &grad[range] };
            let step = &steps[table];
            let writing = self.shape.tables[table].writing_rows_or_exclusive()?;
            plan.keep_rows(stores[table].tensors());
            with_rows!(&stores[table], rows => {
                // SAFETY: as in backward_pooled.
                unsafe { backward(rows, &plan.index, &gradient, step, threads) }
            });
            ended = ended.and(plan.end_kernels_step(writing));
        }
        inner.stage = Stage::Trained;
        ended
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
}

/// A training step under way over some tables. Dropped by a panic it leaves them torn: rows may be updated that are not marked so.
struct Step<'a>(&'a [Arc<Shared>]);

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|table| table.tear(Tear::Panic));
        }
    }
}
