//! Sources of the rows that a save writes.

use crate::cache::{GroupGatherer, GroupSink};
use crate::error::Result;

/// Consumes rows: headers `[n]` and their vector parts `[n × V]`, contiguous.
pub type RowSink<'a> = dyn FnMut(&[crate::rows::RowHeader], &[f32]) -> crate::Result<()> + 'a;

/// A source of the rows of a table.
pub trait RowSource {
    /// Passes every row to `sink` once, in any order, in chunks of any size. Stops at the first error and returns it.
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> Result<()>;

    /// Passes the rows on in groups, each of which becomes a file. A source with rows in memory passes them without
    /// copying. The chunks of other sources are gathered into groups.
    fn for_each_group(&mut self, sink: &mut dyn GroupSink) -> Result<()> {
        let mut gather = GroupGatherer::new(sink);
        self.for_each_chunk(&mut |headers, vectors| gather.add(headers, vectors))?;
        gather.finish()
    }
}

impl<F: FnMut(&mut RowSink<'_>) -> Result<()>> RowSource for F {
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> Result<()> {
        self(sink)
    }
}
