//! The entire cache is stopped, or fails, at every operation on its files. It has tables of several tiers that are
//! flushed under common commit ids, also below several commit directories, and checkpoints that are saved from them.
#![allow(clippy::unwrap_used)]

mod commit_directories;
mod errors;
mod kill;
mod stop;
mod workload;
