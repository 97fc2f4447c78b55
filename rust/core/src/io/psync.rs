//! Portable I/O by `pread` and `pwrite`.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{DirLock, IoEngine, IoFile, Open, Read, ReadSink};
use crate::error::{Error, Result};

/// Plain system calls, buffered.
#[derive(Debug, Default)]
pub struct PsyncEngine;

#[derive(Debug)]
struct PsyncFile {
    path: PathBuf,
    file: std::fs::File,
}

impl IoFile for PsyncFile {
    fn path(&self) -> &Path {
        &self.path
    }
    fn len(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| Error::io("read the size of", &self.path, &e))?.len())
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        super::check_aligned(&self.path, offset, data.len())?;
        self.file.write_all_at(data, offset).map_err(|e| Error::io("write", &self.path, &e))
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        match self.file.read_exact_at(into, offset) {
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(super::short_file(&self.path, offset + into.len() as u64, self.len()?))
            }
            done => done.map_err(|e| Error::io("read", &self.path, &e)),
        }
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.file.set_len(len).map_err(|e| Error::io("resize", &self.path, &e))
    }
    fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io("sync", &self.path, &e))
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl IoEngine for PsyncEngine {
    fn name(&self) -> String {
        "pread".into()
    }
    fn open(&self, path: &Path, how: Open) -> Result<Arc<dyn IoFile>> {
        let file = match how {
            Open::Read => std::fs::File::open(path),
            Open::Create { .. } => std::fs::File::options().read(true).write(true).create_new(true).open(path),
        }
        .map_err(|e| Error::io("open", path, &e))?;
        Ok(Arc::new(PsyncFile { path: path.to_owned(), file }))
    }
    fn read_batch(&self, reads: &[Read], sink: &mut ReadSink<'_>) {
        for (position, read) in reads.iter().enumerate() {
            let mut data = vec![0; read.len];
            let done = read.file.read_at(read.offset, &mut data);
            sink(position, done.map(|()| &data[..]));
        }
    }
    fn create_dir_all(&self, path: &Path) -> Result<()> {
        std::fs::create_dir_all(path).map_err(|e| Error::io("make", path, &e))
    }
    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let mut entries = std::fs::read_dir(path)
            .and_then(|dir| dir.map(|entry| entry.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>())
            .map_err(|e| Error::io("list", path, &e))?;
        entries.sort();
        Ok(entries)
    }
    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).map_err(|e| Error::io("rename", from, &e))
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        std::fs::remove_file(path).map_err(|e| Error::io("remove", path, &e))
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        std::fs::remove_dir_all(path).map_err(|e| Error::io("remove", path, &e))
    }
    fn sync_dir(&self, path: &Path) -> Result<()> {
        std::fs::File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("sync", path, &e))
    }
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        DirLock::acquire(path)
    }
}
