//! Tensors and objects beside the tables: bytes of any meaning.

pub(crate) mod reader;
pub(crate) mod verify;
pub(crate) mod writer;
