//! A disk whose reads and writes cost next to nothing: files are memory. With it a bench shows the CPU time of a path,
//! which does not depend on the disk.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use embcache::error::{Error, Result};
use embcache::io::{DirLock, DirLockPurpose, IoEngine, IoFile, IoOpenMode, IoReadRequest, MemoryEngine, ReadSink};

use crate::plain::huge_pages;

type Bytes = Arc<RwLock<Vec<u8>>>;

/// A disk in memory. A write is one copy, a read of a batch is none, and syncing does nothing. The memory of removed
/// files is reused, so that the OS provides each page once.
#[derive(Debug, Default)]
pub struct NullDisk {
    /// Folders and locks.
    folders: MemoryEngine,
    files: Mutex<BTreeMap<PathBuf, Bytes>>,
    removed: Mutex<Vec<Vec<u8>>>,
}

#[derive(Debug)]
struct NullFile {
    path: PathBuf,
    bytes: Bytes,
}

impl NullDisk {
    /// An empty disk.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Bytes>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns empty memory of `room` bytes or more, from a removed file if one is large enough.
    fn memory(&self, room: usize) -> Vec<u8> {
        let mut removed = self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = removed.iter().position(|memory| memory.capacity() >= room) {
            return removed.swap_remove(at);
        }
        let mut memory = vec![0; room];
        huge_pages(&memory);
        memory.fill(1); // so that the OS has provided all pages
        memory.clear();
        memory
    }

    fn keep(&self, file: Option<Bytes>) {
        let Some(Ok(memory)) = file.map(Arc::try_unwrap) else { return };
        let mut memory = memory.into_inner().unwrap_or_else(PoisonError::into_inner);
        memory.clear();
        self.removed.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }
}

fn missing(what: &str, path: &Path) -> Error {
    Error::io(what, path, &std::io::Error::from_raw_os_error(libc::ENOENT))
}

impl IoEngine for NullDisk {
    fn name(&self) -> String {
        "null disk".into()
    }
    fn open(&self, path: &Path, how: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        let bytes = match how {
            IoOpenMode::Create { preallocate } => {
                let bytes = Bytes::new(RwLock::new(self.memory(preallocate as usize)));
                self.files().insert(path.to_owned(), bytes.clone());
                bytes
            }
            IoOpenMode::Read | IoOpenMode::Write => {
                self.files().get(path).cloned().ok_or_else(|| missing("open", path))?
            }
        };
        Ok(Arc::new(NullFile { path: path.to_owned(), bytes }))
    }
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        for (position, read) in reads.iter().enumerate() {
            let file: &NullFile = read.file.as_any().downcast_ref().expect("a file of this disk");
            let bytes = file.read();
            let from = read.offset as usize;
            sink(position, Ok(&bytes[from..from + read.len]), Duration::ZERO);
        }
    }
    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.folders.create_dir_all(path)
    }
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let mut entries = self.folders.list(path)?;
        entries.extend(self.files().keys().filter(|file| file.parent() == Some(path)).cloned());
        entries.sort();
        Ok(entries)
    }
    fn exists(&self, path: &Path) -> Result<bool> {
        Ok(self.files().contains_key(path) || self.folders.exists(path)?)
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let file = self.files().remove(from);
        let Some(file) = file else {
            self.folders.rename(from, to)?;
            let moved: Vec<PathBuf> = self.files().keys().filter(|path| path.starts_with(from)).cloned().collect();
            for path in moved {
                let below = path.strip_prefix(from).expect("it is below").to_owned();
                let file = self.files().remove(&path).expect("just seen");
                self.files().insert(to.join(below), file);
            }
            return Ok(());
        };
        let replaced = self.files().insert(to.to_owned(), file);
        self.keep(replaced);
        Ok(())
    }
    fn link(&self, _file: &dyn IoFile, to: &Path) -> Result<()> {
        Err(Error::io("link", to, &std::io::Error::from_raw_os_error(libc::EXDEV)))
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        let file = self.files().remove(path).ok_or_else(|| missing("remove", path))?;
        self.keep(Some(file));
        Ok(())
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.files().retain(|file, _| !file.starts_with(path));
        self.folders.remove_dir_all(path)
    }
    fn sync_dir(&self, _path: &Path) -> Result<()> {
        Ok(())
    }
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.folders.lock_dir(path)
    }
    fn lock_dir_for(&self, path: &Path, how: DirLockPurpose) -> Result<DirLock> {
        self.folders.lock_dir_for(path, how)
    }
}

impl NullFile {
    fn read(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IoFile for NullFile {
    fn path(&self) -> &Path {
        &self.path
    }
    fn len(&self) -> Result<u64> {
        Ok(self.read().len() as u64)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let (mut bytes, from) = (self.write(), offset as usize);
        let held = bytes.len();
        if from > held {
            bytes.resize(from, 0);
        }
        let over = data.len().min(bytes.len() - from);
        bytes[from..from + over].copy_from_slice(&data[..over]);
        bytes.extend_from_slice(&data[over..]);
        Ok(())
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let (bytes, from) = (self.read(), offset as usize);
        into.copy_from_slice(&bytes[from..from + into.len()]);
        Ok(())
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.write().resize(len as usize, 0);
        Ok(())
    }
    fn sync(&self) -> Result<()> {
        Ok(())
    }
    fn links(&self) -> Result<u64> {
        Ok(1)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
