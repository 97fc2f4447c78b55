//! Publishes a checkpoint as the latest one, and removes older ones.

pub(crate) mod retention;
pub(crate) mod save;
