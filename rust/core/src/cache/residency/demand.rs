//! Inputs of the admission rule for the ids of a plan, and the ids that were not admitted.

use crate::lifecycle::admission::AdmissionCandidate;
use crate::types::Id;

/// Inputs of the admission rule for the ids of a training plan.
#[derive(Debug, Default)]
pub(crate) struct PlanDemand {
    /// Number of occurrences of each distinct id of the plan: `[U]`.
    pub(crate) occurrences: Vec<u32>,
    /// Clicks of each distinct id: `[U]`, or empty if there are none.
    pub(crate) clicks: Vec<u32>,
}

impl PlanDemand {
    /// The admission candidate of the id at a position.
    pub(super) fn candidate(&self, ids: &[Id], position: u32) -> AdmissionCandidate {
        let at = position as usize;
        let clicks = self.clicks.get(at).copied().unwrap_or(0);
        AdmissionCandidate::new(ids[at], self.occurrences[at], clicks)
    }
}

/// Ids without a row that were predicted not to be admitted, so no slot was reserved for them.
#[derive(Debug, Default)]
pub(super) struct WaitingIds {
    /// Positions in the plan's distinct ids: `[n]`.
    pub(super) positions: Vec<u32>,
    /// Their admission candidates: `[n]`.
    pub(super) candidates: Vec<AdmissionCandidate>,
    /// The table's version at the prediction.
    pub(super) version: u64,
    /// The admitter's change number at the prediction; `None` if the ids were predicted at different change numbers.
    decided_at: Option<u64>,
}

impl WaitingIds {
    /// Adds ids that were predicted not to be admitted at table version `version` and admitter change number `changes`.
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

    /// True if the prediction still holds because the admitter has not changed since.
    pub(super) fn still_wait(&self, changes: u64) -> bool {
        self.positions.is_empty() || self.decided_at == Some(changes)
    }
}

/// The ids of a plan that are not admitted.
#[derive(Debug)]
pub(super) struct NotAdmittedIds {
    pub(super) candidates: Vec<AdmissionCandidate>,
    /// The table's version at the decision.
    pub(super) version: u64,
}
