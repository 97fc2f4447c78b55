//! Matching of rows against a sweep, and the names of expiry reasons, for the counters and the eviction queue.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use crate::lifecycle::ExpirySweep;
use crate::rows::RowHeader;
use crate::types::Id;

/// Maximum number of replaced sweeps to keep. Rows matched by an older one count as matched by the oldest of these.
const MOST_EARLIER: usize = 1023;

/// A row matched by a sweep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpiredRow {
    pub(crate) id: Id,
    /// The epoch in which the row was last modified.
    pub(crate) modified_epoch: u32,
    /// Expiry reason: a position in [`SweepMatcher::reasons`].
    pub(crate) reason: u8,
}

/// A sweep, and the reasons of the rows that it matches.
#[derive(Debug)]
pub(crate) struct SweepMatcher {
    pub(crate) sweep: ExpirySweep,
    /// The epoch in which the sweep started.
    pub(crate) epoch: u32,
    /// Sweeps replaced by this one, oldest first. Each matches all rows that the sweeps before it match.
    earlier: Vec<ExpirySweep>,
    /// Distinct names of the reasons of these sweeps.
    reasons: Vec<&'static str>,
}

impl SweepMatcher {
    /// A matcher for a sweep that starts in `epoch`.
    pub(crate) fn new(sweep: ExpirySweep, epoch: u32) -> Self {
        let mut names = Vec::new();
        sweep.add_reasons(&mut names);
        Self { sweep, epoch, earlier: Vec::new(), reasons: names }
    }

    /// A matcher for a sweep that starts in `epoch` and replaces another one, which ends. Without a notifier only the
    /// names of reasons matter.
    pub(crate) fn replacing(replaced: &mut Arc<Self>, sweep: ExpirySweep, epoch: u32, has_notifier: bool) -> Self {
        let mut names = replaced.reasons.clone();
        sweep.add_reasons(&mut names);
        if !has_notifier && names.len() == 1 {
            return Self { sweep, epoch, earlier: Vec::new(), reasons: names };
        }
        // Only rows in transit hold another reference, so there is mostly nothing to copy.
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

    /// A row matched by this sweep, with weights `[D]`. They may be empty unless
    /// [`SweepMatcher::reason_needs_weights`].
    pub(crate) fn expired_row(&self, header: &RowHeader, weights: &[f32]) -> ExpiredRow {
        ExpiredRow { id: header.id, modified_epoch: header.modified_epoch, reason: self.reason(header, weights) }
    }

    /// The expiry reason of a row matched by this sweep, as a position in the names. `weights` as for
    /// [`SweepMatcher::expired_row`].
    pub(crate) fn reason(&self, header: &RowHeader, weights: &[f32]) -> u8 {
        if !self.reasons_differ() {
            return 0;
        }
        let (_, name) = self.step_and_reason(header, weights);
        self.reasons.iter().position(|known| *known == name).unwrap_or_default() as u8
    }

    /// True if the reason depends on the row.
    pub(crate) fn reasons_differ(&self) -> bool {
        self.reasons.len() > 1
    }

    /// True if the reason depends on the weights of the row.
    pub(crate) fn reason_needs_weights(&self) -> bool {
        self.reasons_differ() && self.earlier.iter().chain([&self.sweep]).any(ExpirySweep::needs_weights)
    }

    /// The step and the reason by which a row matched by this sweep expires: those of the first sweep that matches it.
    pub(super) fn step_and_reason(&self, header: &RowHeader, weights: &[f32]) -> (u64, &'static str) {
        let first = self.earlier.partition_point(|sweep| !sweep.matches(header, weights));
        let sweep = self.earlier.get(first).unwrap_or(&self.sweep);
        (sweep.step, sweep.reason(header, weights))
    }

    /// Adds rows expired by this sweep to the counts by reason.
    pub(crate) fn count(&self, expired: &[ExpiredRow], counts: &mut BTreeMap<&'static str, u64>) {
        for (place, &name) in self.reasons.iter().enumerate() {
            let rows = expired.iter().filter(|row| usize::from(row.reason) == place).count();
            if rows > 0 {
                *counts.entry(name).or_default() += rows as u64;
            }
        }
    }
}
