//! Segments: their write buffers, their files, open and sealed, and their footers.

pub(crate) mod buffer;
pub(crate) mod file;
pub(crate) mod footers;
pub(crate) mod home;
pub(crate) mod open;
pub(crate) mod part;
pub(crate) mod unwritten;
