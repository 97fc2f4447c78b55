//! What the ids of a plan ask for, and which of them got nothing.

use crate::lifecycle::admission::AdmissionCandidate;
use crate::types::Id;

/// What the ids of a training plan ask for, of a table that refuses some.
#[derive(Debug, Default)]
pub(crate) struct PlanDemand {
    /// How often each distinct id of the plan occurs: `[U]`.
    pub(crate) occurrences: Vec<u32>,
    /// The clicks of each distinct id: `[U]`, or empty for none.
    pub(crate) clicks: Vec<u32>,
}

impl PlanDemand {
    /// What the id at a position asks for.
    pub(super) fn candidate(&self, ids: &[Id], position: u32) -> AdmissionCandidate {
        let at = position as usize;
        let clicks = self.clicks.get(at).copied().unwrap_or(0);
        AdmissionCandidate::new(ids[at], self.occurrences[at], clicks)
    }
}

/// Ids of a plan without a row that would not be admitted as far as was known, and so have no slot.
#[derive(Debug, Default)]
pub(super) struct WaitingIds {
    /// Their positions in the plan's distinct ids: `[n]`.
    pub(super) positions: Vec<u32>,
    /// What they ask for: `[n]`.
    pub(super) candidates: Vec<AdmissionCandidate>,
    /// The table's version when that was known.
    pub(super) version: u64,
    /// The number of the admitter's changes when that was known; `None` where it was known at different times.
    decided_at: Option<u64>,
}

impl WaitingIds {
    /// Add ids, with what they ask for, that were refused by what was known at the table's version `version` and the admitter's change
    /// `changes`.
    pub(super) fn add(
        &mut self,
        mut positions: Vec<u32>,
        mut candidates: Vec<AdmissionCandidate>,
        version: u64,
        changes: u64,
    ) {
        self.version = version;
        self.decided_at = (self.positions.is_empty() || self.decided_at == Some(changes)).then_some(changes);
        if self.positions.is_empty() {
            (self.positions, self.candidates) = (positions, candidates);
        } else {
            self.positions.append(&mut positions);
            self.candidates.append(&mut candidates);
        }
    }

    /// Whether they would still be refused, because the admitter has not changed since.
    pub(super) fn still_wait(&self, changes: u64) -> bool {
        self.positions.is_empty() || self.decided_at == Some(changes)
    }
}

/// The ids of a plan that get no row.
#[derive(Debug)]
pub(super) struct NotAdmittedIds {
    /// What they asked for.
    pub(super) candidates: Vec<AdmissionCandidate>,
    /// The table's version when this was decided.
    pub(super) version: u64,
}
