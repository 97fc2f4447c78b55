//! The dense state of a checkpoint: tensors and objects outside the tables, stored as bytes that only the caller
//! interprets.

pub(crate) mod reader;
pub(crate) mod verify;
pub(crate) mod writer;
