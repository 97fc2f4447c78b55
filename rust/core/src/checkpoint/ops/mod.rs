//! Operations on entire checkpoints: reading, merging and resharding chains, and asynchronous saves.

pub(crate) mod beside;
pub(crate) mod chain;
pub(crate) mod check;
pub(crate) mod compact;
pub(crate) mod copy;
pub(crate) mod life;
pub(crate) mod part;
pub(crate) mod reshard;
pub(crate) mod serving;
pub(crate) mod tables;
