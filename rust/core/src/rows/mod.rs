//! Rows: their memory layout, their initialization, and the arena that stores them.
//!
//! A row has a *vector part* (`D` weights, then each vector slot of `D`, all float32) and a *header* (id, metadata, and
//! the one scalar slot of rowwise optimizers). Every tier, staging buffer, record and checkpoint moves both together.

mod arena;
mod initializer;
mod layout;
pub(crate) mod philox;
mod precision;
mod score_decay;

pub use arena::{RowArena, RowList};
pub use initializer::{InitializerSpec, RowInitializer};
pub use layout::{RowAddress, RowHeader, RowLayout, RowMut, RowRef};
pub use precision::WeightPrecision;
pub use score_decay::{ScoreDecay, ScoreDecayTo};
