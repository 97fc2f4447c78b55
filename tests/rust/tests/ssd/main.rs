//! Tests of the SSD tier by its public interface.
#![allow(clippy::unwrap_used)]

mod counts;
mod damage;
mod heads;
mod held;
mod kill;
mod modified;
mod panic;
mod reopen;
mod resume_errors;
mod reuse;
mod room;
