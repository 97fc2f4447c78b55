//! The operations of a tier, one file each. They execute the decisions of `space`.

pub(crate) mod append;
pub(crate) mod commit;
pub(crate) mod compaction;
pub(crate) mod cursor;
pub(crate) mod evict;
pub(crate) mod expire;
pub(crate) mod fetch;
pub(crate) mod make_space;
pub(crate) mod scan;
