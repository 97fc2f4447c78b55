//! Checkpoints: every row of every table, in safetensors files that any number of ranks can load, published atomically.
//!
//! ```text
//! path/LATEST                                        one line: the name of the latest complete checkpoint
//! path/lock                                          held while LATEST is replaced, and while a directory is created or removed
//! path/<seq>-<random>/manifest.json                  written last, by the coordinator; names the ranks' manifests
//! path/<seq>-<random>/REFERENCED_BY                  the file of another program that refers to it, such as Lightning's; such a checkpoint stays
//! path/<seq>-<random>/<rank>-of-<world>.json         tables, files, counts and checksums of one rank
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<n>.safetensors
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<n>.counts.safetensors   admission counts of pending ids
//! path/<seq>-<random>/<module>+<table>/<rank>-of-<world>.<serial>.seg   of a linked checkpoint
//! path/<seq>-<random>/dense/<rank>-of-<world>.<n>.extents
//! path/<seq>-<random>/dense.json                     DCP's metadata of the extents; only of checkpoints saved through DCP
//! path/part-<random>/                                files of a rank that are in no checkpoint yet, see `CheckpointPart`
//! ```
//!
//! A data file contains groups of rows of at most 16 MiB, each sorted by (bucket, `uint64(id)`), with one tensor per
//! column (see [`mod@format`]).
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
//! 2. Every rank calls [`OpenCheckpoint::open`], which checks the coordinator's manifest, and
//!    [`OpenCheckpoint::table_reader`] for each of its tables, which checks the ranks' manifests, headers and sizes of the
//!    files that it needs. No table is changed before all
//!    ranks have done so.
//! 3. [`TableReader::read`] delivers the rows of the buckets that the rank owns, verified as they are read.
//!
//! From the bottom up: `directory` is a checked and held user's directory. `manifest` has names, digests, manifests,
//! and directory locks. `chunked_file` writes files in the background and verifies chunks. `dense` and `rows` write and
//! read the contents of a checkpoint. `recis` has RecIS-format saves. `commit` makes a checkpoint the latest one, and
//! `retention` removes others. `ops` works on entire checkpoints. None imports from a later one.

mod chunked_file;
mod commit;
mod dense;
mod directory;
mod manifest;
mod ops;
mod recis;
mod retention;
mod rows;

pub use crate::runtime::process::work_in_background;
pub use commit::{CheckpointSave, PublishedCheckpoint, SaveOptions};
pub use dense::{DenseReader, DenseWriter};
pub use directory::CheckpointDirectory;
pub use manifest::latest::{CheckpointName, LatestCheckpoint, PartName, WaitCallback};
pub use manifest::manifests::{
    CheckpointId, CheckpointKind, CheckpointManifest, DenseEntry, DenseExtent, DenseShare, TableEntry,
};
pub use manifest::spec::{OptimizerSpec, TableSpec};
pub(crate) use manifest::{MANIFEST_FILE, seal_text, unseal as unseal_text};
pub use manifest::{REFERENCE_FILE, RankDigest};
pub use ops::async_save::{
    AsyncSaveOptions, AsyncSaveTable, CheckpointPart, PRE_IMAGE_BYTES, RankSnapshot, WriteRateLimiter,
};
pub(crate) use ops::chain::open_parent;
pub use ops::chain::{ChainReader, CheckpointChain, LoadColumns, LoadSegments, TableRequest, TableSource};
pub use ops::copy::{CheckpointCopyReport, copy};
pub use ops::rewrite::{ChainCompaction, make_for_serving, reshard};
pub use ops::row_history::{IdExpiry, IdHistoryEntry, IdState};
pub use ops::tables::LinkedTable;
pub use recis::layout::{RecisSaveName, RecisShard};
pub use recis::load::{RecisBlockShape, RecisReader, RecisRun, RecisTableInfo};
pub use recis::manifest::RecisTableShare;
pub use recis::save::{RecisBlockSpec, RecisJoinMode, RecisSave, RecisShardOutcome, RecisShardWriter};
pub use retention::{PruneReport, prune, remove_stale_parts};
pub use rows::format;
pub(crate) use rows::input::RowFileOffsets;
pub use rows::reader::{OpenCheckpoint, TableReader};
pub use rows::writer::{DeltaChanges, RankWriter, RowChunks, RowSink};
