//! A sweep as rows are judged by it, and what rows that it takes are called: for the counters, and for those who are told of the rows.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use crate::lifecycle::Sweep;
use crate::rows::RowHeader;
use crate::types::Id;

/// So many sweeps are remembered at most in whose place one goes on. What an older one took counts as taken by the oldest of these.
const MOST_BEFORE: usize = 1023;

/// A row that a sweep takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dead {
    pub(super) id: Id,
    /// The epoch in which it was modified last.
    pub(super) modified_epoch: u32,
    /// The name of what it dies by, by its place among [`Judge::names`].
    pub(super) name: u8,
}

/// A sweep, and what is to be said of the rows that it takes.
#[derive(Debug)]
pub(super) struct Judge {
    pub(super) sweep: Sweep,
    /// The epoch in which it began.
    pub(super) epoch: u32,
    /// The sweeps in whose place this one goes on, the oldest first. Each takes all that the ones before it take.
    before: Vec<Sweep>,
    /// The names of what these sweeps may take rows by, without doubles.
    names: Vec<&'static str>,
}

impl Judge {
    /// A sweep that begins in `epoch`.
    pub(super) fn new(sweep: Sweep, epoch: u32) -> Self {
        let mut names = Vec::new();
        sweep.reasons(&mut names);
        Self { sweep, epoch, before: Vec::new(), names }
    }

    /// A sweep that begins in `epoch` and goes on in the place of another one, which is done then. Where nobody is told of rows, only names
    /// matter.
    pub(super) fn in_place_of(other: &mut Arc<Self>, sweep: Sweep, epoch: u32, is_told: bool) -> Self {
        let mut names = other.names.clone();
        sweep.reasons(&mut names);
        if !is_told && names.len() == 1 {
            return Self { sweep, epoch, before: Vec::new(), names };
        }
        // Nobody else holds it but for rows that are on their way, so there is mostly nothing to copy.
        let mut before = match Arc::get_mut(other) {
            Some(other) => mem::take(&mut other.before),
            None => other.before.clone(),
        };
        if before.len() == MOST_BEFORE {
            before.remove(0);
        }
        before.push(other.sweep.clone());
        Self { sweep, epoch, before, names }
    }

    /// A row that this takes, with weights `[D]`. They may be empty where [`Judge::name_needs_weights`] says no.
    pub(super) fn dead(&self, header: &RowHeader, weights: &[f32]) -> Dead {
        Dead { id: header.id, modified_epoch: header.modified_epoch, name: self.name(header, weights) }
    }

    /// What a row that this takes dies by: a place among the names. Weights are as in [`Judge::dead`].
    pub(super) fn name(&self, header: &RowHeader, weights: &[f32]) -> u8 {
        if !self.names_differ() {
            return 0;
        }
        let (_, name) = self.step_and_name(header, weights);
        self.names.iter().position(|known| *known == name).unwrap_or_default() as u8
    }

    /// Whether one must look at a row to know what it dies by.
    pub(super) fn names_differ(&self) -> bool {
        self.names.len() > 1
    }

    /// Whether one must look at the weights of a row to know what it dies by.
    pub(super) fn name_needs_weights(&self) -> bool {
        self.names_differ() && self.before.iter().chain([&self.sweep]).any(Sweep::needs_weights)
    }

    /// The step after which a row that this takes dies, and what it dies by: those of the first sweep that takes it.
    pub(super) fn step_and_name(&self, header: &RowHeader, weights: &[f32]) -> (u64, &'static str) {
        let first = self.before.partition_point(|sweep| !sweep.kills(header, weights));
        let sweep = self.before.get(first).unwrap_or(&self.sweep);
        (sweep.step, sweep.reason(header, weights))
    }

    /// Add these rows, which this has taken, to the numbers of rows that died by what is called so.
    pub(super) fn count(&self, dead: &[Dead], evicted: &mut BTreeMap<&'static str, u64>) {
        for (place, &name) in self.names.iter().enumerate() {
            let rows = dead.iter().filter(|row| usize::from(row.name) == place).count();
            if rows > 0 {
                *evicted.entry(name).or_default() += rows as u64;
            }
        }
    }
}
