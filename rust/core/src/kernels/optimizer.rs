//! Optimizer formulas, FBGEMM's.

use crate::config::OptimizerKind;

/// Hyperparameters of one update; those an optimizer does not have are ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Learning rate.
    pub lr: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Weight decay, for rows of the batch only.
    pub weight_decay: f64,
}

/// One update of a table: the optimizer, its hyperparameters and the step it is (from 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerStep {
    /// Which formula.
    pub kind: OptimizerKind,
    /// With which numbers.
    pub hyperparameters: Hyperparameters,
    /// The table's step counter, this update included.
    pub step: u64,
}
