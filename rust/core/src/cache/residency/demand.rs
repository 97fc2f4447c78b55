//! What the ids of a plan ask for, and which of them got nothing.

use crate::lifecycle::admission::Candidate;
use crate::types::Id;

/// What the ids of a training plan ask for, of a table that refuses some.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    /// How often each distinct id of the plan occurs: `[U]`.
    pub(crate) occurrences: Vec<u32>,
    /// The clicks of each distinct id: `[U]`, or empty for none.
    pub(crate) clicks: Vec<u32>,
}

impl Demand {
    /// What the id at a position asks for.
    pub(super) fn of(&self, ids: &[Id], position: u32) -> Candidate {
        let at = position as usize;
        let clicks = self.clicks.get(at).copied().unwrap_or(0);
        Candidate { id: ids[at], occurrences: self.occurrences[at], clicks }
    }
}

/// The ids of a plan that get no row.
#[derive(Debug)]
pub(super) struct Refused {
    /// What they asked for.
    pub(super) candidates: Vec<Candidate>,
    /// The table's version when this was decided.
    pub(super) version: u64,
}
