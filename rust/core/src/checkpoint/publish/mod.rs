//! Publishing a checkpoint as the newest one, and removing older ones.

pub(crate) mod retention;
pub(crate) mod save;
