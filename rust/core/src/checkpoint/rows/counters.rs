//! Writes and reads admission counts of pending ids, and merges the counts of a chain of checkpoints.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::file_writer::{DataFileWriter, FileContent};
use super::format::{ColumnField, GROUP_BYTES, GroupLayout};
use super::input::{GroupReader, StagedColumns};
use super::writer::RankWriter;
use crate::checkpoint::manifest::counts_file;
use crate::checkpoint::manifest::manifests::{CountsShare, GroupShape};
use crate::error::Result;
use crate::io::{BufPool, IoEngine};
use crate::lifecycle::{BucketCounts, CountedId};
use crate::runtime::memory;
use crate::types::{BucketMapper, Id};

/// Bytes per id in a file.
const ID_BYTES: usize = size_of::<Id>() + 3 * size_of::<u32>();
/// Maximum number of ids per group.
const IDS_PER_GROUP: usize = GROUP_BYTES / ID_BYTES / 2;

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
        let share = self.last_table();
        let (spec, buckets) = (share.spec.clone(), share.buckets());
        let content = FileContent {
            spec: &spec,
            buckets: buckets.clone(),
            columns: 0,
            layout: Box::new(|shape| GroupLayout::of_counts(clicks, shape)),
            largest: GroupShape {
                rows: IDS_PER_GROUP,
                tombstones: 0,
                bucket_begin: buckets.start,
                bucket_end: buckets.end,
                generations: generations.len(),
            },
        };
        let mut files = self.small_files(content, counts_file);
        let (mut gathered, mut later): (Vec<(u32, CountedId)>, &[u32]) = (Vec::new(), generations);
        give(&mut |BucketCounts { bucket, ids: pending, .. }| {
            gathered.extend(pending.into_iter().map(|each| (bucket, each)));
            while gathered.len() >= IDS_PER_GROUP {
                let rest = gathered.split_off(IDS_PER_GROUP);
                push_counts(&mut files, buckets.start, std::mem::take(&mut later), &gathered)?;
                gathered = rest;
            }
            Ok(())
        })?;
        if !gathered.is_empty() || later.iter().any(|&generation| generation > 0) {
            push_counts(&mut files, buckets.start, later, &gathered)?;
        }
        let files = files.finish()?;
        self.last_table().counts = Some(CountsShare { clicks, files });
        Ok(())
    }
}

/// Writes a group of counts, of ids in file order, each with its bucket, of a rank whose first bucket is `first`.
fn push_counts(
    files: &mut DataFileWriter<'_>,
    first: u32,
    generations: &[u32],
    pending: &[(u32, CountedId)],
) -> Result<()> {
    let bucket_begin = pending.first().map_or(first, |(bucket, _)| *bucket);
    let shape = GroupShape {
        rows: pending.len(),
        tombstones: 0,
        bucket_begin,
        bucket_end: pending.last().map_or(bucket_begin, |(bucket, _)| bucket + 1),
        generations: generations.len(),
    };
    let fill_u32 = |column: &mut [u8], of: fn(&CountedId) -> u32| {
        let values = column.chunks_exact_mut(size_of::<u32>()).zip(pending);
        values.for_each(|(to, (_, each))| to.copy_from_slice(&of(each).to_le_bytes()));
    };
    // A full group is one of many.
    let expected = if pending.len() == IDS_PER_GROUP { usize::MAX } else { 1 };
    files.push_columns(shape, expected, |layout, field, column| match field {
        ColumnField::Id => {
            let ids = column.chunks_exact_mut(size_of::<Id>()).zip(pending);
            ids.for_each(|(to, (_, each))| to.copy_from_slice(&each.id.to_le_bytes()));
        }
        ColumnField::BucketOffsets => {
            let first_row = |bucket| pending.partition_point(|(of, _)| *of < bucket) as u32;
            let offsets = column.chunks_exact_mut(size_of::<u32>()).zip(layout.offsets.buckets());
            offsets.for_each(|(to, bucket)| to.copy_from_slice(&first_row(bucket).to_le_bytes()));
        }
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

/// Groups of counts with checked headers and bucket offsets, of one rank.
#[derive(Debug)]
pub(super) struct CountsReader {
    /// The groups with ids of the requested buckets, and the first one.
    pub(super) groups: Vec<GroupReader>,
    /// First bucket of the rank.
    pub(super) first: u32,
    /// The requested buckets of the rank.
    pub(super) buckets: Range<u32>,
    /// True if there are counts of clicks.
    pub(super) clicks: bool,
}

impl CountsReader {
    /// Number of ids with counts.
    pub(super) fn ids(&self) -> u64 {
        self.groups.iter().map(|group| group.rows.len() as u64).sum()
    }

    /// Reads and verifies the counts of the requested buckets, and passes those of each bucket to `sink`.
    pub(super) fn read(&self, engine: &dyn IoEngine, bucketing: BucketMapper, sink: &mut CountsSink<'_>) -> Result<()> {
        let generations = self.generations(engine)?;
        let generation = |bucket: u32| generations[(bucket - self.buckets.start) as usize];
        let without_ids = |bucket: u32| BucketCounts { bucket, generation: generation(bucket), ids: Vec::new() };
        let mut next = self.buckets.start;
        for group in &self.groups {
            let staged = group.stage(engine, &Arc::new(BufPool::new(0, 0)), bucketing)?;
            let mut ids = self.pending(&staged).peekable();
            while let Some(bucket) = ids.peek().map(|each| bucketing.of(each.id)) {
                let counted = (next..bucket).filter(|&bucket| generation(bucket) > 0);
                counted.map(without_ids).try_for_each(&mut *sink)?;
                let pending = std::iter::from_fn(|| ids.next_if(|each| bucketing.of(each.id) == bucket)).collect();
                sink(BucketCounts { bucket, generation: generation(bucket), ids: pending })?;
                next = bucket + 1;
            }
        }
        let counted = (next..self.buckets.end).filter(|&bucket| generation(bucket) > 0);
        counted.map(without_ids).try_for_each(&mut *sink)
    }

    /// Reads the generation of each requested bucket.
    fn generations(&self, engine: &dyn IoEngine) -> Result<Vec<u32>> {
        let (first, last) = (self.buckets.start - self.first, self.buckets.end - self.first);
        let mut found = memory::zeros("read the generations of buckets", (last - first) as usize)?;
        let Some(group) = self.groups.first() else { return Ok(found) };
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
