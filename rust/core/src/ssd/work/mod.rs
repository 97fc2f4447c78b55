//! What is done with a tier, one file for each operation. The workers do what the decisions in `room` chose.

pub(crate) mod append;
pub(crate) mod bury;
pub(crate) mod by_entry;
pub(crate) mod compact;
pub(crate) mod copies;
pub(crate) mod evict;
pub(crate) mod fetch;
pub(crate) mod held;
pub(crate) mod make_room;
pub(crate) mod memory;
pub(crate) mod moment;
pub(crate) mod publish;
pub(crate) mod remove;
pub(crate) mod scan;
pub(crate) mod states;
pub(crate) mod walk;
