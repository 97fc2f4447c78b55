//! Writes and reads admission counts of pending ids, and merges the counts of a chain of checkpoints.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::format::{ColumnField, FileLayout, GROUP_BYTES, image_of};
use super::input::{GroupReader, StagedColumns};
use super::writer::RankWriter;
use crate::checkpoint::manifest::manifests::{CountsShare, DataFile, DataShape};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::error::{Kind, Result};
use crate::io::{AlignedBuf, BufPool, IoEngine};
use crate::lifecycle::{BucketCounts, CountedId};
use crate::runtime::memory;
use crate::types::{BucketMapper, Id};

/// Bytes per id in a file.
const ID_BYTES: usize = size_of::<Id>() + 3 * size_of::<u32>();
/// Approximate maximum number of ids per file.
const IDS_PER_FILE: usize = GROUP_BYTES / ID_BYTES / 2;

/// Consumes the counts of buckets.
pub(crate) type CountsSink<'a> = dyn FnMut(BucketCounts) -> Result<()> + 'a;

/// The admission counts of a table shard to write.
pub(crate) struct CountsSource<'a> {
    /// True if clicks are counted too.
    pub(crate) clicks: bool,
    /// Generation of each bucket of the shard.
    pub(crate) generations: &'a [u32],
    /// Passes the counts of the buckets on, in ascending bucket order. Omitted buckets have no counts.
    pub(crate) for_each_bucket: &'a mut dyn FnMut(&mut CountsSink<'_>) -> Result<()>,
}

impl RankWriter {
    /// Writes the counts of the table that was written last, unless counts are omitted.
    pub(crate) fn write_counts(&mut self, counts: CountsSource<'_>) -> Result<()> {
        if !self.counts {
            return Ok(());
        }
        let CountsSource { clicks, generations, for_each_bucket: give } = counts;
        self.last_table().counts = Some(CountsShare { clicks, files: Vec::new() });
        let mut gathered: Vec<(u32, CountedId)> = Vec::new();
        give(&mut |BucketCounts { bucket, ids: pending, .. }| {
            gathered.extend(pending.into_iter().map(|each| (bucket, each)));
            while gathered.len() >= IDS_PER_FILE {
                let rest = gathered.split_off(IDS_PER_FILE);
                self.append_file(|spec, buckets| counts_file(spec, buckets, clicks, generations, &gathered))?;
                gathered = rest;
            }
            Ok(())
        })?;
        self.append_file(|spec, buckets| counts_file(spec, buckets, clicks, generations, &gathered))
    }
}

/// Builds a counts file from ids in file order, each with its bucket.
fn counts_file(
    spec: &TableSpec,
    buckets: &Range<u32>,
    clicks: bool,
    generations: &[u32],
    pending: &[(u32, CountedId)],
) -> Result<(AlignedBuf, DataFile)> {
    let shape = DataShape { rows: pending.len(), buckets: buckets.len(), tombstones: 0 };
    let layout =
        FileLayout::of_counts(clicks, shape).ok_or_else(|| Kind::Input.error("the size of the counts overflows"))?;
    let starts: Vec<i64> =
        (buckets.start..=buckets.end).map(|bucket| pending.partition_point(|(of, _)| *of < bucket) as i64).collect();
    let fill_u32 = |column: &mut [u8], of: fn(&CountedId) -> u32| {
        let values = column.chunks_exact_mut(size_of::<u32>()).zip(pending);
        values.for_each(|(to, (_, each))| to.copy_from_slice(&of(each).to_le_bytes()));
    };
    image_of((&layout, shape), &layout.header(spec, buckets), |field, column| match field {
        ColumnField::Id => {
            let ids = column.chunks_exact_mut(size_of::<Id>()).zip(pending);
            ids.for_each(|(to, (_, each))| to.copy_from_slice(&each.id.to_le_bytes()));
        }
        ColumnField::BucketOffsets => column.copy_from_slice(bytemuck::cast_slice(&starts)),
        ColumnField::Generation => column.copy_from_slice(bytemuck::cast_slice(generations)),
        ColumnField::Shows => fill_u32(column, |each| each.shows),
        ColumnField::Clicks => fill_u32(column, |each| each.clicks),
        ColumnField::Age => fill_u32(column, |each| u32::from(each.is_older)),
        _ => {}
    })
}

/// Counts of a chain of checkpoints, merged from the latest to the oldest.
#[derive(Debug, Default)]
pub(crate) struct MergedCounts {
    buckets: BTreeMap<u32, BucketCounts>,
}

impl MergedCounts {
    /// Adds the counts of a bucket in the next older checkpoint. Skips ids for which `is_known` returns true: a newer
    /// checkpoint has a row, a tombstone or a count of them.
    pub(crate) fn add(&mut self, mut older: BucketCounts, is_known: impl Fn(Id) -> bool) {
        older.ids.retain(|each| !is_known(each.id));
        match self.buckets.get_mut(&older.bucket) {
            None => {
                self.buckets.insert(older.bucket, older);
            }
            Some(newer) => newer.ids.append(&mut older.aged_to(newer.generation).ids),
        }
    }

    /// Generation of a bucket in the latest checkpoint that has its counts.
    pub(crate) fn generation(&self, bucket: u32) -> u32 {
        self.buckets.get(&bucket).map_or(0, |counts| counts.generation)
    }

    /// Returns the counts, in ascending bucket order.
    pub(crate) fn into_buckets(self) -> impl Iterator<Item = BucketCounts> {
        self.buckets.into_values().map(|mut counts| {
            counts.ids.sort_unstable_by_key(|each| each.id as u64);
            counts
        })
    }
}

/// A counts file with checked header and bucket offsets.
#[derive(Debug)]
pub(super) struct CountsReader {
    pub(super) group: GroupReader,
    /// First bucket of the shard that the file belongs to.
    pub(super) first: u32,
    /// True if it has counts of clicks.
    pub(super) clicks: bool,
}

impl CountsReader {
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
