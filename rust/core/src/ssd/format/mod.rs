//! The bytes on disk: records, the frame of a segment's file, and the file of a published state. This module opens no
//! files (except to read and write a state) and does not depend on tiers.

mod checksums;
pub(crate) mod end;
pub(crate) mod footer;
pub(crate) mod head;
pub(crate) mod names;
pub(crate) mod record;
pub(crate) mod segment;
pub(crate) mod state;
mod words;
