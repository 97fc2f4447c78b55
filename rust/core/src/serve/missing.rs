//! Values read for missing ids.

use crate::checkpoint::TableSpec;
use crate::config::MissingRead;
use crate::error::{Error, Kind, Result};
use crate::rows::RowInitializer;
use crate::types::Id;

/// Value read for a missing id of one table, with the data needed to write it.
#[derive(Clone, Debug)]
pub(super) enum MissingWeights {
    Value(f32),
    Initial(RowInitializer),
    OovRow(Vec<f32>),
}

impl MissingWeights {
    /// Returns the configured value. `None` selects the value that evaluation reads during training.
    pub(super) fn of(spec: &TableSpec, configured: Option<MissingRead>) -> Result<Self> {
        let layout = spec.optimizer_kind()?.layout(spec.dim as usize);
        let shared = spec.oov_row.as_ref().map(|row| row.weights(layout).to_vec());
        Ok(match (configured.unwrap_or(spec.missing_read), shared) {
            (MissingRead::Zeros, _) => Self::Value(0.0),
            (MissingRead::Value(value), _) => Self::Value(value),
            (MissingRead::Initial, _) => Self::Initial(RowInitializer::new(spec.initializer, spec.seed, spec.key)?),
            (MissingRead::OovRow, Some(row)) => Self::OovRow(row),
            (MissingRead::OovRow, None) => {
                let what = format!(
                    "table {:?} of module {:?} has no shared row in its checkpoint: say what else a missing id reads",
                    spec.table, spec.module
                );
                return Err(Error::new(Kind::Mismatch, what));
            }
        })
    }

    /// Writes the value of a missing id to `weights`, which is `[D]`.
    pub(super) fn fill(&self, id: Id, weights: &mut [f32]) {
        match self {
            Self::Value(value) => weights.fill(*value),
            Self::Initial(birth) => birth.fill(id, weights),
            Self::OovRow(row) => weights.copy_from_slice(row),
        }
    }
}
