//! Slots of a tier in RAM.

mod pins;

pub use pins::PinTable;
