//! Room below the cap: how a cap is divided ([`geometry`]), who holds its bytes ([`space`]), what compaction takes next
//! ([`compaction`]), and what whoever waits for room does next ([`waiting`]).
//!
//! The two decisions are functions of plain numbers. They change nothing and know no lock. `work` takes the numbers under the tier's
//! lock and does what was decided. docs/design-ssd.md, *Room*, argues from their properties that every row of the capacity fits.

pub(crate) mod compaction;
pub(crate) mod geometry;
pub(crate) mod space;
#[cfg(test)]
mod tests;
pub(crate) mod waiting;
