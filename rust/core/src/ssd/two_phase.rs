//! Two-phase commit of a flush of several tables. Their directories may be below several commit directories
//! (`ssd_dir`s), on several disks.
//!
//! First every table publishes its state under one commit id. Then, in `<dir>/.flushed`, commit records are written:
//!
//! 1. Each commit directory except one, the coordinator, gets `<commit id>.prepared`, which names the coordinator.
//! 2. The coordinator gets `<commit id>`. This completes the flush everywhere.
//! 3. The others get `<commit id>` too, and do not need the coordinator afterwards.
//!
//! A commit directory has a random name, given by the file `<name>.root`. So two machines that each have a disk at the
//! same path do not mistake each other's directory for their own.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::io::{IoEngine, IoOpenMode, read_file, write_atomically};

const RECORDS_DIR: &str = ".flushed";
const RECORD_TITLE: &str = "embcache-flush 1";
/// Maximum bytes of a commit record, with a path of [`crate::paths::MAX_ABSOLUTE_BYTES`].
const MAX_RECORD_BYTES: u64 = 4096;

/// A directory that contains tables' directories, and the commit records of their flushes.
#[derive(Debug)]
pub struct CommitDirectory {
    engine: Arc<dyn IoEngine>,
    dir: PathBuf,
    records_dir: PathBuf,
}

impl CommitDirectory {
    /// Uses the existing directory `dir`.
    pub fn new(engine: Arc<dyn IoEngine>, dir: &Path) -> Self {
        Self { engine, dir: dir.to_owned(), records_dir: dir.join(RECORDS_DIR) }
    }

    /// Returns a name of this directory. If it has none, `random` becomes its name. Existing commit records are durable
    /// when this returns.
    pub fn ensure_name(&self, random: u64) -> Result<u64> {
        if !self.engine.exists(&self.records_dir)? {
            self.engine.create_dir_all(&self.records_dir)?;
        }
        let listing = self.engine.list(&self.records_dir)?;
        let name = if let Some(name) = listing.iter().find_map(|path| parse_name(path)) {
            name
        } else {
            drop(self.engine.open(&self.name_path(random), IoOpenMode::Create { preallocate: 0 })?);
            random
        };
        self.sync()?;
        Ok(name)
    }

    /// True if `name` is a name of this directory. It has several if two processes named it at the same time.
    pub fn has_name(&self, name: u64) -> Result<bool> {
        self.engine.exists(&self.name_path(name))
    }

    /// Records durably that the directory `dir`, an absolute path, with the name `name` decides whether the flush
    /// `commit_id` is complete.
    pub fn prepare(&self, commit_id: u64, dir: &Path, name: u64) -> Result<()> {
        let mut body = format!("{name:016x} ").into_bytes();
        body.extend_from_slice(dir.as_os_str().as_bytes());
        let mut text = format!("{RECORD_TITLE} {:08x} ", crc32c::crc32c(&body)).into_bytes();
        text.append(&mut body);
        write_atomically(&*self.engine, &self.prepared_path(commit_id), &text)
    }

    /// Records durably that the flush `commit_id` is complete.
    pub fn commit(&self, commit_id: u64) -> Result<()> {
        let path = self.committed_path(commit_id);
        if !self.engine.exists(&path)? {
            drop(self.engine.open(&path, IoOpenMode::Create { preallocate: 0 })?);
        }
        self.sync()
    }

    /// True if the flush `commit_id` is complete.
    ///
    /// Errors: `State` if its coordinator has to decide and is missing, `Corruption` if the commit record is corrupted.
    pub fn is_committed(&self, commit_id: u64) -> Result<bool> {
        if self.engine.exists(&self.committed_path(commit_id))? {
            return Ok(true);
        }
        let path = self.prepared_path(commit_id);
        if !self.engine.exists(&path)? {
            return Ok(false);
        }
        let (name, dir) = parse_prepared(&read_file(&*self.engine, &path, MAX_RECORD_BYTES)?, &path)?;
        let coordinator = Self::new(self.engine.clone(), &dir);
        if !coordinator.has_name(name)? {
            return Err(Kind::State.error(format!(
                "the last flush of {} ended before it was complete everywhere, and {}, which says whether it was, is not there: \
                 mount it at this place again; or load a checkpoint made with Saver and open with reopen = \"discard\"",
                self.dir.display(),
                dir.display()
            )).at(&dir));
        }
        self.engine.exists(&coordinator.committed_path(commit_id))
    }

    /// Removes the commit records of a flush whose states no table keeps.
    pub fn remove_records(&self, commit_id: u64) -> Result<()> {
        for path in [self.prepared_path(commit_id), self.committed_path(commit_id)] {
            if self.engine.exists(&path)? {
                self.engine.remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Returns the commit ids of the flushes with commit records here, ascending.
    pub fn commit_ids(&self) -> Result<Vec<u64>> {
        if !self.engine.exists(&self.records_dir)? {
            return Ok(Vec::new());
        }
        let mut commit_ids: Vec<u64> =
            self.engine.list(&self.records_dir)?.iter().filter_map(|path| record_commit_id(path)).collect();
        commit_ids.sort_unstable();
        commit_ids.dedup();
        Ok(commit_ids)
    }

    fn name_path(&self, name: u64) -> PathBuf {
        self.records_dir.join(format!("{name:016x}.root"))
    }

    fn prepared_path(&self, commit_id: u64) -> PathBuf {
        self.records_dir.join(format!("{commit_id}.prepared"))
    }

    fn committed_path(&self, commit_id: u64) -> PathBuf {
        self.records_dir.join(commit_id.to_string())
    }

    fn sync(&self) -> Result<()> {
        self.engine.sync_dir(&self.records_dir)?;
        self.engine.sync_dir(&self.dir)
    }
}

/// Parses the name in a file name `<name>.root`.
fn parse_name(path: &Path) -> Option<u64> {
    let digits = path.file_name()?.to_str()?.strip_suffix(".root")?;
    let name = u64::from_str_radix(digits, 16).ok()?;
    (format!("{name:016x}") == digits).then_some(name)
}

/// Parses the commit id in the file name of a commit record.
fn record_commit_id(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let digits = name.strip_suffix(".prepared").unwrap_or(name);
    let commit_id: u64 = digits.parse().ok()?;
    (commit_id.to_string() == digits).then_some(commit_id)
}

/// Parses the name and the path of the coordinator in the bytes of a commit record.
fn parse_prepared(bytes: &[u8], path: &Path) -> Result<(u64, PathBuf)> {
    let shown = || format!("{:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(80)]));
    let parse = || {
        let rest = bytes.strip_prefix(RECORD_TITLE.as_bytes())?.strip_prefix(b" ")?;
        let (crc, rest) = rest.split_at_checked(8)?;
        let body = rest.strip_prefix(b" ")?;
        let (name, dir) = body.split_at_checked(16)?;
        let dir = Path::new(OsStr::from_bytes(dir.strip_prefix(b" ")?));
        let name = u64::from_str_radix(std::str::from_utf8(name).ok()?, 16).ok()?;
        let whole = crc == format!("{:08x}", crc32c::crc32c(body)).as_bytes();
        (whole && dir.is_absolute()).then(|| (name, dir.to_owned()))
    };
    parse().ok_or_else(|| {
        let expected = format!("'{RECORD_TITLE} <crc32c> <name> <absolute path>'");
        Error::corruption(path, 0, "the mark of a flush", expected, shown())
    })
}
