//! Configuration, checked before anything is made.

use std::ops::Range;
use std::path::PathBuf;

use crate::error::{Error, Kind, Result};
use crate::rows::{Initializer, RowLayout};
use crate::types::{BucketHash, Bucketing};

/// Which optimizer a table's rows carry slots for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimizerKind {
    /// No slots.
    Sgd,
    /// `sum`: `[D]`.
    Adagrad,
    /// `sum`: one scalar.
    RowWiseAdagrad,
    /// `exp_avg`, `exp_avg_sq`: `[D]`; weight decay added to the gradient (L2).
    Adam,
    /// `exp_avg`, `exp_avg_sq`: `[D]`; weight decay apart from the gradient (decoupled).
    AdamW,
}

impl OptimizerKind {
    /// The name that manifests and Python use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Adagrad => "adagrad",
            Self::RowWiseAdagrad => "rowwise_adagrad",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
        }
    }

    /// The inverse of [`OptimizerKind::name`].
    pub fn from_name(name: &str) -> Result<Self> {
        [Self::Sgd, Self::Adagrad, Self::RowWiseAdagrad, Self::Adam, Self::AdamW]
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| {
                Error::new(
                    Kind::Config,
                    format!("optimizer {name:?} is not known: use sgd, adagrad, rowwise_adagrad, adam or adamw"),
                )
            })
    }

    /// The layout of a row of width `dim` under this optimizer.
    pub fn layout(self, dim: usize) -> RowLayout {
        let (vector_slots, scalar_slot) = match self {
            Self::Sgd => (0, false),
            Self::RowWiseAdagrad => (0, true),
            Self::Adagrad => (1, false),
            Self::Adam | Self::AdamW => (2, false),
        };
        RowLayout { dim, vector_slots, scalar_slot }
    }

    /// The slots' names, vector slots first, as torch calls them.
    pub fn slot_names(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &[],
            Self::Adagrad | Self::RowWiseAdagrad => &["sum"],
            Self::Adam | Self::AdamW => &["exp_avg", "exp_avg_sq"],
        }
    }
}

/// Replacement policy of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Least frequently used, ties by age.
    Lfu,
    /// S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP 2023).
    S3Fifo,
}

/// What happens when the last tier is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnFull {
    /// `Kind::Capacity`, before anything is lost.
    Error,
    /// Rows leave the table by policy, counted, with a tombstone.
    Evict,
}

/// What to do with an SSD directory that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reopen {
    /// Refuse it.
    Never,
    /// Continue from the last published state.
    Resume,
    /// Remove what is there.
    Discard,
    /// Continue from the state that [`SsdConfig::resume_token`] names. Where it names none, remove what is there: no state newer than
    /// `unfinished` may have been published meanwhile.
    Auto {
        /// The newest state that is there and cannot be resumed, because a flush of several tables did not finish.
        unfinished: Option<u64>,
    },
}

/// The SSD tier of a table.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// The table's own directory, `<ssd_dir>/<module>/<table>/<rank>-of-<world>`, names already encoded. Made if missing.
    pub dir: PathBuf,
    /// Cap on the bytes of all files of the table.
    pub bytes: u64,
    /// What to do when the directory is not empty.
    pub reopen: Reopen,
    /// With `Reopen::Resume`: the token of the state to resume; `None` takes the newest. With `Reopen::Auto`: `None` starts anew.
    pub resume_token: Option<u64>,
}

/// A table shard and its budgets.
#[derive(Clone, Debug)]
pub struct TableConfig {
    /// The table's name.
    pub name: String,
    /// See [`crate::types::table_key`].
    pub key: u64,
    /// Width of the embedding, 1 to 65,536.
    pub dim: usize,
    /// The optimizer whose slots the rows carry.
    pub optimizer: OptimizerKind,
    /// How rows are born.
    pub initializer: Initializer,
    /// The seed of births.
    pub seed: u64,
    /// Buckets of the whole table.
    pub total_num_buckets: u32,
    /// How ids fall into them. A table that resumes a state has that state's.
    pub bucket_hash: BucketHash,
    /// The buckets this shard owns.
    pub buckets: Range<u32>,
    /// Cap on the bytes of rows, metadata and indexes in RAM.
    pub host_bytes: u64,
    /// Cache slots of a device tier; `None` runs the kernels on the host tier's rows in place.
    pub device_rows: Option<u32>,
    /// The SSD tier; `None` makes the host tier the last.
    pub ssd: Option<SsdConfig>,
    /// Replacement policy of device and host tier.
    pub policy: PolicyKind,
    /// What happens when the last tier is full.
    pub on_full: OnFull,
}

impl TableConfig {
    /// The layout of this table's rows.
    pub fn layout(&self) -> RowLayout {
        self.optimizer.layout(self.dim)
    }

    /// How ids fall into the table's buckets.
    pub fn bucketing(&self) -> Bucketing {
        Bucketing::new(self.total_num_buckets, self.bucket_hash)
    }
}
