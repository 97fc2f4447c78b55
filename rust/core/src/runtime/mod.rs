//! Services of the process: memory, threads, signals, forks and instruction sets.

pub mod budget;
pub mod call_context;
pub(crate) mod mapping;
pub mod memory;
pub(crate) mod process;
pub mod signals;
pub(crate) mod simd;
pub(crate) mod sync;
