//! A census of the rows by their standings in the order in which sweeps take them.
//!
//! The table's lock is held until each row was seen, so that none moves meanwhile, and nothing is kept of a row but where it is counted.

use super::{Residency, SLOTS_AHEAD};
use crate::error::{Error, Kind, Result};
use crate::lifecycle::{RankKeyRange, ScoreHistogram, ScoreHistogramBuilder};
use crate::types::CacheSlot;

impl Residency {
    /// Count the rows of all tiers after `step`, which is the present one, unless the contents have another number than `version` by then. What a sweep
    /// under way takes goes first. Returns also the number of the contents that were counted.
    ///
    /// Errors: `Memory`, those of [`Residency::finish_sweep`] and of reads from SSD, and `State` where the table is at another step, or rows are
    /// missing.
    pub(crate) fn score_histogram(
        &mut self,
        step: u64,
        spans: &[RankKeyRange],
        version: Option<u64>,
    ) -> Result<Option<(u64, ScoreHistogram)>> {
        if step != self.step {
            let (table, now) = (&self.context.config.name, self.step);
            let message = format!(
                "table {table:?} is at step {now}, and a sweep after step {step} is asked for: sweep and save between steps"
            );
            return Err(Error::new(Kind::State, message));
        }
        self.finish_sweep()?;
        let now = self.context.version();
        if version.is_some_and(|version| version != now) {
            return Ok(None);
        }
        let mut census = ScoreHistogramBuilder::new(step, self.context.decay, spans)?;
        let seen = self.count_in_ram(&mut census)? + self.count_on_ssd(&mut census)?;
        if seen != self.counts.rows() {
            let (table, rows) = (&self.context.config.name, self.counts.rows());
            let message = format!(
                "table {table:?} has {rows} rows and {seen} were counted: a bug of torchrec-embcache to report"
            );
            return Err(Error::new(Kind::State, message));
        }
        Ok(Some((now, census.finish())))
    }

    /// Count the rows that are newest in RAM or on the device. Returns how many.
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

    /// Count the rows on SSD that no tier above has newer. Returns how many.
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
