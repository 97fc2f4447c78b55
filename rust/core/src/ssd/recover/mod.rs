//! Opens a directory, resumes a published state, and reads segments of a linked checkpoint.

pub(crate) mod linked_segments;
pub(crate) mod open;
pub(crate) mod restore;
