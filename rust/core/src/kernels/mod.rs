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
mod crew;
mod exact;
mod forward;
mod ftrl;
mod gradient;
mod optimizer;
mod rows;
#[cfg(test)]
mod tests;
pub(crate) mod threads;

pub(crate) use backward::{add_up_exactly, update_row};
pub use backward::{backward, weight_gradient};
pub use exact::EXACT_PLACES;
pub(crate) use exact::rounded_row;
pub use forward::{forward_pooled, forward_sequence};
pub use gradient::{GradientView, PooledFeature, PooledGradient, TransposedIndex};
pub use optimizer::{Hyperparameters, OptimizerStep};
pub use rows::{ArenaRows, RowStore, TensorRows};
pub(crate) use threads::parallel_ranges;
