//! How many rows a table may have, and what becomes of those that are too many.

use super::table::{Shared, State, charged_lineage_bytes};
use crate::config::OnFull;
use crate::error::{Error, Kind, Result};
use crate::host::HostTier;
use crate::ssd::SsdTier;
use crate::types::Id;

/// How many rows that are planned may be born, at most: two training plans may hold one row.
fn may_be_born(state: &State) -> u64 {
    state.provisional.min(state.pledged)
}

impl Shared {
    /// How many rows the last tier can hold.
    pub(crate) fn capacity_rows(&self, state: &State) -> u64 {
        self.ssd.as_ref().map_or(u64::from(state.host.slots.limit()), SsdTier::capacity_rows)
    }

    /// The error of rows whose index takes all that the rows in RAM have.
    pub(crate) fn index_full(&self, state: &State) -> Error {
        let beside = charged_lineage_bytes(state) + state.host.row_bytes();
        let needed = |rows: u64| HostTier::charged_bytes(u64::MAX, rows) + beside;
        let capacity = self.capacity_rows(state);
        Error::new(
            Kind::Capacity,
            format!(
                "table {:?}: the index of its {} rows on SSD fills host_bytes={} and leaves no room for a row in RAM: {} bytes are \
                 needed at least, and {} for the index of all {capacity} rows that ssd_bytes holds; set host_bytes to that, and more \
                 for the rows of a batch",
                self.config.name,
                state.rows,
                self.config.host_bytes,
                needed(state.rows + 1).max(self.config.host_bytes + 1),
                needed(capacity.max(state.rows + 1)).max(self.config.host_bytes + 1),
            ),
        )
    }

    /// Check that `more` rows can be born, or make room for them by policy where the table is allowed to drop rows: others than
    /// `needed`.
    pub(crate) fn check_capacity(&self, state: &mut State, more: u64, needed: &[Id]) -> Result<()> {
        let capacity = self.capacity_rows(state);
        let wanted = state.rows + may_be_born(state) + more;
        let index_full = more > 0 && self.host_rows_beside_index(state) == 0;
        if wanted <= capacity && !index_full {
            return Ok(());
        }
        if index_full && self.config.on_full == OnFull::Error {
            return Err(self.index_full(state));
        }
        match self.config.on_full {
            OnFull::Evict => loop {
                let rows = state.rows;
                let wanted = rows + may_be_born(state) + more;
                self.drop_rows(state, wanted.saturating_sub(capacity).max(1), needed)?;
                let checked = self.check_dropped(state, capacity, more);
                // An error of the disk that comes when rows were dropped already is told by the next drop.
                if checked.is_ok() || state.rows == rows {
                    return checked;
                }
            },
            OnFull::Error => {
                let (tier, cure) = match &self.config.ssd {
                    Some(ssd) => (format!("its SSD tier (ssd_bytes={})", ssd.bytes), "raise ssd_bytes"),
                    None => (
                        format!("it has no SSD tier, and RAM (host_bytes={})", self.config.host_bytes),
                        "add an SSD tier with TierBudgets(ssd_bytes=..., ssd_dir=...), raise host_bytes",
                    ),
                };
                Err(Error::new(
                    Kind::Capacity,
                    format!(
                        "table {:?} is full: {tier} holds {capacity} rows, {} are there and {more} new ones are to be added; {cure}, or \
                         set on_full=\"evict\" to drop rows by policy",
                        self.config.name, state.rows
                    ),
                ))
            }
        }
    }

    /// After rows were dropped: whether those that batches in flight use, and could not be, leave room for `more`. Without an SSD tier
    /// rows past the budget are in the overflow until others go; past the SSD tier's capacity they could not be written down.
    fn check_dropped(&self, state: &State, capacity: u64, more: u64) -> Result<()> {
        let new = may_be_born(state) + more;
        let Some(ssd) = self.config.ssd.as_ref().filter(|_| state.rows + new > capacity) else { return Ok(()) };
        Err(Error::new(
            Kind::Capacity,
            format!(
                "table {:?}: ssd_bytes={} holds {capacity} rows, and there is no room for {new} new ones beside the {} of its rows that \
                 this batch and others in flight use: raise ssd_bytes, or use smaller batches",
                self.config.name, ssd.bytes, state.rows
            ),
        ))
    }
}
