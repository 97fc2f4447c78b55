//! Estimates for budgets other than the table's own.

use super::Table;
use crate::cache::residency::host_row_bytes;
use crate::error::Result;
use crate::sizing::MissRatioCurve;

impl Table {
    /// Starts measuring the miss ratio as a function of the rows in RAM. A measurement in progress continues.
    ///
    /// Errors: `State` if the table is closed or poisoned.
    pub fn begin_sizing(&self) -> Result<()> {
        let _open = self.inner.lock_any()?;
        let config = &self.inner.config;
        let in_host = config.expected_host_bytes() / host_row_bytes(&self.inner.layout, config.policy);
        self.inner.sizing.begin(config.policy, in_host + u64::from(config.device_rows.unwrap_or(0)));
        Ok(())
    }

    /// Returns the measurement since its start or since the last call with `reset`: the curve of the table's policy,
    /// then that of `lru` if it is another. `None` if nothing is measured. With `reset`, restarts the counts from zero.
    ///
    /// Errors: as [`Table::begin_sizing`].
    pub fn miss_ratio_curves(&self, reset: bool) -> Result<Option<Vec<MissRatioCurve>>> {
        let _open = self.inner.lock_any()?;
        Ok(self.inner.sizing.curves(reset))
    }
}
