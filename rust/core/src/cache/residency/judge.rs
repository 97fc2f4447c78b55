//! A sweep as rows are judged by it, and what rows that it takes are called: for the counters, and for those who are told of the rows.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use crate::lifecycle::ExpirySweep;
use crate::rows::RowHeader;
use crate::types::Id;

/// So many sweeps are remembered at most in whose place one goes on. What an older one took counts as taken by the oldest of these.
const MOST_EARLIER: usize = 1023;

/// A row that a sweep takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpiredRow {
    pub(super) id: Id,
    /// The epoch in which it was modified last.
    pub(super) modified_epoch: u32,
    /// The name of what it dies by, by its place among [`SweepMatcher::names`].
    pub(super) reason: u8,
}

/// A sweep, and what is to be said of the rows that it takes.
#[derive(Debug)]
pub(super) struct SweepMatcher {
    pub(super) sweep: ExpirySweep,
    /// The epoch in which it began.
    pub(super) epoch: u32,
    /// The sweeps in whose place this one goes on, the oldest first. Each takes all that the ones before it take.
    earlier: Vec<ExpirySweep>,
    /// The names of what these sweeps may take rows by, without doubles.
    reasons: Vec<&'static str>,
}

impl SweepMatcher {
    /// A sweep that begins in `epoch`.
    pub(super) fn new(sweep: ExpirySweep, epoch: u32) -> Self {
        let mut names = Vec::new();
        sweep.add_reasons(&mut names);
        Self { sweep, epoch, earlier: Vec::new(), reasons: names }
    }

    /// A sweep that begins in `epoch` and goes on in the place of another one, which is done then. Where nobody is told of rows, only names
    /// matter.
    pub(super) fn replacing(replaced: &mut Arc<Self>, sweep: ExpirySweep, epoch: u32, has_notifier: bool) -> Self {
        let mut names = replaced.reasons.clone();
        sweep.add_reasons(&mut names);
        if !has_notifier && names.len() == 1 {
            return Self { sweep, epoch, earlier: Vec::new(), reasons: names };
        }
        // Nobody else holds it but for rows that are on their way, so there is mostly nothing to copy.
        let mut before = match Arc::get_mut(replaced) {
            Some(other) => mem::take(&mut other.earlier),
            None => replaced.earlier.clone(),
        };
        if before.len() == MOST_EARLIER {
            before.remove(0);
        }
        before.push(replaced.sweep.clone());
        Self { sweep, epoch, earlier: before, reasons: names }
    }

    /// A row that this takes, with weights `[D]`. They may be empty where [`SweepMatcher::reason_needs_weights`] says no.
    pub(super) fn expired_row(&self, header: &RowHeader, weights: &[f32]) -> ExpiredRow {
        ExpiredRow { id: header.id, modified_epoch: header.modified_epoch, reason: self.reason(header, weights) }
    }

    /// What a row that this takes dies by: a place among the names. Weights are as in [`SweepMatcher::dead`].
    pub(super) fn reason(&self, header: &RowHeader, weights: &[f32]) -> u8 {
        if !self.reasons_differ() {
            return 0;
        }
        let (_, name) = self.step_and_reason(header, weights);
        self.reasons.iter().position(|known| *known == name).unwrap_or_default() as u8
    }

    /// Whether one must look at a row to know what it dies by.
    pub(super) fn reasons_differ(&self) -> bool {
        self.reasons.len() > 1
    }

    /// Whether one must look at the weights of a row to know what it dies by.
    pub(super) fn reason_needs_weights(&self) -> bool {
        self.reasons_differ() && self.earlier.iter().chain([&self.sweep]).any(ExpirySweep::needs_weights)
    }

    /// The step after which a row that this takes dies, and what it dies by: those of the first sweep that takes it.
    pub(super) fn step_and_reason(&self, header: &RowHeader, weights: &[f32]) -> (u64, &'static str) {
        let first = self.earlier.partition_point(|sweep| !sweep.matches(header, weights));
        let sweep = self.earlier.get(first).unwrap_or(&self.sweep);
        (sweep.step, sweep.reason(header, weights))
    }

    /// Add these rows, which this has taken, to the numbers of rows that died by what is called so.
    pub(super) fn count(&self, expired: &[ExpiredRow], counts: &mut BTreeMap<&'static str, u64>) {
        for (place, &name) in self.reasons.iter().enumerate() {
            let rows = expired.iter().filter(|row| usize::from(row.reason) == place).count();
            if rows > 0 {
                *counts.entry(name).or_default() += rows as u64;
            }
        }
    }
}
