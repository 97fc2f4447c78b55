//! Tests of the SSD tier by its public interface.
#![allow(clippy::unwrap_used)]

mod capacity;
mod corruption;
mod crash;
mod directory_lock;
mod file_reuse;
mod kill;
mod modified_rows;
mod panic;
mod record_counts;
mod record_heads;
mod reopen;
mod resume_errors;
