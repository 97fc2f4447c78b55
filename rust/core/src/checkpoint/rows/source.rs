//! The rows that a save writes, wherever they come from.

use crate::cache::{GroupGatherer, GroupSink};
use crate::error::Result;

/// Takes rows: headers `[n]` and their vector parts `[n × V]`, one behind the other.
pub type RowSink<'a> = dyn FnMut(&[crate::rows::RowHeader], &[f32]) -> crate::Result<()> + 'a;

/// Gives the rows of a table.
pub trait RowSource {
    /// Hand every row to `sink` once, in any order, in chunks of any size; stop at the first error and return it.
    fn for_each_chunk(&mut self, sink: &mut RowSink<'_>) -> Result<()>;

    /// Hand the rows over in groups, each of which becomes a file. A source whose rows lie in memory hands them over where they lie. The
    /// chunks of other sources are gathered into groups.
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
