//! Saves that run while training continues: one rank's part of a checkpoint as of a snapshot, and parts that ranks
//! write without communicating and the coordinator adopts.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::{BaseCheckpoint, PreImages, Table, TableSnapshot};
use crate::checkpoint::commit::CheckpointSave;
use crate::checkpoint::dense::DenseWriter;
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::{CheckpointName, PartName, make_held};
use crate::checkpoint::manifest::manifests::{DENSE_DIR, DenseShare, RankManifest, read_digested};
use crate::checkpoint::manifest::{
    RankDigest, checksum, counts_file, data_file, dense_data_file, parse, rank_file, render, table_dir,
};
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, IoEngine, write_atomically};

/// Default memory limit in bytes for copies of rows that training changes before they are written. See [`PreImages`].
pub const PRE_IMAGE_BYTES: usize = 32 << 20;
/// A part is written as the only rank of a world of size 1.
const PART_RANK: u32 = 0;
const PART_WORLD: u32 = 1;
/// The file for row copies that do not fit into [`PRE_IMAGE_BYTES`] of memory.
const PRE_IMAGES: &str = "pre-images";

/// Options of an asynchronous save.
#[derive(Clone, Copy, Debug)]
pub struct AsyncSaveOptions {
    /// Epoch of rows that are trained after the snapshot. The checkpoint is published with it.
    pub next_epoch: u32,
    /// Memory limit for copy-on-write row copies in bytes. See [`PRE_IMAGE_BYTES`].
    pub pre_image_bytes: usize,
    /// Maximum bytes of rows written per second; `None` for no limit.
    pub bytes_per_second: Option<u64>,
    /// If true, admission counts of pending ids are written.
    pub counts: bool,
}

/// A table to save.
#[derive(Clone, Debug)]
pub struct AsyncSaveTable {
    /// Path of its module in the model.
    pub module: String,
    /// The table.
    pub table: Table,
    /// Hyperparameters of its optimizer.
    pub hyperparameters: BTreeMap<String, f64>,
    /// Base checkpoint of the delta; `None` for a full save.
    pub base: Option<BaseCheckpoint>,
}

/// A snapshot of a table, with the path of its module and its hyperparameters.
type ModuleSnapshot = (String, TableSnapshot, BTreeMap<String, f64>);

/// A snapshot of one rank's tables, and the writer of its part of the checkpoint. Dropping it releases the snapshot;
/// the next save removes files already written.
#[derive(Debug)]
pub struct RankSnapshot {
    writer: RankWriter,
    tables: VecDeque<ModuleSnapshot>,
    images: Arc<PreImages>,
    limiter: WriteRateLimiter,
}

impl RankSnapshot {
    /// Takes a snapshot of the tables, for the part of `rank` (of `world`) in the checkpoint `name` in `root`. No table
    /// may be trained during this call.
    ///
    /// Errors: as [`Table::snapshot`]. After an error no snapshot is held.
    pub fn begin(
        root: &CheckpointDirectory,
        name: CheckpointName,
        (rank, world): (u32, u32),
        tables: Vec<AsyncSaveTable>,
        options: AsyncSaveOptions,
    ) -> Result<Self> {
        let writer = RankWriter::new(root, name, rank, world)?.with_counts(options.counts);
        let path = root.subdirectory(name).join(rank_file(rank, world)).with_extension("preimages");
        let images = Arc::new(PreImages::new(root.shared_engine(), path, options.pre_image_bytes, tables.len()));
        let snapshot_of = |AsyncSaveTable { module, table, hyperparameters, base }| {
            let snapshot = match base {
                None => table.snapshot(&images, options.next_epoch)?,
                Some(base) => table.snapshot_of_changes(&images, options.next_epoch, &base)?,
            };
            Ok((module, snapshot, hyperparameters))
        };
        let tables = tables.into_iter().map(snapshot_of).collect::<Result<_>>()?;
        Ok(Self { writer, tables, images, limiter: WriteRateLimiter::new(options.bytes_per_second) })
    }

    /// Writes the next table. Returns its numbers of rows and tombstones, or `None` if no table is left.
    pub fn write_next(&mut self) -> Result<Option<(u64, u64)>> {
        let Some((module, snapshot, hyperparameters)) = self.tables.pop_front() else { return Ok(None) };
        self.writer.write_snapshot(&module, snapshot, hyperparameters, &mut self.limiter).map(Some)
    }

    /// Makes this rank's part durable after every table is written. The caller sends the digest to the coordinator.
    pub fn finish(self) -> Result<RankDigest> {
        if let Some((_, snapshot, _)) = self.tables.front() {
            let message = format!("table {:?} is not written yet", snapshot.config().name);
            return Err(Kind::State.error(message));
        }
        self.images.close()?;
        self.writer.finish()
    }
}

/// Limits the number of bytes written per second.
#[derive(Debug)]
pub struct WriteRateLimiter {
    bytes_per_second: Option<u64>,
    /// Time at which the limit allows the next bytes.
    due: Instant,
}

impl WriteRateLimiter {
    /// If a slow disk has fallen behind the limit, later bytes are written faster, to make up for at most this much
    /// time.
    const CREDIT: Duration = Duration::from_millis(200);

    /// Creates a limiter in bytes per second; `None` for no limit.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, due: Instant::now() }
    }

    /// Sleeps until the limit allows more, after `bytes` were written.
    pub(super) fn wait(&mut self, bytes: u64) {
        std::thread::sleep(self.delay_after(bytes, Instant::now()));
    }

    /// Time to sleep at time `now`, when `bytes` were just written.
    fn delay_after(&mut self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.bytes_per_second else { return Duration::ZERO };
        let earliest = now.checked_sub(Self::CREDIT).unwrap_or(now);
        self.due = self.due.max(earliest) + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        self.due.saturating_duration_since(now)
    }
}

/// A part of a checkpoint, written under its own name, so that ranks do not communicate before the end of a save. A
/// part that is dropped and not adopted leaves a directory, which a later save removes.
///
/// 1. Every rank creates one or more [`CheckpointPart`]s, writes tables and dense extents, calls
///    [`CheckpointPart::finish`], and sends names and digests to the coordinator. The rank holds its parts until the
///    save has finished: while they are held no other save removes them.
/// 2. The coordinator calls [`CheckpointSave::begin`], [`CheckpointSave::adopt`] for each rank, and
///    [`CheckpointSave::publish`].
#[derive(Debug)]
pub struct CheckpointPart {
    directory: CheckpointDirectory,
    name: PartName,
    /// Writers of the tables and of the dense extents; `None` after they have finished.
    writers: Option<(RankWriter, DenseWriter)>,
    snapshots: Vec<ModuleSnapshot>,
    /// While this lock is held no save removes the part.
    _lock: DirLock,
}

impl CheckpointPart {
    /// Creates a part in `root`. `random` distinguishes parts. `expected_bytes` is the approximate length of the dense
    /// stream.
    pub fn begin(root: &CheckpointDirectory, random: u64, expected_bytes: u64) -> Result<Self> {
        root.check_to_save()?;
        let name = PartName(random);
        let (directory, lock) = make_held(root, name)?;
        root.sync()?;
        let writer = RankWriter::in_dir(directory.clone(), name.to_string(), PART_RANK, PART_WORLD);
        let extents = DenseWriter::new(&directory, PART_RANK, PART_WORLD, expected_bytes);
        Ok(Self { directory, name, writers: Some((writer, extents)), snapshots: Vec::new(), _lock: lock })
    }

    /// See [`DenseWriter::with_file_bytes`].
    #[must_use]
    pub fn with_file_bytes(mut self, bytes: u64) -> Self {
        self.writers = self.writers.map(|(writer, extents)| (writer, extents.with_file_bytes(bytes)));
        self
    }

    /// Name of the part, for [`CheckpointSave::adopt`].
    pub fn name(&self) -> PartName {
        self.name
    }

    /// Writer of the part's tables.
    pub fn rank_writer(&mut self) -> Result<&mut RankWriter> {
        self.writers.as_mut().map(|(writer, _)| writer).ok_or_else(part_finished_error)
    }

    /// Writer of the part's dense extents.
    pub fn dense_writer(&mut self) -> Result<&mut DenseWriter> {
        self.writers.as_mut().map(|(_, extents)| extents).ok_or_else(part_finished_error)
    }

    /// Takes a snapshot of tables. Rows trained after this call have `next_epoch`. Each table is passed with the path
    /// of its module and its hyperparameters.
    pub fn snapshot_tables(
        &mut self,
        tables: Vec<(String, &Table, BTreeMap<String, f64>)>,
        next_epoch: u32,
    ) -> Result<()> {
        let path = self.directory.join(PRE_IMAGES);
        let images = Arc::new(PreImages::new(self.directory.shared_engine(), path, PRE_IMAGE_BYTES, tables.len()));
        for (module, table, hyperparameters) in tables {
            let snapshot = table.snapshot(&images, next_epoch)?;
            self.snapshots.push((module, snapshot, hyperparameters));
        }
        Ok(())
    }

    /// Writes the snapshots of tables while training continues. Returns the number of rows.
    pub fn write_snapshots(&mut self) -> Result<u64> {
        let (writer, _) = self.writers.as_mut().ok_or_else(part_finished_error)?;
        let mut rows = 0;
        for (module, snapshot, hyperparameters) in self.snapshots.drain(..) {
            rows += writer.write_snapshot(&module, snapshot, hyperparameters, &mut WriteRateLimiter::new(None))?.0;
        }
        Ok(rows)
    }

    /// Makes everything durable.
    pub fn finish(&mut self) -> Result<RankDigest> {
        let (mut writer, extents) = self.writers.take().ok_or_else(part_finished_error)?;
        writer.set_dense(extents.finish()?);
        writer.finish()
    }

    /// Cancels the part and removes its files.
    pub fn abandon(mut self) -> Result<()> {
        // Dropping the writers waits for their threads, so that nothing is written afterwards.
        drop((self.writers.take(), std::mem::take(&mut self.snapshots)));
        self.directory.remove()
    }
}

fn part_finished_error() -> Error {
    Kind::State.error("this part of a checkpoint is finished: make another")
}

impl CheckpointSave {
    /// Opens the directory of parts that other processes created. Returns this save's own directory if the path is the
    /// same.
    ///
    /// Errors: `Path` or `Permission` if the directory has changed since a part was created in it, for example if it
    /// was replaced by a link.
    pub fn directory_of_parts(&self, path: &Path) -> Result<CheckpointDirectory> {
        if path == self.root.path() { Ok(self.root.clone()) } else { self.root.reopen_to_save(path) }
    }

    /// Adopts the parts that `rank` of `world` wrote. At most one of them has dense extents. Each is passed with the
    /// directory in which it was created, which must be on the file system of this checkpoint.
    pub fn adopt(
        &self,
        rank: u32,
        world: u32,
        parts: &[(CheckpointDirectory, PartName, RankDigest)],
    ) -> Result<RankDigest> {
        parts.iter().try_for_each(|(root, ..)| root.check_to_save())?;
        let dir = &self.dir;
        let mut adopted = RankManifest::new(self.name().to_string(), rank, world);
        let renamed = |name: fn(u32, u32, usize) -> String, files: usize| {
            (0..files).map(move |n| (name(PART_RANK, PART_WORLD, n), name(rank, world, n)))
        };
        for (root, name, digest) in parts {
            let (from, engine) = (root.subdirectory(name), self.root.engine_with(root)?);
            let path = from.join(rank_file(PART_RANK, PART_WORLD));
            let part: RankManifest = parse(&read_digested(from.engine(), &path, digest)?, &path)?;
            if part.name != name.to_string() || (part.rank, part.world) != (PART_RANK, PART_WORLD) {
                return Err(Error::corruption(&path, 0, "the part's name", name, part.name));
            }
            for share in part.tables {
                let table = table_dir(&share.spec.module, &share.spec.table);
                let of_counts = share.counts.as_ref().map_or(0, |counts| counts.files.len());
                let files = renamed(data_file, share.files.len()).chain(renamed(counts_file, of_counts));
                move_files(&*engine, &from.join(&table), &dir.join(&table), files)?;
                adopted.tables.push(share);
            }
            if let Some(dense) = part.dense.filter(|dense| dense.bytes() > 0) {
                let files = renamed(dense_data_file, dense.files.len());
                move_files(&*engine, &from.join(DENSE_DIR), &dir.join(DENSE_DIR), files)?;
                if adopted.dense.replace(dense).is_some() {
                    return Err(Kind::Input.error(format!("rank {rank} has two parts with extents")));
                }
            }
        }
        adopted.dense.get_or_insert_with(DenseShare::default);
        let bytes = render(&adopted)?;
        write_atomically(dir.engine(), &dir.join(rank_file(rank, world)), &bytes)?;
        for (root, name, _) in parts {
            // A later save removes any leftovers.
            let _ = root.subdirectory(name).remove();
        }
        Ok(RankDigest { bytes: bytes.len() as u64, xxh3: checksum(&bytes) })
    }
}

/// Renames files into another directory, which is created, and makes the new names durable.
fn move_files(
    engine: &dyn IoEngine,
    from: &Path,
    to: &Path,
    names: impl Iterator<Item = (String, String)>,
) -> Result<()> {
    engine.create_dir_all(to)?;
    for (old, new) in names {
        engine.rename(&from.join(old), &to.join(new))?;
    }
    engine.sync_dir(to)
}

#[cfg(test)]
mod tests;
