//! The beginning of a sweep: by which rule, whether the one before has to end first, and what is carried on from it.

use super::Residency;
use super::judge::Judge;
use super::under_way::UnderWay;
use crate::cache::watch::MOST_SWEEPS;
use crate::config::EvictionRule;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::Sweep;
use crate::slots::SlotMap;

impl Residency {
    fn is_sweep_due_at(&self, step: u64) -> bool {
        let every = self.base.config.eviction.as_ref().and_then(|eviction| eviction.every_steps);
        every.is_some_and(|every| step.is_multiple_of(every.get()))
    }

    /// The sweep of now by the table's rule, or by the rule that is given for it. `None` where the table has no rule.
    ///
    /// Errors: `State` where the table's rule has to be given and is not, or the other way round; `Config` for a rule that is out of range.
    fn sweep_of_now(&self, given: Option<&EvictionRule>) -> Result<Option<Sweep>> {
        self.sweep_after(self.step, given)
    }

    /// As [`Residency::sweep_of_now`], after this step.
    fn sweep_after(&self, step: u64, given: Option<&EvictionRule>) -> Result<Option<Sweep>> {
        let config = &self.base.config;
        let own = config.eviction.as_ref().map(|eviction| &eviction.rule);
        let refuse = |message: &str| Err(Error::new(Kind::State, format!("table {:?}: {message}", config.name)));
        let rule = match (own, given) {
            (None, None) => return Ok(None),
            (Some(own), None) if own.is_given() => {
                return refuse(
                    "its ranks agree on what a sweep takes: call torchrec_embcache.evict(model) on all of them",
                );
            }
            (Some(own), Some(given)) if own.is_given() && !given.is_given() => {
                given.check()?;
                given
            }
            (Some(own), None) => own,
            (_, Some(_)) => {
                return refuse("a sweep was given a rule that the table's eviction does not ask for");
            }
        };
        Ok(Some(Sweep::after(step, rule, config.score_half_life_steps)))
    }

    /// Do what can fail of [`Residency::begin_sweep`] with this rule, which does not fail then before the next step. No row is unseen by it.
    ///
    /// Errors: as there. The sweep under way is as it was then, but that it may have gone on.
    pub(crate) fn prepare_sweep(&mut self, given: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.sweep_of_now(given)? else { return Ok(()) };
        self.end_before(&sweep)
    }

    /// Let the sweep under way come to its end, if `sweep` cannot go on in its place. Rows that it spares are kept beside.
    fn end_before(&mut self, sweep: &Sweep) -> Result<()> {
        // Of rows that came in since, a sweep that goes on in the place of another one could not tell by which of the two they die.
        let goes_on = |before: &UnderWay| !before.came_in && sweep.covers(&before.judge.sweep);
        if self.sweeping.as_ref().is_none_or(goes_on) {
            return Ok(());
        }
        if self.is_sweeping() {
            self.finish_sweep()?;
        }
        self.set_aside();
        Ok(())
    }

    /// Apply the table's rule to the rows of now, or the rule that is given where the table's says that one is. Nothing where the table has
    /// none.
    ///
    /// Errors: `State`, `Config` where a rule is given or missing and should not be; those of [`Residency::finish_sweep`], of a sweep that is
    /// under way and took other rows, which this one waits for.
    pub(crate) fn begin_sweep(&mut self, given: Option<&EvictionRule>) -> Result<()> {
        let Some(sweep) = self.sweep_of_now(given)? else { return Ok(()) };
        let found_all = |before: &Sweep| before.step == sweep.step && before.covers(&sweep);
        if self.swept.as_ref().is_some_and(found_all) {
            // It would find what the one before has left. It is noted all the same, as by ranks whose rows have changed since.
            self.note_sweep(&sweep);
            return Ok(());
        }
        self.end_before(&sweep)?;
        self.base.contents_changed();
        self.note_sweep(&sweep);
        self.as_swept = Some(self.base.version());
        let (host, device) = (&self.host.slots, self.device.as_ref().map(|tier| &tier.slots));
        let slots = (host.high_water(), device.map_or(0, SlotMap::high_water));
        // A sweep that takes all that the one before takes goes on where that one is, so that each slot and each record has its turn.
        let mut before = self.sweeping.take();
        let judge = match &mut before {
            Some(before) => Judge::in_place_of(&mut before.judge, sweep, self.epoch, self.tells()),
            None => Judge::new(sweep, self.epoch),
        };
        self.sweeping = Some(UnderWay::after(before, judge, slots, self.counts.evicted()));
        Ok(())
    }

    /// Note a sweep for later deltas.
    fn note_sweep(&mut self, sweep: &Sweep) {
        if let Some(forgotten) = self.lineage.note_sweep(self.epoch, sweep) {
            tracing::info!(
                "table {:?}: what sweeps have taken since the checkpoint {forgotten} is not remembered any more, because there were more \
                 than {MOST_SWEEPS} of which none takes all that another one takes: the next save on it is a full one",
                self.base.config.name
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
        let ended =
            self.sweep_after(next, None).and_then(|sweep| sweep.map_or(Ok(()), |sweep| self.end_before(&sweep)));
        match ended {
            Err(error) if self.owes_copies() => Err(error),
            Err(_) => {
                self.try_copies_again();
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
            self.note_stopped(&error);
        }
    }
}
