//! The way back into memory: opening a directory, resuming a published state, reading segments of a linked checkpoint.

pub(crate) mod open;
pub(crate) mod restore;
pub(crate) mod segment_files;
pub(crate) mod shards;
