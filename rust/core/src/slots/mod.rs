//! Slots of a tier in RAM.

mod pins;

pub(crate) use pins::PinTable;
