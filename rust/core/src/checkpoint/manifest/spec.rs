//! Metadata of an entire table in a checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::config::{MissingRead, OptimizerKind, TableConfig};
use crate::error::{Kind, Result};
use crate::lifecycle::OovRow;
use crate::rows::{InitializerSpec, RowLayout, WeightPrecision};
use crate::types::BucketMapper;

/// Maximum length of a module or table name in bytes.
const MAX_NAME_BYTES: usize = 4096;
/// Maximum embedding width.
const MAX_DIM: u32 = 65_536;
/// Larger numbers of rows, ranks, files or training steps are treated as corruption. Sums of valid numbers do not
/// overflow.
pub(crate) const MAX_COUNT: u64 = 1 << 56;

/// An optimizer and its hyperparameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    /// [`OptimizerKind::name`].
    pub name: String,
    /// Finite values by name (`lr`, `eps`, …).
    pub hyperparameters: BTreeMap<String, f64>,
}

/// Metadata of an entire table, the same on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Path of the module in the model, without the names of wrappers.
    pub module: String,
    /// Name of the table in the module.
    pub table: String,
    /// See [`crate::types::table_key`].
    pub key: u64,
    /// Width of the embedding.
    pub dim: u32,
    /// Safetensors dtype of weights and slots: `F32`, or the dtype of the precision in a serving checkpoint.
    pub dtype: String,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// Number of training steps.
    pub step: u64,
    /// Seed of the initializer.
    pub seed: u64,
    /// Initializer of new rows.
    pub initializer: InitializerSpec,
    /// Number of buckets of the table.
    pub total_num_buckets: u32,
    /// The OOV row, if the table has one and it was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oov_row: Option<OovRow>,
    /// Values that an evaluation reads for a missing id.
    pub missing_read: MissingRead,
    /// Precision of the weights in a serving checkpoint, whose rows have no optimizer slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<WeightPrecision>,
}

impl TableSpec {
    /// Builds the metadata from a table's configuration and its OOV row, if it has one. `module` is the path of its
    /// module in the model.
    pub fn new(
        module: &str,
        config: &TableConfig,
        hyperparameters: BTreeMap<String, f64>,
        step: u64,
        oov_row: Option<OovRow>,
    ) -> Self {
        Self {
            module: module.to_owned(),
            table: config.name.clone(),
            key: config.key,
            dim: config.dim as u32,
            dtype: "F32".to_owned(),
            optimizer: OptimizerSpec { name: config.optimizer.name().to_owned(), hyperparameters },
            step,
            seed: config.seed,
            initializer: config.initializer,
            total_num_buckets: config.total_num_buckets,
            oov_row,
            missing_read: config.missing_read,
            precision: None,
        }
    }

    /// Returns the metadata of the same table in a serving checkpoint.
    #[must_use]
    pub(crate) fn for_serving(self, precision: WeightPrecision) -> Self {
        Self { dtype: precision.dtype().to_owned(), precision: Some(precision), ..self }
    }

    /// Parses the JSON of a manifest. `Kind::Input` describes the field that is missing, unknown or out of range.
    pub fn from_json(text: &str) -> Result<Self> {
        let spec: Self =
            serde_json::from_str(text).map_err(|e| Kind::Input.error(format!("invalid table description: {e}")))?;
        spec.check()?;
        Ok(spec)
    }

    /// Mapping of ids to the table's buckets.
    pub fn bucketing(&self) -> BucketMapper {
        BucketMapper::new(self.total_num_buckets)
    }

    /// Checks that these are buckets of the table. The message describes the difference.
    pub(crate) fn check_buckets(&self, buckets: &Range<u32>) -> Result<(), String> {
        if buckets.start <= buckets.end && buckets.end <= self.total_num_buckets {
            return Ok(());
        }
        Err(format!("buckets {buckets:?} are not within 0..{}", self.total_num_buckets))
    }

    /// The optimizer's kind.
    pub fn optimizer_kind(&self) -> Result<OptimizerKind> {
        OptimizerKind::from_name(&self.optimizer.name)
    }

    /// The layout of the table's rows in memory.
    pub(crate) fn row_layout(&self) -> Result<RowLayout> {
        Ok(self.optimizer_kind()?.layout(self.dim as usize))
    }

    /// Checks that rows of this table can be loaded into a table with the configuration `config`. This covers values
    /// that are valid in a checkpoint but do not match that table. Without `slots`, rows fit any optimizer. A load
    /// checks all tables before it changes one of them.
    ///
    /// Errors: `Mismatch`, which names the field.
    pub fn check_fits(&self, config: &TableConfig, slots: bool) -> Result<()> {
        let differs = |field: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            Err(Kind::Mismatch.error(format!(
                    "table {:?} of module {:?} has {field} {here} and the checkpoint {there}: make the table as it was saved",
                    self.table, self.module
                ),
            ))
        };
        if let Some(precision) = self.precision {
            return differs(
                "rows that are trained",
                &"float32 weights and slots",
                &format!("{} to be served", precision.name()),
            );
        }
        if self.dim as usize != config.dim {
            return differs("embedding_dim", &config.dim, &self.dim);
        }
        if slots && self.optimizer.name != config.optimizer.name() {
            return differs("optimizer", &config.optimizer.name(), &self.optimizer.name);
        }
        Ok(())
    }

    /// Checks that every value is within the format's limits. A save rejects other values, and a manifest with them is
    /// corrupted.
    ///
    /// Errors: `Input`; readers of a manifest convert it to `Corruption`.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |what: String| {
            Err(Kind::Input.error(format!("table {:?} of module {:?}: {what}", self.table, self.module)))
        };
        if self.module.len() > MAX_NAME_BYTES || self.table.len() > MAX_NAME_BYTES {
            return refuse(format!("names have at most {MAX_NAME_BYTES} bytes"));
        }
        if self.dim == 0 || self.dim > MAX_DIM {
            return refuse(format!("dim {} is not within 1 to {MAX_DIM}", self.dim));
        }
        let dtype = self.precision.unwrap_or(WeightPrecision::Fp32).dtype();
        if self.dtype != dtype {
            return refuse(format!("dtype {:?} is not {dtype}", self.dtype));
        }
        if self.total_num_buckets == 0 {
            return refuse("total_num_buckets is 0".into());
        }
        if self.step > MAX_COUNT {
            return refuse(format!("step {} is more than any table has made", self.step));
        }
        if let (Some(shared), Ok(layout)) = (&self.oov_row, self.row_layout()) {
            let (floats, got) = (layout.floats(), shared.values().len());
            if floats != got {
                return refuse(format!("its OOV row has {got} numbers, and its rows have {floats}"));
            }
        }
        match self.missing_read {
            MissingRead::Value(value) if !value.is_finite() => {
                return refuse(format!("ids without a row read {value}, which is not finite"));
            }
            MissingRead::OovRow if self.oov_row.is_none() => {
                return refuse("ids without a row read its OOV row, and it has none".into());
            }
            _ => (),
        }
        if let Some((name, value)) = self.optimizer.hyperparameters.iter().find(|(_, value)| !value.is_finite()) {
            return refuse(format!("hyperparameter {name} is {value}"));
        }
        self.optimizer_kind().map(|_| ())
    }
}
