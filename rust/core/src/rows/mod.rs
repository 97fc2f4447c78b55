//! Rows: their memory layout, their initialization, and the arena that stores them.
//!
//! A row has a *vector part* (`D` weights, then each vector slot of `D`, all float32) and a *header* (id, metadata, and
//! the one scalar slot of rowwise optimizers). Every tier, staging buffer, record and checkpoint moves both together.

mod arena;
mod decay;
mod init;
mod layout;
mod list;
pub(crate) mod philox;
mod precision;
mod quantile;

pub use arena::RowArena;
pub use decay::{ScoreDecay, ScoreDecayTo};
pub use init::{InitializerSpec, RowInitializer};
pub use layout::{RowAddress, RowHeader, RowLayout, RowMut, RowRef};
pub use list::RowList;
pub use precision::WeightPrecision;
