//! By which rule rows die: for the counters, and for those who are told of the rows.

use std::collections::BTreeMap;

use super::Residency;
use crate::lifecycle::Sweep;
use crate::rows::RowHeader;
use crate::types::Id;

/// So many sweeps are remembered at most while one is under way. What an older one took counts as taken by the oldest of these.
const MOST_SWEEPS: usize = 1024;

/// A name of [`Reasons::rows`].
pub(super) type Reason = u8;

/// A row that a sweep takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dead {
    pub(super) id: Id,
    /// The epoch in which it was modified last.
    pub(super) modified_epoch: u32,
    /// What it dies by.
    pub(super) reason: Reason,
}

/// Why rows die, and how many have died of what.
#[derive(Debug, Default)]
pub(super) struct Reasons {
    /// The sweep under way, and before it those in whose place it goes on: each takes all that the ones before it take.
    sweeps: Vec<Sweep>,
    /// The names of what these sweeps may take rows by, without doubles.
    possible: Vec<&'static str>,
    /// How many rows have died by what is called so.
    rows: Vec<(&'static str, u64)>,
}

impl Reasons {
    /// A sweep begins. It goes on in the place of one that is under way, or there is none.
    pub(super) fn begin(&mut self, sweep: &Sweep, goes_on: bool) {
        if !goes_on {
            self.sweeps.clear();
            self.possible.clear();
        } else if self.sweeps.len() == MOST_SWEEPS {
            self.sweeps.remove(0);
        }
        sweep.reasons(&mut self.possible);
        for &name in &self.possible {
            if !self.rows.iter().any(|(known, _)| *known == name) {
                self.rows.push((name, 0));
            }
        }
        self.sweeps.push(sweep.clone());
    }

    /// What all rows die by that die now, where that is known without a look at them.
    pub(super) fn only(&self) -> Option<Reason> {
        if self.possible.len() > 1 { None } else { Some(self.place(self.possible.first().copied().unwrap_or(""))) }
    }

    /// Whether [`Reasons::of`] looks at weights.
    pub(super) fn need_weights(&self) -> bool {
        self.possible.len() > 1 && self.sweeps.iter().any(Sweep::needs_weights)
    }

    /// What a row dies by, with weights `[D]`. They may be empty where none are [needed](Reasons::need_weights).
    pub(super) fn of(&self, header: &RowHeader, weights: &[f32]) -> Reason {
        self.only().unwrap_or_else(|| self.place(self.step_and_name(header, weights).1))
    }

    /// The step after which a row dies, and what it dies by: those of the first sweep that takes it.
    pub(super) fn step_and_name(&self, header: &RowHeader, weights: &[f32]) -> (u64, &'static str) {
        let first = self.sweeps.partition_point(|sweep| !sweep.kills(header, weights));
        let Some(sweep) = self.sweeps.get(first).or(self.sweeps.last()) else { return (0, "") };
        (sweep.step, sweep.reason(header, weights))
    }

    fn place(&self, name: &str) -> Reason {
        self.rows.iter().position(|(known, _)| *known == name).unwrap_or(0) as Reason
    }

    /// These rows have died.
    pub(super) fn count(&mut self, dead: &[Dead]) {
        for row in dead {
            if let Some((_, rows)) = self.rows.get_mut(usize::from(row.reason)) {
                *rows += 1;
            }
        }
    }

    /// How many rows have died by what, without rules that took none.
    pub(super) fn counted(&self) -> BTreeMap<&'static str, u64> {
        self.rows.iter().filter(|(_, rows)| *rows > 0).copied().collect()
    }
}

impl Residency {
    /// A row that the sweep under way takes, with weights `[D]`, which may be empty where [`Reasons::need_weights`] says no.
    pub(super) fn dead(&self, header: &RowHeader, weights: &[f32]) -> Dead {
        Dead { id: header.id, modified_epoch: header.modified_epoch, reason: self.reasons.of(header, weights) }
    }
}
