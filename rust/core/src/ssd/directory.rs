//! A tier's directory: the lock that excludes other tables, and the identity and counters that its published states
//! contain.

use std::path::Path;

use crate::config::TableConfig;
use crate::error::Result;
use crate::io::{DirLock, DirLockPurpose, IoEngine};

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

/// Permission bits of a tier's directory.
pub(crate) const DIR_MODE: u32 = 0o750;

/// Locks a tier's directory until it is dropped. The lock on the directory is released first: until the lock on its
/// file is released too, another open of the table reports the pid.
#[derive(Debug)]
pub(crate) struct TierDirLock {
    _directory: DirLock,
    _file: DirLock,
}

/// Locks a table's existing directory against other tables of any process. The lock file names the holder. The second
/// lock, on the directory itself, holds even if the lock file is deleted.
///
/// Errors: `InUse`, without waiting.
pub(crate) fn lock_tier_dir(engine: &dyn IoEngine, dir: &Path) -> Result<TierDirLock> {
    let file = engine.lock_dir(dir)?;
    Ok(TierDirLock { _directory: engine.lock_dir_for(dir, DirLockPurpose::ToOpen)?, _file: file })
}
