//! The configuration of a table. It is checked before anything is made.

use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::budget::SharedBudget;
use crate::error::{Error, Kind, Result};
use crate::rows::{InitializerSpec, RowLayout};
use crate::types::BucketMapper;

/// The optimizer of a table, which decides the optimizer slots of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimizerKind {
    /// No slots.
    Sgd,
    /// One vector slot `sum`: `[D]` float32.
    Adagrad,
    /// One scalar slot `sum`.
    RowWiseAdagrad,
    /// Two vector slots `exp_avg` and `exp_avg_sq`: `[D]` float32 each. Weight decay is added to the gradient (L2).
    Adam,
    /// Two vector slots `exp_avg` and `exp_avg_sq`: `[D]` float32 each. Weight decay is applied apart from the gradient
    /// (decoupled).
    AdamW,
    /// One vector slot `exp_avg`: `[D]` float32, and the scalar slot `exp_avg_sq`. Weight decay is decoupled.
    PartialRowWiseAdam,
    /// FTRL-Proximal. Two vector slots `z` and `n`: `[D]` float32 each.
    Ftrl,
    /// Two vector slots `exp_avg` and `exp_avg_sq`: `[D]` float32 each. Weight decay is part of the direction.
    Lamb,
}

impl OptimizerKind {
    /// Every optimizer. Tests try each of these.
    pub const ALL: [Self; 8] = [
        Self::Sgd,
        Self::Adagrad,
        Self::RowWiseAdagrad,
        Self::Adam,
        Self::AdamW,
        Self::PartialRowWiseAdam,
        Self::Ftrl,
        Self::Lamb,
    ];

    /// The name that manifests and Python use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Adagrad => "adagrad",
            Self::RowWiseAdagrad => "rowwise_adagrad",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::PartialRowWiseAdam => "partial_rowwise_adam",
            Self::Ftrl => "ftrl",
            Self::Lamb => "lamb",
        }
    }

    /// The inverse of [`OptimizerKind::name`]. `Kind::Config` for another name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|kind| kind.name()).collect();
            Error::new(Kind::Config, format!("optimizer {name:?} is not known: use one of {}", known.join(", ")))
        })
    }

    /// The layout of a row of width `dim` under this optimizer.
    pub fn layout(self, dim: usize) -> RowLayout {
        let (vector_slots, scalar_slot) = match self {
            Self::Sgd => (0, false),
            Self::RowWiseAdagrad => (0, true),
            Self::Adagrad => (1, false),
            Self::Adam | Self::AdamW | Self::Ftrl | Self::Lamb => (2, false),
            Self::PartialRowWiseAdam => (1, true),
        };
        RowLayout { dim, vector_slots, scalar_slot }
    }

    /// The names of the slots as torch calls them, vector slots first.
    pub fn slot_names(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &[],
            Self::Adagrad | Self::RowWiseAdagrad => &["sum"],
            Self::Adam | Self::AdamW | Self::PartialRowWiseAdam | Self::Lamb => &["exp_avg", "exp_avg_sq"],
            Self::Ftrl => &["z", "n"],
        }
    }

    /// Whether the update corrects the moments by the table's step, because they start at zeros.
    pub fn corrects_bias(self) -> bool {
        matches!(self, Self::Adam | Self::AdamW | Self::PartialRowWiseAdam | Self::Lamb)
    }
}

/// The replacement policy of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Least frequently used, and among equals the one whose last use is longest ago.
    Lfu,
    /// S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023).
    S3Fifo,
}

impl PolicyKind {
    /// Every policy. Tests try each of these.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Lfu, Self::S3Fifo];

    /// The name that users give.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::S3Fifo => "s3fifo",
        }
    }

    /// The policy of a name.
    ///
    /// Errors: `Config` where there is none, with the names that there are.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known: Vec<String> = Self::ALL.iter().map(|kind| format!("{:?}", kind.name())).collect();
            Error::new(Kind::Config, format!("policy {name:?} is not known: use one of {}", known.join(", ")))
        })
    }
}

/// What happens when the last tier is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnFull {
    /// The call fails with `Kind::Capacity` before anything is lost.
    Error,
    /// Rows leave the table in the policy's order. They are counted, and each leaves a tombstone.
    Evict,
}

/// What to do with an SSD directory that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReopenMode {
    /// Refuse it.
    Never,
    /// Continue from the last published state.
    Resume,
    /// Remove what is there.
    Discard,
    /// Continue from the state that [`SsdConfig::resume_token`] names. Where it names none, remove what is there, provided that no
    /// state newer than `unfinished` was published meanwhile.
    Auto {
        /// The newest state that is there and cannot be resumed, because a flush of several tables did not finish.
        unfinished: Option<u64>,
    },
}

/// Which ids get a row when a batch trains them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AdmissionRule {
    /// Every id.
    #[default]
    All,
    /// An id that has occurred `threshold` times in training batches, the present one included.
    Count {
        /// 1 to 2²⁴ − 1.
        threshold: u32,
        /// An id is forgotten when it did not occur for one to two times so many steps. `None`: never for that.
        window_steps: Option<NonZeroU64>,
        /// Bytes of RAM that the counts of the whole table take at most. When they are full, the ids that did not occur for longest are
        /// forgotten.
        memory: u64,
    },
    /// An id by a throw of a coin for each of its occurrences.
    Probability {
        /// The probability that one occurrence admits the id: more than 0, at most 1.
        p: f64,
    },
    /// An id whose shows (occurrences) and clicks reach `alpha × shows + beta × clicks >= threshold`.
    ShowClick {
        /// The weight of a show.
        alpha: f64,
        /// The weight of a click.
        beta: f64,
        /// What the weighted sum must reach.
        threshold: f64,
        /// As for `Count`.
        window_steps: Option<NonZeroU64>,
        /// As for `Count`.
        memory: u64,
    },
    /// No id: only rows that are there are trained.
    ReadOnly,
}

impl AdmissionRule {
    /// Whether some ids may get no row.
    pub fn is_selective(&self) -> bool {
        *self != Self::All
    }

    /// Whether clicks are counted.
    pub fn counts_clicks(&self) -> bool {
        matches!(self, Self::ShowClick { .. })
    }

    /// Bytes of RAM that counts take at most, where ids are counted.
    pub fn memory(&self) -> Option<u64> {
        match self {
            Self::Count { memory, .. } | Self::ShowClick { memory, .. } => Some(*memory),
            Self::All | Self::Probability { .. } | Self::ReadOnly => None,
        }
    }
}

/// What is read for an id that has no row.
///
/// Its serde form is part of a checkpoint's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingRead {
    /// Zeros.
    Zeros,
    /// This number in every column.
    Value(f32),
    /// The weights that a row of the id would be born with.
    Initial,
    /// The weights of the one row that such ids of the table share; see [`OovRow`](crate::lifecycle::SharedRow).
    #[serde(rename = "oov_row")]
    OovRow,
}

/// Which rows leave a table by a rule of their own columns, and when. A sweep takes those that the rule names.
#[derive(Clone, Debug, PartialEq)]
pub struct EvictionConfig {
    /// Which rows leave.
    pub rule: EvictionRule,
    /// A sweep follows every step whose number is a multiple of this. `None`: sweeps are only made when they are asked for.
    pub every_steps: Option<NonZeroU64>,
}

/// Which rows leave a table in a sweep after step `s`.
#[derive(Clone, Debug, PartialEq)]
pub enum EvictionRule {
    /// Rows whose last training step is at most `s - steps`.
    Unused {
        /// At least 1.
        steps: u64,
    },
    /// Rows whose score, decayed to step `s`, is below this: more than 0.
    ScoreBelow(f32),
    /// Rows whose weights have an L2 norm below this: more than 0. The squares are summed in float64, column after column.
    NormBelow(f64),
    /// Rows whose last training step is at most this one, whatever `s` is.
    TrainedUntil {
        /// A step.
        step: u64,
    },
    /// No rows.
    Nothing,
    /// As the rule says that is given with each sweep, because ranks agree on it then. It stands alone.
    PerSweep,
    /// As [`EvictionRule::PerSweep`], of a table that also keeps the times of its steps, from which such rules are made.
    PerSweepTimed,
    /// Rows that stand below a cut in the order of rows after step `s`: by their score, decayed to step `s`, then by their last step, then
    /// by their id as a u64.
    Below {
        /// The score of the cut, as [`rising`](crate::lifecycle::rising) maps it.
        score: u32,
        /// Its last step.
        last_step: u64,
        /// Its id.
        id: u64,
    },
    /// Rows that any of these rules takes. There is at least one.
    Any(Vec<EvictionRule>),
    /// Rows that all of these rules take. There is at least one.
    All(Vec<EvictionRule>),
}

impl EvictionRule {
    /// Whether a rule is given with each sweep.
    pub fn is_per_sweep(&self) -> bool {
        matches!(self, Self::PerSweep | Self::PerSweepTimed)
    }

    /// Check that the numbers are in range.
    ///
    /// Errors: `Config`, which names the number.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::new(Kind::Config, message));
        match self {
            Self::Unused { steps: 0 } => refuse("eviction after 0 unused steps: give at least 1 step".into()),
            Self::ScoreBelow(below) if !(below.is_finite() && *below > 0.0) => {
                refuse(format!("eviction of scores below {below}: give a finite number above 0"))
            }
            Self::NormBelow(below) if !(below.is_finite() && *below > 0.0) => {
                refuse(format!("eviction of L2 norms below {below}: give a finite number above 0"))
            }
            Self::Any(rules) | Self::All(rules) if rules.is_empty() => {
                refuse("an eviction rule is joined from no rule: give at least one".into())
            }
            Self::Any(rules) | Self::All(rules) if rules.iter().any(Self::is_per_sweep) => refuse(
                "a rule that is given with each sweep is joined with others: join the others with what is given".into(),
            ),
            Self::Any(rules) | Self::All(rules) => rules.iter().try_for_each(Self::check),
            _ => Ok(()),
        }
    }
}

/// The configuration of a table's SSD tier.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// The table's own directory: `<ssd_dir>/<module>/<table>/<rank>-of-<world>`, with encoded names. It is made if it is missing.
    pub dir: PathBuf,
    /// The most bytes that all files of the table may take together.
    pub bytes: u64,
    /// What to do when the directory is not empty.
    pub reopen: ReopenMode,
    /// With `Reopen::Resume` the token of the state to resume, or `None` for the newest. With `Reopen::Auto` the token, or `None`
    /// to start anew.
    pub resume_commit_id: Option<u64>,
}

/// The configuration of a table shard, with its budgets.
#[derive(Clone, Debug)]
pub struct TableConfig {
    /// The table's name.
    pub name: String,
    /// The table's key; see [`crate::types::table_key`].
    pub key: u64,
    /// The width of the embedding, 1 to 65,536.
    pub dim: usize,
    /// The optimizer whose slots the rows have.
    pub optimizer: OptimizerKind,
    /// The distribution of the initial weights.
    pub initializer: InitializerSpec,
    /// The seed of births.
    pub seed: u64,
    /// The number of buckets of the whole table, all shards together.
    pub total_num_buckets: u32,
    /// The buckets that this shard owns.
    pub buckets: Range<u32>,
    /// The most bytes of RAM for rows, metadata and indexes that the table has by itself.
    pub host_bytes: u64,
    /// The budget from which it takes the bytes that it needs beyond `host_bytes`. Only for a table without an SSD tier that drops no rows.
    pub shared_budget: Option<Arc<SharedBudget>>,
    /// The number of cache slots of a device tier. `None` runs the kernels on the rows in the host tier.
    pub device_rows: Option<u32>,
    /// The SSD tier. `None` makes the host tier the last one.
    pub ssd: Option<SsdConfig>,
    /// The replacement policy of the device tier and of the host tier.
    pub policy: PolicyKind,
    /// What happens when the last tier is full.
    pub on_full: OnFull,
    /// Which ids get a row.
    pub admission: AdmissionRule,
    /// What a training batch reads for an id that gets none. The gradient of such an id is dropped, but where it trains the shared row.
    pub not_admitted: MissingRead,
    /// What an evaluation reads for an id without a row. Each plan is told by its [`PlanMode`](crate::cache::PlanMode); this is for
    /// checkpoints, which say it to those who read the rows without this configuration.
    pub missing_read: MissingRead,
    /// The steps over which the score of a row halves: 1 to [`ScoreDecay::LONGEST`](crate::rows::Decay::LONGEST).
    pub score_half_life_steps: u64,
    /// Which rows leave by a rule. `None`: none do.
    pub eviction: Option<EvictionConfig>,
}

impl TableConfig {
    /// The layout of this table's rows.
    pub fn layout(&self) -> RowLayout {
        self.optimizer.layout(self.dim)
    }

    /// The bytes of RAM that the table can count on: its own, and an equal share of those that tables share.
    pub fn expected_host_bytes(&self) -> u64 {
        let share = |shared: &Arc<SharedBudget>| shared.bytes() / u64::from(shared.tables());
        self.host_bytes + self.shared_budget.as_ref().map_or(0, share)
    }

    /// Whether the table keeps the times of its steps.
    pub fn keeps_times(&self) -> bool {
        matches!(self.eviction, Some(EvictionConfig { rule: EvictionRule::PerSweepTimed, .. }))
    }

    /// The rule by which ids fall into the table's buckets.
    pub fn bucketing(&self) -> BucketMapper {
        BucketMapper::new(self.total_num_buckets)
    }
}
