//! The bytes on disk: records, what frames them in a segment's file, and the file of a published state. Nothing here opens a file
//! (but to read and write a state) or knows a tier.

mod checksums;
pub(crate) mod end;
pub(crate) mod footer;
pub(crate) mod head;
pub(crate) mod names;
pub(crate) mod record;
pub(crate) mod segment;
pub(crate) mod state;
mod words;
