//! Reads a file of admission counts.

use std::sync::Arc;

use super::counts::CountsSink;
use super::format::ColumnField;
use super::input::GroupReader;
use super::staged::StagedColumns;
use crate::error::Result;
use crate::io::{BufPool, IoEngine};
use crate::lifecycle::{BucketCounts, CountedId};
use crate::memory;
use crate::types::{BucketMapper, Id};

/// A counts file with checked header and bucket offsets.
#[derive(Debug)]
pub(super) struct CountsReader {
    group: GroupReader,
    /// First bucket of the shard that the file belongs to.
    first: u32,
    clicks: bool,
}

impl CountsReader {
    /// Creates a reader for a file of a shard whose buckets start at `first`. `clicks` is true if it has counts of
    /// clicks.
    pub(super) fn new(group: GroupReader, first: u32, clicks: bool) -> Self {
        Self { group, first, clicks }
    }

    /// True if it has counts of clicks.
    pub(super) fn has_clicks(&self) -> bool {
        self.clicks
    }

    /// Number of ids in the requested buckets.
    pub(super) fn ids(&self) -> u64 {
        self.group.rows.len() as u64
    }

    /// Reads and verifies the counts of the requested buckets, and passes those of each bucket to `sink`.
    pub(super) fn read(&self, engine: &dyn IoEngine, bucketing: BucketMapper, sink: &mut CountsSink<'_>) -> Result<()> {
        let generations = self.generations(engine)?;
        let staged = self.group.stage(engine, &Arc::new(BufPool::new(0, 0)), bucketing)?;
        let mut ids = self.pending(&staged).peekable();
        for (bucket, &generation) in self.group.buckets.clone().zip(&generations) {
            let mut pending = Vec::new();
            while let Some(each) = ids.next_if(|each| bucketing.of(each.id) == bucket) {
                pending.push(each);
            }
            if generation > 0 || !pending.is_empty() {
                sink(BucketCounts { bucket, generation, ids: pending })?;
            }
        }
        Ok(())
    }

    /// Reads the generation of each requested bucket.
    fn generations(&self, engine: &dyn IoEngine) -> Result<Vec<u32>> {
        let group = &self.group;
        let (first, last) = (group.buckets.start - self.first, group.buckets.end - self.first);
        let mut found = memory::zeros("read the generations of buckets", (last - first) as usize)?;
        let column = group.layout.column(ColumnField::Generation);
        group.for_each_window(&group.reopen(engine)?, column, |begin, values: &[u32]| {
            let of_window = values.iter().zip(begin as u32..);
            let wanted = of_window.filter(|(_, bucket)| (first..last).contains(bucket));
            wanted.for_each(|(&value, bucket)| found[(bucket - first) as usize] = value);
            Ok(())
        })?;
        Ok(found)
    }

    fn pending<'a>(&self, staged: &'a StagedColumns<'_>) -> impl Iterator<Item = CountedId> + use<'a> {
        let clicks: &[u32] = if self.clicks { staged.rows(ColumnField::Clicks) } else { &[] };
        let (ids, shows, ages): (&[Id], &[u32], &[u32]) =
            (staged.rows(ColumnField::Id), staged.rows(ColumnField::Shows), staged.rows(ColumnField::Age));
        (0..ids.len()).map(move |at| CountedId {
            id: ids[at],
            shows: shows[at],
            clicks: clicks.get(at).copied().unwrap_or(0),
            is_older: ages[at] != 0,
        })
    }
}
