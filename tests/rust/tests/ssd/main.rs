//! The SSD tier through its public surface.
#![allow(clippy::unwrap_used)]

mod counts;
mod damage;
mod kill;
mod modified;
mod panic;
mod reopen;
mod reuse;
mod room;
