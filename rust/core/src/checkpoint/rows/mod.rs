//! Files that contain rows: groups of sorted columns, or segments of an SSD tier.

pub(crate) mod counters;
mod file_writer;
pub mod format;
pub(crate) mod group;
pub(crate) mod input;
pub(crate) mod linked;
pub(crate) mod reader;
pub(crate) mod sort;
pub(crate) mod writer;
