//! The beginning of a sweep: by which rule, whether the one before has to end first, and what is carried on from it.

use super::Residency;
use super::judge::SweepMatcher;
use super::under_way::SweepProgress;
use crate::cache::watch::MOST_SWEEPS;
use crate::config::EvictionRule;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::ExpirySweep;
use crate::slots::SlotMap;

impl Residency {
    fn is_sweep_due_at(&self, step: u64) -> bool {
        let every = self.context.config.eviction.as_ref().and_then(|eviction| eviction.every_steps);
        every.is_some_and(|every| step.is_multiple_of(every.get()))
    }

    /// The sweep of now by the table's rule, or by the rule that is given for it. `None` where the table has no rule.
    ///
    /// Errors: `State` where the table's rule has to be given and is not, or the other way round; `Config` for a rule that is out of range.
    fn current_sweep(&self, rule: Option<&EvictionRule>) -> Result<Option<ExpirySweep>> {
        self.sweep_after(self.step, rule)
    }

    /// As [`Residency::current_sweep`], after this step.
    fn sweep_after(&self, step: u64, sweep_rule: Option<&EvictionRule>) -> Result<Option<ExpirySweep>> {
        let config = &self.context.config;
        let own = config.eviction.as_ref().map(|eviction| &eviction.rule);
        let refuse = |message: &str| Err(Error::new(Kind::State, format!("table {:?}: {message}", config.name)));
        let rule = match (own, sweep_rule) {
            (None, None) => return Ok(None),
            (Some(own), None) if own.is_per_sweep() => {
                return refuse(
                    "its ranks agree on what a sweep takes: call torchrec_embcache.evict(model) on all of them",
                );
            }
            (Some(own), Some(given)) if own.is_per_sweep() && !given.is_per_sweep() => {
                given.check()?;
                given
            }
            (Some(own), None) => own,
            (_, Some(_)) => {
                return refuse("a sweep was given a rule that the table's eviction does not ask for");
            }
        };
        Ok(Some(ExpirySweep::after(step, rule, config.score_half_life_steps)))
    }

    /// Do what can fail of [`Residency::begin_sweep`] with this rule, which does not fail then before the next step. No row is missing by it.
    ///
    /// Errors: as there. The sweep under way is as it was then, but that it may have gone on.
    pub(crate) fn prepare_sweep(&mut self, rule: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.current_sweep(rule)? else { return Ok(()) };
        self.finish_previous_sweep(&sweep)
    }

    /// Let the sweep under way come to its end, if `sweep` cannot go on in its place. Rows that it spares are kept beside.
    fn finish_previous_sweep(&mut self, sweep: &ExpirySweep) -> Result<()> {
        // Of rows that came in since, a sweep that goes on in the place of another one could not tell by which of the two they die.
        let goes_on = |before: &SweepProgress| !before.rows_added && sweep.covers(&before.matcher.sweep);
        if self.sweep.as_ref().is_none_or(goes_on) {
            return Ok(());
        }
        if self.is_sweeping() {
            self.finish_sweep()?;
        }
        self.defer_rest();
        Ok(())
    }

    /// Apply the table's rule to the rows of now, or the rule that is given where the table's says that one is. Nothing where the table has
    /// none.
    ///
    /// Errors: `State`, `Config` where a rule is given or missing and should not be; those of [`Residency::finish_sweep`], of a sweep that is
    /// under way and took other rows, which this one waits for.
    pub(crate) fn begin_sweep(&mut self, rule: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.current_sweep(rule)? else { return Ok(()) };
        let found_all = |before: &ExpirySweep| before.step == sweep.step && before.covers(&sweep);
        if self.last_sweep.as_ref().is_some_and(found_all) {
            // It would find what the one before has left. It is noted all the same, as by ranks whose rows have changed since.
            self.record_sweep(&sweep);
            return Ok(());
        }
        self.finish_previous_sweep(&sweep)?;
        self.context.bump_version();
        self.record_sweep(&sweep);
        self.version_after_sweep = Some(self.context.version());
        let (host, device) = (&self.host.slots, self.device.as_ref().map(|tier| &tier.slots));
        let slots = (host.high_water(), device.map_or(0, SlotMap::high_water));
        // A sweep that takes all that the one before takes goes on where that one is, so that each slot and each record has its turn.
        let mut before = self.sweep.take();
        let judge = match &mut before {
            Some(before) => SweepMatcher::replacing(&mut before.matcher, sweep, self.epoch, self.has_notifier()),
            None => SweepMatcher::new(sweep, self.epoch),
        };
        self.sweep = Some(SweepProgress::after(before, judge, slots, self.counts.expired()));
        Ok(())
    }

    /// Note a sweep for later deltas.
    fn record_sweep(&mut self, sweep: &ExpirySweep) {
        if let Some(forgotten) = self.history.record_sweep(self.epoch, sweep) {
            tracing::info!(
                "table {:?}: what sweeps have taken since the checkpoint {forgotten} is not remembered any more, because there were more \
                 than {MOST_SWEEPS} of which none takes all that another one takes: the next save on it is a full one",
                self.context.config.name
            );
        }
    }

    /// A step is about to be committed. Where a sweep is due after it, and the one before has to end first, let that come to its end now as far
    /// as it reads rows from the device: after the commit nothing is read from there. What fails is tried again after the step.
    ///
    /// Errors: the one that says that rows are to be read from the device first.
    pub(crate) fn prepare_sweep_after_step(&mut self) -> Result<()> {
        let next = self.step + 1;
        if self.device.is_none() || !self.has_sweep() || !self.is_sweep_due_at(next) {
            return Ok(());
        }
        let ended = self
            .sweep_after(next, None)
            .and_then(|sweep| sweep.map_or(Ok(()), |sweep| self.finish_previous_sweep(&sweep)));
        match ended {
            Err(error) if self.needs_device_reads() => Err(error),
            Err(_) => {
                self.retry_copies();
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// A step was committed: begin a sweep if one is due. What may fail is the end of the sweep before, which rows came in to. That one goes on
    /// then, and the next sweep comes when it is due.
    pub(crate) fn sweep_after_step(&mut self) {
        if self.is_sweep_due_at(self.step)
            && let Err(error) = self.begin_sweep(None)
        {
            self.log_sweep_stopped(&error);
        }
    }
}
