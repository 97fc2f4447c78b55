//! Engines for tests and benchmarks: files in memory that survive simulated crashes, and injected faults.

mod fault;
mod memory_fs;

pub use fault::{FaultEngine, IoFault, IoOperation};
pub use memory_fs::MemoryEngine;
