//! The counts of ids that wait for rows: how they are written, and how those of a chain of checkpoints are put together.

use std::collections::BTreeMap;
use std::ops::Range;

use super::format::{ColumnField, FileLayout, GROUP_BYTES};
use super::image::image_of;
use super::writer::RankWriter;
use crate::checkpoint::manifest::manifests::{CountsShare, DataFile, DataShape, TableSpec};
use crate::error::{Error, Kind, Result};
use crate::io::AlignedBuf;
use crate::lifecycle::{BucketCounts, CountedId};
use crate::types::Id;

/// Bytes that an id takes in a file.
const ID_BYTES: usize = size_of::<Id>() + 3 * size_of::<u32>();
/// About how many ids a file has at most.
const IDS_PER_FILE: usize = GROUP_BYTES / ID_BYTES / 2;

/// Takes the counts of buckets.
pub(crate) type CountsSink<'a> = dyn FnMut(BucketCounts) -> Result<()> + 'a;

/// The counts of a table's share that are to be written.
pub(crate) struct CountsSource<'a> {
    /// Whether there are counts of clicks.
    pub(crate) clicks: bool,
    /// How many generations of each bucket of the share have ended.
    pub(crate) generations: &'a [u32],
    /// Hands the counts of the buckets over, buckets rising. Those that are left out have none.
    pub(crate) for_each_bucket: &'a mut dyn FnMut(&mut CountsSink<'_>) -> Result<()>,
}

impl RankWriter {
    /// Write the counts of the table that was written last, unless counts are left out.
    pub(crate) fn write_counts(&mut self, counts: CountsSource<'_>) -> Result<()> {
        if !self.writes_counts() {
            return Ok(());
        }
        let CountsSource { clicks, generations, for_each_bucket: give } = counts;
        self.set_counts(CountsShare { clicks, files: Vec::new() });
        let mut gathered: Vec<(u32, CountedId)> = Vec::new();
        give(&mut |BucketCounts { bucket, ids: pending, .. }| {
            gathered.extend(pending.into_iter().map(|each| (bucket, each)));
            while gathered.len() >= IDS_PER_FILE {
                let rest = gathered.split_off(IDS_PER_FILE);
                self.append_counts(clicks, generations, &gathered)?;
                gathered = rest;
            }
            Ok(())
        })?;
        self.append_counts(clicks, generations, &gathered)
    }

    fn append_counts(&mut self, clicks: bool, generations: &[u32], pending: &[(u32, CountedId)]) -> Result<()> {
        self.append_counts_file(|spec, buckets| counts_file(spec, buckets, clicks, generations, pending))
    }
}

/// The image of a file with the counts of ids that are in the order of the file, each with its bucket.
fn counts_file(
    spec: &TableSpec,
    buckets: &Range<u32>,
    clicks: bool,
    generations: &[u32],
    pending: &[(u32, CountedId)],
) -> Result<(AlignedBuf, DataFile)> {
    let shape = DataShape { rows: pending.len(), buckets: buckets.len(), tombstones: 0 };
    let layout = FileLayout::of_counts(clicks, shape)
        .ok_or_else(|| Error::new(Kind::Input, "the size of the counts overflows"))?;
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

/// The counts of a chain of checkpoints, put together from the newest to the oldest.
#[derive(Debug, Default)]
pub(crate) struct MergedCounts {
    buckets: BTreeMap<u32, BucketCounts>,
}

impl MergedCounts {
    /// Add the counts that the next older checkpoint has of a bucket: of those ids of which `is_known` says that no newer checkpoint has a
    /// row, a tombstone or a count.
    pub(crate) fn add(&mut self, mut older: BucketCounts, is_known: impl Fn(Id) -> bool) {
        older.ids.retain(|each| !is_known(each.id));
        match self.buckets.get_mut(&older.bucket) {
            None => {
                self.buckets.insert(older.bucket, older);
            }
            Some(newer) => newer.ids.append(&mut older.aged_to(newer.generation).ids),
        }
    }

    /// How many generations of a bucket have ended in the newest checkpoint that has its counts.
    pub(crate) fn generation(&self, bucket: u32) -> u32 {
        self.buckets.get(&bucket).map_or(0, |counts| counts.generation)
    }

    /// Hand the counts over, buckets rising.
    pub(crate) fn hand_over(self, sink: &mut CountsSink<'_>) -> Result<()> {
        self.buckets.into_values().try_for_each(|mut counts| {
            counts.ids.sort_unstable_by_key(|each| each.id as u64);
            sink(counts)
        })
    }
}
