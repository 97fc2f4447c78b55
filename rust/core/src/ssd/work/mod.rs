//! The operations of a tier, one file each. They execute the decisions of `room`.

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
