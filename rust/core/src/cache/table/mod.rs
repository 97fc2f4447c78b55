//! A table, as its users see it.

mod handle;
mod rows;
mod walks;

pub use handle::Table;
