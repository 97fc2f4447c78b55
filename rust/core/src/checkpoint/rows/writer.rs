//! Writes a rank's part of a checkpoint: the rows of its tables, from any source, and the changes of a delta.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::file_writer::{DataFileWriter, FileContent};
use super::format::{ColumnField, GROUP_BYTES, GroupLayout, group_rows};
use super::group::GroupEncoder;
use crate::cache::{GroupGatherer, GroupSink};
use crate::checkpoint::chunked_file::{IMAGE_WRITERS, ImageWriter, for_each_piece};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::checkpoint::manifest::manifests::{ColumnEntry, DataFile, DenseShare, GroupShape, RankManifest, RankShare};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::checkpoint::manifest::{
    RankDigest, TOMBSTONES_PER_GROUP, checksum, data_file, rank_file, render, segment_file, table_dir,
};
use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, write_whole};
use crate::lifecycle::ExpirySweep;
use crate::rows::{RowHeader, RowLayout, RowList};
use crate::ssd::SegmentSet;
use crate::types::Id;

/// If an allocation for a group fails, groups are made smaller, down to this many rows.
const MIN_GROUP_ROWS: usize = 256;
/// Number of groups into which a known number of rows is divided, as long as none is smaller than `SMALL_GROUP_BYTES`.
const PARALLEL_GROUPS: usize = 6;
const SMALL_GROUP_BYTES: usize = 2 << 20;
/// Number of threads that make names durable. A file system often commits several names at the cost of one.
const SYNC_THREADS: usize = 4;

/// Consumes a chunk of rows: headers `[n]` and their vector parts `[n × V]`, contiguous.
pub type RowSink<'a> = dyn FnMut(&[RowHeader], &[f32]) -> Result<()> + 'a;

/// A source of rows in chunks: passes every row to the sink once, in any order, in chunks of any size. Stops at the
/// first error and returns it.
pub type RowChunks<'a> = dyn FnMut(&mut RowSink<'_>) -> Result<()> + 'a;

/// A source of rows in groups. Rows in memory are passed without copying.
type RowGroups<'a> = dyn FnMut(&mut dyn GroupSink) -> Result<()> + 'a;

/// The changes of one rank's shard of a table in a delta, other than modified rows.
#[derive(Clone, Copy, Debug)]
pub struct DeltaChanges<'a> {
    /// Ids removed since the parent, in any order. An id with a row in the delta was inserted again. Expired rows that
    /// were not modified since the parent may be omitted.
    pub tombstones: &'a [Id],
    /// The sweeps since the parent.
    pub sweeps: &'a [ExpirySweep],
    /// Number of rows of the entire shard, including unchanged ones.
    pub total_rows: u64,
}

/// Writes one rank's tables into a checkpoint created by [`crate::checkpoint::CheckpointSave::begin`].
///
/// It holds at most six groups in memory: one is filled while the others are written (96 MiB with the default size).
#[derive(Debug)]
pub struct RankWriter {
    directory: CheckpointDirectory,
    group_bytes: usize,
    manifest: RankManifest,
    /// True if admission counts of pending ids are written.
    pub(super) counts: bool,
}

impl RankWriter {
    /// Creates the writer of the part of `rank` (of `world`) in the checkpoint `name` in `root`.
    pub fn new(root: &CheckpointDirectory, name: CheckpointName, rank: u32, world: u32) -> Result<Self> {
        root.check_to_save()?;
        if rank >= world {
            return Err(Kind::Input.error(format!("rank {rank} is not within a world of {world}")));
        }
        Ok(Self::in_dir(root.subdirectory(name), name.to_string(), rank, world))
    }

    /// Creates the writer of the part of `rank` (of `world`) in `directory`, which belongs to the checkpoint or
    /// checkpoint part `name`.
    pub(crate) fn in_dir(directory: CheckpointDirectory, name: String, rank: u32, world: u32) -> Self {
        Self { directory, group_bytes: GROUP_BYTES, manifest: RankManifest::new(name, rank, world), counts: true }
    }

    /// Sets the rank's dense extents, which are in the same directory.
    pub(crate) fn set_dense(&mut self, dense: DenseShare) {
        self.manifest.dense = Some(dense);
    }

    /// Omits the admission counts of pending ids, unless `counts`.
    #[must_use]
    pub fn with_counts(mut self, counts: bool) -> Self {
        self.counts = counts;
        self
    }

    /// Limits groups to `bytes`, and at least one row. The default and maximum is [`GROUP_BYTES`].
    #[must_use]
    pub fn with_group_bytes(mut self, bytes: usize) -> Self {
        self.group_bytes = bytes.min(GROUP_BYTES);
        self
    }

    /// Writes the rows of one table, all of which are in `buckets`. Returns the number of rows.
    pub fn write_table(&mut self, spec: TableSpec, buckets: Range<u32>, rows: &mut RowChunks<'_>) -> Result<u64> {
        self.write_groups(spec, buckets, &mut |sink| {
            let mut gather = GroupGatherer::new(sink);
            rows(&mut |headers, vectors| gather.add(headers, vectors))?;
            gather.finish()
        })
    }

    /// Like [`Self::write_table`], from a source of groups.
    pub(crate) fn write_groups(
        &mut self,
        spec: TableSpec,
        buckets: Range<u32>,
        rows: &mut RowGroups<'_>,
    ) -> Result<u64> {
        let layout = spec.row_layout()?;
        let dir = self.begin_table(&spec, &buckets)?;
        let files = self.write_files(&spec, &buckets, (&dir, layout), rows)?;
        let (columns, total_rows) = (columns_of(&spec)?, files.iter().map(DataFile::rows).sum());
        self.manifest.tables.push(RankShare { total_rows, columns, files, ..RankShare::new(spec, &buckets) });
        Ok(total_rows)
    }

    /// Writes the data files of a table in `dir`.
    fn write_files(
        &self,
        spec: &TableSpec,
        buckets: &Range<u32>,
        (dir, layout): (&Path, RowLayout),
        rows: &mut RowGroups<'_>,
    ) -> Result<Vec<DataFile>> {
        let capacity = group_rows(spec, layout, self.group_bytes);
        let output = ImageWriter::start(self.directory.shared_engine(), IMAGE_WRITERS);
        let content = FileContent { largest: largest_group(buckets, capacity), ..row_content(spec, buckets) };
        let (rank, world) = (self.manifest.rank, self.manifest.world);
        let mut writer = RowGroupWriter {
            small_group_rows: group_rows(spec, layout, SMALL_GROUP_BYTES),
            max_group_rows: capacity,
            next_group_rows: capacity,
            expected_rows: None,
            format: GroupEncoder::new(spec, layout, buckets.clone()),
            files: DataFileWriter::new(output, content, |n| dir.join(data_file(rank, world, n))),
        };
        rows(&mut writer)?;
        writer.files.finish()
    }

    /// Writes a table into a delta. `rows` are the rows modified since the parent. Otherwise like
    /// [`Self::write_table`].
    pub fn write_changes(
        &mut self,
        spec: TableSpec,
        buckets: Range<u32>,
        rows: &mut RowChunks<'_>,
        changes: DeltaChanges<'_>,
    ) -> Result<u64> {
        let written = self.write_table(spec, buckets, rows)?;
        self.add_changes(changes)?;
        Ok(written)
    }

    /// Adds the changes of a delta to the table written last, whose rows are those modified since the parent.
    pub(crate) fn add_changes(&mut self, changes: DeltaChanges<'_>) -> Result<()> {
        let share = self.last_table();
        share.total_rows = changes.total_rows;
        changes.sweeps.clone_into(&mut share.sweeps);
        let (bucketing, buckets) = (share.spec.bucketing(), share.buckets());
        let mut tombstones: Vec<(u32, u64)> =
            changes.tombstones.iter().map(|&id| (bucketing.of(id), id as u64)).collect();
        tombstones.sort_unstable();
        tombstones.dedup();
        if let Some((bucket, id)) = tombstones.iter().find(|(bucket, _)| !buckets.contains(bucket)) {
            let what = format!("tombstone {} is of bucket {bucket}, which is not within {buckets:?}", *id as Id);
            return Err(Kind::Input.error(what));
        }
        let (first, groups) = (share.files.len(), tombstones.len().div_ceil(TOMBSTONES_PER_GROUP));
        let tombstones_of = |count, of: &[(u32, u64)]| GroupShape {
            tombstones: count,
            bucket_begin: of.first().map_or(buckets.start, |(bucket, _)| *bucket),
            bucket_end: of.last().map_or(buckets.end, |(bucket, _)| bucket + 1),
            ..GroupShape::default()
        };
        let share = &self.manifest.tables[self.manifest.tables.len() - 1];
        let largest = tombstones_of(TOMBSTONES_PER_GROUP, &[]);
        let content = FileContent { largest, ..row_content(&share.spec, &buckets) };
        let mut files = self.small_files(content, |rank, world, n| data_file(rank, world, first + n));
        for (number, chunk) in tombstones.chunks(TOMBSTONES_PER_GROUP).enumerate() {
            let shape = tombstones_of(chunk.len(), chunk);
            files.push_columns(shape, groups - number, |_, field, column| {
                if field == ColumnField::Tombstone {
                    let ids = column.chunks_exact_mut(size_of::<Id>()).zip(chunk);
                    ids.for_each(|(to, (_, id))| to.copy_from_slice(&id.to_le_bytes()));
                }
            })?;
        }
        let files = files.finish()?;
        self.last_table().files.extend(files);
        Ok(())
    }

    /// Returns a writer of files of the table written last, without threads. `name` names the file of a rank, a world and
    /// a number.
    pub(super) fn small_files<'a>(
        &self,
        content: FileContent<'a>,
        name: impl Fn(u32, u32, usize) -> String + 'a,
    ) -> DataFileWriter<'a> {
        let dir = self.directory.join(table_dir(&content.spec.module, &content.spec.table));
        let (rank, world) = (self.manifest.rank, self.manifest.world);
        let output = ImageWriter::start(self.directory.shared_engine(), 0);
        DataFileWriter::new(output, content, move |n| dir.join(name(rank, world, n)))
    }

    /// Checks that a table can be written, and creates its directory.
    fn begin_table(&self, spec: &TableSpec, buckets: &Range<u32>) -> Result<PathBuf> {
        spec.check()?;
        let outside = |what| Kind::Input.error(format!("table {:?}: {what}", spec.table));
        spec.check_buckets(buckets).map_err(outside)?;
        if self.manifest.shares_of(&spec.module, &spec.table).next().is_some() {
            return Err(
                Kind::Input.error(format!("table {:?} of module {:?} is written twice", spec.table, spec.module))
            );
        }
        let dir = self.directory.join(table_dir(&spec.module, &spec.table));
        self.directory.engine().create_dir_all(&dir)?;
        Ok(dir)
    }

    /// Adds a shard of a table to the checkpoint as segments. `link` creates each segment at the path for its serial.
    /// Returns the result of `link`.
    pub(crate) fn write_segments<T>(
        &mut self,
        spec: TableSpec,
        buckets: Range<u32>,
        set: SegmentSet,
        link: impl FnOnce(&dyn IoEngine, &dyn Fn(u64) -> PathBuf) -> Result<T>,
    ) -> Result<T> {
        let dir = self.begin_table(&spec, &buckets)?;
        let (rank, world) = (self.manifest.rank, self.manifest.world);
        let linked = link(self.directory.engine(), &|serial| dir.join(segment_file(rank, world, serial)))?;
        let segments = RankShare { total_rows: set.rows, segments: Some(set), ..RankShare::new(spec, &buckets) };
        self.manifest.tables.push(segments);
        Ok(linked)
    }

    /// Returns the manifest entry of the table written last.
    pub(crate) fn last_table(&mut self) -> &mut RankShare {
        self.manifest.tables.last_mut().expect("a table was written")
    }

    /// Makes this rank's part durable. The caller sends the digest to the coordinator.
    pub fn finish(self) -> Result<RankDigest> {
        let (engine, bytes) = (self.directory.engine(), render(&self.manifest)?);
        // A temporary name is not needed: no load uses the file before the coordinator's manifest has its checksum.
        let manifest = self.directory.join(rank_file(self.manifest.rank, self.manifest.world));
        let manifest = write_whole(engine, &manifest, &bytes)?;
        let table = |share: &RankShare| self.directory.join(table_dir(&share.spec.module, &share.spec.table));
        let dirs = self.manifest.tables.iter().map(table).chain([self.directory.path().to_owned()]).map(Some);
        for_each_piece(SYNC_THREADS, [None].into_iter().chain(dirs).collect(), |dir: Option<PathBuf>| match dir {
            None => manifest.sync(),
            Some(dir) => engine.sync_dir(&dir),
        })?;
        Ok(RankDigest { bytes: bytes.len() as u64, xxh3: checksum(&bytes) })
    }
}

/// Upper bound of the shapes of groups of at most this many rows of any of the buckets.
fn largest_group(buckets: &Range<u32>, rows: usize) -> GroupShape {
    GroupShape { rows, bucket_begin: buckets.start, bucket_end: buckets.end, ..GroupShape::default() }
}

/// Contents of data files with rows or tombstones of a table.
fn row_content<'a>(spec: &'a TableSpec, buckets: &Range<u32>) -> FileContent<'a> {
    FileContent {
        spec,
        buckets: buckets.clone(),
        columns: spec.dim,
        layout: Box::new(|shape| GroupLayout::new(spec, shape)),
        largest: largest_group(buckets, 0),
    }
}

/// Columns of the data files of a checked table.
pub(super) fn columns_of(spec: &TableSpec) -> Result<Vec<ColumnEntry>> {
    let layout = GroupLayout::new(spec, GroupShape::default());
    layout.map(|layout| layout.entries()).ok_or_else(|| Kind::Input.error("a group's size overflows"))
}

/// Writes the groups of one rank's shard of a table.
struct RowGroupWriter<'a> {
    format: GroupEncoder<'a>,
    files: DataFileWriter<'a>,
    /// Number of rows of a small group.
    small_group_rows: usize,
    /// Maximum number of rows per group, less than the format allows after an allocation has failed.
    max_group_rows: usize,
    /// Maximum number of rows of the next group.
    next_group_rows: usize,
    /// Approximate number of rows to come, if known.
    expected_rows: Option<usize>,
}

impl RowGroupWriter<'_> {
    /// Makes later groups smaller. Returns the error if they are small already.
    fn shrink(&mut self, refused: Error) -> Result<()> {
        if refused.kind() != Kind::Memory || self.next_group_rows <= MIN_GROUP_ROWS {
            return Err(refused);
        }
        self.next_group_rows /= 2;
        self.max_group_rows = self.next_group_rows;
        Ok(())
    }

    /// Approximate number of groups to come, the first of which has `rows` rows. If unknown, a full group is one of
    /// many.
    fn expected_groups(&self, rows: usize) -> usize {
        match self.expected_rows {
            Some(expected) => expected.max(rows).div_ceil(self.next_group_rows),
            None if rows == self.next_group_rows => usize::MAX,
            None => 1,
        }
    }

    /// Writes one group.
    fn write(&mut self, rows: RowList<'_>) -> Result<()> {
        let expected = self.expected_groups(rows.len());
        let shape = self.format.order(rows)?;
        let format = &mut self.format;
        self.files.push(shape, expected, |layout, data, checksums| format.fill(rows, layout, data, checksums))?;
        self.expected_rows = self.expected_rows.map(|expected| expected.saturating_sub(rows.len()));
        Ok(())
    }
}

impl GroupSink for RowGroupWriter<'_> {
    fn vector_floats(&self) -> usize {
        self.format.vector_floats
    }

    fn expect_rows(&mut self, rows: usize) {
        self.expected_rows = (rows != usize::MAX).then_some(rows);
        self.next_group_rows = rows.div_ceil(PARALLEL_GROUPS).max(self.small_group_rows).min(self.max_group_rows);
    }

    fn wait_for_space(&mut self) -> Result<usize> {
        loop {
            let bytes = self.files.image_bytes(largest_group(&self.format.buckets, self.next_group_rows))?;
            match self.files.output.wait_for_buffer(bytes) {
                Ok(()) => return Ok(self.next_group_rows),
                Err(refused) => self.shrink(refused)?,
            }
        }
    }

    fn take(&mut self, rows: RowList<'_>) -> Result<()> {
        let mut begin = 0;
        while begin < rows.len() {
            let part = rows.range(begin..rows.len().min(begin + self.next_group_rows));
            match self.write(part) {
                Ok(()) => begin += part.len(),
                // Try a smaller group.
                Err(refused) => self.shrink(refused)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
