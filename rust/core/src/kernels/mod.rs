//! CPU kernels over rows in slots: gather and pool, and the backward with the optimizer fused.
//!
//! Shapes: `N` occurrences of ids, `U` distinct rows, `B` bags a feature, `D` the table's width, `C` columns of the pooled output.
//! Results are the same bits for any number of threads and any instruction set: a bag, and a row's update, is the work of one
//! thread, in occurrence order, without fused multiply-add, with a fixed number of lanes for sums over a row.

mod backward;
mod forward;
mod gradient;
mod optimizer;
mod rows;
#[cfg(test)]
mod tests;
pub(crate) mod threads;

pub use backward::{backward, weight_gradient};
pub use forward::{forward_pooled, forward_sequence};
pub use gradient::{Gradient, PooledFeature, PooledGradient, TransposedIndex};
pub use optimizer::{Hyperparameters, OptimizerStep};
pub use rows::{ArenaRows, RowStore, TensorRows};
pub(crate) use threads::deal;
