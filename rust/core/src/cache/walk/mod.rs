//! Walks over the rows of a table: all of them, those modified since a checkpoint, those of a snapshot.
//!
//! They differ in the selected rows and in the guarantees about concurrent changes. The loop that passes on rows is
//! common to all, in `chunker`.

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
