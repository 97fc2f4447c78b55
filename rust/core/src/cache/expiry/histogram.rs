//! Score histogram: counts rows by rank key, in eviction order.
//!
//! The table's lock is held until every row was counted, so that no row moves. Only the counts are kept.

use super::Residency;
use crate::cache::placement::{Placement, SLOTS_AHEAD};
use crate::error::{Kind, Result};
use crate::lifecycle::{RankKeyRange, ScoreHistogram, ScoreHistogramBuilder};
use crate::types::CacheSlot;

impl Residency {
    /// Counts the rows of all tiers at `step`, which must be the present step. Returns the histogram and the version of
    /// the counted contents, or `None` if that version differs from `version`. Finishes the sweep in progress first.
    ///
    /// Errors: `Memory`; those of [`Residency::finish_sweep`] and of reads from SSD; `State` if the table is at another
    /// step or rows are missing.
    pub(crate) fn score_histogram(
        &mut self,
        step: u64,
        ranges: &[RankKeyRange],
        version: Option<u64>,
    ) -> Result<Option<(u64, ScoreHistogram)>> {
        if step != self.placement.changes.step {
            let (table, now) = (&self.placement.context.config.name, self.placement.changes.step);
            return Err(Kind::State.error(format!(
                "table {table:?} is at step {now}, and a sweep after step {step} is asked for: sweep and save between steps"
            )));
        }
        self.finish_sweep()?;
        let now = self.placement.context.version();
        if version.is_some_and(|version| version != now) {
            return Ok(None);
        }
        let mut histogram = ScoreHistogramBuilder::new(step, self.placement.context.decay, ranges)?;
        let seen = self.placement.count_in_ram(&mut histogram)? + self.placement.count_on_ssd(&mut histogram)?;
        if seen != self.placement.counts.rows() {
            let (table, rows) = (&self.placement.context.config.name, self.placement.counts.rows());
            return Err(Kind::State.error(format!(
                "table {table:?} has {rows} rows and {seen} were counted: a bug of torchrec-embcache to report"
            )));
        }
        Ok(Some((now, histogram.finish())))
    }
}

impl Placement {
    /// Counts the rows with their newest copy in RAM or on the device. Returns their number.
    fn count_in_ram(&self, histogram: &mut ScoreHistogramBuilder) -> Result<u64> {
        let (host, mut seen) = (&self.host, 0);
        for slot in host.slots.occupied_from(0) {
            if host.slots.state(slot + SLOTS_AHEAD as CacheSlot).is_newest() {
                host.prefetch_header(slot + SLOTS_AHEAD as CacheSlot);
            }
            if host.slots.state(slot).is_newest() {
                histogram.add(&host.metadata(slot))?;
                seen += 1;
            }
        }
        let Some(tier) = &self.device else { return Ok(seen) };
        for slot in tier.slots.occupied_from(0).filter(|&slot| tier.slots.state(slot).is_newest()) {
            histogram.add(tier.header(slot))?;
            seen += 1;
        }
        Ok(seen)
    }

    /// Counts the rows on SSD without a newer copy in a tier above. Returns their number.
    fn count_on_ssd(&self, histogram: &mut ScoreHistogramBuilder) -> Result<u64> {
        let (Some(ssd), mut seen) = (&self.context.ssd, 0) else { return Ok(0) };
        let scanned = ssd.scan(&mut |row| {
            if !self.is_newer_than_on_ssd(row.header.id) {
                histogram.add(row.header)?;
                seen += 1;
            }
            Ok(())
        });
        scanned.map_err(|error| self.context.in_table(error))?;
        Ok(seen)
    }
}
