//! The dense part of a checkpoint: tensors and objects beside the tables, as bytes whose meaning the caller knows.

pub(crate) mod reader;
pub(crate) mod verify;
pub(crate) mod writer;
