//! Saves that start and finish while other saves clean up the same directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Result;
use embcache::checkpoint::{
    CheckpointChain, CheckpointPart, CheckpointSave, LatestCheckpoint, SaveOptions, remove_stale_parts,
};
use embcache::config::OptimizerKind::RowWiseAdagrad;
use embcache::io::{
    DirLock, DirLockPurpose, FaultEngine, IoEngine, IoFault, IoFile, IoOpenMode, IoOperation, IoReadRequest, ReadSink,
};
use embcache_tests::checkpoint::{ROOT, Table, load, memory, on, save, save_delta};
use embcache_tests::directory_in;

/// An engine under which another save cleans up `root` before each directory is locked, unless `root` is locked at that
/// time.
#[derive(Debug)]
struct Swept {
    inner: Arc<dyn IoEngine>,
    root: PathBuf,
}

impl IoEngine for Swept {
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        let is_free = path != self.root && self.inner.lock_dir(&self.root).is_ok();
        if is_free {
            let directory = directory_in(&self.inner, &self.root);
            remove_stale_parts(&directory)?;
            drop(CheckpointSave::begin(&directory, 99)?);
        }
        self.inner.lock_dir(path)
    }
    fn lock_dir_for(&self, path: &Path, how: DirLockPurpose) -> Result<DirLock> {
        self.inner.lock_dir_for(path, how)
    }
    fn name(&self) -> String {
        self.inner.name()
    }
    fn open(&self, path: &Path, how: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        self.inner.open(path, how)
    }
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        self.inner.read_batch(reads, sink);
    }
    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        self.inner.list(path)
    }
    fn exists(&self, path: &Path) -> Result<bool> {
        self.inner.exists(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to)
    }
    fn link(&self, file: &dyn IoFile, to: &Path) -> Result<()> {
        self.inner.link(file, to)
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        self.inner.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.remove_dir_all(path)
    }
    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.inner.sync_dir(path)
    }
}

#[test]
fn saves_and_parts_that_begin_while_others_sweep_are_not_swept() {
    let inner: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    let engine: Arc<dyn IoEngine> = Arc::new(Swept { inner: Arc::clone(&inner), root: root.to_owned() });
    let tables = |salt| vec![Table::new("m", "a", RowWiseAdagrad, 4, &[1, 2, 3], salt)];
    save(&inner, root, &tables(0), 1, 4096, 7).expect("saved");
    let directory = directory_in(&engine, root);
    let mut part = CheckpointPart::begin(&directory, 8, 0).expect("a part");
    let begun = CheckpointSave::begin(&directory, 9).expect("begun");
    for name in [part.name().to_string(), begun.name().to_string()] {
        assert!(inner.exists(&root.join(name)).unwrap());
    }
    save(&engine, root, &tables(1), 1, 4096, 10).expect("saved");
    part.dense_writer().expect("not finished").append(b"x").expect("written");
    part.finish().expect("it is there");
    begun.abandon().expect("it is there");
    assert_eq!(load(&engine, root, 1).expect("loaded"), tables(1));
}

/// A checkpoint that is being read, and its base checkpoints, are removed by a later save only.
#[test]
fn chain_being_read_is_removed_by_later_save() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let root = Path::new(ROOT);
    let tables = |salt| vec![Table::new("m", "a", RowWiseAdagrad, 4, &[1, 2, 3], salt)];
    let full = save(&engine, root, &tables(0), 1, 4096, 1).expect("saved");
    let options = SaveOptions { keep: 1, ..on(&full.identity) };
    let delta = save_delta(&engine, root, (&tables(0), &tables(1)), (1, 4096), 2, options).expect("saved");
    let chain = CheckpointChain::open(&directory_in(&engine, root), delta.latest).expect("it is there");
    let is_there = |published: &LatestCheckpoint| {
        engine.exists(&root.join(published.to_string()).join("manifest.json")).expect("it can be looked at")
    };
    let second = save(&engine, root, &tables(2), 1, 4096, 3).expect("saved");
    assert!(second.cleanup_errors.is_empty(), "nothing that should go could not be removed");
    assert!(is_there(&full.latest) && is_there(&delta.latest) && is_there(&second.latest));
    let rows =
        chain.table_reader("m", "a", 0..chain.table("m", "a").expect("a").spec.total_num_buckets).expect("whole");
    assert_eq!(rows.read(&mut |_, _| Ok(())).expect("whole"), 3);
    chain.release();
    let third = save(&engine, root, &tables(3), 1, 4096, 4).expect("saved");
    assert!(!is_there(&full.latest) && !is_there(&delta.latest) && !is_there(&second.latest));
    assert!(is_there(&third.latest));
}

#[test]
fn os_error_never_removes_bases_of_checkpoint_being_read() {
    let disk = memory();
    let root = Path::new(ROOT);
    let tables = |salt| vec![Table::new("m", "a", RowWiseAdagrad, 4, &[1, 2, 3], salt)];
    let engine: Arc<dyn IoEngine> = Arc::new(disk.clone());
    let full = save(&engine, root, &tables(0), 1, 4096, 1).expect("saved");
    let options = SaveOptions { keep: 1, ..on(&full.identity) };
    let delta = save_delta(&engine, root, (&tables(0), &tables(1)), (1, 4096), 2, options).expect("saved");
    for (operation, errno) in
        [(IoOperation::Read, libc::EIO), (IoOperation::Open, libc::EMFILE), (IoOperation::Exists, libc::EIO)]
    {
        for passing in 0.. {
            let image = disk.kill();
            let reading = image
                .lock_dir_for(&root.join(delta.latest.to_string()), DirLockPurpose::ToRead)
                .expect("nobody removes it");
            let faults = FaultEngine::new(Arc::new(image.clone()));
            faults.hit_once(operation, passing, IoFault::Fail(errno));
            let engine: Arc<dyn IoEngine> = Arc::new(faults.clone());
            // This save may succeed or not.
            drop(save(&engine, root, &tables(2), 1, 4096, 3));
            for published in [&full, &delta] {
                let manifest = root.join(published.latest.to_string()).join("manifest.json");
                assert!(image.exists(&manifest).expect("looked at"), "{operation:?} {passing}: {}", manifest.display());
            }
            drop(reading);
            if faults.will_hit() {
                assert!(passing > 0, "{operation:?} is not used");
                break;
            }
        }
    }
}
