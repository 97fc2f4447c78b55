//! The configuration of a table, which is checked before anything is created.

use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Kind, Result};
use crate::rows::{InitializerSpec, RowLayout};
use crate::runtime::budget::SharedBudget;
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
    /// Two vector slots `exp_avg` and `exp_avg_sq`: `[D]` float32 each. Weight decay is decoupled from the gradient.
    AdamW,
    /// One vector slot `exp_avg`: `[D]` float32, and the scalar slot `exp_avg_sq`. Weight decay is decoupled.
    PartialRowWiseAdam,
    /// FTRL-Proximal. Two vector slots `z` and `n`: `[D]` float32 each.
    Ftrl,
    /// Two vector slots `exp_avg` and `exp_avg_sq`: `[D]` float32 each. Weight decay is part of the direction.
    Lamb,
}

impl OptimizerKind {
    /// Every optimizer, for tests.
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

    /// The name in manifests and in Python.
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

    /// The inverse of [`OptimizerKind::name`]. Returns `Kind::Config` for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|kind| kind.name()).collect();
            Kind::Config.error(format!("optimizer {name:?} is not known: use one of {}", known.join(", ")))
        })
    }

    /// Returns the layout of a row of width `dim` under this optimizer.
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

    /// The names of the slots in torch, vector slots first.
    pub fn slot_names(self) -> &'static [&'static str] {
        match self {
            Self::Sgd => &[],
            Self::Adagrad | Self::RowWiseAdagrad => &["sum"],
            Self::Adam | Self::AdamW | Self::PartialRowWiseAdam | Self::Lamb => &["exp_avg", "exp_avg_sq"],
            Self::Ftrl => &["z", "n"],
        }
    }

    /// True if the update corrects the bias of its moments, which start at zero, by the table's step.
    pub fn corrects_bias(self) -> bool {
        matches!(self, Self::Adam | Self::AdamW | Self::PartialRowWiseAdam | Self::Lamb)
    }
}

/// The replacement policy of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Least frequently used; the least recently used among equals.
    Lfu,
    /// S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023).
    S3Fifo,
}

impl PolicyKind {
    /// Every policy, for tests.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Lfu, Self::S3Fifo];

    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::S3Fifo => "s3fifo",
        }
    }

    /// Returns the policy with this name.
    ///
    /// Errors: `Config` for an unknown name; the message lists the known names.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known: Vec<String> = Self::ALL.iter().map(|kind| format!("{:?}", kind.name())).collect();
            Kind::Config.error(format!("policy {name:?} is not known: use one of {}", known.join(", ")))
        })
    }
}

/// Behaviour when the last tier is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnFull {
    /// The call fails with `Kind::Capacity` before anything is lost.
    Error,
    /// Rows are evicted in the policy's order. They are counted, and each leaves a tombstone.
    Evict,
}

/// Treatment of an SSD directory that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReopenMode {
    /// Returns an error.
    Never,
    /// Continues from the last published state.
    Resume,
    /// Removes the contents.
    Discard,
    /// Continues from the state of [`SsdConfig::resume_commit_id`]. If that is `None`, removes the contents, unless a
    /// state later than `unfinished` has been published concurrently.
    Auto {
        /// The latest state in the directory that cannot be resumed, because a flush of several tables did not finish.
        unfinished: Option<u64>,
    },
}

/// Admission rules: the ids that get a row when a batch trains them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AdmissionRule {
    /// Every id.
    #[default]
    All,
    /// An id that has occurred `threshold` times in training batches, including the present batch.
    Count {
        /// 1 to 2²⁴ − 1.
        threshold: u32,
        /// An id without an occurrence for one to two times this number of steps is forgotten. `None`: the age of a
        /// count does not matter.
        window_steps: Option<NonZeroU64>,
        /// Maximum bytes of RAM for the counts of the entire table. When they are full, the ids whose last occurrence
        /// is oldest are forgotten.
        memory: u64,
    },
    /// An id with a fixed probability per occurrence.
    Probability {
        /// The probability that one occurrence admits the id, in (0, 1].
        p: f64,
    },
    /// An id whose shows (occurrences) and clicks reach `alpha × shows + beta × clicks >= threshold`.
    ShowClick {
        /// The weight of a show.
        alpha: f64,
        /// The weight of a click.
        beta: f64,
        /// The minimum of the weighted sum.
        threshold: f64,
        /// See `Count`.
        window_steps: Option<NonZeroU64>,
        /// See `Count`.
        memory: u64,
    },
    /// No id: only existing rows are trained.
    ReadOnly,
}

impl AdmissionRule {
    /// True if some ids may not be admitted.
    pub fn is_selective(&self) -> bool {
        *self != Self::All
    }

    /// True if clicks are counted.
    pub fn counts_clicks(&self) -> bool {
        matches!(self, Self::ShowClick { .. })
    }

    /// Maximum bytes of RAM for counts, if ids are counted.
    pub fn memory(&self) -> Option<u64> {
        match self {
            Self::Count { memory, .. } | Self::ShowClick { memory, .. } => Some(*memory),
            Self::All | Self::Probability { .. } | Self::ReadOnly => None,
        }
    }
}

/// The value that is read for an id without a row.
///
/// Its serde form is part of a checkpoint's manifest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingRead {
    /// Zeros.
    Zeros,
    /// This value in every column.
    Value(f32),
    /// The weights with which a row of the id would be initialized.
    Initial,
    /// The weights of the table's OOV row; see [`OovRow`](crate::lifecycle::OovRow).
    OovRow,
}

/// The rule by which rows expire from a table, evaluated on their own columns, and the interval of its sweeps.
#[derive(Clone, Debug, PartialEq)]
pub struct EvictionConfig {
    /// The rows that expire.
    pub rule: EvictionRule,
    /// A sweep follows every step that is a multiple of this. `None`: sweeps only run on request.
    pub every_steps: Option<NonZeroU64>,
}

/// The rows that expire in a sweep after step `s`.
#[derive(Clone, Debug, PartialEq)]
pub enum EvictionRule {
    /// Rows whose last training step is at most `s - steps`.
    Unused {
        /// At least 1.
        steps: u64,
    },
    /// Rows whose score, decayed to step `s`, is below this, which is more than 0.
    ScoreBelow(f32),
    /// Rows whose weights have an L2 norm below this, which is more than 0. The squares are summed in float64, in
    /// column order.
    NormBelow(f64),
    /// Rows whose last training step is at most this one, for any `s`.
    TrainedUntil {
        /// A step.
        step: u64,
    },
    /// No rows.
    Nothing,
    /// A rule that is passed to each sweep, because ranks agree on it at that time. It cannot be part of another rule.
    PerSweep,
    /// Like [`EvictionRule::PerSweep`], for a table that also records the times of its steps, from which the rules are
    /// derived.
    PerSweepTimed,
    /// Rows below a threshold in eviction order after step `s`: by score decayed to step `s`, then by last step, then
    /// by id as a u64.
    Below {
        /// The threshold's score, as mapped by [`sortable_score`](crate::lifecycle::sortable_score).
        score: u32,
        /// The threshold's last step.
        last_step: u64,
        /// The threshold's id.
        id: u64,
    },
    /// Rows that match any of these rules. There is at least one.
    Any(Vec<EvictionRule>),
    /// Rows that match all of these rules. There is at least one.
    All(Vec<EvictionRule>),
}

impl EvictionRule {
    /// True if a rule is passed to each sweep.
    pub fn is_per_sweep(&self) -> bool {
        matches!(self, Self::PerSweep | Self::PerSweepTimed)
    }

    /// Checks that the parameters are in range.
    ///
    /// Errors: `Config`, which names the parameter.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Kind::Config.error(message));
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
    /// The table's own directory: `<ssd_dir>/<module>/<table>/<rank>-of-<world>`, with encoded names. It is created if
    /// missing.
    pub dir: PathBuf,
    /// Maximum total bytes of the table's files.
    pub bytes: u64,
    /// Treatment of a directory that is not empty.
    pub reopen: ReopenMode,
    /// With `ReopenMode::Resume` the commit id of the state to resume, or `None` for the latest. With
    /// `ReopenMode::Auto` the commit id, or `None` to start empty.
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
    /// The seed of initial weights.
    pub seed: u64,
    /// The number of buckets of the entire table, over all shards.
    pub total_num_buckets: u32,
    /// The buckets of this shard.
    pub buckets: Range<u32>,
    /// Maximum bytes of RAM for rows, metadata and indexes that belong to this table only.
    pub host_bytes: u64,
    /// The budget for bytes beyond `host_bytes`. Only for a table without an SSD tier that drops no rows.
    pub shared_budget: Option<Arc<SharedBudget>>,
    /// The number of cache slots of a device tier. If `None`, the kernels run on the rows in the host tier.
    pub device_rows: Option<u32>,
    /// The SSD tier. If `None`, the host tier is the last one.
    pub ssd: Option<SsdConfig>,
    /// The replacement policy of the device tier and of the host tier.
    pub policy: PolicyKind,
    /// Behaviour when the last tier is full.
    pub on_full: OnFull,
    /// The ids that get a row.
    pub admission: AdmissionRule,
    /// The value that a training batch reads for an id that is not admitted. The gradient of such an id is dropped,
    /// unless it trains the OOV row.
    pub not_admitted: MissingRead,
    /// The value that an evaluation reads for an id without a row. Plans take it from their
    /// [`PlanMode`](crate::cache::PlanMode); this field is for checkpoints, which store it for readers without this
    /// configuration.
    pub missing_read: MissingRead,
    /// The number of steps over which the score of a row halves: 1 to
    /// [`ScoreDecay::LONGEST`](crate::rows::ScoreDecay::LONGEST).
    pub score_half_life_steps: u64,
    /// The rule by which rows expire, if any.
    pub eviction: Option<EvictionConfig>,
}

impl TableConfig {
    /// The layout of this table's rows.
    pub fn layout(&self) -> RowLayout {
        self.optimizer.layout(self.dim)
    }

    /// The bytes of RAM that the table can rely on: its own, and an equal portion of the shared budget.
    pub fn expected_host_bytes(&self) -> u64 {
        let share = |shared: &Arc<SharedBudget>| shared.bytes() / u64::from(shared.tables());
        self.host_bytes + self.shared_budget.as_ref().map_or(0, share)
    }

    /// True if the table records the times of its steps.
    pub fn keeps_times(&self) -> bool {
        matches!(self.eviction, Some(EvictionConfig { rule: EvictionRule::PerSweepTimed, .. }))
    }

    /// Returns the mapping of ids to the table's buckets.
    pub fn bucketing(&self) -> BucketMapper {
        BucketMapper::new(self.total_num_buckets)
    }
}
