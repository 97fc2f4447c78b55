//! The I/O engines: their common behaviour, injected faults, and panics.

mod engines;
mod faults;
mod panics;
