//! Walks over the rows of a table: all of them, those that were modified since a checkpoint, those of a moment.
//!
//! They differ in which rows they want and in what they promise about changes meanwhile. How rows are handed over is the same for all, and
//! is written once, in `chunker`.

mod changes;
mod chunker;
mod counts;
mod export;
mod moment;
mod stream;

pub use moment::TableSnapshot;
pub use stream::ExportStream;

pub(super) use changes::{modified_chunks, modified_groups};
pub(super) use counts::{current_counts, remaining_counts};
pub(super) use export::{all_chunks, all_groups};
