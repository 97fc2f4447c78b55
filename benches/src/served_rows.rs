//! A trainer that publishes checkpoints for serving benches. It has no table: the rows are determined by their ids.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use embcache::checkpoint::{
    CheckpointDirectory, CheckpointId, CheckpointSave, DeltaChanges, RankDigest, RankWriter, RowSink, SaveOptions,
    TableSpec,
};
use embcache::config::OptimizerKind;
use embcache::paths::PathChecks;
use embcache::rows::RowHeader;
use embcache::serve::{ServeIndexReport, make_index};
use embcache::types::Id;

use crate::plain_kernels::DIM;
use crate::process::forget_cached;
use crate::table::table_config;
use crate::workload::{scattered_id, scattered_slot};

/// The name of the table, and of its module.
pub const SERVED_TABLE: &str = "rows";
const MODULE: &str = "m";
/// Rows per call of the writer.
const WRITE_ROWS: usize = 16_384;
/// Bytes of a checkpoint per row: the weights, the sum, 28 bytes of metadata, and an index.
const CHECKPOINT_ROW_BYTES: u64 = 310;

/// The weights of a row that was last trained for checkpoint `version`. The first three values encode the id and the
/// version.
pub fn served_row(id: Id, version: u64) -> [f32; DIM] {
    let (low, high) = (id as u64 & 0xff_ffff, id as u64 >> 40);
    let mut row: [f32; DIM] = std::array::from_fn(|column| (low + column as u64) as f32);
    row[1] = high as f32;
    row[2] = version as f32;
    row
}

/// Publishes checkpoints of a table with rowwise Adagrad and the ids `scattered_id(0..rows)`.
///
/// Frequent ids are distributed over the files, as in a table that was trained for a long time.
#[derive(Debug)]
pub struct Publisher {
    directory: CheckpointDirectory,
    root: PathBuf,
    spec: TableSpec,
    rows: u64,
    newest: Option<CheckpointId>,
    epoch: u32,
}

/// A checkpoint whose files are written and durable, and which `LATEST` does not name yet.
#[derive(Debug)]
pub struct Unpublished {
    save: CheckpointSave,
    digest: RankDigest,
}

impl Publisher {
    /// Creates a publisher in a new folder, without checkpoints.
    ///
    /// # Panics
    /// Panics when the folder cannot be made.
    pub fn new(root: &Path, rows: u64) -> Self {
        let spec = TableSpec::new(MODULE, &table_config(OptimizerKind::RowWiseAdagrad, rows), BTreeMap::new(), 1, None);
        let directory = CheckpointDirectory::open_to_save(root, PathChecks::Basic).expect("a folder of our own");
        Self { directory, root: root.to_owned(), spec, rows, newest: None, epoch: 1 }
    }

    /// Bytes of disk for a full checkpoint and deltas of `delta_rows` rows.
    pub fn bytes(rows: u64, delta_rows: u64) -> u64 {
        (rows + delta_rows) * CHECKPOINT_ROW_BYTES + (64 << 20)
    }

    /// The directory of the checkpoints, for a process that serves them.
    ///
    /// # Panics
    /// Panics if it was removed.
    pub fn to_serve(&self) -> CheckpointDirectory {
        CheckpointDirectory::open_to_load(&self.root, PathChecks::Basic).expect("a directory of checkpoints")
    }

    /// The time of the last rename of `LATEST`.
    ///
    /// # Panics
    /// Panics before the first checkpoint is published.
    pub fn renamed(&self) -> SystemTime {
        let latest = std::fs::metadata(self.root.join("LATEST")).expect("a published checkpoint");
        // A rename changes only this time of a file.
        SystemTime::UNIX_EPOCH + Duration::new(latest.ctime() as u64, latest.ctime_nsec() as u32)
    }

    /// Builds the index of the latest checkpoint.
    ///
    /// # Panics
    /// Panics when the disk fails, and if the index exists.
    pub fn make_index(&self) -> ServeIndexReport {
        let made = make_index(&self.directory, None, &mut || Ok(())).expect("room for an index");
        assert!(!made.existed, "an index that was made before");
        made
    }

    /// The path of the latest checkpoint's own directory.
    ///
    /// # Panics
    /// Panics before the first is published.
    pub fn newest(&self) -> PathBuf {
        self.root.join(&self.newest.as_ref().expect("a published checkpoint").name)
    }

    /// The path of the latest checkpoint's files of rows.
    pub fn files(&self) -> PathBuf {
        self.newest().join(format!("{MODULE}+{SERVED_TABLE}"))
    }

    /// Writes a full checkpoint, with all rows at version 0.
    ///
    /// # Panics
    /// Panics when the disk fails.
    pub fn write_full(&self) -> Unpublished {
        let rows = self.rows;
        let ids = (0..rows).map(|number| scattered_id(scattered_slot(number, rows) as u64));
        self.write(SaveOptions::default(), 0, ids, None)
    }

    /// Writes a delta, with these rows at `version`.
    ///
    /// # Panics
    /// Panics when the disk fails.
    pub fn write_delta(&self, version: u64, ids: impl Iterator<Item = Id>) -> Unpublished {
        let options = SaveOptions { parent: self.newest.clone(), ..SaveOptions::default() };
        self.write(options, version, ids, Some(DeltaChanges { tombstones: &[], sweeps: &[], total_rows: self.rows }))
    }

    /// Publishes a checkpoint as the latest one.
    ///
    /// # Panics
    /// Panics when the disk fails.
    pub fn publish(&mut self, written: Unpublished) {
        self.epoch += 1;
        let published = written.save.publish(&[written.digest], self.epoch).expect("published");
        self.newest = Some(published.identity);
    }

    fn write(
        &self,
        options: SaveOptions,
        version: u64,
        mut ids: impl Iterator<Item = Id>,
        changes: Option<DeltaChanges<'_>>,
    ) -> Unpublished {
        let save = CheckpointSave::begin_with(&self.directory, 7, options).expect("begun");
        let mut writer = RankWriter::new(&self.directory, save.name(), 0, 1).expect("made");
        let epoch = self.epoch;
        let mut rows = move |sink: &mut RowSink<'_>| {
            loop {
                let header =
                    |id| RowHeader { id, scalar: 0.25, modified_epoch: epoch, last_step: 1, ..RowHeader::default() };
                let headers: Vec<RowHeader> = ids.by_ref().take(WRITE_ROWS).map(header).collect();
                if headers.is_empty() {
                    return Ok(());
                }
                let vectors: Vec<f32> = headers.iter().flat_map(|header| served_row(header.id, version)).collect();
                sink(&headers, &vectors)?;
            }
        };
        let buckets = 0..self.spec.total_num_buckets;
        match changes {
            None => writer.write_table(self.spec.clone(), buckets, &mut rows),
            Some(changes) => writer.write_changes(self.spec.clone(), buckets, &mut rows, changes),
        }
        .expect("written");
        Unpublished { save, digest: writer.finish().expect("finished") }
    }
}

/// Reads all files below a folder from first to last byte, so that they are in the page cache.
///
/// # Panics
/// Panics when a file cannot be read.
pub fn read_through(path: &Path) {
    let mut buffer = vec![0; 1 << 20];
    each_file(path, &mut |mut file| while file.read(&mut buffer).expect("a readable file") > 0 {});
}

/// Removes all files below a folder from the page cache. Mapped pages stay.
///
/// # Panics
/// Panics when a file cannot be opened.
pub fn forget_all_cached(path: &Path) {
    each_file(path, &mut |file| forget_cached(file));
}

fn each_file(path: &Path, work: &mut dyn FnMut(&File)) {
    for entry in std::fs::read_dir(path).expect("a folder") {
        let path = entry.expect("a folder").path();
        if path.is_dir() {
            each_file(&path, work);
        } else {
            work(&File::open(path).expect("a readable file"));
        }
    }
}
