//! The public table.

mod evicted;
mod handle;
mod rows;
mod sizing;
mod walks;

pub use handle::Table;
