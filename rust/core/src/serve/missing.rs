//! What an id without a row reads.

use crate::checkpoint::TableSpec;
use crate::config::MissingRead;
use crate::error::{Error, Kind, Result};
use crate::rows::RowBirth;
use crate::types::Id;

/// What an id without a row of one table reads, with what it takes to write the numbers.
#[derive(Clone, Debug)]
pub(super) enum Missing {
    Value(f32),
    Initial(RowBirth),
    Row(Vec<f32>),
}

impl Missing {
    /// What the table's ids read. `None` stands for what training's evaluation reads.
    pub(super) fn of(spec: &TableSpec, said: Option<MissingRead>) -> Result<Self> {
        let layout = spec.optimizer_kind()?.layout(spec.dim as usize);
        let shared = spec.shared_row.as_ref().map(|row| row.weights(layout).to_vec());
        Ok(match (said.unwrap_or(spec.missing_read), shared) {
            (MissingRead::Zeros, _) => Self::Value(0.0),
            (MissingRead::Value(value), _) => Self::Value(value),
            (MissingRead::Initial, _) => Self::Initial(RowBirth::new(spec.initializer, spec.seed, spec.key)?),
            (MissingRead::SharedRow, Some(row)) => Self::Row(row),
            (MissingRead::SharedRow, None) => {
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
            Self::Row(row) => weights.copy_from_slice(row),
        }
    }
}
