//! The row that ids share which are refused one, where the table has such a row.

use super::Residency;
use crate::kernels::OptimizerStep;
use crate::lifecycle::OovRow;

impl Residency {
    /// The shared row; `None` where the table has none.
    pub(crate) fn oov_row(&self) -> Option<&OovRow> {
        self.oov_row.as_ref()
    }

    /// Replace the shared row by a saved one. Its slots begin anew where they are not those of this table's optimizer. Without one the row
    /// begins anew. Nothing where the table has no shared row.
    pub(crate) fn set_oov_row(&mut self, saved: Option<&OovRow>) {
        let layout = self.context.layout;
        let Some(shared) = &mut self.oov_row else { return };
        *shared = match saved {
            Some(saved) => {
                OovRow::from_values(layout, saved.values().to_vec()).unwrap_or_else(|| saved.without_slots(layout))
            }
            None => OovRow::zeros(layout),
        };
        self.context.bump_version();
    }

    /// Update the shared row by its gradient: `[D]`.
    pub(crate) fn train_oov_row(&mut self, gradient: &[f32], step: &OptimizerStep) {
        if let Some(shared) = &mut self.oov_row {
            shared.train(self.context.layout, gradient, step);
        }
    }

    /// Say that the table takes over contents that were trained, and have no shared row.
    pub(crate) fn log_new_oov_row(&self, from: &str) {
        if self.oov_row.is_none() || self.step == 0 {
            return;
        }
        tracing::info!(
            "table {:?} has not_admitted = \"shared\" and {from} has no shared row: it begins with zeros",
            self.context.config.name
        );
    }
}
