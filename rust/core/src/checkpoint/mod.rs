//! Checkpoints: every row of every table, in safetensors files that any number of ranks can load, published as a whole.
//!
//! ```text
//! path/LATEST                                        one line: the name of the newest complete checkpoint
//! path/<seq>-<random>/manifest.json                  written last, by the coordinator; names the ranks' manifests
//! path/<seq>-<random>/<rank>-of-<world>.json         tables, files, counts and checksums of one rank
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<n>.safetensors
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<serial>.seg            of a snapshot
//! path/<seq>-<random>/dense.json, dense/<rank>-of-<world>.<n>.extents           beside the tables, see [`ExtentWriter`]
//! path/part-<random>/                                what a rank wrote that is in no checkpoint yet, see [`Part`]
//! path/lock                                          held while `LATEST` is replaced, and while a directory is made or swept
//! ```
//!
//! A data file holds one group of rows of at most 16 MiB, sorted by (bucket, `uint64(id)`), one tensor a column (see [`format`]).
//!
//! Saving, by whom:
//!
//! 1. The coordinator calls [`Save::begin`] and tells every rank the [`CheckpointName`].
//! 2. Every rank makes a [`RankWriter`], calls [`RankWriter::write_table`] for each of its tables, then [`RankWriter::finish`],
//!    and sends the [`RankDigest`] to the coordinator.
//! 3. The coordinator calls [`Save::publish`]: from then on a load finds this checkpoint, and the one before is removed. Until then,
//!    whatever happens, a load finds the one before.
//!
//! Beside training, a [`RankSnapshot`] takes the [`RankWriter`]'s place: the rows are those of when it began.
//!
//! Loading:
//!
//! 1. One rank calls [`Latest::read`] and tells the others, so that all load the same checkpoint.
//! 2. Every rank calls [`Checkpoint::open`] (manifests are checked here) and, for each of its tables, [`Checkpoint::table_reader`]
//!    (headers and sizes of the files it needs are checked here). No table is touched before all ranks have done so.
//! 3. [`TableReader::read`] hands over the rows of the buckets that the rank owns, verified as they arrive.

mod beside;
mod block_writer;
mod bucket_sort;
mod chain;
mod compact;
mod delta;
mod dense;
mod dense_reader;
mod dense_writer;
pub mod format;
mod group;
mod input;
mod latest;
mod manifest;
mod order;
mod output;
mod part;
mod reader;
mod reshard;
mod retention;
mod save;
mod segments;
mod source;
mod stream;
mod tables;
mod writer;

pub use crate::cache::{Gather, GroupSink};
pub use beside::{BesideOptions, IMAGE_BYTES, Pace, RankSnapshot, TableToSave, work_behind};
pub use block_writer::{BlockFile, BlockPlace, BlockWriter};
pub use chain::{Chain, ChainReader};
pub use compact::Compaction;
pub use delta::Changes;
pub use dense::{DenseEntry, DenseShare, Extent};
pub use dense_reader::ExtentReader;
pub use dense_writer::ExtentWriter;
pub use latest::{CheckpointName, Latest};
pub use manifest::{CheckpointKind, Manifest, OptimizerSpec, Parent, RankDigest, TableEntry, TableSpec};
pub use part::{Part, PartName, sweep_parts};
pub use reader::{Checkpoint, TableReader};
pub use reshard::reshard;
pub use save::{Published, Save, SaveOptions};
pub use segments::LinkedTable;
pub use source::RowSource;
pub use writer::RankWriter;

/// Takes rows: headers `[n]` and their vector parts `[n × V]`, one behind the other.
pub type RowSink<'a> = dyn FnMut(&[crate::rows::RowHeader], &[f32]) -> crate::Result<()> + 'a;
