//! Manifests of RecIS-format saves: one per shard, and one per save.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::layout::{RecisFileLayout, RecisShard, RecisTensor, TensorSpacing};
use crate::checkpoint::manifest::inconsistent;
use crate::error::{Error, Kind, Result};

/// Format name in every save manifest.
const FORMAT: &str = "torchrec-embcache blocks";
/// Format version.
const VERSION: u32 = 1;
/// Maximum number of files per shard.
const MAX_PARALLEL: u32 = 1024;
/// Maximum embedding width.
const MAX_DIM: u32 = 65_536;
/// Maximum number of buckets per table.
const MAX_BUCKETS: u32 = (1 << 31) - 1;

/// One shard's rows of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecisTableShare {
    /// Table name in the save.
    pub name: String,
    /// Width of the embedding.
    pub dim: u32,
    /// Name of the optimizer.
    pub optimizer: String,
    /// See [`crate::types::table_key`].
    pub key: u64,
    /// Seed of the initializer.
    pub seed: u64,
    /// Number of training steps.
    pub step: u64,
    /// The table's epoch.
    pub epoch: u32,
    /// Number of buckets of the table.
    pub total_num_buckets: u32,
    /// The shard's bucket range, `[begin, end)`.
    pub buckets: [u32; 2],
    /// Number of rows of each run. A run is sorted by (bucket, `uint64(id)`).
    pub runs: Vec<u64>,
}

impl RecisTableShare {
    /// Number of rows of all runs; `None` if it exceeds the maximum of a table.
    pub(crate) fn rows(&self) -> Option<u64> {
        self.runs.iter().try_fold(0_u64, |all, &rows| all.checked_add(rows)).filter(|&rows| rows < 1 << 62)
    }

    fn check(&self) -> Result<(), String> {
        let [begin, end] = self.buckets;
        if !(1..=MAX_BUCKETS).contains(&self.total_num_buckets) || begin > end || end > self.total_num_buckets {
            return Err(format!("buckets {begin} to {end} are not within 0 to {}", self.total_num_buckets));
        }
        if !(1..=MAX_DIM).contains(&self.dim) {
            return Err(format!("dim {} is not within 1 to {MAX_DIM}", self.dim));
        }
        if self.runs.contains(&0) || self.rows().is_none() {
            return Err("the rows of its runs cannot be counted".into());
        }
        // The maximum step and epoch are rejected because they have no successor.
        if self.step > i64::MAX as u64 || self.epoch == u32::MAX {
            return Err(format!("step {} or epoch {} is out of range", self.step, self.epoch));
        }
        Ok(())
    }
}

/// A block of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecisBlockEntry {
    /// Name of the table or of the dense tensor.
    pub(crate) name: String,
    /// Column of the table's rows that the block contains; `None` for a dense tensor.
    pub(crate) slot: Option<String>,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Number of its data file.
    pub(crate) file: u32,
}

/// Returns a shard's blocks as tensors of its files, or a message if one is invalid.
pub(crate) fn tensors_of(blocks: &[RecisBlockEntry], shard: RecisShard) -> Result<Vec<RecisTensor>, String> {
    let tensor = |block: &RecisBlockEntry| {
        let name = block.slot.as_ref().map_or_else(|| block.name.clone(), |slot| shard.part_name(&block.name, slot));
        RecisTensor::new(name, &block.dtype, block.shape.clone())
    };
    blocks.iter().map(tensor).collect()
}

/// Lays out data file `file` from all blocks of its shard and their tensors; returns a message if there is no such
/// layout.
pub(crate) fn layout_of_file(
    file: u32,
    blocks: &[RecisBlockEntry],
    tensors: &[RecisTensor],
) -> Result<RecisFileLayout, String> {
    let in_file = blocks.iter().zip(tensors).filter(|(block, _)| block.file == file);
    RecisFileLayout::new(in_file.map(|(_, tensor)| tensor).collect(), TensorSpacing::Pages)
}

/// `shard-<i>-of-<n>.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecisShardManifest {
    pub(crate) shard: u32,
    pub(crate) shards: u32,
    /// Maximum number of data files of the shard.
    pub(crate) parallel: u32,
    pub(crate) tables: Vec<RecisTableShare>,
    pub(crate) blocks: Vec<RecisBlockEntry>,
    /// CRC-32C of the shard's checksum file.
    pub(crate) check: u32,
}

impl RecisShardManifest {
    /// Returns `Corruption` unless this is the manifest of `shard` and its values are within the format's limits.
    pub(crate) fn check(&self, shard: RecisShard, path: &Path) -> Result<()> {
        let damaged = |what: String| inconsistent(path, what);
        if (self.shard, self.shards) != (shard.index, shard.count) {
            return Err(damaged(format!("it is of shard {} of {}", self.shard, self.shards)));
        }
        if !(1..=MAX_PARALLEL).contains(&self.parallel) || self.blocks.iter().any(|block| block.file >= self.parallel) {
            return Err(damaged(format!("it has {} files", self.parallel)));
        }
        for table in &self.tables {
            table.check().map_err(|what| damaged(format!("table {:?}: {what}", table.name)))?;
        }
        Ok(())
    }
}

/// `manifest.json`: the CRC-32C of each shard's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecisSaveManifest {
    format: String,
    version: u32,
    pub(crate) shards: Vec<u32>,
}

/// The fields that a manifest of every release has.
#[derive(Deserialize)]
struct RecisManifestHeader {
    format: serde_json::Value,
    version: serde_json::Value,
}

impl RecisSaveManifest {
    pub(crate) fn new(shards: Vec<u32>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, shards }
    }

    /// Parses the manifest; returns `Unsupported` for another format or version.
    pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        let head: RecisManifestHeader = parse(bytes, path)?;
        if head.format != FORMAT || head.version != VERSION {
            let what = format!(
                "{} has format {} of version {} and this release reads {FORMAT:?} of version {VERSION}: load it with the release that wrote \
                 it",
                path.display(),
                head.format,
                head.version
            );
            return Err(Kind::Unsupported.error(what).at(path));
        }
        let found: Self = parse(bytes, path)?;
        if found.shards.is_empty() {
            return Err(Error::corruption(path, 0, "the shards", "checksums", "none"));
        }
        Ok(found)
    }
}

/// Parses a JSON object; returns `Corruption` if it is invalid.
pub(crate) fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::corruption(path, 0, "the manifest", "valid", error))
}
