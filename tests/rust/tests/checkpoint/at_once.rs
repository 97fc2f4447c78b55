//! Saves that begin and end while others sweep the same directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Result;
use embcache::checkpoint::{Part, Save, sweep_parts};
use embcache::config::OptimizerKind::RowWiseAdagrad;
use embcache::io::{DirLock, IoEngine, IoFile, Open, Read, ReadSink};

use crate::made::{ROOT, Table, load, memory, save};

/// An engine under which another save sweeps `root` before each directory is locked, unless somebody holds `root` then.
#[derive(Debug)]
struct Swept {
    inner: Arc<dyn IoEngine>,
    root: PathBuf,
}

impl IoEngine for Swept {
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        let is_free = path != self.root && self.inner.lock_dir(&self.root).is_ok();
        if is_free {
            sweep_parts(&*self.inner, &self.root)?;
            drop(Save::begin(Arc::clone(&self.inner), &self.root, 99)?);
        }
        self.inner.lock_dir(path)
    }
    fn name(&self) -> String {
        self.inner.name()
    }
    fn open(&self, path: &Path, how: Open) -> Result<Arc<dyn IoFile>> {
        self.inner.open(path, how)
    }
    fn read_batch(&self, reads: &[Read], sink: &mut ReadSink<'_>) {
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
    let mut part = Part::begin(Arc::clone(&engine), root, 8, 0).expect("a part");
    let begun = Save::begin(Arc::clone(&engine), root, 9).expect("begun");
    for name in [part.name().to_string(), begun.name().to_string()] {
        assert!(inner.exists(&root.join(name)).unwrap());
    }
    save(&engine, root, &tables(1), 1, 4096, 10).expect("saved");
    part.extents().expect("not finished").append(b"x").expect("written");
    part.finish().expect("it is there");
    begun.abandon().expect("it is there");
    assert_eq!(load(&engine, root, 1).expect("loaded"), tables(1));
}
