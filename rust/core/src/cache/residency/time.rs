//! The clock of a table: times of its training steps, for rules in seconds.
//!
//! Times are those of the system, or event times set by the user. They never decrease.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Residency;
use crate::error::{Error, Kind, Result};
use crate::lifecycle::StepClock;

/// Clock state that another table adopts.
pub(crate) struct ClockState {
    clock: StepClock,
    user_time: Option<u64>,
    time_before_load: u64,
}

impl Residency {
    /// Times of the table's steps, as far as they are known.
    pub(crate) fn clock(&self) -> &StepClock {
        &self.clock
    }

    /// Replaces the times of the table's steps, as a load does.
    pub(crate) fn restore_clock(&mut self, clock: &StepClock) {
        let before = self.event_time();
        self.clock.clone_from(clock);
        // The time that was set belongs to the steps before the load: later steps may have earlier times.
        self.user_time = None;
        self.adopt_time_source(before);
    }

    /// The current event time, if the user sets event times.
    pub(crate) fn event_time(&self) -> Option<u64> {
        self.clock.has_event_times().then(|| self.now())
    }

    /// Keeps the time source after a load has replaced the rows: if the previous contents had event time `before`, the
    /// user continues to set event times.
    pub(crate) fn adopt_time_source(&mut self, before: Option<u64>) {
        if let Some(time) = before {
            self.clock.set_event_times();
            self.time_before_load = time;
        }
    }

    /// Clock state for [`Residency::join_clock`] of another table.
    pub(crate) fn clock_state(&self) -> ClockState {
        ClockState { clock: self.clock.clone(), user_time: self.user_time, time_before_load: self.time_before_load }
    }

    /// Merges the step times and the current time of another shard of the table.
    pub(crate) fn join_clock(&mut self, from: &ClockState) {
        self.clock = StepClock::join([&self.clock, &from.clock].into_iter());
        self.user_time = self.user_time.max(from.user_time);
        self.time_before_load = self.time_before_load.max(from.time_before_load);
    }

    /// The current time in milliseconds: the time set last, else the system's. Never before the time of the last step.
    pub(crate) fn now(&self) -> u64 {
        let now = match self.user_time {
            Some(time) => time,
            // The time does not advance until the user sets a time again, as after a load.
            None if self.clock.has_event_times() && self.clock.is_empty() => self.time_before_load,
            None if self.clock.has_event_times() => 0,
            None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
        };
        now.max(self.clock.latest())
    }

    /// Sets the table's time, in milliseconds, until the next call.
    ///
    /// Errors: those of [`Residency::check_time`].
    pub(crate) fn set_time(&mut self, time: u64) -> Result<()> {
        self.check_time(time)?;
        self.user_time = Some(time);
        self.clock.set_event_times();
        Ok(())
    }

    /// Errors: `Input` if this time precedes the table's, so that [`Residency::set_time`] would decrease it.
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

    /// Records the time of a completed step, if a rule needs it.
    pub(super) fn record_step_time(&mut self) {
        if self.context.config.keeps_times() {
            let now = self.now();
            if self.user_time.is_some() {
                // A clock that was reset, as when all rows are removed, does not know that yet.
                self.clock.set_event_times();
            }
            self.clock.record(self.step, now);
        }
    }
}
