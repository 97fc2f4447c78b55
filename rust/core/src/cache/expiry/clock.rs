//! The clock of a table: times of its training steps, for rules in seconds.
//!
//! Times are those of the system, or event times set by the user. They never decrease.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::TableConfig;
use crate::error::{Kind, Result};
use crate::lifecycle::StepClock;

/// Times of a table's training steps, and its current time.
#[derive(Clone, Debug, Default)]
pub(crate) struct TableClock {
    /// Times of the training steps, as far as they are known.
    pub(crate) steps: StepClock,
    /// The time set by the user, in milliseconds.
    user_time: Option<u64>,
    /// The time set by the user before a load. It is the current time if the load brought no times. Times set later may
    /// precede it.
    time_before_load: u64,
}

impl TableClock {
    /// Replaces the times of the table's steps, as a load does.
    pub(crate) fn restore(&mut self, steps: &StepClock) {
        let before = self.event_time();
        self.steps.clone_from(steps);
        // The time that was set belongs to the steps before the load: later steps may have earlier times.
        self.user_time = None;
        self.adopt_time_source(before);
    }

    /// The current event time, if the user sets event times.
    pub(crate) fn event_time(&self) -> Option<u64> {
        self.steps.has_event_times().then(|| self.now())
    }

    /// Keeps the time source after a load has replaced the rows: if the previous contents had event time `before`, the
    /// user continues to set event times.
    pub(crate) fn adopt_time_source(&mut self, before: Option<u64>) {
        if let Some(time) = before {
            self.steps.set_event_times();
            self.time_before_load = time;
        }
    }

    /// Merges the step times and the current time of another shard of the table.
    pub(crate) fn join(&mut self, from: &Self) {
        self.steps = StepClock::join([&self.steps, &from.steps].into_iter());
        self.user_time = self.user_time.max(from.user_time);
        self.time_before_load = self.time_before_load.max(from.time_before_load);
    }

    /// The current time in milliseconds: the time set last, else the system's. Never before the time of the last step.
    pub(crate) fn now(&self) -> u64 {
        let now = match self.user_time {
            Some(time) => time,
            // The time does not advance until the user sets a time again, as after a load.
            None if self.steps.has_event_times() && self.steps.is_empty() => self.time_before_load,
            None if self.steps.has_event_times() => 0,
            None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64),
        };
        now.max(self.steps.latest())
    }

    /// Sets the table's time, in milliseconds, until the next call.
    ///
    /// Errors: those of [`TableClock::check_time`].
    pub(crate) fn set_time(&mut self, config: &TableConfig, time: u64) -> Result<()> {
        self.check_time(config, time)?;
        self.user_time = Some(time);
        self.steps.set_event_times();
        Ok(())
    }

    /// Errors: `Input` if this time precedes the table's, so that [`TableClock::set_time`] would decrease it.
    pub(crate) fn check_time(&self, config: &TableConfig, time: u64) -> Result<()> {
        let latest = self.user_time.unwrap_or(0).max(self.steps.latest());
        if time >= latest {
            return Ok(());
        }
        let (given, before) = (time as f64 / 1e3, latest as f64 / 1e3);
        let name = &config.name;
        Err(Kind::Input.error(format!(
            "table {name:?}: the time {given} is before {before}, the time of its last step or the one that was set last, and time does not \
             go back: give times that rise, from before the first step on"
        )))
    }

    /// Records the time of a completed step, if a rule needs it.
    pub(crate) fn record_step(&mut self, config: &TableConfig, step: u64) {
        if config.keeps_times() {
            let now = self.now();
            if self.user_time.is_some() {
                // A clock that was reset, as when all rows are removed, does not know that yet.
                self.steps.set_event_times();
            }
            self.steps.record(step, now);
        }
    }
}
