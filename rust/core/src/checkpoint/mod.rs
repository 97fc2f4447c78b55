//! Checkpoints: every row of every table, in safetensors files that any number of ranks can load, published atomically.
//!
//! ```text
//! path/LATEST                                        one line: the name of the newest complete checkpoint
//! path/<seq>-<random>/manifest.json                  written last, by the coordinator; names the ranks' manifests
//! path/<seq>-<random>/REFERENCED_BY                  a file elsewhere that refers to it, as long as it does; such a checkpoint stays
//! path/<seq>-<random>/<rank>-of-<world>.json         tables, files, counts and checksums of one rank
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<n>.safetensors
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<serial>.seg            of a linked checkpoint
//! path/<seq>-<random>/dense.json, dense/<rank>-of-<world>.<n>.extents           beside the tables, see [`DenseWriter`]
//! path/part-<random>/                                what a rank wrote that is in no checkpoint yet, see [`Part`]
//! path/lock                                          held while `LATEST` is replaced, and while a directory is made or swept
//! ```
//!
//! A data file contains one group of rows of at most 16 MiB, sorted by (bucket, `uint64(id)`), with one tensor per
//! column (see [`format`]).
//!
//! All operations in a user's directory take a [`CheckpointDirectory`], which was checked and is held open. Saving:
//!
//! 1. The coordinator calls [`CheckpointSave::begin`] and sends the [`CheckpointName`] to every rank.
//! 2. Every rank creates a [`RankWriter`], calls [`RankWriter::write_table`] for each of its tables, then
//!    [`RankWriter::finish`], and sends the [`RankDigest`] to the coordinator.
//! 3. The coordinator calls [`CheckpointSave::publish`]: loads then find this checkpoint, and the previous one is
//!    removed. Before this call succeeds, loads always find the previous one.
//!
//! In an asynchronous save a [`RankSnapshot`] replaces the [`RankWriter`]: the rows are those at its creation.
//!
//! Loading:
//!
//! 1. One rank calls [`LatestCheckpoint::read`] and sends the result to the others, so that all load the same
//!    checkpoint.
//! 2. Every rank calls [`OpenCheckpoint::open`], which checks the manifests, and [`OpenCheckpoint::table_reader`] for
//!    each of its tables, which checks the headers and sizes of the files it needs. No table is changed before all
//!    ranks have done so.
//! 3. [`TableReader::read`] delivers the rows of the buckets that the rank owns, verified as they are read.
//!
//! The folders, from the bottom up: `directory` is a checked and held user's directory. `output` writes files.
//! `manifest` has names, digests, manifests, and directory locks. `extents` and `rows` write and read the contents of a
//! checkpoint. `blocks` has RecIS-format saves. `publish` makes a checkpoint the latest one and removes others. `ops`
//! works on entire checkpoints. None imports from a later one.

mod blocks;
mod directory;
mod extents;
mod manifest;
mod ops;
mod output;
mod publish;
mod rows;

pub use crate::cache::{GroupGatherer, GroupSink};
pub use blocks::manifest::RecisTableShare;
pub use blocks::names::{RecisSaveName, RecisShard};
pub use blocks::reader::{RecisBlockShape, RecisReader, RecisRun, RecisTableInfo};
pub use blocks::save::{RecisJoinMode, RecisSave, RecisShardOutcome};
pub use blocks::shard::{RecisBlockSpec, RecisShardWriter, RecisWrittenTable};
pub use blocks::writer::{RecisBlockRange, RecisBlockWriter, RecisFileSpec};
pub use directory::CheckpointDirectory;
pub use extents::reader::DenseReader;
pub use extents::writer::DenseWriter;
pub use manifest::dense::{DenseEntry, DenseExtent, DenseShare};
pub use manifest::digest::RankDigest;
pub use manifest::holds::WaitCallback;
pub(crate) use manifest::json::{seal_text, unseal as unseal_text};
pub use manifest::latest::{CheckpointName, LatestCheckpoint, PartName};
pub use manifest::manifests::{CheckpointId, CheckpointKind, CheckpointManifest, OptimizerSpec, TableEntry, TableSpec};
pub(crate) use manifest::names::MANIFEST_FILE;
pub use manifest::names::REFERENCE_FILE;
pub use ops::beside::{
    AsyncSaveOptions, AsyncSaveTable, PRE_IMAGE_BYTES, RankSnapshot, WriteRateLimiter, work_in_background,
};
pub(crate) use ops::chain::open_parent;
pub use ops::chain::{ChainReader, CheckpointChain};
pub use ops::check::{LoadColumns, LoadSegments, TableRequest, TableSource};
pub use ops::compact::ChainCompaction;
pub use ops::copy::{CheckpointCopyReport, copy};
pub use ops::life::{IdExpiry, IdHistoryEntry, IdState};
pub use ops::part::CheckpointPart;
pub use ops::reshard::reshard;
pub use ops::serving::make_for_serving;
pub use ops::tables::LinkedTable;
pub use publish::retention::{PruneReport, prune, remove_stale_parts};
pub use publish::save::{CheckpointSave, PublishedCheckpoint, SaveOptions};
pub use rows::delta::DeltaChanges;
pub use rows::format;
pub use rows::reader::{OpenCheckpoint, TableReader};
pub use rows::source::{RowSink, RowSource};
pub(crate) use rows::staged::RowFileOffsets;
pub use rows::writer::RankWriter;
