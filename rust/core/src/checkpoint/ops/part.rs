//! Saves whose ranks do not communicate before the end. Each rank writes a checkpoint part under its own name, and the
//! coordinator adopts it.
//!
//! 1. Every rank creates one or more [`CheckpointPart`]s, writes tables and dense extents, calls
//!    [`CheckpointPart::finish`], and sends names and digests to the coordinator. The rank holds its parts until the
//!    save has finished: while they are held no other save removes them.
//! 2. The coordinator calls [`CheckpointSave::begin`], [`CheckpointSave::adopt`] for each rank, and
//!    [`CheckpointSave::publish`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::beside::{PRE_IMAGE_BYTES, WriteRateLimiter};
use crate::cache::{PreImages, Table, TableSnapshot};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::extents::writer::DenseWriter;
use crate::checkpoint::manifest::dense::{DENSE_DIR, DenseShare, dense_data_file};
use crate::checkpoint::manifest::digest::{RankDigest, checksum};
use crate::checkpoint::manifest::holds::make_held;
use crate::checkpoint::manifest::latest::PartName;
use crate::checkpoint::manifest::manifests::{RankManifest, parse, render};
use crate::checkpoint::manifest::names::{counts_file, data_file, rank_file, table_dir};
use crate::checkpoint::manifest::read::read_digested;
use crate::checkpoint::publish::save::CheckpointSave;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, IoEngine, write_atomically};

/// A part is written as the only rank of a world of size 1.
const PART_RANK: u32 = 0;
const PART_WORLD: u32 = 1;

/// The file for row copies that do not fit into [`PRE_IMAGE_BYTES`] of memory.
const PRE_IMAGES: &str = "pre-images";

/// A snapshot of a table, with the path of its module.
#[derive(Debug)]
struct PartTableSnapshot {
    module: String,
    snapshot: TableSnapshot,
    hyperparameters: BTreeMap<String, f64>,
}

/// The files that one rank writes. A part that is dropped and not adopted leaves a directory, which a later save
/// removes.
#[derive(Debug)]
pub struct CheckpointPart {
    directory: CheckpointDirectory,
    name: PartName,
    writer: Option<RankWriter>,
    dense_writer: Option<DenseWriter>,
    snapshots: Vec<PartTableSnapshot>,
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
        Ok(Self {
            directory,
            name,
            writer: Some(writer),
            dense_writer: Some(extents),
            snapshots: Vec::new(),
            _lock: lock,
        })
    }

    /// See [`DenseWriter::with_file_bytes`].
    #[must_use]
    pub fn with_file_bytes(mut self, bytes: u64) -> Self {
        self.dense_writer = self.dense_writer.map(|extents| extents.with_file_bytes(bytes));
        self
    }

    /// Name of the part, for [`CheckpointSave::adopt`].
    pub fn name(&self) -> PartName {
        self.name
    }

    /// Writer of the part's tables.
    pub fn rank_writer(&mut self) -> Result<&mut RankWriter> {
        self.writer.as_mut().ok_or_else(part_finished_error)
    }

    /// Writer of the part's dense extents.
    pub fn dense_writer(&mut self) -> Result<&mut DenseWriter> {
        self.dense_writer.as_mut().ok_or_else(part_finished_error)
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
            let moment = table.snapshot(&images, next_epoch)?;
            self.snapshots.push(PartTableSnapshot { module, snapshot: moment, hyperparameters });
        }
        Ok(())
    }

    /// Writes the snapshots of tables while training continues. Returns the number of rows.
    pub fn write_snapshots(&mut self) -> Result<u64> {
        let writer = self.writer.as_mut().ok_or_else(part_finished_error)?;
        let mut rows = 0;
        for PartTableSnapshot { module, snapshot: moment, hyperparameters } in self.snapshots.drain(..) {
            rows += writer.write_snapshot(&module, moment, hyperparameters, &mut WriteRateLimiter::new(None))?.0;
        }
        Ok(rows)
    }

    /// Makes everything durable.
    pub fn finish(&mut self) -> Result<RankDigest> {
        let (mut writer, extents) = self.writer.take().zip(self.dense_writer.take()).ok_or_else(part_finished_error)?;
        writer.set_dense(extents.finish()?);
        writer.finish()
    }

    /// Cancels the part and removes its files.
    pub fn abandon(mut self) -> Result<()> {
        // Dropping the writers waits for their threads, so that nothing is written afterwards.
        drop((self.writer.take(), self.dense_writer.take(), std::mem::take(&mut self.snapshots)));
        self.directory.remove()
    }
}

fn part_finished_error() -> Error {
    Error::new(Kind::State, "this part of a checkpoint is finished: make another")
}

impl CheckpointSave {
    /// Opens the directory of parts that other processes created. Returns this save's own directory if the path is the
    /// same.
    ///
    /// Errors: `Path` or `Permission` if the directory has changed since a part was created in it, for example if it
    /// was replaced by a link.
    pub fn directory_of_parts(&self, path: &Path) -> Result<CheckpointDirectory> {
        if path == self.root().path() { Ok(self.root().clone()) } else { self.root().reopen_to_save(path) }
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
        let dir = self.dir();
        let mut adopted = RankManifest::new(self.name().to_string(), rank, world);
        for (root, name, digest) in parts {
            let (from, both) = (root.subdirectory(name), self.root().engine_with(root)?);
            let path = from.join(rank_file(PART_RANK, PART_WORLD));
            let part: RankManifest = parse(&read_digested(from.engine(), &path, digest)?, &path)?;
            if part.name != name.to_string() || (part.rank, part.world) != (PART_RANK, PART_WORLD) {
                return Err(Error::corruption(&path, 0, "the part's name", name, part.name));
            }
            for share in part.tables {
                let table = table_dir(&share.spec.module, &share.spec.table);
                let files =
                    (0..share.files.len()).map(|n| (data_file(PART_RANK, PART_WORLD, n), data_file(rank, world, n)));
                let of_counts = 0..share.counts.as_ref().map_or(0, |counts| counts.files.len());
                let counts = of_counts.map(|n| (counts_file(PART_RANK, PART_WORLD, n), counts_file(rank, world, n)));
                move_files(&*both, &from.join(&table), &dir.join(&table), files.chain(counts))?;
                adopted.tables.push(share);
            }
            if let Some(dense) = part.dense.filter(|dense| dense.bytes() > 0) {
                let files = (0..dense.files.len())
                    .map(|n| (dense_data_file(PART_RANK, PART_WORLD, n), dense_data_file(rank, world, n)));
                move_files(&*both, &from.join(DENSE_DIR), &dir.join(DENSE_DIR), files)?;
                if adopted.dense.replace(dense).is_some() {
                    return Err(Error::new(Kind::Input, format!("rank {rank} has two parts with extents")));
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
