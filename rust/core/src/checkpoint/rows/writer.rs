//! Writes a rank's part of a checkpoint: the rows of its tables, from any source, and the changes of a delta.

use std::ops::Range;
use std::path::PathBuf;

use super::format::{ColumnField, FileLayout, GROUP_BYTES, group_rows, image_of};
use super::group::GroupEncoder;
use crate::cache::{GroupGatherer, GroupSink};
use crate::checkpoint::chunked_file::{ImageWriter, for_each_piece, write_file};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::CheckpointName;
use crate::checkpoint::manifest::manifests::{DataFile, DataShape, DenseShare, RankManifest, RankShare};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::checkpoint::manifest::{
    RankDigest, TOMBSTONES_PER_FILE, checksum, counts_file, data_file, rank_file, render, segment_file, table_dir,
};
use crate::error::{Error, Kind, Result};
use crate::io::{AlignedBuf, IoEngine, write_whole};
use crate::lifecycle::ExpirySweep;
use crate::rows::{RowHeader, RowList};
use crate::ssd::SegmentSet;
use crate::types::Id;

/// If an allocation for a group fails, groups are made smaller, down to this many rows.
const MIN_GROUP_ROWS: usize = 256;
/// Number of files into which a known number of rows is divided, as long as no file is smaller than `SMALL_FILE_BYTES`.
const PARALLEL_FILES: usize = 6;
const SMALL_FILE_BYTES: usize = 2 << 20;
/// Number of threads that make names durable. A file system often commits several names at the cost of one.
const SYNC_THREADS: usize = 4;

/// Consumes a chunk of rows: headers `[n]` and their vector parts `[n × V]`, contiguous.
pub type RowSink<'a> = dyn FnMut(&[RowHeader], &[f32]) -> Result<()> + 'a;

/// A source of rows in chunks: passes every row to the sink once, in any order, in chunks of any size. Stops at the
/// first error and returns it.
pub type RowChunks<'a> = dyn FnMut(&mut RowSink<'_>) -> Result<()> + 'a;

/// A source of rows in groups, each of which becomes a file. Rows in memory are passed without copying.
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
/// It holds at most six group files in memory: one is filled while the others are written (96 MiB with the default
/// size).
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
        let path = |n| dir.join(data_file(self.manifest.rank, self.manifest.world, n));
        let capacity = group_rows(&spec, layout, self.group_bytes);
        let mut writer = RowFileWriter {
            output: ImageWriter::new(self.directory.shared_engine()),
            small_group_rows: group_rows(&spec, layout, SMALL_FILE_BYTES),
            max_group_rows: capacity,
            next_group_rows: capacity,
            format: GroupEncoder::new(&spec, layout, buckets.clone()),
            path,
            written_files: Vec::new(),
        };
        rows(&mut writer)?;
        writer.output.threads.end()?;
        let files = writer.written_files;
        let total_rows = files.iter().map(|file| file.rows).sum();
        self.manifest.tables.push(RankShare { total_rows, files, ..RankShare::new(spec, &buckets) });
        Ok(total_rows)
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
        for chunk in tombstones.chunks(TOMBSTONES_PER_FILE) {
            let ids: Vec<Id> = chunk.iter().map(|(_, id)| *id as Id).collect();
            self.append_file(|spec, buckets| tombstone_file(spec, buckets, &ids))?;
        }
        Ok(())
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

    /// Adds a file, built as image and manifest entry by `make`, to the table written last, or to its counts if those
    /// were started.
    pub(super) fn append_file(
        &mut self,
        make: impl FnOnce(&TableSpec, &Range<u32>) -> Result<(AlignedBuf, DataFile)>,
    ) -> Result<()> {
        let (rank, world) = (self.manifest.rank, self.manifest.world);
        let share = self.manifest.tables.last_mut().expect("a table was written");
        let (image, file) = make(&share.spec, &share.buckets())?;
        let dir = self.directory.join(table_dir(&share.spec.module, &share.spec.table));
        let (name, files) = match &mut share.counts {
            Some(counts) => (counts_file(rank, world, counts.files.len()), &mut counts.files),
            None => (data_file(rank, world, share.files.len()), &mut share.files),
        };
        write_file(self.directory.engine(), &dir.join(name), &image)?;
        files.push(file);
        Ok(())
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

/// Builds a file with tombstones and no rows. `ids` are in file order.
fn tombstone_file(spec: &TableSpec, buckets: &Range<u32>, ids: &[Id]) -> Result<(AlignedBuf, DataFile)> {
    let shape = DataShape { rows: 0, buckets: buckets.len(), tombstones: ids.len() };
    let layout =
        FileLayout::new(spec, shape).ok_or_else(|| Kind::Input.error("the size of the tombstones overflows"))?;
    image_of((&layout, shape), &layout.header(spec, buckets), |field, column| {
        if field == ColumnField::Tombstone {
            column.copy_from_slice(bytemuck::cast_slice(ids));
        }
    })
}

/// The files of one rank's shard of a table.
struct RowFileWriter<'a, P> {
    format: GroupEncoder<'a>,
    output: ImageWriter,
    path: P,
    /// Number of rows of a small group.
    small_group_rows: usize,
    /// Maximum number of rows per group, less than the format allows after an allocation has failed.
    max_group_rows: usize,
    /// Maximum number of rows of the next group.
    next_group_rows: usize,
    written_files: Vec<DataFile>,
}

impl<P> RowFileWriter<'_, P> {
    /// Makes later groups smaller. Returns the error if they are small already.
    fn shrink(&mut self, refused: Error) -> Result<()> {
        if refused.kind() != Kind::Memory || self.next_group_rows <= MIN_GROUP_ROWS {
            return Err(refused);
        }
        self.next_group_rows /= 2;
        self.max_group_rows = self.next_group_rows;
        Ok(())
    }
}

impl<P: Fn(usize) -> PathBuf> GroupSink for RowFileWriter<'_, P> {
    fn vector_floats(&self) -> usize {
        self.format.vector_floats
    }

    fn expect_rows(&mut self, rows: usize) {
        self.next_group_rows = rows.div_ceil(PARALLEL_FILES).max(self.small_group_rows).min(self.max_group_rows);
    }

    fn wait_for_space(&mut self) -> Result<usize> {
        loop {
            let bytes = self.format.file_bytes(self.next_group_rows)?;
            match self.output.wait_for_buffer(bytes) {
                Ok(()) => return Ok(self.next_group_rows),
                Err(refused) => self.shrink(refused)?,
            }
        }
    }

    fn take(&mut self, rows: RowList<'_>) -> Result<()> {
        let mut begin = 0;
        while begin < rows.len() {
            let part = rows.range(begin..rows.len().min(begin + self.next_group_rows));
            let bytes = self.format.file_bytes(self.next_group_rows)?;
            let written = self.output.buffer(bytes).and_then(|mut image| match self.format.write(part, &mut image) {
                Ok(file) => Ok((image, file)),
                Err(error) => {
                    self.output.free.push(image);
                    Err(error)
                }
            });
            match written {
                Ok((image, file)) => {
                    self.output.write((self.path)(self.written_files.len()), image, file.bytes as usize)?;
                    self.written_files.push(file);
                    begin += part.len();
                }
                // Try a smaller group.
                Err(refused) => self.shrink(refused)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
