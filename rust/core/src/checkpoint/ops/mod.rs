//! Operations on entire checkpoints: reading, merging and resharding chains, and asynchronous saves.

pub(crate) mod async_save;
pub(crate) mod chain;
pub(crate) mod copy;
pub(crate) mod rewrite;
pub(crate) mod row_history;
pub(crate) mod tables;
