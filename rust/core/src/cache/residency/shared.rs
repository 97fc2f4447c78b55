//! The OOV row: the row shared by ids that are not admitted, if the table has one.

use super::Residency;
use crate::kernels::OptimizerStep;
use crate::lifecycle::OovRow;

impl Residency {
    /// The OOV row; `None` if the table has none.
    pub(crate) fn oov_row(&self) -> Option<&OovRow> {
        self.oov_row.as_ref()
    }

    /// Replaces the OOV row with a saved one. Its optimizer slots are reset if they do not fit this table's optimizer.
    /// `None` resets the row to zeros. Does nothing if the table has no OOV row.
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

    /// Updates the OOV row by its gradient: `[D]`.
    pub(crate) fn train_oov_row(&mut self, gradient: &[f32], step: &OptimizerStep) {
        if let Some(shared) = &mut self.oov_row {
            shared.train(self.context.layout, gradient, step);
        }
    }

    /// Logs that the table adopts trained contents that have no OOV row.
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
