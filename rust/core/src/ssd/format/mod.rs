//! The bytes on disk: records, the frame of a segment's file, and the file of a published state. This module opens no
//! files (except to read and write a state) and does not depend on tiers.

pub(crate) mod footer;
pub(crate) mod record;
pub(crate) mod segment_file;
pub(crate) mod state_file;
