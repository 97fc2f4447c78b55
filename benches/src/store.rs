//! The work of another store that is compared with a bench of the SSD tier.

use serde::{Deserialize, Serialize};

/// A workload on rows of 64 float32, rowwise Adagrad's scalar and 20 bytes of metadata, each under an id.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum StoreWork {
    /// Load the ids `scattered_id(0..rows)` and compact. A round fetches batches of the bench's data. No rows are in
    /// RAM when a batch starts, because they represent the misses of a tier in RAM.
    Fetch {
        /// The number of rows to load.
        rows: u64,
        /// The bytes of RAM that the store may use.
        ram_bytes: u64,
    },
    /// Load the ids `scattered_id(0..rows)` and compact. A round rewrites uniformly drawn rows for `seconds`, a batch
    /// at a time. It then waits until the store has moved all of them to their final location.
    Rewrite {
        /// The number of rows to load.
        rows: u64,
        /// The bytes of RAM that the store may use.
        ram_bytes: u64,
        /// The number of rows per write.
        batch: usize,
        /// The seconds for which a round writes.
        seconds: f64,
    },
    /// Load the ids `scattered_id(0..rows)`, each with only the weights of `served_row` at version 0. A round looks up
    /// the batches of the bench's data, one after the other on one thread. Everything is in RAM.
    Lookup {
        /// The number of rows to load.
        rows: u64,
    },
}

impl StoreWork {
    /// The number of rows to load.
    pub fn rows(&self) -> u64 {
        match self {
            Self::Fetch { rows, .. } | Self::Rewrite { rows, .. } | Self::Lookup { rows } => *rows,
        }
    }
}
