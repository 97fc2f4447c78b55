//! What is made of whole checkpoints: chains read, merged and divided anew, and saves beside training.

pub(crate) mod beside;
pub(crate) mod chain;
pub(crate) mod check;
pub(crate) mod compact;
pub(crate) mod part;
pub(crate) mod reshard;
pub(crate) mod tables;
