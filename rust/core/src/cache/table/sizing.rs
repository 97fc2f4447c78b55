//! What a table is asked about budgets other than its own.

use super::Table;
use crate::cache::residency::host_row_bytes;
use crate::error::Result;
use crate::sizing::MissRatioCurve;

impl Table {
    /// Measure from now on how the miss ratio depends on how many rows are in RAM. A measurement that is under way goes on.
    ///
    /// Errors: `State` where the table is closed or torn.
    pub fn begin_sizing(&self) -> Result<()> {
        let _open = self.inner.lock_any()?;
        let config = &self.inner.config;
        let in_host = config.expected_host_bytes() / host_row_bytes(&self.inner.layout, config.policy);
        self.inner.sizing.begin(config.policy, in_host + u64::from(config.device_rows.unwrap_or(0)));
        Ok(())
    }

    /// What was measured since it began or since the last call with `reset`: the curve of the table's policy, then that of `lru` where that
    /// is another. `None` where nothing is measured. With `reset` it counts from zero on.
    ///
    /// Errors: as [`Table::begin_sizing`].
    pub fn miss_ratio_curves(&self, reset: bool) -> Result<Option<Vec<MissRatioCurve>>> {
        let _open = self.inner.lock_any()?;
        Ok(self.inner.sizing.curves(reset))
    }
}
