//! A table's rows as segments of its SSD tier.

use super::table::Table;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::ssd::{HeldSegments, SegmentFiles, StateCounters};

impl Table {
    /// Write every row down and hold the segments of the SSD tier, durable, which are then all of the table; `None` without an SSD tier. The
    /// states that a resume could take are not touched.
    ///
    /// Errors as [`Table::flush`].
    pub fn hold_segments(&self) -> Result<Option<(HeldSegments, StateCounters)>> {
        let shared = &self.shared;
        let Some(ssd) = &shared.ssd else { return Ok(None) };
        memory::check()?;
        let _rows = shared.reading_rows()?;
        let mut state = shared.lock()?;
        shared.finish_loads(&mut state);
        shared.write_down_all(&mut state)?;
        let counters = StateCounters { step: state.step, epoch: state.epoch };
        let held = ssd.hold_segments().map_err(|error| error.context(format!("table {:?}", shared.config.name)))?;
        Ok(Some((held, counters)))
    }

    /// Whether [`Table::open_from`] can open a table of this configuration from `files`: `Mismatch` without an SSD tier, `Config` where
    /// that is too small.
    pub fn check_takes(&self, files: &SegmentFiles) -> Result<()> {
        let _open = self.shared.lock_any()?;
        match (&self.shared.ssd, &self.shared.config.ssd) {
            (Some(ssd), Some(config)) => ssd.check_room(config, files.rows(), files.bytes()),
            _ => Err(Error::new(
                Kind::Mismatch,
                format!("table {:?} has no SSD tier to take segments: give it ssd_bytes", self.shared.config.name),
            )),
        }
    }
}
