//! The SSD tier through its public surface.
#![allow(clippy::unwrap_used)]

mod damage;
mod kill;
mod made;
mod panic;
mod reopen;
mod room;
