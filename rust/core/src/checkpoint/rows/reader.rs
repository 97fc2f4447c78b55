//! Loads a checkpoint: manifests and headers first, then the rows of the buckets that a rank owns.

use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::Builder;

use super::counters::{CountsReader, CountsSink};
use super::format::{FileLayout, GROUP_BYTES, group_rows};
use super::input::{DataFileRequest, GroupReader, RowFileOffsets, StagedColumns};
use super::linked::read_segments;
use super::writer::RowSink;
use crate::cache::{PickedRows, RowColumns};
use crate::checkpoint::chunked_file::for_each_piece;
use crate::checkpoint::dense::DenseReader;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::{LatestCheckpoint, hold_to_read};
use crate::checkpoint::manifest::manifests::{
    CheckpointId, CheckpointKind, CheckpointManifest, DENSE_FILE, DenseEntry, RankManifest, RankShare, TableEntry,
    read_digested, read_manifest, read_ranks,
};
use crate::checkpoint::manifest::spec::TableSpec;
use crate::checkpoint::manifest::{
    MANIFEST_FILE, counts_file, data_file, inconsistent, rank_file, segment_file, table_dir,
};
use crate::error::{Error, Kind, Result};
use crate::io::{BufPool, DirLock, IoEngine};
use crate::rows::{RowHeader, RowLayout, WeightPrecision};
use crate::runtime::memory::{self, can_start_threads};
use crate::runtime::process::BackgroundFlag;
use crate::runtime::sync::lock;
use crate::ssd::{LinkedSegments, SegmentSet, ShardIdentity};
use crate::types::Id;

/// Number of groups that are read ahead, each by a thread and its helpers.
const AHEAD: usize = 4;
/// Number of files whose headers are read at once.
const HEADERS: usize = 8;
/// Bytes of rows passed to a sink per call, at least one row.
const EMIT_BYTES: usize = 4 << 20;

/// A checkpoint with checked manifests.
#[derive(Debug)]
pub struct OpenCheckpoint {
    directory: CheckpointDirectory,
    identity: CheckpointId,
    manifest: CheckpointManifest,
    pub(crate) ranks: Vec<RankManifest>,
    /// While this lock is held no save removes the directory.
    hold: Mutex<Option<DirLock>>,
}

impl OpenCheckpoint {
    /// Reads and checks the manifests of the checkpoint that `latest` names in `root`. No save removes it until this is
    /// dropped or [`Self::release`] is called.
    ///
    /// Errors: `Corruption` (missing, corrupted, or contradictory manifests), `Unsupported` (a newer format),
    /// `Storage`, `InUse` (a save is removing it). A save may have replaced the checkpoint since `latest` was read; the
    /// caller then reads `LATEST` again.
    pub fn open(root: &CheckpointDirectory, latest: LatestCheckpoint) -> Result<Self> {
        let directory = root.subdirectory(latest.name);
        let missing = || {
            let what = format!("LATEST of {}", root.path().display());
            Error::corruption(root.path(), 0, &what, "the name of an existing checkpoint", latest.name)
        };
        if !directory.has(MANIFEST_FILE)? {
            return Err(missing());
        }
        let hold = hold_to_read(&directory)?;
        // A save may have removed it before it was locked.
        if !directory.has(MANIFEST_FILE)? {
            return Err(missing());
        }
        let (manifest, identity) = read_manifest(&directory)?;
        let path = directory.join(MANIFEST_FILE);
        let damaged = |what: String| inconsistent(&path, what);
        manifest.check(latest.name).map_err(damaged)?;
        let ranks = read_ranks(&directory, &manifest.ranks)?;
        manifest.check_ranks(&ranks).map_err(damaged)?;
        Ok(Self { directory, identity, manifest, ranks, hold: Mutex::new(Some(hold)) })
    }

    /// Allows saves to remove the checkpoint. It must not be read after this call, unless a checkpoint based on it is
    /// held.
    pub fn release(&self) {
        drop(lock(&self.hold).take());
    }

    /// Identity that a delta based on this checkpoint names as its parent.
    pub fn identity(&self) -> CheckpointId {
        self.identity.clone()
    }

    pub(crate) fn directory(&self) -> &CheckpointDirectory {
        &self.directory
    }

    /// The coordinator's manifest.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifest
    }

    /// Returns a table of the checkpoint. Returns `Mismatch`, which lists its tables, if there is no such table.
    pub fn table(&self, module: &str, table: &str) -> Result<&TableEntry> {
        let found = self.manifest.tables.iter().find(|entry| entry.spec.module == module && entry.spec.table == table);
        found.ok_or_else(|| {
            let name = |entry: &TableEntry| format!("{}/{}", entry.spec.module, entry.spec.table);
            let (dir, tables) = (self.directory.path().display(), self.manifest.tables.iter().map(name));
            let tables = tables.collect::<Vec<_>>().join(", ");
            Kind::Mismatch.error(format!("{dir} has no table {table:?} of module {module:?}; it has [{tables}]"))
        })
    }

    /// The only rank with rows of a table, if there were several ranks; `None` otherwise.
    pub(crate) fn only_rank(&self, module: &str, table: &str) -> Option<u32> {
        let mut owners = self.ranks.iter().filter(|rank| rank.shares_of(module, table).next().is_some());
        match (owners.next(), owners.next()) {
            (Some(owner), None) if owner.world > 1 => Some(owner.rank),
            _ => None,
        }
    }

    /// Reads the description of the dense extents that was passed to
    /// [`crate::checkpoint::CheckpointSave::write_dense_metadata`]; returns `None` if there is no dense state.
    pub fn dense_metadata(&self) -> Result<Option<Vec<u8>>> {
        let path = self.directory.join(DENSE_FILE);
        let read = |entry: &DenseEntry| read_digested(self.directory.engine(), &path, &entry.metadata);
        self.manifest.dense.as_ref().map(read).transpose()
    }

    /// Returns a reader for the dense extents of all ranks.
    pub fn dense_reader(&self) -> DenseReader {
        let shares = self.ranks.iter().map(|rank| rank.dense.as_ref());
        DenseReader::new(&self.directory, shares)
    }

    /// Checks the headers and sizes of the files with rows of `buckets`, and returns a reader for them.
    pub fn table_reader(&self, module: &str, table: &str, buckets: Range<u32>) -> Result<TableReader> {
        let spec = self.table(module, table)?.spec.clone();
        let layout = spec.row_layout()?;
        let outside = |what| Kind::Input.error(format!("table {table:?}: {what}"));
        spec.check_buckets(&buckets).map_err(outside)?;
        let dir = self.directory.join(table_dir(module, table));
        let (mut wanted, mut counts, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        for rank in &self.ranks {
            for share in rank.shares_of(module, table) {
                let owned = buckets.start.max(share.bucket_begin)..buckets.end.min(share.bucket_end);
                if owned.is_empty() {
                    continue;
                }
                segments.extend(share.segments.as_ref().map(|set| self.segment_files(rank, share, set)).transpose()?);
                let file = |(n, file)| (dir.join(data_file(rank.rank, rank.world, n)), share, file, owned.clone());
                wanted.extend(share.files.iter().enumerate().map(file));
                for (n, file) in share.counts.iter().flat_map(|counts| counts.files.iter().enumerate()) {
                    counts.push((dir.join(counts_file(rank.rank, rank.world, n)), share, file, owned.clone()));
                }
            }
        }
        let counts = counts.into_iter().map(|file| self.open_counts(file)).collect::<Result<_>>()?;
        let groups = self.open_groups(wanted)?;
        let slots = spec.precision.is_none();
        Ok(TableReader {
            engine: self.directory.shared_engine(),
            spec,
            layout,
            buckets,
            groups,
            counts,
            segments,
            slots,
        })
    }

    fn open_counts(&self, request: DataFileRequest<'_>) -> Result<CountsReader> {
        let share = request.1;
        let clicks = share.counts.as_ref().is_some_and(|counts| counts.clicks);
        let layout = FileLayout::of_counts(clicks, share.shape(request.2));
        let group = GroupReader::open(layout, self.directory.engine(), request)?;
        Ok(CountsReader { group, first: share.bucket_begin, clicks })
    }

    /// Checks several files in parallel: each needs a few small reads.
    fn open_groups(&self, requested: Vec<DataFileRequest<'_>>) -> Result<Vec<GroupReader>> {
        let mut groups: Vec<Option<GroupReader>> = requested.iter().map(|_| None).collect();
        let pieces = groups.iter_mut().zip(requested).collect();
        for_each_piece(HEADERS, pieces, |(group, request): (&mut Option<GroupReader>, DataFileRequest<'_>)| {
            let layout = FileLayout::new(&request.1.spec, request.1.shape(request.2));
            *group = Some(GroupReader::open(layout, self.directory.engine(), request)?);
            Ok(())
        })?;
        Ok(groups.into_iter().flatten().collect())
    }

    /// Returns `Unsupported` if this is a serving checkpoint, which does not support `action`, a verb phrase.
    pub(crate) fn refuse_serving(&self, action: &str) -> Result<()> {
        let manifest = self.manifest();
        let (CheckpointKind::Serving, Some(source)) = (manifest.kind, &manifest.made_from) else { return Ok(()) };
        let precision = manifest.tables.iter().find_map(|entry| entry.spec.precision).map_or("", WeightPrecision::name);
        Err(Kind::Unsupported.error(format!(
                "{} is a serving checkpoint (kind serving, {precision}): it is for torchrec_embcache.serving, and has no optimizer state; \
                 to {action}, use the checkpoint that it was made from, {}",
                self.directory.path().display(),
                source.name
            ),
        )
        .at(self.directory.path()))
    }

    /// Opens the segments of a rank's shard of a table, with checked footers.
    fn segment_files(&self, rank: &RankManifest, share: &RankShare, set: &SegmentSet) -> Result<LinkedSegments> {
        let spec = &share.spec;
        let layout = spec.row_layout()?;
        let identity = ShardIdentity {
            table: spec.table.clone(),
            key: spec.key,
            dim: u64::from(spec.dim),
            optimizer: spec.optimizer.name.clone(),
            seed: spec.seed,
            initializer: format!("{:?}", spec.initializer),
            total_num_buckets: spec.total_num_buckets,
            bucket_begin: share.bucket_begin,
            bucket_end: share.bucket_end,
        };
        let dir = self.directory.join(table_dir(&spec.module, &spec.table));
        LinkedSegments::open(
            self.directory.shared_engine(),
            (identity, layout),
            set,
            |serial| dir.join(segment_file(rank.rank, rank.world, serial)),
            self.directory.join(rank_file(rank.rank, rank.world)),
        )
    }

    /// Returns the segments from which a table with exactly these buckets can be opened. `None` if the rows of the
    /// buckets are in data files.
    ///
    /// Errors: `Mismatch` if segments also contain rows of other buckets, or only of some; `Corruption` as
    /// [`LinkedSegments::open`].
    pub fn segments_of(&self, module: &str, table: &str, buckets: &Range<u32>) -> Result<Option<LinkedSegments>> {
        let mut found = None;
        for rank in &self.ranks {
            for share in rank.shares_of(module, table) {
                let Some(set) = &share.segments else { continue };
                let owned = share.buckets();
                if owned == *buckets {
                    found = Some((rank, share, set));
                } else if buckets.start.max(owned.start) < buckets.end.min(owned.end) {
                    let what =
                        format!("holds buckets {owned:?} of table {table:?} together, and this rank owns {buckets:?}");
                    return Err(self.only_for_same_ranks(&what));
                }
            }
        }
        found.map(|(rank, share, set)| self.segment_files(rank, share, set)).transpose()
    }

    /// Returns the error of a load that cannot use the segments of a linked checkpoint, for `reason`.
    pub fn only_for_same_ranks(&self, reason: &str) -> Error {
        let (dir, world) = (self.directory.path(), self.ranks.len());
        let root = dir.parent().unwrap_or(dir).display();
        Kind::Mismatch.error(format!(
                "{} is a linked checkpoint of {world} ranks, for a restart of the same ranks, and {reason}: make it one that \
                 any ranks load by `embcache compact {root}`, or another directory of it by `embcache reshard`",
                dir.display()
            ),
        )
    }
}

/// Reads the rows of some buckets of one table.
#[derive(Debug)]
pub struct TableReader {
    engine: Arc<dyn IoEngine>,
    spec: TableSpec,
    layout: RowLayout,
    buckets: Range<u32>,
    groups: Vec<GroupReader>,
    /// The counts files with ids of the buckets, in the order in which they were written.
    counts: Vec<CountsReader>,
    /// Segments with rows of the buckets, and of others.
    segments: Vec<LinkedSegments>,
    /// True if rows include the optimizer's slots.
    slots: bool,
}

impl TableReader {
    /// Omits the optimizer's slots, which are then not read from data files.
    #[must_use]
    pub fn without_slots(mut self) -> Self {
        self.slots = false;
        self.groups.iter_mut().for_each(|group| group.slots = false);
        self
    }

    /// True if rows include slots.
    pub(crate) fn has_slots(&self) -> bool {
        self.slots
    }

    /// Metadata of the table as it was saved.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The buckets that it reads.
    pub fn buckets(&self) -> &Range<u32> {
        &self.buckets
    }

    /// Number of rows that [`Self::read`] delivers. An upper bound if it reads segments, because the rows of a segment
    /// are not ordered by bucket.
    pub fn rows(&self) -> u64 {
        let in_files: u64 = self.groups.iter().map(|group| group.rows.len() as u64).sum();
        in_files + self.segments.iter().map(LinkedSegments::rows).sum::<u64>()
    }

    /// The files with rows, in the order in which [`Self::read_columns`] delivers their rows if all buckets are read.
    pub(crate) fn row_file_offsets(&self) -> Vec<RowFileOffsets> {
        self.groups.iter().filter(|group| !group.rows.is_empty()).map(GroupReader::row_file_offsets).collect()
    }

    /// Upper bound of the number of rows in any file of the table, including later checkpoints.
    pub(crate) fn max_rows_per_file(&self) -> usize {
        let largest = self.groups.iter().map(|group| group.rows.len()).max().unwrap_or(0);
        largest.max(group_rows(&self.spec, self.layout, GROUP_BYTES))
    }

    /// Number of tombstones in the files with some of the buckets: an upper bound for [`Self::read_tombstones`].
    pub fn tombstones(&self) -> u64 {
        self.groups.iter().map(GroupReader::tombstones).sum()
    }

    /// Reads and verifies the tombstones of the buckets, and passes them to `sink` in chunks. Errors as [`Self::read`].
    pub fn read_tombstones(&self, sink: &mut dyn FnMut(&[Id]) -> Result<()>) -> Result<()> {
        for group in self.groups.iter().filter(|group| group.tombstones() > 0) {
            group.read_tombstones(&*self.engine, self.spec.bucketing(), sink)?;
        }
        Ok(())
    }

    /// True if there are admission counts of pending ids.
    pub(crate) fn has_counts(&self) -> bool {
        !self.counts.is_empty()
    }

    /// True if they count clicks.
    pub(crate) fn counts_clicks(&self) -> bool {
        self.counts.iter().any(|counts| counts.clicks)
    }

    /// Number of ids with counts.
    pub(crate) fn pending(&self) -> u64 {
        self.counts.iter().map(|counts| counts.group.rows.len() as u64).sum()
    }

    /// Reads and verifies the admission counts, and passes those of each bucket to `sink`. A bucket may be delivered in
    /// several parts. Errors as [`Self::read`].
    pub(crate) fn read_counts(&self, sink: &mut CountsSink<'_>) -> Result<()> {
        let bucketing = self.spec.bucketing();
        self.counts.iter().try_for_each(|counts| counts.read(&*self.engine, bucketing, sink))
    }

    /// Reads and verifies every row of the buckets, and passes it to `sink` in chunks of about 4 MiB. At most five
    /// groups are in memory (80 MiB).
    ///
    /// Errors: `Corruption` with file and byte offset, after the preceding rows were delivered; `Storage`; errors of
    /// the sink.
    pub fn read(&self, sink: &mut RowSink<'_>) -> Result<()> {
        self.read_columns(&mut |rows| self.emit(PickedRows::all(rows), sink))
    }

    /// Like [`Self::read`], but passes entire groups as columns.
    pub fn read_columns(&self, sink: &mut dyn FnMut(&RowColumns<'_>) -> Result<()>) -> Result<()> {
        for files in &self.segments {
            let mut hand_over =
                |rows: &RowColumns<'_>| if self.slots { sink(rows) } else { sink(&rows.without_slots()) };
            read_segments(files, &self.buckets, self.spec.bucketing(), EMIT_BYTES, &mut hand_over)?;
        }
        let groups: Vec<&GroupReader> = self.groups.iter().filter(|group| !group.rows.is_empty()).collect();
        let largest = groups.iter().map(|group| group.staged_bytes()).max().unwrap_or(0);
        let staging = Arc::new(BufPool::new(largest, AHEAD + 1));
        let dim = self.spec.dim as usize;
        let mut hand_over = |staged: StagedColumns<'_>| {
            let served = self.spec.precision.map(|precision| staged.decode(precision, dim)).transpose()?;
            sink(&staged.columns(self.layout, served.as_ref()))
        };
        let can_read_ahead = groups.len() > 1 && can_start_threads();
        std::thread::scope(|scope| {
            // Thread n mod AHEAD reads group n, so that groups arrive in order.
            let mut ahead = Vec::new();
            for number in 0..AHEAD.min(groups.len()) {
                // A thread keeps its group until the caller receives it.
                let (send, receive) = mpsc::sync_channel(0);
                let own_groups = groups.iter().skip(number).step_by(AHEAD);
                let (staging, behind) = (&staging, BackgroundFlag::of_this_thread());
                let read = move || {
                    behind.apply();
                    for group in own_groups {
                        // After an error of the sink there is no receiver.
                        if send.send(self.stage(group, staging)).is_err() {
                            return;
                        }
                    }
                };
                let name = format!("embcache-load-{number}");
                if !can_read_ahead || Builder::new().name(name).spawn_scoped(scope, read).is_err() {
                    // Unless all threads start, nothing is read ahead. Threads that were started end, because their
                    // receivers are dropped.
                    drop(std::mem::take(&mut ahead));
                    return groups.iter().try_for_each(|group| hand_over(self.stage(group, staging)?));
                }
                ahead.push(receive);
            }
            let ended = |_| Err(Kind::Storage.error("the reading threads ended"));
            (0..groups.len()).try_for_each(|n| hand_over(ahead[n % AHEAD].recv().unwrap_or_else(ended)?))
        })
    }

    fn stage<'g>(&self, group: &'g GroupReader, staging: &Arc<BufPool>) -> Result<StagedColumns<'g>> {
        group.stage(&*self.engine, staging, self.spec.bucketing())
    }

    /// Passes rows to `sink` in chunks, as headers and vectors.
    pub(crate) fn emit(&self, rows: PickedRows<'_>, sink: &mut RowSink<'_>) -> Result<()> {
        let floats = self.layout.vector_floats();
        let chunk_rows = (EMIT_BYTES / (floats * 4 + size_of::<RowHeader>())).max(1).min(rows.len().max(1));
        let mut headers = Vec::new();
        memory::reserve(&mut headers, "read rows", chunk_rows)?;
        let mut vectors = memory::zeros("read rows", chunk_rows * floats)?;
        for start in (0..rows.len()).step_by(chunk_rows) {
            let chunk = start..(start + chunk_rows).min(rows.len());
            headers.clear();
            headers.extend(chunk.clone().map(|row| rows.header(row)));
            let vectors = &mut vectors[..chunk.len() * floats];
            chunk.zip(vectors.chunks_exact_mut(floats)).for_each(|(row, vector)| rows.copy_vector(row, vector));
            sink(&headers, vectors)?;
        }
        Ok(())
    }
}
