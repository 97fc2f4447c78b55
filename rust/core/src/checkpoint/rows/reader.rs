//! Loads a checkpoint: manifests and headers first, then the rows of the buckets that a rank owns.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::Builder;

use super::counters::{CountsReader, CountsSink};
use super::format::{GROUP_BYTES, GroupLayout, group_rows};
use super::input::{DataFileRequest, GroupReader, RowFileOffsets, StagedColumns};
use super::linked::read_segments;
use super::writer::{RowSink, columns_of};
use crate::cache::{PickedRows, RowColumns};
use crate::checkpoint::chunked_file::for_each_piece;
use crate::checkpoint::dense::DenseReader;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::{LatestCheckpoint, hold_to_read};
use crate::checkpoint::manifest::manifests::{
    CheckpointId, CheckpointKind, CheckpointManifest, CheckpointManifests, ColumnEntry, CountsShare, DENSE_FILE,
    DenseEntry, GroupEntry, RankManifest, RankShare, TableEntry, merge_shares, read_digested,
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
/// Number of files, or groups, that are checked at once.
const HEADERS: usize = 8;
/// Bytes of rows passed to a sink per call, at least one row.
const EMIT_BYTES: usize = 4 << 20;

/// A checkpoint with a checked manifest of its coordinator. Those of ranks are read and checked when needed.
#[derive(Debug)]
pub struct OpenCheckpoint {
    manifests: Arc<CheckpointManifests>,
    /// While this lock is held no save removes the directory.
    hold: Mutex<Option<DirLock>>,
}

impl OpenCheckpoint {
    /// Reads and checks the coordinator's manifest of the checkpoint that `latest` names in `root`. The ranks' manifests
    /// are read when they are needed. No save removes the checkpoint until this is dropped or [`Self::release`] is
    /// called.
    ///
    /// Errors: `Corruption` (a missing, corrupted, or contradictory manifest), `Unsupported` (a newer format),
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
        let manifests = Arc::new(CheckpointManifests::open(directory, latest.name)?);
        Ok(Self { manifests, hold: Mutex::new(Some(hold)) })
    }

    /// Allows saves to remove the checkpoint. It must not be read after this call, unless a checkpoint based on it is
    /// held.
    pub fn release(&self) {
        drop(lock(&self.hold).take());
    }

    /// Identity that a delta based on this checkpoint names as its parent.
    pub fn identity(&self) -> CheckpointId {
        self.manifests.identity.clone()
    }

    pub(crate) fn directory(&self) -> &CheckpointDirectory {
        &self.manifests.directory
    }

    /// The coordinator's manifest.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifests.coordinator
    }

    /// Returns a table of the checkpoint. Returns `Mismatch`, which lists its tables, if there is no such table.
    pub fn table(&self, module: &str, table: &str) -> Result<&TableEntry> {
        let found =
            self.manifest().tables.iter().find(|entry| entry.spec.module == module && entry.spec.table == table);
        found.ok_or_else(|| {
            let name = |entry: &TableEntry| format!("{}/{}", entry.spec.module, entry.spec.table);
            let (dir, tables) = (self.directory().path().display(), self.manifest().tables.iter().map(name));
            let tables = tables.collect::<Vec<_>>().join(", ");
            Kind::Mismatch.error(format!("{dir} has no table {table:?} of module {module:?}; it has [{tables}]"))
        })
    }

    /// Reads and checks the manifests of `part` of `parts` of the ranks, such as those that no load has needed.
    ///
    /// Errors: `Corruption`, `Storage`.
    pub fn check_ranks(&self, part: u32, parts: u32) -> Result<()> {
        self.manifests.check(part, parts)
    }

    /// Returns the shards of a table that have some of `buckets`, each with its rank's manifest; all shards if these are
    /// all buckets.
    fn shares<'a>(
        &'a self,
        entry: &'a TableEntry,
        buckets: &Range<u32>,
    ) -> Result<Vec<(&'a RankManifest, &'a RankShare)>> {
        let (mut found, all) = (Vec::new(), *buckets == (0..entry.spec.total_num_buckets));
        for listed in entry.all_shares(self.manifest().world()) {
            if all || listed.bucket_begin.max(buckets.start) < listed.bucket_end.min(buckets.end) {
                let rank = self.manifests.rank(listed.rank)?;
                found.extend(rank.shares_of(&entry.spec.module, &entry.spec.table).map(|share| (rank, share)));
            }
        }
        if all {
            self.check_merged(entry, &found)?;
        }
        found.retain(|(_, share)| !share.buckets().is_empty());
        Ok(found)
    }

    /// The only rank with rows of a table, if there were several ranks; `None` otherwise.
    pub(crate) fn only_rank(&self, entry: &TableEntry) -> Option<u32> {
        match &entry.shares[..] {
            [owner] if self.manifest().world() > 1 => Some(owner.rank),
            _ => None,
        }
    }

    /// Reads the description of the dense extents that was passed to
    /// [`crate::checkpoint::CheckpointSave::write_dense_metadata`]; returns `None` if there is no dense state.
    pub fn dense_metadata(&self) -> Result<Option<Vec<u8>>> {
        let path = self.directory().join(DENSE_FILE);
        let read = |entry: &DenseEntry| read_digested(self.directory().engine(), &path, &entry.metadata);
        self.manifest().dense.as_ref().map(read).transpose()
    }

    /// Returns a reader for the dense extents of all ranks.
    pub fn dense_reader(&self) -> DenseReader {
        DenseReader::new(&self.manifests)
    }

    /// Checks the headers and sizes of the files with rows of `buckets`, and returns a reader for them.
    pub fn table_reader(&self, module: &str, table: &str, buckets: Range<u32>) -> Result<TableReader> {
        let entry = self.table(module, table)?;
        let spec = entry.spec.clone();
        let layout = spec.row_layout()?;
        let outside = |what| Kind::Input.error(format!("table {table:?}: {what}"));
        spec.check_buckets(&buckets).map_err(outside)?;
        let dir = self.directory().join(table_dir(module, table));
        let (mut files, mut counts, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, share) in self.shares(entry, &buckets)? {
            let owned = buckets.start.max(share.bucket_begin)..buckets.end.min(share.bucket_end);
            segments.extend(share.segments.as_ref().map(|set| self.segment_files(rank, share, set)).transpose()?);
            self.check_columns(rank, share)?;
            for (n, file) in share.files.iter().enumerate() {
                let path = dir.join(data_file(rank.rank, rank.world, n)).into();
                let layout = |group: &GroupEntry| GroupLayout::new(&share.spec, group.shape(0));
                let layouts = file.groups.iter().map(layout).collect();
                files.push(DataFileRequest { path, share, file, layouts, buckets: owned.clone() });
            }
            counts.extend(self.open_counts((rank, share), &dir, owned)?);
        }
        let groups = self.open_groups(files, GroupReader::is_requested)?;
        let slots = spec.precision.is_none();
        Ok(TableReader {
            engine: self.directory().shared_engine(),
            spec,
            layout,
            buckets,
            groups,
            counts,
            segments,
            slots,
        })
    }

    /// Returns `Corruption` unless `shares`, all of them, make the table of the coordinator's manifest.
    fn check_merged(&self, entry: &TableEntry, shares: &[(&RankManifest, &RankShare)]) -> Result<()> {
        let shares = shares.iter().map(|(rank, share)| (rank.rank as usize, *share)).collect();
        let merged = merge_shares(shares, self.manifest().world());
        let path = self.directory().join(MANIFEST_FILE);
        if merged.map_err(|what| inconsistent(&path, what))? == *entry {
            return Ok(());
        }
        let what = format!("the ranks' manifests hold other settings or counts of table {:?}", entry.spec.table);
        Err(inconsistent(&path, what))
    }

    /// Returns `Corruption` if the files of a shard have other columns than rows of its table.
    fn check_columns(&self, rank: &RankManifest, share: &RankShare) -> Result<()> {
        let expected = columns_of(&share.spec)?;
        if share.files.is_empty() || share.columns == expected {
            return Ok(());
        }
        let path = self.directory().join(rank_file(rank.rank, rank.world));
        let listed = |columns: &[ColumnEntry]| {
            let columns = columns.iter().map(|column| format!("{} {:?}", column.name, column.dtype));
            columns.collect::<Vec<_>>().join(", ")
        };
        let what = format!("the columns of table {:?}", share.spec.table);
        Err(Error::corruption(&path, 0, &what, listed(&expected), listed(&share.columns)))
    }

    /// Opens the counts of a rank's shard of a table, whose directory is `dir`.
    fn open_counts(
        &self,
        (rank, share): (&RankManifest, &RankShare),
        dir: &Path,
        buckets: Range<u32>,
    ) -> Result<Option<CountsReader>> {
        let Some(CountsShare { clicks, files }) = &share.counts else { return Ok(None) };
        let requests = files.iter().enumerate().map(|(n, file)| {
            let generations = |k: usize| if (n, k) == (0, 0) { share.buckets().len() } else { 0 };
            let layout =
                |(k, group): (usize, &GroupEntry)| GroupLayout::of_counts(*clicks, group.shape(generations(k)));
            let path = dir.join(counts_file(rank.rank, rank.world, n)).into();
            let layouts = file.groups.iter().enumerate().map(layout).collect();
            DataFileRequest { path, share, file, layouts, buckets: buckets.clone() }
        });
        // The first group has the generations.
        let mut is_first = true;
        let groups =
            self.open_groups(requests.collect(), |group| std::mem::take(&mut is_first) || group.is_requested())?;
        Ok(Some(CountsReader { groups, first: share.bucket_begin, buckets, clicks: *clicks }))
    }

    /// Checks several files in parallel, then the selected groups: each needs a few small reads.
    fn open_groups(
        &self,
        requests: Vec<DataFileRequest<'_>>,
        mut select: impl FnMut(&GroupReader) -> bool,
    ) -> Result<Vec<GroupReader>> {
        let engine = self.directory().engine();
        let Some(bucketing) = requests.first().map(|request| request.share.spec.bucketing()) else {
            return Ok(Vec::new());
        };
        let mut opened: Vec<Vec<GroupReader>> = requests.iter().map(|_| Vec::new()).collect();
        let pieces = opened.iter_mut().zip(requests).collect();
        for_each_piece(HEADERS, pieces, |(groups, request): (&mut Vec<GroupReader>, DataFileRequest<'_>)| {
            *groups = request.open(engine)?;
            Ok(())
        })?;
        let mut groups: Vec<GroupReader> = opened.into_iter().flatten().filter(|group| select(group)).collect();
        for_each_piece(HEADERS, groups.iter_mut().collect(), |group: &mut GroupReader| group.check(engine, bucketing))?;
        Ok(groups)
    }

    /// Returns `Unsupported` if this is a serving checkpoint, which does not support `action`, a verb phrase.
    pub(crate) fn refuse_serving(&self, action: &str) -> Result<()> {
        let manifest = self.manifest();
        let (CheckpointKind::Serving, Some(source)) = (manifest.kind, &manifest.made_from) else { return Ok(()) };
        let precision = manifest.tables.iter().find_map(|entry| entry.spec.precision).map_or("", WeightPrecision::name);
        Err(Kind::Unsupported.error(format!(
                "{} is a serving checkpoint (kind serving, {precision}): it is for torchrec_embcache.serving, and has no optimizer state; \
                 to {action}, use the checkpoint that it was made from, {}",
                self.directory().path().display(),
                source.name
            ),
        )
        .at(self.directory().path()))
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
        let dir = self.directory().join(table_dir(&spec.module, &spec.table));
        LinkedSegments::open(
            self.directory().shared_engine(),
            (identity, layout),
            set,
            |serial| dir.join(segment_file(rank.rank, rank.world, serial)),
            self.directory().join(rank_file(rank.rank, rank.world)),
        )
    }

    /// Returns the segments from which a table with exactly these buckets can be opened. `None` if the rows of the
    /// buckets are in data files.
    ///
    /// Errors: `Mismatch` if segments also contain rows of other buckets, or only of some; `Corruption` as
    /// [`LinkedSegments::open`].
    pub fn segments_of(&self, module: &str, table: &str, buckets: &Range<u32>) -> Result<Option<LinkedSegments>> {
        let mut found = None;
        for (rank, share) in self.shares(self.table(module, table)?, buckets)? {
            let Some(set) = &share.segments else { continue };
            if share.buckets() != *buckets {
                let owned = share.buckets();
                let what =
                    format!("holds buckets {owned:?} of table {table:?} together, and this rank owns {buckets:?}");
                return Err(self.only_for_same_ranks(&what));
            }
            found = Some((rank, share, set));
        }
        found.map(|(rank, share, set)| self.segment_files(rank, share, set)).transpose()
    }

    /// Returns the error of a load that cannot use the segments of a linked checkpoint, for `reason`.
    pub fn only_for_same_ranks(&self, reason: &str) -> Error {
        let (dir, world) = (self.directory().path(), self.manifest().world());
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
    /// The counts of each rank with ids of the buckets.
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

    /// The groups with rows, in the order in which [`Self::read_columns`] delivers their rows if all buckets are read.
    pub(crate) fn row_file_offsets(&self) -> Vec<RowFileOffsets> {
        self.groups.iter().filter(|group| !group.rows.is_empty()).map(GroupReader::row_file_offsets).collect()
    }

    /// Upper bound of the number of rows in any group of the table, including later checkpoints.
    pub(crate) fn max_rows_per_group(&self) -> usize {
        let largest = self.groups.iter().map(|group| group.rows.len()).max().unwrap_or(0);
        largest.max(group_rows(&self.spec, self.layout, GROUP_BYTES))
    }

    /// Number of tombstones in the groups with some of the buckets: an upper bound for [`Self::read_tombstones`].
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
        self.counts.iter().map(CountsReader::ids).sum()
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
