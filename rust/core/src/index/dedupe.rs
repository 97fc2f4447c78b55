//! The distinct ids of a batch, and where each occurs.

use crate::types::Id;

/// A batch's ids without repetition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deduped {
    /// Distinct ids in the order of their first occurrence: `[U]`.
    pub unique: Vec<Id>,
    /// For each occurrence the position of its id in `unique`: `[N]`.
    pub inverse: Vec<u32>,
}

/// Distinct ids and inverse of `ids`: `[N]`, N below 2³².
pub fn dedupe(ids: &[Id]) -> Deduped {
    let mut seen = std::collections::HashMap::new();
    let mut unique = Vec::new();
    let inverse = ids
        .iter()
        .map(|&id| {
            *seen.entry(id).or_insert_with(|| {
                unique.push(id);
                unique.len() as u32 - 1
            })
        })
        .collect();
    Deduped { unique, inverse }
}
