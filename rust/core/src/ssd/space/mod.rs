//! Disk space below the cap: segment sizing ([`sizing`]), accounting of bytes ([`reservation`]), choice of the next
//! segment to compact ([`compaction_choice`]), and the next step of a writer that waits for free space ([`wait`]).
//!
//! The two decisions are functions of plain numbers. They change nothing and take no lock. `ops` reads the numbers under
//! the tier's lock and executes the decision. docs/design-ssd.md, *Free space*, derives from their properties that every
//! row of the capacity fits.

pub(crate) mod compaction_choice;
pub(crate) mod reservation;
pub(crate) mod sizing;
#[cfg(test)]
mod tests;
pub(crate) mod wait;
