//! The table shard that a tier belongs to, and the table's counters in a published state.

use crate::config::TableConfig;

/// The table shard that a tier's files belong to. A published state contains it, and a resume compares it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardIdentity {
    /// Table name.
    pub table: String,
    /// Table key.
    pub key: u64,
    /// Embedding width.
    pub dim: u64,
    /// Optimizer name.
    pub optimizer: String,
    /// Seed of the initial values of new rows.
    pub seed: u64,
    /// Rendering of the initializer.
    pub initializer: String,
    /// Number of buckets of the table.
    pub total_num_buckets: u32,
    /// First bucket of this shard.
    pub bucket_begin: u32,
    /// One past the last bucket of this shard.
    pub bucket_end: u32,
}

impl ShardIdentity {
    /// Returns the identity of the table that `config` describes.
    pub fn of(config: &TableConfig) -> Self {
        Self {
            table: config.name.clone(),
            key: config.key,
            dim: config.dim as u64,
            optimizer: config.optimizer.name().to_owned(),
            seed: config.seed,
            initializer: format!("{:?}", config.initializer),
            total_num_buckets: config.total_num_buckets,
            bucket_begin: config.buckets.start,
            bucket_end: config.buckets.end,
        }
    }
}

/// The table's counters in a published state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateCounters {
    /// The table's step counter.
    pub step: u64,
    /// The table's checkpoint epoch.
    pub epoch: u32,
}
