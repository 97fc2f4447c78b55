//! The step clock of a table: the times of its training steps, by which a time to live in seconds becomes a step.
//!
//! The clock is a list of pairs of a step and a time, at which that step and all steps before it were complete. A step
//! between two pairs has the time of the later pair. So a clock with fewer pairs returns later times, and never earlier
//! ones: rows may expire late, but not early. The clock keeps one pair per second of the current and the previous
//! minute, one per minute of the last 31 days, and one per hour of the time before.
//!
//! Times are milliseconds since the beginning of 1970, or since the epoch of the user's event times.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};

const SECOND: u64 = 1000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
/// Hours before the current one with a pair per minute.
const HOURS: u64 = 31 * 24;
/// Upper limit of times and steps. Sums of two such numbers are far from an overflow.
const MAX_VALUE: u64 = 1 << 62;

/// The times of a table's steps. Its serde form is part of published states and of manifests. It is one string of
/// integers separated by spaces, because a manifest has each item of a list on its own line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StepClock {
    /// Steps and times, both ascending.
    pairs: Vec<(u64, u64)>,
    /// True if the times are set by the user.
    has_event_times: bool,
}

impl StepClock {
    /// True if the clock has no pairs.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The latest time, or 0 if there is none.
    pub fn latest(&self) -> u64 {
        self.pairs.last().map_or(0, |&(_, time)| time)
    }

    /// The last step whose time is known, or 0 if there is none.
    pub(crate) fn last_step(&self) -> u64 {
        self.pairs.last().map_or(0, |&(step, _)| step)
    }

    /// True if the times are set by the user.
    pub fn has_event_times(&self) -> bool {
        self.has_event_times
    }

    /// Marks the times as set by the user.
    pub(crate) fn set_event_times(&mut self) {
        self.has_event_times = true;
    }

    /// Records a step. A time before the latest one counts as the latest one. The unrecorded steps before `step` have
    /// the same time.
    pub fn record(&mut self, step: u64, time: u64) {
        self.forget_from(step);
        let (known, latest) = self.pairs.last().copied().unwrap_or_default();
        let time = time.max(latest).min(MAX_VALUE);
        if known + 1 < step || self.pairs.is_empty() {
            self.push(step - 1, time);
        }
        self.push(step, time);
    }

    /// Removes this step and the steps after it.
    pub(crate) fn forget_from(&mut self, step: u64) {
        let known = self.pairs.partition_point(|&(before, _)| before < step);
        self.pairs.truncate(known);
    }

    fn push(&mut self, step: u64, time: u64) {
        let Some(last) = self.pairs.last_mut() else { return self.pairs.push((step, time)) };
        let before = last.1;
        let begins = |unit: u64| time / unit != before / unit;
        if !begins(SECOND) {
            *last = (step, time);
            return;
        }
        self.pairs.push((step, time));
        if begins(HOUR) {
            self.thin(0);
        } else if begins(MINUTE) {
            // Pairs of earlier minutes were thinned at the start of the previous minute.
            let from = self.pairs.partition_point(|&(_, time)| time / MINUTE + 1 < before / MINUTE);
            self.thin(from);
        }
    }

    /// Keeps the last pair per second, minute or hour, depending on its age. Pairs before the index `from` are not
    /// changed.
    fn thin(&mut self, from: usize) {
        let (minute, hour) = (self.latest() / MINUTE, self.latest() / HOUR);
        let unit = |time: u64| match (minute - time / MINUTE, hour - time / HOUR) {
            (0 | 1, _) => SECOND,
            (_, 0..=HOURS) => MINUTE,
            _ => HOUR,
        };
        let mut next = None;
        let last_of_unit = |&&(_, time): &&(u64, u64)| {
            let unit = unit(time);
            next.replace(time).is_none_or(|next: u64| time / unit != next / unit)
        };
        let mut kept: Vec<(u64, u64)> = self.pairs[from..].iter().rev().filter(last_of_unit).copied().collect();
        kept.reverse();
        self.pairs.truncate(from);
        self.pairs.append(&mut kept);
    }

    /// The largest step that was complete at this time, or `None` if no such step is known.
    pub fn step_at(&self, time: u64) -> Option<u64> {
        let complete = self.pairs.partition_point(|&(_, by)| by <= time);
        complete.checked_sub(1).map(|last| self.pairs[last].0)
    }

    /// Joins the clocks of several ranks that made the same steps: the time of a step is its maximum over the clocks.
    pub fn join<'a>(clocks: impl Iterator<Item = &'a Self>) -> Self {
        let mut clocks: Vec<&Self> = clocks.collect();
        let of_events = clocks.iter().any(|clock| clock.has_event_times);
        clocks.retain(|clock| !clock.is_empty());
        let mut steps: Vec<u64> = clocks.iter().flat_map(|clock| &clock.pairs).map(|&(step, _)| step).collect();
        steps.sort_unstable();
        steps.dedup();
        let mut at = vec![0; clocks.len()];
        let mut joined = Self { pairs: Vec::new(), has_event_times: of_events };
        for step in steps {
            let mut time = joined.latest();
            for (clock, at) in clocks.iter().zip(&mut at) {
                while clock.pairs.get(*at).is_some_and(|&(known, _)| known < step) {
                    *at += 1;
                }
                time = time.max(clock.pairs.get(*at).map_or(0, |&(_, time)| time));
            }
            match joined.pairs.last_mut() {
                Some(last) if last.1 / SECOND == time / SECOND => *last = (step, time),
                _ => joined.pairs.push((step, time)),
            }
        }
        joined.thin(0);
        joined
    }

    /// Encodes the clock for a file. Removes pairs until the result has at most `most` bytes. An empty clock is encoded
    /// as no bytes.
    pub(crate) fn encode(&self, most: usize) -> Vec<u8> {
        let mut clock = self.clone();
        loop {
            let bytes = if clock.is_empty() { Vec::new() } else { serde_json::to_vec(&clock).unwrap_or_default() };
            if bytes.len() <= most {
                return bytes;
            }
            // Every other pair, so that the last pair is kept.
            let odd = clock.pairs.len() % 2;
            let mut number = 0;
            clock.pairs.retain(|_| {
                number += 1;
                number % 2 == odd
            });
            if clock.pairs.len() < 2 {
                return Vec::new();
            }
        }
    }
}

impl From<StepClock> for String {
    /// Writes the event time flag, the first pair, and the difference of each pair to the previous one.
    fn from(clock: StepClock) -> Self {
        use std::fmt::Write;
        let mut text = u64::from(clock.has_event_times).to_string();
        let (mut step, mut time) = (0, 0);
        for pair in clock.pairs {
            // Writing to a string does not fail.
            let _ = write!(text, " {} {}", pair.0 - step, pair.1 - time);
            (step, time) = pair;
        }
        text
    }
}

impl TryFrom<String> for StepClock {
    type Error = Error;

    /// Memory is requested after all pairs have been checked.
    fn try_from(text: String) -> Result<Self> {
        let mut words = text.split(' ');
        let of_events = number(words.next().unwrap_or_default())?;
        if of_events > 1 {
            return Err(damaged_error("of a kind that is not known"));
        }
        let count = pairs_of(words.clone()).try_fold(0, |count: usize, pair| pair.map(|_| count + 1))?;
        let mut pairs = Vec::with_capacity(count);
        for pair in pairs_of(words) {
            pairs.push(pair?);
        }
        Ok(Self { pairs, has_event_times: of_events == 1 })
    }
}

fn damaged_error(problem: &str) -> Error {
    Kind::Corruption.error(format!("a step clock {problem}"))
}

/// Parses a word of decimal digits.
fn number(word: &str) -> Result<u64> {
    let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
    word.parse().ok().filter(|_| is_number).ok_or_else(|| damaged_error("with other text than numbers"))
}

/// The steps and times whose differences these words are. Each is checked against the previous one. Items after an
/// error are meaningless.
fn pairs_of<'a>(mut words: impl Iterator<Item = &'a str>) -> impl Iterator<Item = Result<(u64, u64)>> {
    let mut last: Option<(u64, u64)> = None;
    let mut pair = move |step: &str, time: Option<&str>| {
        let time = time.ok_or_else(|| damaged_error("whose last step has no time"))?;
        let (step, time) = (number(step)?, number(time)?);
        let before = last.unwrap_or_default();
        let next = (before.0.saturating_add(step), before.1.saturating_add(time));
        if next.0 > MAX_VALUE || next.1 > MAX_VALUE || (step == 0 && last.is_some()) {
            return Err(damaged_error("with steps or times out of range"));
        }
        last = Some(next);
        Ok(next)
    };
    std::iter::from_fn(move || words.next().map(|step| pair(step, words.next())))
}

#[cfg(test)]
mod tests;
