//! Checkpoints: every row of every table, in safetensors files that any number of ranks can load, published as a whole.
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
//! A data file holds one group of rows of at most 16 MiB, sorted by (bucket, `uint64(id)`), one tensor a column (see [`format`]).
//!
//! Everything that works in a user's directory takes a [`Directory`], which was checked and is held. Saving, by whom:
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
//! 1. One rank calls [`LatestCheckpoint::read`] and tells the others, so that all load the same checkpoint.
//! 2. Every rank calls [`Checkpoint::open`] (manifests are checked here) and, for each of its tables, [`Checkpoint::table_reader`]
//!    (headers and sizes of the files it needs are checked here). No table is touched before all ranks have done so.
//! 3. [`TableReader::read`] hands over the rows of the buckets that the rank owns, verified as they arrive.
//!
//! The folders, from the bottom up. `directory` is a user's directory that was checked and is held. `output` writes files. `manifest` has names,
//! digests, manifests, and holds on directories. `extents` and `rows` write and read the contents of a checkpoint. `blocks` has block-level
//! saves. `publish` makes a checkpoint the newest one and removes others. `ops` works on whole checkpoints. None imports from one after it.

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
