//! What another store is given to do beside a bench of the SSD tier.

use serde::{Deserialize, Serialize};

/// A workload of rows that are 64 floats, rowwise Adagrad's scalar and 20 bytes of metadata, under an id.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum StoreWork {
    /// Load the ids `scattered_id(0..rows)` and compact; a round fetches batches of the bench's data, with nothing of the rows in
    /// RAM when a batch begins: they are what a tier in RAM has missed.
    Fetch {
        /// Rows loaded.
        rows: u64,
        /// What the store may hold in RAM.
        ram_bytes: u64,
    },
    /// Load the ids `scattered_id(0..rows)` and compact; a round rewrites rows drawn uniformly for `seconds`, a batch at a time, then
    /// waits until the store has moved all of them to where they stay.
    Rewrite {
        /// Rows loaded.
        rows: u64,
        /// What the store may hold in RAM.
        ram_bytes: u64,
        /// Rows handed over at a time.
        batch: usize,
        /// Length of the writing part of a round.
        seconds: f64,
    },
}

impl StoreWork {
    /// Rows loaded.
    pub fn rows(&self) -> u64 {
        match self {
            Self::Fetch { rows, .. } | Self::Rewrite { rows, .. } => *rows,
        }
    }
}
