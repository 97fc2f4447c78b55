//! The whole cache, stopped or failed at every operation on its files: tables of several tiers, flushed under common tokens, and
//! the checkpoints saved from them.
#![allow(clippy::unwrap_used)]

mod errors;
mod kill;
mod stop;
mod workload;
