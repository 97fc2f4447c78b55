//! Saves whose ranks agree on nothing before the end. Each rank writes a part under a name of its own, and the coordinator takes it over.
//!
//! 1. Every rank makes a [`Part`] (or several), writes tables and extents, and calls [`Part::finish`]; names and digests go to the
//!    coordinator. The rank keeps its parts until the save is over: while it holds them no other save sweeps them.
//! 2. The coordinator calls [`Save::begin`], [`Save::adopt`] for each rank, and [`Save::publish`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::beside::{IMAGE_BYTES, Pace};
use crate::cache::{PreImages, Table, TableMoment};
use crate::checkpoint::directory::Directory;
use crate::checkpoint::extents::writer::ExtentWriter;
use crate::checkpoint::manifest::dense::{DENSE_DIR, DenseShare, extents_file};
use crate::checkpoint::manifest::digest::{RankDigest, checksum};
use crate::checkpoint::manifest::holds::make_held;
use crate::checkpoint::manifest::latest::PartName;
use crate::checkpoint::manifest::manifests::{RankManifest, parse, render};
use crate::checkpoint::manifest::names::{counts_file, data_file, rank_file, table_dir};
use crate::checkpoint::manifest::read::read_digested;
use crate::checkpoint::publish::save::Save;
use crate::checkpoint::rows::writer::RankWriter;
use crate::error::{Error, Kind, Result};
use crate::io::{DirLock, IoEngine, publish};

/// A part is written as the one rank of a world of its own.
const RANK: u32 = 0;
const WORLD: u32 = 1;

/// The file for pre-images that do not fit into [`IMAGE_BYTES`] of memory.
const PRE_IMAGES: &str = "pre-images";

/// A table at one moment, with the path of its module.
#[derive(Debug)]
struct HeldTable {
    module: String,
    moment: TableMoment,
    hyperparameters: BTreeMap<String, f64>,
}

/// What one rank writes. A part that is dropped and not adopted leaves a directory, which a later save removes.
#[derive(Debug)]
pub struct Part {
    directory: Directory,
    name: PartName,
    writer: Option<RankWriter>,
    extents: Option<ExtentWriter>,
    held: Vec<HeldTable>,
    /// While this is held no save sweeps the part.
    _lock: DirLock,
}

impl Part {
    /// Make a part in `root`. `random` tells it from other parts. About `expected_bytes` of extents will be written.
    pub fn begin(root: &Directory, random: u64, expected_bytes: u64) -> Result<Self> {
        root.check_to_save()?;
        let name = PartName(random);
        let (directory, lock) = make_held(root, name)?;
        root.sync()?;
        let writer = RankWriter::in_dir(directory.clone(), name.to_string(), RANK, WORLD);
        let extents = ExtentWriter::new(&directory, RANK, WORLD, expected_bytes);
        Ok(Self { directory, name, writer: Some(writer), extents: Some(extents), held: Vec::new(), _lock: lock })
    }

    /// See [`ExtentWriter::with_file_bytes`].
    #[must_use]
    pub fn with_file_bytes(mut self, bytes: u64) -> Self {
        self.extents = self.extents.map(|extents| extents.with_file_bytes(bytes));
        self
    }

    /// Its name, for [`Save::adopt`].
    pub fn name(&self) -> PartName {
        self.name
    }

    /// Where tables are written.
    pub fn tables(&mut self) -> Result<&mut RankWriter> {
        self.writer.as_mut().ok_or_else(finished)
    }

    /// Where extents are written.
    pub fn extents(&mut self) -> Result<&mut ExtentWriter> {
        self.extents.as_mut().ok_or_else(finished)
    }

    /// Hold the rows of tables as of now. Rows that are trained from now on carry `next_epoch`. Each table comes with the path of its module
    /// and its hyperparameters.
    pub fn hold(&mut self, tables: Vec<(String, &Table, BTreeMap<String, f64>)>, next_epoch: u32) -> Result<()> {
        let path = self.directory.join(PRE_IMAGES);
        let images = Arc::new(PreImages::new(self.directory.shared_engine(), path, IMAGE_BYTES, tables.len()));
        for (module, table, hyperparameters) in tables {
            let moment = table.moment(&images, next_epoch)?;
            self.held.push(HeldTable { module, moment, hyperparameters });
        }
        Ok(())
    }

    /// Write the tables that are held, while training goes on. Returns how many rows they have.
    pub fn write_held(&mut self) -> Result<u64> {
        let writer = self.writer.as_mut().ok_or_else(finished)?;
        let mut rows = 0;
        for HeldTable { module, moment, hyperparameters } in self.held.drain(..) {
            rows += writer.write_moment(&module, moment, hyperparameters, &mut Pace::new(None))?.0;
        }
        Ok(rows)
    }

    /// Make everything durable.
    pub fn finish(&mut self) -> Result<RankDigest> {
        let (mut writer, extents) = self.writer.take().zip(self.extents.take()).ok_or_else(finished)?;
        writer.set_dense(extents.finish()?);
        writer.finish()
    }

    /// Give it up and remove what it wrote.
    pub fn abandon(mut self) -> Result<()> {
        // Dropping the writers waits for their threads, so that nothing is written there any more.
        drop((self.writer.take(), self.extents.take(), std::mem::take(&mut self.held)));
        self.directory.remove()
    }
}

fn finished() -> Error {
    Error::new(Kind::State, "this part of a checkpoint is finished: make another")
}

impl Save {
    /// A handle on the directory of parts that other processes made: this save's own where its path is the same.
    ///
    /// Errors: `Path` or `Permission` where it is not as it was when a part was made in it, for example where a link is in its place.
    pub fn directory_of_parts(&self, path: &Path) -> Result<Directory> {
        if path == self.root().path() { Ok(self.root().clone()) } else { self.root().again(path) }
    }

    /// Take over what `rank` of `world` wrote: any number of parts, of which one at most has extents. Each comes with the directory that it
    /// was made in, which must be on the file system of this checkpoint.
    pub fn adopt(&self, rank: u32, world: u32, parts: &[(Directory, PartName, RankDigest)]) -> Result<RankDigest> {
        parts.iter().try_for_each(|(root, ..)| root.check_to_save())?;
        let dir = self.dir();
        let mut adopted = RankManifest::new(self.name().to_string(), rank, world);
        for (root, name, digest) in parts {
            let (from, both) = (root.below(name), self.root().engine_with(root)?);
            let path = from.join(rank_file(RANK, WORLD));
            let part: RankManifest = parse(&read_digested(from.engine(), &path, digest)?, &path)?;
            if part.name != name.to_string() || (part.rank, part.world) != (RANK, WORLD) {
                return Err(Error::corruption(&path, 0, "the part's name", name, part.name));
            }
            for share in part.tables {
                let table = table_dir(&share.spec.module, &share.spec.table);
                let files = (0..share.files.len()).map(|n| (data_file(RANK, WORLD, n), data_file(rank, world, n)));
                let of_counts = 0..share.counts.as_ref().map_or(0, |counts| counts.files.len());
                let counts = of_counts.map(|n| (counts_file(RANK, WORLD, n), counts_file(rank, world, n)));
                move_files(&*both, &from.join(&table), &dir.join(&table), files.chain(counts))?;
                adopted.tables.push(share);
            }
            if let Some(dense) = part.dense.filter(|dense| dense.bytes() > 0) {
                let files =
                    (0..dense.files.len()).map(|n| (extents_file(RANK, WORLD, n), extents_file(rank, world, n)));
                move_files(&*both, &from.join(DENSE_DIR), &dir.join(DENSE_DIR), files)?;
                if adopted.dense.replace(dense).is_some() {
                    return Err(Error::new(Kind::Input, format!("rank {rank} has two parts with extents")));
                }
            }
        }
        adopted.dense.get_or_insert_with(DenseShare::default);
        let bytes = render(&adopted)?;
        publish(dir.engine(), &dir.join(rank_file(rank, world)), &bytes)?;
        for (root, name, _) in parts {
            // A later save removes what stays.
            let _ = root.below(name).remove();
        }
        Ok(RankDigest { bytes: bytes.len() as u64, xxh3: checksum(&bytes) })
    }
}

/// Rename files into another directory, which is made, and make the new names durable.
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
