//! Training of one table in steps that are timed, and checkpoints of it.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use embcache::cache::{BaseCheckpoint, Lookup, Plan, PlanMode, RowBlock, Table};
use embcache::checkpoint::{CheckpointDirectory, CheckpointId, CheckpointSave, RankWriter, SaveOptions};
use embcache::io::IoEngine;
use embcache::kernels::Hyperparameters;
use embcache::rows::RowHeader;

use crate::plain_kernels::BAG;
use crate::workload::{Ids, scattered_id};

/// Trains a table repeatedly on batches of bags of [`BAG`] ids. A batch is planned ahead while the previous one is
/// computed.
pub struct Training {
    lookup: Lookup,
    ids: Ids,
    at: usize,
    ahead: Option<Plan>,
    offsets: Vec<i64>,
    out: Vec<f32>,
    grad: Vec<f32>,
}

impl Training {
    /// Creates a training on these batches of whole bags. The table has rows of `dim` weights.
    ///
    /// # Panics
    /// Panics for a table that is closed.
    pub fn new(table: &Table, dim: usize, ids: Ids) -> Self {
        let bags = ids.batch / BAG;
        Self {
            lookup: Lookup::new(std::slice::from_ref(table), &[0]).expect("one feature"),
            ids,
            at: 0,
            ahead: None,
            offsets: (0..=bags).map(|bag| (bag * BAG) as i64).collect(),
            out: vec![0.0; bags * dim],
            grad: vec![0.01; bags * dim],
        }
    }

    /// Runs a step. Returns its seconds.
    ///
    /// # Panics
    /// Panics for ids that the table rejects, and when its disk fails.
    pub fn step(&mut self) -> f64 {
        let begin = Instant::now();
        let plan = self.ahead.take().unwrap_or_else(|| self.plan());
        let next = self.plan();
        plan.wait(&mut []).expect("its rows");
        plan.forward_pooled(&self.offsets, None, &[false], &mut self.out, &mut [None], 1).expect("a batch's room");
        let numbers = Hyperparameters { lr: 0.01, eps: 1e-8, ..Hyperparameters::default() };
        plan.backward_pooled(&self.grad, &[numbers], None, &mut [None], 1).expect("an update");
        self.ahead = Some(next);
        begin.elapsed().as_secs_f64()
    }

    /// Runs this number of steps. Returns the seconds of each.
    pub fn steps(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.step()).collect()
    }

    /// Releases the batch that is planned ahead, so that no row is in use.
    pub fn pause(&mut self) {
        self.ahead = None;
    }

    /// The number of batches.
    pub fn batches(&self) -> usize {
        self.ids.values.len() / self.ids.batch
    }

    fn plan(&mut self) -> Plan {
        let batch = self.ids.batch;
        let ids = &self.ids.values[self.at * batch..][..batch];
        self.at = (self.at + 1) % (self.ids.values.len() / batch);
        self.lookup.plan(ids, &[0, batch as i64], PlanMode::TRAIN_PREFETCH, &[]).expect("ids of the table")
    }
}

/// Imports the rows of these numbers into a table of rows of `dim` weights, with `last_step`.
///
/// # Panics
/// Panics if the table has no space for them.
pub fn give_rows(table: &Table, dim: usize, numbers: impl Iterator<Item = u64>, last_step: u64) {
    let header = |number| RowHeader { id: scattered_id(number), last_step, ..RowHeader::default() };
    let headers: Vec<RowHeader> = numbers.map(header).collect();
    let vectors = vec![0.5; headers.len() * dim];
    table.import_rows(RowBlock { headers: &headers, vectors: &vectors }).expect("room for all rows");
}

/// A checkpoint of a table.
#[derive(Debug)]
pub struct Saved {
    /// The checkpoint, as the base of a delta.
    pub ancestor: BaseCheckpoint,
    /// The rows that were written.
    pub rows: u64,
    /// The bytes of its files.
    pub bytes: u64,
}

/// Saves a table into `root`: in full, or the changes since `ancestor`. The checkpoint becomes the latest base.
///
/// # Panics
/// Panics when the disk fails.
pub fn save(table: &Table, engine: &Arc<dyn IoEngine>, root: &Path, ancestor: Option<&BaseCheckpoint>) -> Saved {
    let parent = ancestor.map(|one| CheckpointId { name: one.name.clone(), manifest_xxh3: one.manifest_xxh3 });
    let options = SaveOptions { parent, ..SaveOptions::default() };
    let directory = CheckpointDirectory::with_engine(Arc::clone(engine), root);
    let save = CheckpointSave::begin_with(&directory, 7, options).expect("begun");
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("made");
    let rows = match ancestor {
        None => writer.write_rows_of("m", table, BTreeMap::new()).expect("written"),
        Some(one) => writer.write_changes_of("m", table, BTreeMap::new(), one).expect("written").0,
    };
    let next_epoch = table.epoch().expect("open") + 1;
    let digests = [writer.finish().expect("finished")];
    let CheckpointId { name, manifest_xxh3 } = save.publish(&digests, next_epoch).expect("published").identity;
    let bytes = bytes_of(&root.join(&name));
    let ancestor = BaseCheckpoint { name, manifest_xxh3, next_epoch };
    table.set_epoch(next_epoch).expect("open");
    table.saved_as(ancestor.clone()).expect("open");
    Saved { ancestor, rows, bytes }
}

/// Bytes of all files below a folder, by their lengths.
///
/// # Panics
/// Panics when the folder cannot be read.
pub fn bytes_of(path: &Path) -> u64 {
    files_of(path, &|file| file.len())
}

/// Bytes of disk in use by all files below a folder. Files that are removed concurrently count as removed.
///
/// # Panics
/// Panics when the folder cannot be read.
pub fn disk_bytes_of(path: &Path) -> u64 {
    files_of(path, &|file| file.blocks() * 512)
}

fn files_of(path: &Path, bytes: &dyn Fn(&std::fs::Metadata) -> u64) -> u64 {
    let entries = std::fs::read_dir(path).expect("a folder").flatten();
    let of_entry = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => files_of(&entry.path(), bytes),
        Ok(found) => bytes(&found),
        Err(_) => 0,
    };
    entries.map(of_entry).sum()
}
