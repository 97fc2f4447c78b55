//! Slots of a tier in RAM.
