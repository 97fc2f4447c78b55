//! A table, as its users see it.

mod evicted;
mod handle;
mod rows;
mod sizing;
mod walks;

pub use handle::Table;
