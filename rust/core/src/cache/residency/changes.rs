//! Counts of the contents of a delta. A save uses them to check that a load would restore the present rows.

use super::Residency;
use crate::cache::watch::BaseCheckpoint;
use crate::error::Result;
use crate::lifecycle::ExpirySweep;
use crate::rows::RowHeader;

/// Counts of changes in a table since a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeCounts {
    /// Number of rows of the table.
    pub rows: u64,
    /// Number of removed ids for which a delta has tombstones.
    pub tombstones: u64,
    /// Number of rows expired by sweeps for which a delta has no tombstones.
    pub expired: u64,
    /// Number of unmodified rows in RAM or on the device that a load would drop because one of the sweeps matches them.
    /// It is 0 unless a sweep has skipped a row. Rules that read weights are not counted.
    pub expiring: u64,
}

impl Residency {
    /// Counts the changes since `base`. Reads row headers if there were sweeps since.
    ///
    /// Errors: those of [`Residency::tombstones_since`].
    pub(crate) fn count_changes(&mut self, base: &BaseCheckpoint) -> Result<ChangeCounts> {
        let left = self.tombstones_since(base)?.len() as u64;
        let doomed = self.count_expiring(base);
        Ok(ChangeCounts {
            rows: self.rows(),
            tombstones: left,
            expired: self.history.expired_since(base),
            expiring: doomed,
        })
    }

    fn count_expiring(&mut self, base: &BaseCheckpoint) -> u64 {
        let mut sweeps = self.history.sweeps_since(base);
        sweeps.retain(|sweep| !sweep.needs_weights());
        if sweeps.is_empty() {
            return 0;
        }
        self.finish_loads();
        let is_doomed = |header: &RowHeader| {
            header.modified_epoch < base.next_epoch
                && sweeps.iter().any(|sweep: &ExpirySweep| sweep.matches(header, &[]))
        };
        let host = &self.host;
        let in_host = host.slots.occupied_from(0).filter(|&slot| host.slots.state(slot).is_current());
        let in_host = in_host.filter(|&slot| is_doomed(&host.metadata(slot))).count();
        let on_device = self.device.as_ref().map_or(0, |tier| {
            let current = tier.slots.occupied_from(0).filter(|&slot| tier.slots.state(slot).is_current());
            current.filter(|&slot| is_doomed(tier.header(slot))).count()
        });
        (in_host + on_device) as u64
    }
}
