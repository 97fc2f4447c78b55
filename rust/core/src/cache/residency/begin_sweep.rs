//! Start of a sweep: its rule, whether the previous sweep has to finish first, and the progress it inherits from that
//! sweep.

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

    /// Returns the sweep for the current step by the table's rule, or by `rule` if it is passed. `None` if the table
    /// has no rule.
    ///
    /// Errors: `State` if a per-sweep rule is missing, or a rule is passed to a table that does not take one; `Config`
    /// if the rule is out of range.
    fn current_sweep(&self, rule: Option<&EvictionRule>) -> Result<Option<ExpirySweep>> {
        self.sweep_after(self.step, rule)
    }

    /// Like [`Residency::current_sweep`], but after `step`.
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

    /// Does the fallible part of [`Residency::begin_sweep`] with this rule, which then cannot fail before the next
    /// step. Removes no row by the new sweep.
    ///
    /// Errors: those of [`Residency::begin_sweep`]. The sweep in progress is kept, and may have advanced.
    pub(crate) fn prepare_sweep(&mut self, rule: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.current_sweep(rule)? else { return Ok(()) };
        self.finish_previous_sweep(&sweep)
    }

    /// Finishes the sweep in progress, unless `sweep` can continue in its place. Its deferred rows are kept separately.
    fn finish_previous_sweep(&mut self, sweep: &ExpirySweep) -> Result<()> {
        // For rows added since the start, a replacing sweep could not distinguish which of the two sweeps expires them.
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

    /// Applies the table's rule to the current rows, or `rule` if the table takes a rule per sweep. Does nothing if the
    /// table has no rule.
    ///
    /// Errors: `State` or `Config` if a rule is passed or missing and should not be; those of
    /// [`Residency::finish_sweep`], for a sweep in progress that matches other rows and must finish first.
    pub(crate) fn begin_sweep(&mut self, rule: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.current_sweep(rule)? else { return Ok(()) };
        let found_all = |before: &ExpirySweep| before.step == sweep.step && before.covers(&sweep);
        if self.last_sweep.as_ref().is_some_and(found_all) {
            // It would match only rows that the previous sweep has deferred. It is recorded nevertheless, as on ranks
            // whose rows have changed since.
            self.record_sweep(&sweep);
            return Ok(());
        }
        self.finish_previous_sweep(&sweep)?;
        self.context.bump_version();
        self.record_sweep(&sweep);
        self.version_after_sweep = Some(self.context.version());
        let (host, device) = (&self.host.slots, self.device.as_ref().map(|tier| &tier.slots));
        let slots = (host.high_water(), device.map_or(0, SlotMap::high_water));
        // A sweep that covers the previous one continues from its position, so that every slot and record is visited.
        let mut before = self.sweep.take();
        let judge = match &mut before {
            Some(before) => SweepMatcher::replacing(&mut before.matcher, sweep, self.epoch, self.has_notifier()),
            None => SweepMatcher::new(sweep, self.epoch),
        };
        self.sweep = Some(SweepProgress::after(before, judge, slots, self.counts.expired()));
        Ok(())
    }

    /// Records a sweep for later deltas.
    fn record_sweep(&mut self, sweep: &ExpirySweep) {
        if let Some(forgotten) = self.history.record_sweep(self.epoch, sweep) {
            tracing::info!(
                "table {:?}: what sweeps have taken since the checkpoint {forgotten} is not remembered any more, because there were more \
                 than {MOST_SWEEPS} of which none takes all that another one takes: the next save on it is a full one",
                self.context.config.name
            );
        }
    }

    /// Called before a step is committed. If a sweep is due after the step and the previous one must finish first,
    /// finishes it as far as it reads rows from the device, because nothing is read from the device after the commit.
    /// Other failures are retried after the step.
    ///
    /// Errors: the error that requests reads from the device.
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

    /// Called after a step was committed: starts a sweep if one is due. Only finishing the previous sweep, to which
    /// rows were added, can fail. That sweep then continues, and the next one starts when it is due.
    pub(crate) fn sweep_after_step(&mut self) {
        if self.is_sweep_due_at(self.step)
            && let Err(error) = self.begin_sweep(None)
        {
            self.log_sweep_stopped(&error);
        }
    }
}
