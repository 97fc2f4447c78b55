//! CPU kernels over rows in slots: the forward pass gathers and pools, and the backward pass is fused with the
//! optimizer.
//!
//! Shapes: `N` occurrences of ids, `U` distinct rows, `B` bags per feature, `D` the table's width, `C` columns of the
//! pooled output.
//!
//! Results are bitwise identical for any number of threads and any instruction set. A bag, or the update of a row, is
//! computed by one thread, in the order of the occurrences. There is no fused multiply-add, and sums over a row have a
//! fixed number of lanes.

mod adam;
mod backward;
mod exact_sum;
mod forward;
mod ftrl;
mod gradients;
mod optimizer;
mod row_store;
#[cfg(test)]
mod tests;
pub(crate) mod thread_pool;

pub(crate) use backward::{add_up_exactly, update_row};
pub use backward::{backward, weight_gradient};
pub use exact_sum::EXACT_PLACES;
pub(crate) use exact_sum::rounded_row;
pub use forward::{forward_pooled, forward_sequence};
pub use gradients::{GradientView, PooledFeature, PooledGradient, TransposedIndex};
pub use optimizer::{Hyperparameters, OptimizerStep};
pub use row_store::{ArenaRows, RowStore, TensorRows};
pub(crate) use thread_pool::parallel_ranges;
