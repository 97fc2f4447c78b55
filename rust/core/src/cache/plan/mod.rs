//! Batches. A [`Lookup`] plans a batch over several tables: it finds the distinct ids, pins rows in RAM and loads the
//! others. A [`Plan`] then places rows in the slots that kernels run on, runs the kernels or returns the slots to
//! Python, and commits or releases.

mod handle;
mod kernel_args;
mod kernels;
mod lookup;
mod table_plan;

pub use handle::Plan;
pub use kernel_args::RowLists;
pub use lookup::Lookup;
