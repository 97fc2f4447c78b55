//! Opens a directory, resumes a published state, and reads segments of a linked checkpoint.

pub(crate) mod open;
pub(crate) mod restore;
pub(crate) mod segment_files;
pub(crate) mod shards;
