//! An SSD tier to measure, the rows for it, and an engine that counts bytes written and read.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use embcache::config::{OptimizerKind, ReopenMode, SsdConfig};
use embcache::error::Result;
use embcache::io::{DirLock, DirLockPurpose, IoEngine, IoFile, IoOpenMode, IoReadRequest, ReadSink};
use embcache::rows::{RowHeader, RowLayout, RowRef};
use embcache::ssd::{ShardIdentity, SsdTier};

use crate::plain_kernels::DIM;
use crate::workload::{SplitMix64, scattered_id, scattered_slot};

/// Bytes of a record of [`TierRows`]: a head of 16 bytes, 64 float32, and rowwise Adagrad's scalar.
pub const RECORD_BYTES: usize = 276;
/// Bytes of a row in RAM.
pub const ROW_BYTES: usize = 288;

/// Rows per call of `append`.
pub const APPEND_ROWS: usize = 16_384;

/// The layout of rows of 64 float32 under rowwise Adagrad.
pub fn tier_layout() -> RowLayout {
    OptimizerKind::RowWiseAdagrad.layout(DIM)
}

/// Creates a tier of `bytes` bytes in the folder `tier` of `dir`.
///
/// # Panics
/// Panics if the tier cannot be created.
pub fn new_tier(dir: &Path, engine: &Arc<dyn IoEngine>, bytes: u64) -> SsdTier {
    open_tier(dir, engine, bytes, ReopenMode::Never)
}

/// Opens a tier of `bytes` bytes in the folder `tier` of `dir`. It is new, or resumes the state that was published
/// there.
///
/// # Panics
/// Panics when the tier cannot be opened.
pub fn open_tier(dir: &Path, engine: &Arc<dyn IoEngine>, bytes: u64, reopen: ReopenMode) -> SsdTier {
    let config = SsdConfig { dir: dir.join("tier"), bytes, reopen, resume_commit_id: None };
    let identity = ShardIdentity {
        table: "bench".into(),
        key: 1,
        dim: DIM as u64,
        optimizer: "rowwise_adagrad".into(),
        seed: 0,
        initializer: "Constant(0)".into(),
        total_num_buckets: 1,
        bucket_begin: 0,
        bucket_end: 1,
    };
    SsdTier::open(&config, &identity, tier_layout(), engine.clone()).expect("a tier that opens").0
}

/// Rows to append to the tier. Their ids are set for each call.
pub struct TierRows {
    headers: Vec<RowHeader>,
    vectors: Vec<f32>,
}

impl Default for TierRows {
    /// [`APPEND_ROWS`] rows of random weights.
    fn default() -> Self {
        let mut random = SplitMix64(3);
        let vectors = (0..APPEND_ROWS * DIM).map(|_| random.next_f64() as f32).collect();
        Self { headers: vec![RowHeader::default(); APPEND_ROWS], vectors }
    }
}

impl TierRows {
    /// Appends a row of each id to the tier. `known` is true if the tier has an older version of each.
    ///
    /// # Panics
    /// Panics if the tier returns an error, and for more ids than [`APPEND_ROWS`].
    pub fn append(&mut self, tier: &SsdTier, ids: impl ExactSizeIterator<Item = i64>, known: bool) {
        let count = ids.len();
        let headers = &mut self.headers[..count];
        headers.iter_mut().zip(ids).for_each(|(header, id)| header.id = id);
        let rows: Vec<RowRef<'_>> = headers
            .iter()
            .zip(self.vectors.chunks_exact(DIM))
            .map(|(header, vector)| RowRef { header, vector })
            .collect();
        tier.append(&rows, &vec![known; count]).expect("the tier has room");
    }

    /// The rows' bytes, for a loop that copies them.
    pub fn bytes(&self) -> Vec<&[u8]> {
        self.vectors.chunks_exact(DIM).map(bytemuck::cast_slice).collect()
    }

    /// Appends the rows of ranks `0..rows` to a new tier, in an order that is independent of the rank.
    pub fn load(&mut self, tier: &SsdTier, rows: u64) {
        for first in (0..rows).step_by(APPEND_ROWS) {
            let positions = first..rows.min(first + APPEND_ROWS as u64);
            let ids: Vec<i64> = positions.map(|at| scattered_id(scattered_slot(at, rows) as u64)).collect();
            self.append(tier, ids.into_iter(), false);
        }
    }
}

/// Wraps another engine and counts the bytes that are written to files and read from them.
#[derive(Debug)]
pub struct CountedEngine {
    inner: Arc<dyn IoEngine>,
    written: Arc<AtomicU64>,
    read: Arc<AtomicU64>,
}

#[derive(Debug)]
struct CountedFile {
    inner: Arc<dyn IoFile>,
    written: Arc<AtomicU64>,
    read: Arc<AtomicU64>,
}

impl CountedEngine {
    /// Wraps `inner` with counts of 0.
    pub fn over(inner: Arc<dyn IoEngine>) -> Arc<Self> {
        Arc::new(Self { inner, written: Arc::default(), read: Arc::default() })
    }

    /// Number of bytes requested by reads.
    pub fn read_bytes(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Number of bytes passed to writes.
    pub fn written_bytes(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

impl IoEngine for CountedEngine {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn open(&self, path: &Path, how: IoOpenMode) -> Result<Arc<dyn IoFile>> {
        let inner = self.inner.open(path, how)?;
        Ok(Arc::new(CountedFile { inner, written: self.written.clone(), read: self.read.clone() }))
    }
    fn read_batch(&self, reads: &[IoReadRequest], sink: &mut ReadSink<'_>) {
        self.read.fetch_add(reads.iter().map(|read| read.len as u64).sum(), Ordering::Relaxed);
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
    fn lock_dir(&self, path: &Path) -> Result<DirLock> {
        self.inner.lock_dir(path)
    }
    fn lock_dir_for(&self, path: &Path, how: DirLockPurpose) -> embcache::Result<DirLock> {
        self.inner.lock_dir_for(path, how)
    }
}

impl IoFile for CountedFile {
    fn path(&self) -> &Path {
        self.inner.path()
    }
    fn len(&self) -> Result<u64> {
        self.inner.len()
    }
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.written.fetch_add(data.len() as u64, Ordering::Relaxed);
        self.inner.write_at(offset, data)
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read.fetch_add(into.len() as u64, Ordering::Relaxed);
        self.inner.read_at(offset, into)
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.inner.set_len(len)
    }
    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }
    fn links(&self) -> Result<u64> {
        self.inner.links()
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}
