//! The row that ids share which are refused one, where the table has such a row.

use super::Residency;
use crate::kernels::OptimizerStep;
use crate::lifecycle::SharedRow;

impl Residency {
    /// The shared row; `None` where the table has none.
    pub(crate) fn shared_row(&self) -> Option<&SharedRow> {
        self.shared.as_ref()
    }

    /// Replace the shared row by a saved one. Its slots begin anew where they are not those of this table's optimizer. Without one the row
    /// begins anew. Nothing where the table has no shared row.
    pub(crate) fn set_shared_row(&mut self, saved: Option<&SharedRow>) {
        let layout = self.base.layout;
        let Some(shared) = &mut self.shared else { return };
        *shared = match saved {
            Some(saved) => {
                SharedRow::of(layout, saved.values().to_vec()).unwrap_or_else(|| saved.without_slots(layout))
            }
            None => SharedRow::begun(layout),
        };
        self.base.contents_changed();
    }

    /// Update the shared row by its gradient: `[D]`.
    pub(crate) fn train_shared(&mut self, gradient: &[f32], step: &OptimizerStep) {
        if let Some(shared) = &mut self.shared {
            shared.train(self.base.layout, gradient, step);
        }
    }

    /// Say that the table takes over contents that were trained, and have no shared row.
    pub(crate) fn note_shared_row_begins(&self, from: &str) {
        if self.shared.is_none() || self.step == 0 {
            return;
        }
        tracing::info!(
            "table {:?} has not_admitted = \"shared\" and {from} has no shared row: it begins with zeros",
            self.base.config.name
        );
    }
}
