//! Disk space below the cap: segment sizing ([`geometry`]), accounting of bytes ([`space`]), choice of the next segment
//! to compact ([`compaction`]), and the next step of a writer that waits for free space ([`waiting`]).
//!
//! The two decisions are functions of plain numbers. They change nothing and take no lock. `work` reads the numbers
//! under the tier's lock and executes the decision. docs/design-ssd.md, *Free space*, derives from their properties
//! that every row of the capacity fits.

pub(crate) mod compaction;
pub(crate) mod geometry;
pub(crate) mod space;
#[cfg(test)]
mod tests;
pub(crate) mod waiting;
