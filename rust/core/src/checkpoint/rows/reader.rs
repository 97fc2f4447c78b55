//! Loads a checkpoint: manifests and headers first, then the rows of the buckets that a rank owns.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::Builder;

use super::counts::CountsSink;
use super::counts_input::CountsReader;
use super::format::{GROUP_BYTES, group_rows};
use super::input::GroupReader;
use super::segment_rows::read_segments;
use super::source::RowSink;
use super::staged::{RowFileOffsets, StagedColumns};
use crate::cache::{PickedRows, RowColumns};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::extents::reader::DenseReader;
use crate::checkpoint::manifest::dense::{DENSE_FILE, DenseEntry};
use crate::checkpoint::manifest::holds::hold_to_read;
use crate::checkpoint::manifest::json::inconsistent;
use crate::checkpoint::manifest::latest::LatestCheckpoint;
use crate::checkpoint::manifest::manifests::{
    CheckpointId, CheckpointManifest, DataFile, RankManifest, RankShare, TableEntry, TableSpec,
};
use crate::checkpoint::manifest::names::{MANIFEST_FILE, counts_file, data_file, table_dir};
use crate::checkpoint::manifest::read::{read_digested, read_manifest, read_ranks};
use crate::checkpoint::output::for_each_piece;
use crate::config::OptimizerKind;
use crate::error::{Error, Kind, Result};
use crate::io::{BufPool, DirLock, IoEngine};
use crate::memory::{self, can_start_threads};
use crate::process::BackgroundFlag;
use crate::rows::RowHeader;
use crate::ssd::LinkedSegments;
use crate::sync::lock;
use crate::types::Id;

/// How many groups are read ahead, each by a thread and its helpers.
const AHEAD: usize = 4;
/// How many files' headers are read at once.
const HEADERS: usize = 8;
/// How many bytes of rows a sink is given at a time, one row at least.
const EMIT_BYTES: usize = 4 << 20;

/// A checkpoint whose manifests are checked.
#[derive(Debug)]
pub struct OpenCheckpoint {
    directory: CheckpointDirectory,
    identity: CheckpointId,
    manifest: CheckpointManifest,
    pub(crate) ranks: Vec<RankManifest>,
    /// While this is held no save removes the directory.
    hold: Mutex<Option<DirLock>>,
}

impl OpenCheckpoint {
    /// Read and check the manifests of the checkpoint that `latest` names in `root`, which no save removes until this is dropped or
    /// [`Checkpoint::release`] is called.
    ///
    /// Errors: `Corruption` (missing, damaged, or manifests that contradict each other), `Unsupported` (a newer format), `Storage`,
    /// `InUse` (a save is removing it). A save may have replaced the checkpoint since `latest` was read: then read that again.
    pub fn open(root: &CheckpointDirectory, latest: LatestCheckpoint) -> Result<Self> {
        let directory = root.subdirectory(latest.name);
        let missing = || {
            let what = format!("LATEST of {}", root.path().display());
            Error::corruption(root.path(), 0, &what, "the name of a checkpoint that is there", latest.name)
        };
        if !directory.has(MANIFEST_FILE)? {
            return Err(missing());
        }
        let hold = hold_to_read(&directory)?;
        // A save may have removed it before it was held.
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

    /// Let saves remove the checkpoint. Nothing more may be read of it, unless one that builds on it is held.
    pub fn release(&self) {
        drop(lock(&self.hold).take());
    }

    /// What a delta that builds on it names as its parent.
    pub fn identity(&self) -> CheckpointId {
        self.identity.clone()
    }

    /// Its directory.
    pub(crate) fn directory(&self) -> &CheckpointDirectory {
        &self.directory
    }

    /// The coordinator's manifest.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifest
    }

    /// A table of the checkpoint. The error is `Mismatch` and lists the tables that it has.
    pub fn table(&self, module: &str, table: &str) -> Result<&TableEntry> {
        self.manifest.tables.iter().find(|entry| entry.spec.module == module && entry.spec.table == table).ok_or_else(
            || {
                let there: Vec<String> = self
                    .manifest
                    .tables
                    .iter()
                    .map(|entry| format!("{}/{}", entry.spec.module, entry.spec.table))
                    .collect();
                Error::new(
                    Kind::Mismatch,
                    format!(
                        "{} has no table {table:?} of module {module:?}; it has [{}]",
                        self.directory.path().display(),
                        there.join(", ")
                    ),
                )
            },
        )
    }

    /// The rank that alone had rows of a table when there were several ranks; `None` otherwise.
    pub(crate) fn only_rank(&self, module: &str, table: &str) -> Option<u32> {
        let has = |rank: &&RankManifest| {
            rank.tables.iter().any(|share| share.spec.module == module && share.spec.table == table)
        };
        let mut owners = self.ranks.iter().filter(has);
        match (owners.next(), owners.next()) {
            (Some(owner), None) if owner.world > 1 => Some(owner.rank),
            _ => None,
        }
    }

    /// What the extents mean, as [`crate::checkpoint::Save::write_dense_metadata`] was given it; `None` where there is no dense part.
    pub fn dense_metadata(&self) -> Result<Option<Vec<u8>>> {
        let path = self.directory.join(DENSE_FILE);
        let read = |entry: &DenseEntry| read_digested(self.directory.engine(), &path, &entry.metadata);
        self.manifest.dense.as_ref().map(read).transpose()
    }

    /// Get ready to read extents of any rank.
    pub fn dense_reader(&self) -> DenseReader {
        let shares = self.ranks.iter().map(|rank| rank.dense.as_ref());
        DenseReader::new(&self.directory, shares)
    }

    /// Check the headers and sizes of the files that hold rows of `buckets`, and get ready to read them.
    pub fn table_reader(&self, module: &str, table: &str, buckets: Range<u32>) -> Result<TableReader> {
        let spec = self.table(module, table)?.spec.clone();
        let optimizer = spec.optimizer_kind()?;
        if buckets.start > buckets.end || buckets.end > spec.total_num_buckets {
            return Err(Error::new(
                Kind::Input,
                format!("table {table:?}: buckets {buckets:?} are not within 0..{}", spec.total_num_buckets),
            ));
        }
        let dir = self.directory.join(table_dir(module, table));
        let (mut wanted, mut counts, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        for rank in &self.ranks {
            for share in rank.tables.iter().filter(|share| share.spec.module == module && share.spec.table == table) {
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
            optimizer,
            buckets,
            groups,
            counts,
            segments,
            slots,
        })
    }

    fn open_counts(&self, (path, share, file, owned): DataFileRequest<'_>) -> Result<CountsReader> {
        let clicks = share.counts.as_ref().is_some_and(|counts| counts.clicks);
        let group = GroupReader::open_counts(clicks, self.directory.engine(), path, share, file, owned)?;
        Ok(CountsReader::new(group, share.bucket_begin, clicks))
    }

    /// Check several files at once: each is a few small reads.
    fn open_groups(&self, requested: Vec<DataFileRequest<'_>>) -> Result<Vec<GroupReader>> {
        let mut groups: Vec<Option<GroupReader>> = requested.iter().map(|_| None).collect();
        let pieces = groups.iter_mut().zip(requested).collect();
        for_each_piece(HEADERS, pieces, |(group, (path, share, file, owned))| {
            *group = Some(GroupReader::open(self.directory.engine(), path, share, file, owned)?);
            Ok(())
        })?;
        Ok(groups.into_iter().flatten().collect())
    }
}

/// A file: its path, its rank's share of the table, what the manifest says of it, and the buckets wanted.
type DataFileRequest<'a> = (PathBuf, &'a RankShare, &'a DataFile, Range<u32>);

/// Reads the rows of some buckets of one table.
#[derive(Debug)]
pub struct TableReader {
    engine: Arc<dyn IoEngine>,
    spec: TableSpec,
    optimizer: OptimizerKind,
    buckets: Range<u32>,
    groups: Vec<GroupReader>,
    /// The files of counts with ids of the buckets, in the order in which they were written.
    counts: Vec<CountsReader>,
    /// Segments with rows of the buckets, and of others.
    segments: Vec<LinkedSegments>,
    /// Whether the optimizer's slots are handed over.
    slots: bool,
}

impl TableReader {
    /// Hand rows over without the optimizer's slots, which are not read from data files then.
    #[must_use]
    pub fn without_slots(mut self) -> Self {
        self.slots = false;
        self.groups.iter_mut().for_each(|group| group.slots = false);
        self
    }

    /// Whether it hands slots over.
    pub(crate) fn has_slots(&self) -> bool {
        self.slots
    }

    /// The table as it was saved.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The buckets it reads.
    pub fn buckets(&self) -> &Range<u32> {
        &self.buckets
    }

    /// How many rows [`TableReader::read`] will hand over. Where it reads segments these are at most so many, because the rows of a segment
    /// are not in the order of buckets.
    pub fn rows(&self) -> u64 {
        let in_files: u64 = self.groups.iter().map(|group| group.rows.len() as u64).sum();
        in_files + self.segments.iter().map(LinkedSegments::rows).sum::<u64>()
    }

    /// The files with rows, in the order in which [`TableReader::read_columns`] hands their rows over where all buckets are read.
    pub(crate) fn row_file_offsets(&self) -> Vec<RowFileOffsets> {
        self.groups.iter().filter(|group| !group.rows.is_empty()).map(GroupReader::row_file_offsets).collect()
    }

    /// No fewer rows than any file of the table has, also in later checkpoints.
    pub(crate) fn max_rows_per_file(&self) -> usize {
        let here = self.groups.iter().map(|group| group.rows.len()).max().unwrap_or(0);
        here.max(group_rows(self.optimizer, self.spec.dim as usize, self.spec.precision, GROUP_BYTES))
    }

    /// Tombstones of the files that hold some of the buckets: no fewer than [`TableReader::read_tombstones`] will hand over.
    pub fn tombstones(&self) -> u64 {
        self.groups.iter().map(GroupReader::tombstones).sum()
    }

    /// Read the tombstones of the buckets, verify them, and hand them to `sink`, some at a time. Errors as [`TableReader::read`].
    pub fn read_tombstones(&self, sink: &mut dyn FnMut(&[Id]) -> Result<()>) -> Result<()> {
        for group in self.groups.iter().filter(|group| group.tombstones() > 0) {
            group.read_tombstones(&*self.engine, self.spec.bucketing(), sink)?;
        }
        Ok(())
    }

    /// Whether there are counts of ids that wait for rows.
    pub(crate) fn has_counts(&self) -> bool {
        !self.counts.is_empty()
    }

    /// Whether they count clicks.
    pub(crate) fn counts_clicks(&self) -> bool {
        self.counts.iter().any(CountsReader::has_clicks)
    }

    /// How many ids have counts.
    pub(crate) fn pending(&self) -> u64 {
        self.counts.iter().map(CountsReader::ids).sum()
    }

    /// Read the counts of ids that wait for rows, verify them, and hand those of each bucket to `sink`. A bucket may come in several parts.
    /// Errors as [`TableReader::read`].
    pub(crate) fn read_counts(&self, sink: &mut CountsSink<'_>) -> Result<()> {
        let bucketing = self.spec.bucketing();
        self.counts.iter().try_for_each(|counts| counts.read(&*self.engine, bucketing, sink))
    }

    /// Read every row of the buckets, verify it, and hand it to `sink` in chunks of about 4 MiB. At most five groups are in memory (80 MiB).
    ///
    /// Errors: `Corruption` with the file and the byte, after the rows before were handed over; `Storage`; and those of the sink.
    pub fn read(&self, sink: &mut RowSink<'_>) -> Result<()> {
        self.read_columns(&mut |rows| self.emit(PickedRows::all(rows), sink))
    }

    /// Read as [`TableReader::read`] does, and hand whole groups over as columns.
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
            sink(&staged.columns(self.optimizer.layout(dim), served.as_ref()))
        };
        let has_room = groups.len() > 1 && can_start_threads();
        std::thread::scope(|scope| {
            // Thread n mod AHEAD reads group n, so that groups come in order.
            let mut ahead = Vec::new();
            for number in 0..AHEAD.min(groups.len()) {
                // A thread keeps its group until the caller asks for it.
                let (send, receive) = mpsc::sync_channel(0);
                let mine = groups.iter().skip(number).step_by(AHEAD);
                let (staging, behind) = (&staging, BackgroundFlag::of_this_thread());
                let read = move || {
                    behind.apply();
                    for group in mine {
                        // After an error of the sink nobody receives this.
                        if send.send(self.stage(group, staging)).is_err() {
                            return;
                        }
                    }
                };
                let name = format!("embcache-load-{number}");
                if !has_room || Builder::new().name(name).spawn_scoped(scope, read).is_err() {
                    // Without all of the threads nothing is read ahead. Those that were started end, because nobody receives from them.
                    drop(std::mem::take(&mut ahead));
                    return groups.iter().try_for_each(|group| hand_over(self.stage(group, staging)?));
                }
                ahead.push(receive);
            }
            let ended = |_| Err(Error::new(Kind::Storage, "the reading threads ended"));
            (0..groups.len()).try_for_each(|n| hand_over(ahead[n % AHEAD].recv().unwrap_or_else(ended)?))
        })
    }

    fn stage<'g>(&self, group: &'g GroupReader, staging: &Arc<BufPool>) -> Result<StagedColumns<'g>> {
        group.stage(&*self.engine, staging, self.spec.bucketing())
    }

    /// Hand rows over in chunks, as headers and vectors.
    pub(crate) fn emit(&self, rows: PickedRows<'_>, sink: &mut RowSink<'_>) -> Result<()> {
        let floats = self.optimizer.layout(self.spec.dim as usize).vector_floats();
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
