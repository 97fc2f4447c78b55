//! Files that contain rows: groups of sorted columns, or segments of an SSD tier.

pub(crate) mod bucket_sort;
pub(crate) mod counts;
mod counts_input;
pub(crate) mod delta;
pub mod format;
pub(crate) mod group;
mod image;
pub(crate) mod input;
pub(crate) mod order;
pub(crate) mod reader;
pub(crate) mod segment_rows;
pub(crate) mod segments;
pub(crate) mod source;
pub(crate) mod staged;
pub(crate) mod stream;
pub(crate) mod writer;
