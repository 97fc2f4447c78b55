//! Files that a block-level save writes: many blocks that grow side by side.

pub(crate) mod writer;
