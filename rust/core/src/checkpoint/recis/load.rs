//! Reads a RecIS-format save: first checks its manifests, then verifies blocks as they are read.
//!
//! Sizes in manifests are verified against the lengths of the files before they are used for allocations.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::layout::{
    LATEST_FILE, LatestRecisSave, RecisFileLayout, RecisShard, RecisTensor, TensorSpacing, read_checked, whole_pages,
};
use super::manifest::{RecisSaveManifest, RecisShardManifest, RecisTableShare, layout_of_file, parse, tensors_of};
use super::save::check_tensors;
use crate::checkpoint::chunked_file::{ChunkedInput, STREAM_PIECE_BYTES, STREAM_THREADS, check_crc32c};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::latest::{WaitCallback, hold_recis_root};
use crate::checkpoint::manifest::manifests::STREAM_CHUNK_BYTES;
use crate::checkpoint::manifest::{MANIFEST_FILE, inconsistent};
use crate::error::{Error, Kind, Result};
use crate::io::{BufPool, DirLock, DirLockPurpose};
use crate::runtime::memory;
use crate::types::{BucketMapper, Id};

/// The slot that contains a table's ids.
const ID: &str = "id";

/// A block in a file.
#[derive(Debug)]
struct RecisBlock {
    tensor: RecisTensor,
    /// The block's whole pages.
    pages: ChunkedInput,
}

/// Dtype and shape of a block: per row for a table's block, of the entire tensor for a dense one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecisBlockShape {
    /// Dtype by its safetensors name.
    pub dtype: String,
    /// Shape of one row, or of the tensor.
    pub shape: Vec<u64>,
    /// Bytes of one row, or of the tensor.
    pub bytes: u64,
}

/// A shard's rows of a table.
#[derive(Debug)]
struct RecisShardShare {
    buckets: Range<u32>,
    /// Number of rows of each run.
    runs: Vec<u64>,
    blocks: BTreeMap<String, RecisBlock>,
}

/// Metadata of a table. All shards agree on it, except for the epoch, of which this is the highest.
#[derive(Clone, Debug, PartialEq)]
pub struct RecisTableInfo {
    /// Table name in the save.
    pub name: String,
    /// Width of the embedding.
    pub dim: u32,
    /// See [`crate::types::table_key`].
    pub key: u64,
    /// Number of training steps.
    pub step: u64,
    /// The table's epoch.
    pub epoch: u32,
    /// Mapping of ids to the table's buckets.
    pub bucketing: BucketMapper,
    /// Dtype and shape of its blocks, by slot.
    pub slots: BTreeMap<String, RecisBlockShape>,
}

/// A table of the save.
#[derive(Debug)]
struct RecisTable {
    info: RecisTableInfo,
    shares: Vec<RecisShardShare>,
}

/// The ids of a chunk of a block, and their rows in the block.
#[derive(Debug, Default)]
struct IdChunk {
    rows: Range<u64>,
    ids: Vec<Id>,
}

/// Adjacent rows in the blocks of one shard, sorted by (bucket, `uint64(id)`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecisRun {
    share: usize,
    rows: Range<u64>,
    buckets: Range<u32>,
}

impl RecisRun {
    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows.end - self.rows.start
    }
}

/// The latest complete save of a directory, which is not removed while this reader exists.
#[derive(Debug)]
pub struct RecisReader {
    /// The save's own directory.
    dir: CheckpointDirectory,
    tables: BTreeMap<String, RecisTable>,
    tensors: BTreeMap<String, RecisBlock>,
    buffers: Arc<BufPool>,
    _held: DirLock,
}

impl RecisReader {
    /// Opens the latest save and checks its manifests. `wait` is called while another process publishes a save; an
    /// error from it aborts the wait.
    ///
    /// Errors: `Path` if there is no save; `Corruption`, `Unsupported` (a newer format), `Storage`.
    pub fn open(root: &CheckpointDirectory, wait: &mut WaitCallback<'_>) -> Result<Self> {
        let (latest, held) = hold_newest(root, wait)?;
        let dir = root.subdirectory(latest.name);
        let path = dir.join(MANIFEST_FILE);
        let manifest = RecisSaveManifest::parse(&read_checked(dir.engine(), &path, latest.manifest_crc32c)?, &path)?;
        let mut reader = Self {
            dir,
            tables: BTreeMap::new(),
            tensors: BTreeMap::new(),
            buffers: Arc::new(BufPool::new(STREAM_PIECE_BYTES, STREAM_THREADS)),
            _held: held,
        };
        let count = manifest.shards.len() as u32;
        for (index, &expected) in manifest.shards.iter().enumerate() {
            let shard = RecisShard { index: index as u32, count };
            let path = reader.dir.join(shard.manifest_file());
            let found: RecisShardManifest = parse(&read_checked(reader.dir.engine(), &path, expected)?, &path)?;
            found.check(shard, &path)?;
            reader.open_shard(shard, &found, &path)?;
        }
        reader.tables.values().try_for_each(|table| table.check_complete(reader.dir.path()))?;
        Ok(reader)
    }

    /// The tables, by name.
    pub fn tables(&self) -> impl Iterator<Item = &RecisTableInfo> {
        self.tables.values().map(|table| &table.info)
    }

    /// The dense tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, RecisBlockShape)> {
        self.tensors.iter().map(|(name, block)| (name.as_str(), RecisBlockShape::of(&block.tensor, 0)))
    }

    fn open_shard(&mut self, shard: RecisShard, found: &RecisShardManifest, path: &Path) -> Result<()> {
        let damaged = |what: String| inconsistent(path, what);
        let tensors = tensors_of(&found.blocks, shard).map_err(damaged)?;
        let mut files = BTreeMap::new();
        for entry in &found.blocks {
            if files.contains_key(&entry.file) {
                continue;
            }
            let layout = layout_of_file(entry.file, &found.blocks, &tensors).map_err(damaged)?;
            let io = layout.open(self.dir.engine(), &self.dir.join(shard.data_file(entry.file, found.parallel)))?;
            files.insert(entry.file, (layout, io));
        }
        // Shapes are consistent with the lengths of existing files here, which bounds the allocations below.
        let checksums = self.read_checks(shard, found, &tensors, path)?;
        let mut blocks: BTreeMap<&str, BTreeMap<String, RecisBlock>> = BTreeMap::new();
        for ((entry, tensor), checksums) in found.blocks.iter().zip(tensors).zip(checksums) {
            let (layout, io) = &files[&entry.file];
            let (start, label) = (layout.start(&tensor), format!(" of {:?}", tensor.name));
            let pages = ChunkedInput { io: Arc::clone(io), start, bytes: whole_pages(tensor.bytes), checksums, label };
            let block = RecisBlock { tensor, pages };
            let duplicate = match &entry.slot {
                None => self.tensors.insert(entry.name.clone(), block),
                Some(slot) => blocks.entry(&entry.name).or_default().insert(slot.clone(), block),
            };
            if duplicate.is_some() {
                return Err(damaged(format!("{:?} is there twice", entry.name)));
            }
        }
        for share in &found.tables {
            let blocks = blocks.remove(share.name.as_str()).unwrap_or_default();
            self.add_share(share, blocks, path)?;
        }
        match blocks.keys().next() {
            Some(name) => Err(damaged(format!("{name:?} is not among its tables"))),
            None => Ok(()),
        }
    }

    /// Reads the checksums of a shard's blocks.
    fn read_checks(
        &self,
        shard: RecisShard,
        found: &RecisShardManifest,
        tensors: &[RecisTensor],
        path: &Path,
    ) -> Result<Vec<Vec<u32>>> {
        let damaged = |what: String| inconsistent(path, what);
        let described = check_tensors(tensors).map_err(damaged)?;
        let layout = RecisFileLayout::new(described.iter().collect(), TensorSpacing::Packed).map_err(damaged)?;
        let path = self.dir.join(shard.check_file());
        let bytes = layout.read(self.dir.engine(), &path)?;
        check_crc32c(&path, 0, || "the checksum", &bytes, found.check)?;
        layout.check_header(&path, &bytes)?;
        let data = |tensor: &RecisTensor| {
            let start = layout.start(tensor) as usize;
            &bytes[start..start + tensor.bytes as usize]
        };
        Ok(described.iter().map(|tensor| bytemuck::pod_collect_to_vec(data(tensor))).collect())
    }

    fn add_share(&mut self, share: &RecisTableShare, blocks: BTreeMap<String, RecisBlock>, path: &Path) -> Result<()> {
        let damaged = |what: &str, expected: &str| {
            Error::corruption(path, 0, &format!("{what} of table {:?}", share.name), expected, "others")
        };
        let slots: BTreeMap<String, RecisBlockShape> =
            blocks.iter().map(|(slot, block)| (slot.clone(), RecisBlockShape::of(&block.tensor, 1))).collect();
        let rows = share.rows().unwrap_or(u64::MAX);
        let known = |shape: &RecisBlockShape| {
            matches!(shape.dtype.as_str(), "I64" | "U64" | "F32" | "U32")
                && (shape.shape.is_empty() || shape.shape == [u64::from(share.dim)])
        };
        let ids = slots.get(ID).is_some_and(|ids| ids.dtype == "I64" && ids.shape.is_empty());
        let counted = blocks.values().all(|block| block.tensor.shape.first() == Some(&rows));
        if !ids || !counted || !slots.values().all(known) {
            return Err(damaged("the counts", "consistent"));
        }
        let about = RecisTableInfo {
            name: share.name.clone(),
            dim: share.dim,
            key: share.key,
            step: share.step,
            epoch: share.epoch,
            bucketing: BucketMapper::new(share.total_num_buckets),
            slots,
        };
        let table = self
            .tables
            .entry(share.name.clone())
            .or_insert_with(|| RecisTable { info: about.clone(), shares: Vec::new() });
        let epoch = table.info.epoch.max(about.epoch);
        if (RecisTableInfo { epoch, ..table.info.clone() }) != (RecisTableInfo { epoch, ..about }) {
            return Err(damaged("the settings", "as on the other shards"));
        }
        table.info.epoch = epoch;
        let [begin, end] = share.buckets;
        table.shares.push(RecisShardShare { buckets: begin..end, runs: share.runs.clone(), blocks });
        Ok(())
    }

    /// Returns the runs with the rows of `buckets` under `bucketing`. If the save has other buckets, returns the runs
    /// of all rows. Searches the ids of runs for the bounds of the buckets.
    ///
    /// Errors: `Input` if there is no such table; `Corruption`, `Storage`.
    pub fn runs(&self, table: &str, bucketing: BucketMapper, buckets: &Range<u32>) -> Result<Vec<RecisRun>> {
        let table = self.table(table)?;
        let same = table.info.bucketing == bucketing;
        let mut runs = Vec::new();
        for (number, share) in table.shares.iter().enumerate() {
            let wanted = if same {
                share.buckets.start.max(buckets.start)..share.buckets.end.min(buckets.end)
            } else {
                share.buckets.clone()
            };
            if wanted.is_empty() {
                continue;
            }
            let (mut first, mut chunk) = (0, IdChunk::default());
            for &rows in &share.runs {
                let run = first..first + rows;
                let begin = self.first_row(share, run.clone(), wanted.start, (bucketing, &mut chunk))?;
                let within = begin..self.first_row(share, begin..run.end, wanted.end, (bucketing, &mut chunk))?;
                if !within.is_empty() {
                    runs.push(RecisRun { share: number, rows: within, buckets: wanted.clone() });
                }
                first = run.end;
            }
        }
        Ok(runs)
    }

    /// Finds the first of some rows of a run, which are sorted by bucket, whose bucket is `bucket` or a later one. `chunk`
    /// has the ids that were read last.
    fn first_row(
        &self,
        share: &RecisShardShare,
        mut rows: Range<u64>,
        bucket: u32,
        (bucketing, chunk): (BucketMapper, &mut IdChunk),
    ) -> Result<u64> {
        if bucket == share.buckets.start {
            return Ok(rows.start);
        }
        if bucket == share.buckets.end {
            return Ok(rows.end);
        }
        // Halves the rows until they are in one chunk.
        while !rows.is_empty() {
            let middle = rows.start + (rows.end - rows.start) / 2;
            if !chunk.rows.contains(&middle) {
                *chunk = self.id_chunk(&share.blocks[ID], middle)?;
            }
            let found = chunk.rows.start.max(rows.start)..chunk.rows.end.min(rows.end);
            let ids = &chunk.ids[(found.start - chunk.rows.start) as usize..(found.end - chunk.rows.start) as usize];
            let before = ids.partition_point(|&id| bucketing.of(id) < bucket) as u64;
            if before == 0 {
                rows.end = found.start;
            } else if before == ids.len() as u64 {
                rows.start = found.end;
            } else {
                return Ok(found.start + before);
            }
        }
        Ok(rows.start)
    }

    /// Reads the chunk of ids with this row.
    fn id_chunk(&self, block: &RecisBlock, row: u64) -> Result<IdChunk> {
        let (width, bytes) = (size_of::<Id>() as u64, STREAM_CHUNK_BYTES as u64);
        let begin = row * width / bytes * bytes;
        let range = begin..(begin + bytes).min(block.tensor.bytes);
        let mut ids = memory::zeros("read ids", ((range.end - range.start) / width) as usize)?;
        self.read(block, range.clone(), bytemuck::cast_slice_mut(&mut ids))?;
        Ok(IdChunk { rows: range.start / width..range.end / width, ids })
    }

    /// Reads one slot of the rows of `run` into memory of matching length and verifies it. Ids must belong to the run's
    /// buckets, in order.
    ///
    /// Errors: `Corruption`, `Storage`; `Input` if there is no such slot or the length differs.
    pub fn read_rows(&self, table: &str, run: &RecisRun, slot: &str, into: &mut [u8]) -> Result<()> {
        let table = self.table(table)?;
        let block = table.shares.get(run.share).and_then(|share| share.blocks.get(slot));
        let (Some(block), Some(shape)) = (block, table.info.slots.get(slot)) else {
            return Err(Kind::Input.error(format!("table {:?} has no {slot:?}", table.info.name)));
        };
        self.read(block, run.rows.start * shape.bytes..run.rows.end * shape.bytes, into)?;
        if slot == ID { table.check_order(block, run, into) } else { Ok(()) }
    }

    /// Reads some bytes of a dense tensor and verifies them.
    ///
    /// Errors: as [`Self::read_rows`].
    pub fn read_tensor(&self, name: &str, begin: u64, into: &mut [u8]) -> Result<()> {
        let block = self.tensors.get(name);
        let block = block.ok_or_else(|| Kind::Input.error(format!("there is no tensor {name:?}")))?;
        self.read(block, begin..begin.saturating_add(into.len() as u64), into)
    }

    fn table(&self, name: &str) -> Result<&RecisTable> {
        self.tables.get(name).ok_or_else(|| Kind::Input.error(format!("there is no table {name:?}")))
    }

    /// Reads a range of a block's bytes in pieces and verifies their chunks.
    fn read(&self, block: &RecisBlock, range: Range<u64>, into: &mut [u8]) -> Result<()> {
        if range.end > block.tensor.bytes || range.end - range.start != into.len() as u64 {
            let what = format!("{range:?} of {} bytes of {:?} cannot be read", block.tensor.bytes, block.tensor.name);
            return Err(Kind::Input.error(what));
        }
        let (mut at, mut rest) = (range.start, into);
        while at < range.end {
            let end =
                (at / STREAM_CHUNK_BYTES as u64 * STREAM_CHUNK_BYTES as u64 + STREAM_PIECE_BYTES as u64).min(range.end);
            let (head, tail) = rest.split_at_mut((end - at) as usize);
            block.pages.read(&(at..end), head, &self.buffers)?;
            (at, rest) = (end, tail);
        }
        Ok(())
    }
}

impl RecisBlockShape {
    /// Shape of a tensor without its first `leading` dimensions.
    fn of(tensor: &RecisTensor, leading: usize) -> Self {
        let shape = tensor.shape.get(leading..).unwrap_or_default().to_vec();
        let bytes = shape.iter().product::<u64>() * tensor.width;
        Self { dtype: tensor.dtype.clone(), shape, bytes }
    }
}

impl RecisTable {
    /// Returns `Corruption` unless the shards contain every bucket once.
    fn check_complete(&self, dir: &Path) -> Result<()> {
        let mut ranges: Vec<&Range<u32>> = self.shares.iter().map(|share| &share.buckets).collect();
        ranges.sort_by_key(|range| (range.start, range.end));
        let (total, mut expected) = (self.info.bucketing.total(), 0);
        for range in ranges.into_iter().chain([&(total..total)]) {
            if range.start != expected {
                let what = format!("the buckets of table {:?}", self.info.name);
                return Err(Error::corruption(dir, 0, &what, expected, range.start));
            }
            expected = range.end;
        }
        Ok(())
    }

    /// Returns `Corruption` unless the ids belong to the run's buckets, sorted and unique.
    fn check_order(&self, block: &RecisBlock, run: &RecisRun, ids: &[u8]) -> Result<()> {
        let bucketing = self.info.bucketing;
        let ids = ids.as_chunks::<8>().0.iter().map(|bytes| Id::from_le_bytes(*bytes));
        let mut last = None;
        for id in ids {
            let key = (bucketing.of(id), id.cast_unsigned());
            if !run.buckets.contains(&key.0) || last.is_some_and(|last| last >= key) {
                let what = format!("the ids of {:?} from row {} on", block.tensor.name, run.rows.start);
                let (at, expected) =
                    (block.pages.start + run.rows.start * 8, format!("of buckets {:?}, in order", run.buckets));
                return Err(Error::corruption(block.pages.io.path(), at, &what, expected, "others"));
            }
            last = Some(key);
        }
        Ok(())
    }
}

/// Finds the latest complete save and locks it.
fn hold_newest(root: &CheckpointDirectory, wait: &mut WaitCallback<'_>) -> Result<(LatestRecisSave, DirLock)> {
    let _no_removal = hold_recis_root(root, DirLockPurpose::ToRead, wait)?;
    let latest = LatestRecisSave::find(root)?.ok_or_else(|| {
        let what = format!(
            "there is no RecIS-format checkpoint in {}: {LATEST_FILE} is missing; save one first",
            root.path().display()
        );
        Kind::Path.error(what).at(root.path())
    })?;
    let dir = root.subdirectory(latest.name);
    if !root.has(&latest.name.to_string())? {
        let expected = "the name of an existing save";
        return Err(Error::corruption(&root.join(LATEST_FILE), 0, "the name", expected, latest.name));
    }
    let held = dir.hold(DirLockPurpose::ToRead)?;
    Ok((latest, held))
}
