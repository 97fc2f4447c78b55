//! What makes a checkpoint the newest one, and what becomes of those before.

pub(crate) mod retention;
pub(crate) mod save;
