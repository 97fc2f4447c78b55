//! The limit of the load bench: a plain loop.

use embcache::rows::RowHeader;
use embcache::types::Id;

use crate::{DIM, FreshRows, PlainIndex, huge_pages};

/// The entry of an id is prefetched this many ids early.
const AHEAD: usize = 32;

/// Rows of [`DIM`] float32 with rowwise Adagrad's scalar, in memory in the column layout of a file.
#[derive(Debug)]
pub struct PlainLoad {
    ids: Vec<Id>,
    last_steps: Vec<u64>,
    counts: Vec<u32>,
    scores: Vec<f32>,
    scalars: Vec<f32>,
    modified_epochs: Vec<u32>,
    weights: Vec<[f32; DIM]>,
}

impl PlainLoad {
    /// Creates a row for each of `ids`.
    pub fn new(ids: impl Iterator<Item = Id>) -> Self {
        let ids: Vec<Id> = ids.collect();
        let rows = ids.len();
        Self {
            last_steps: vec![7; rows],
            counts: vec![1; rows],
            scores: vec![0.5; rows],
            scalars: vec![0.25; rows],
            modified_epochs: vec![1; rows],
            weights: vec![[1.0; DIM]; rows],
            ids,
        }
    }

    /// Copies the rows to fresh memory, and their ids to a new index. Returns the number of rows.
    pub fn load(&self) -> usize {
        let mut index = PlainIndex::with_room(self.ids.len());
        let mut rows = FreshRows::new(self.ids.len());
        let mut headers = Vec::with_capacity(self.ids.len());
        huge_pages(headers.spare_capacity_mut());
        for (at, &id) in self.ids.iter().enumerate() {
            if let Some(&later) = self.ids.get(at + AHEAD) {
                index.prefetch(later);
            }
            index.put(id, at as u64 + 1);
            rows.row(at).copy_from_slice(&self.weights[at]);
            headers.push(RowHeader {
                id,
                last_step: self.last_steps[at],
                count: self.counts[at],
                score: self.scores[at],
                scalar: self.scalars[at],
                modified_epoch: self.modified_epochs[at],
            });
        }
        std::hint::black_box((&index, &mut rows, &headers));
        headers.len()
    }
}
