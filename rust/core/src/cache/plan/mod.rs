//! Batches. A [`Lookup`] plans a batch over several tables: it finds the distinct ids, pins rows in RAM and loads the
//! others. A [`Plan`] then places rows in the slots that kernels run on, runs the kernels or returns the slots to
//! Python, and commits or releases.

mod compute;
mod given;
mod handle;
mod lookup;
mod shape;
mod shared;
mod side_by_side;
mod state;
mod tensors;

pub use given::RowLists;
pub use handle::Plan;
pub use lookup::Lookup;
