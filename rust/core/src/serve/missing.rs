//! What an id without a row reads.

use crate::checkpoint::TableSpec;
use crate::config::MissingRead;
use crate::error::{Error, Kind, Result};
use crate::rows::RowInitializer;
use crate::types::Id;

/// What an id without a row of one table reads, with what it takes to write the numbers.
#[derive(Clone, Debug)]
pub(super) enum MissingWeights {
    Value(f32),
    Initial(RowInitializer),
    OovRow(Vec<f32>),
}

impl MissingWeights {
    /// What the table's ids read. `None` stands for what training's evaluation reads.
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

    /// Write what an id without a row reads to `weights`, which is `[D]`.
    pub(super) fn fill(&self, id: Id, weights: &mut [f32]) {
        match self {
            Self::Value(value) => weights.fill(*value),
            Self::Initial(birth) => birth.fill(id, weights),
            Self::OovRow(row) => weights.copy_from_slice(row),
        }
    }
}
