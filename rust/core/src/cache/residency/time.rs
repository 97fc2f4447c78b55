//! The time of a table: when its training steps were made, for rules in seconds.
//!
//! It is the system's, or what the user gives as the time of the events that are trained. Whatever it is, it does not go back.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Residency;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::StepClock;

/// What a table knows of time, for a table that goes on in its place.
pub(crate) struct ClockState {
    clock: StepClock,
    user_time: Option<u64>,
    time_before_load: u64,
}

impl Residency {
    /// When the table's steps were made, as far as that is known.
    pub(crate) fn clock(&self) -> &StepClock {
        &self.clock
    }

    /// Replace what is known of when the table's steps were made, as a load does.
    pub(crate) fn restore_clock(&mut self, clock: &StepClock) {
        let before = self.event_time();
        self.clock.clone_from(clock);
        // What was set is of the steps before the load: those that come may be of times before it.
        self.user_time = None;
        self.adopt_time_source(before);
    }

    /// The time of now where the user gives it.
    pub(crate) fn event_time(&self) -> Option<u64> {
        self.clock.has_event_times().then(|| self.now())
    }

    /// Rows were loaded in the place of others, whose time was this one where the user gives it: the user gives it from now on too.
    pub(crate) fn adopt_time_source(&mut self, before: Option<u64>) {
        if let Some(time) = before {
            self.clock.set_event_times();
            self.time_before_load = time;
        }
    }

    /// What [`Residency::join_clock`] of another table takes over.
    pub(crate) fn clock_state(&self) -> ClockState {
        ClockState { clock: self.clock.clone(), user_time: self.user_time, time_before_load: self.time_before_load }
    }

    /// Also take over what another shard of the table knows of these steps, and what time it is there.
    pub(crate) fn join_clock(&mut self, from: &ClockState) {
        self.clock = StepClock::join([&self.clock, &from.clock].into_iter());
        self.user_time = self.user_time.max(from.user_time);
        self.time_before_load = self.time_before_load.max(from.time_before_load);
    }

    /// The time of now, in milliseconds: what was set last, else the system's. It is never before that of the last step.
    pub(crate) fn now(&self) -> u64 {
        let now = match self.user_time {
            Some(time) => time,
            // Until the user goes on to give times, as after a load, it stands still.
            None if self.clock.has_event_times() && self.clock.is_empty() => self.time_before_load,
            None if self.clock.has_event_times() => 0,
            None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
        };
        now.max(self.clock.latest())
    }

    /// From now on the table's time is the one that is given, in milliseconds, until the next is.
    ///
    /// Errors: those of [`Residency::check_time`].
    pub(crate) fn set_time(&mut self, time: u64) -> Result<()> {
        self.check_time(time)?;
        self.user_time = Some(time);
        self.clock.set_event_times();
        Ok(())
    }

    /// `Input` where this time is before the table's, so that [`Residency::set_time`] would let it go back.
    pub(crate) fn check_time(&self, time: u64) -> Result<()> {
        let latest = self.user_time.unwrap_or(0).max(self.clock.latest());
        if time >= latest {
            return Ok(());
        }
        let (said, before) = (time as f64 / 1e3, latest as f64 / 1e3);
        let name = &self.context.config.name;
        Err(Error::new(
            Kind::Input,
            format!(
                "table {name:?}: the time {said} is before {before}, the time of its last step or the one that was set last, and time does not \
                 go back: give times that rise, from before the first step on"
            ),
        ))
    }

    /// A step was made: note when, where a rule asks for it.
    pub(super) fn record_step_time(&mut self) {
        if self.context.config.keeps_times() {
            let now = self.now();
            if self.user_time.is_some() {
                // A clock that was made anew, as when all rows are removed, does not know it yet.
                self.clock.set_event_times();
            }
            self.clock.record(self.step, now);
        }
    }
}
