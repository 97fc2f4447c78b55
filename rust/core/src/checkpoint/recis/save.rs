//! Saves in the RecIS format: a save waits for its shards, and each of them writes its blocks to data files, then their
//! checksums and its manifest. The last one publishes the save.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::index::{RecisIndexes, check_complete};
use super::layout::{
    BEGUN_FILE, INDEX_FILE, LATEST_FILE, LatestRecisSave, MAX_MANIFEST_BYTES, NAMES_FILE, OrderedFields,
    RecisFileLayout, RecisSaveName, RecisShard, RecisTensor, TensorSpacing, list_saves, read_small, render,
    whole_pages,
};
use super::manifest::{
    RecisBlockEntry, RecisSaveManifest, RecisShardManifest, RecisTableShare, layout_of_file, parse, tensors_of,
};
use crate::checkpoint::background_file::for_each_piece;
use crate::checkpoint::dense::{
    DENSE_PIECE_BYTES, DENSE_THREADS, MAX_QUEUED_PIECES, PieceTarget, PieceWriteTask, PieceWriterPool,
};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::MANIFEST_FILE;
use crate::checkpoint::manifest::latest::{CheckpointName, WaitCallback, hold_recis_root, hold_unread};
use crate::checkpoint::manifest::manifests::DENSE_CHUNK_BYTES;
use crate::error::{Error, Kind, Result};
use crate::io::{
    ALIGNMENT, AlignedBuf, BufPool, DirLock, DirLockPurpose, IoFile, IoOpenMode, PooledBuf, write_atomically,
};
use crate::runtime::sync::lock;

/// Selects the save that a shard joins.
#[derive(Clone, Debug)]
pub enum RecisJoinMode {
    /// The latest save that waits for this shard and whose shards saved the tables at the same steps; a new one if
    /// there is none.
    ///
    /// Steps distinguish saves if shards cannot communicate: a shard that was killed in one save and joins the next
    /// does not complete the first one with newer rows.
    NewestOrNew,
    /// A new save.
    New,
    /// The save of this name, which another shard created.
    Named(String),
}

/// A shard's part of a save. No other process removes the save or writes this shard while this exists.
#[derive(Debug)]
pub struct RecisSave {
    root: CheckpointDirectory,
    /// The save's own directory.
    dir: CheckpointDirectory,
    name: RecisSaveName,
    shard: RecisShard,
    /// Locks of the save's directory (shared with the other shards) and of this shard (exclusive).
    _held: [DirLock; 2],
}

/// Result of finishing a shard's part.
#[derive(Debug)]
pub enum RecisShardOutcome {
    /// Other shards have not saved yet.
    WaitingForShards,
    /// This was the last shard: loads find the save. Contains an error for each older save that could not be removed;
    /// the next save tries again.
    Published(Vec<Error>),
}

/// `begun.json`.
#[derive(Serialize)]
struct BegunRecord<'a> {
    shards: u32,
    steps: OrderedFields<'a, u64>,
}

/// `begun.json`, deserialized.
#[derive(Deserialize)]
struct ParsedBegunRecord {
    shards: u32,
    #[serde(deserialize_with = "in_order")]
    steps: Vec<(String, u64)>,
}

/// Deserializes the fields of a JSON object in their order.
fn in_order<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, u64)>, D::Error> {
    struct OrderedFieldsVisitor;
    impl<'de> serde::de::Visitor<'de> for OrderedFieldsVisitor {
        type Value = Vec<(String, u64)>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of numbers")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut fields = Vec::new();
            while let Some(field) = map.next_entry()? {
                fields.push(field);
            }
            Ok(fields)
        }
    }
    deserializer.deserialize_map(OrderedFieldsVisitor)
}

impl RecisSave {
    /// Joins or creates a save in `root`. `steps` has the training step of each table that the shard saves. `random`
    /// distinguishes saves that start at the same time. `wait` is called while another process creates or publishes a
    /// save; an error from it aborts the wait.
    ///
    /// Errors: `InUse` if a named save does not match, or the shard takes part in it already; `Corruption` of
    /// `LATEST.blocks`; `Storage`.
    pub fn begin(
        root: &CheckpointDirectory,
        shard: RecisShard,
        steps: &[(String, u64)],
        join: &RecisJoinMode,
        random: u64,
        wait: &mut WaitCallback<'_>,
    ) -> Result<Self> {
        root.check_to_save()?;
        let _alone = hold_recis_root(root, DirLockPurpose::ToChange, wait)?;
        let done = LatestRecisSave::find(root)?.map_or(0, |latest| latest.name.seq());
        let saves = list_saves(root)?;
        if matches!(join, RecisJoinMode::NewestOrNew) && shard.count > 1 {
            for &name in saves.iter().rev().filter(|name| name.seq() > done) {
                if let Some(joined) = Self::join(root, name, shard, steps)? {
                    return Ok(joined);
                }
            }
        }
        if let RecisJoinMode::Named(name) = join {
            let name: RecisSaveName = name.parse()?;
            let RecisShard { index, count } = shard;
            return Self::join(root, name, shard, steps)?.ok_or_else(|| {
                let dir = name.dir(root);
                let what = format!(
                    "shard {index} of {count} does not fit, or takes part already in, {}",
                    dir.path().display()
                );
                Error::new(Kind::InUse, format!("{what}: save it once"))
            });
        }
        let highest = saves.last().map_or(0, |name| name.seq()).max(done);
        let used_up =
            || Error::new(Kind::Corruption, format!("{}: the numbers of saves are used up", root.path().display()));
        let seq = highest.checked_add(1).ok_or_else(used_up)?;
        let name = RecisSaveName(CheckpointName { seq, random });
        let dir = name.dir(root);
        let changed = || Error::corruption(&dir.join(BEGUN_FILE), 0, "the file", "as it was just written", "another");
        create_save(&dir, root, shard, steps)
            .and_then(|()| Self::join(root, name, shard, steps)?.ok_or_else(changed))
            .inspect_err(|_| drop(dir.remove()))
    }

    /// Joins the save `name`; returns `None` if it does not match, or if another process removes it or writes this
    /// shard.
    fn join(
        root: &CheckpointDirectory,
        name: RecisSaveName,
        shard: RecisShard,
        steps: &[(String, u64)],
    ) -> Result<Option<Self>> {
        let dir = name.dir(root);
        let Some(ParsedBegunRecord { shards, steps: mut known }) = read_begun(&dir)? else {
            return Ok(None);
        };
        let other = |(table, step): &(String, u64)| known.iter().any(|(name, known)| name == table && known != step);
        let written = dir.has(&shard.manifest_file())?;
        if shards != shard.count || written || steps.iter().any(other) {
            return Ok(None);
        }
        let held = dir.hold(DirLockPurpose::ToRead).and_then(|shared| {
            let alone = dir.engine().lock_file(&dir.join(shard.lock_file()))?;
            Ok([shared, alone])
        });
        let held = match held {
            Err(error) if error.kind() == Kind::InUse => return Ok(None),
            held => held?,
        };
        let more: Vec<(String, u64)> =
            steps.iter().filter(|(table, _)| known.iter().all(|(name, _)| name != table)).cloned().collect();
        if !more.is_empty() {
            known.extend(more);
            let begun = BegunRecord { shards, steps: OrderedFields(&known) };
            write_atomically(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)?;
        }
        Ok(Some(Self { root: root.clone(), dir, name, shard, _held: held }))
    }

    /// Name of the save, for the other shards.
    pub fn name(&self) -> RecisSaveName {
        self.name
    }

    pub(super) fn shard(&self) -> RecisShard {
        self.shard
    }

    /// The save's own directory.
    pub(super) fn dir(&self) -> &CheckpointDirectory {
        &self.dir
    }

    /// Writes the shard's manifest, after everything it refers to is durable. The last shard publishes the save.
    pub(super) fn finish(
        &self,
        manifest: &RecisShardManifest,
        wait: &mut WaitCallback<'_>,
    ) -> Result<RecisShardOutcome> {
        let dir = &self.dir;
        write_atomically(dir.engine(), &dir.join(self.shard.manifest_file()), &render(manifest)?)?;
        let _alone = hold_recis_root(&self.root, DirLockPurpose::ToChange, wait)?;
        if dir.has(MANIFEST_FILE)? {
            return Ok(RecisShardOutcome::WaitingForShards);
        }
        for shard in self.shard.all() {
            if !dir.has(&shard.manifest_file())? {
                return Ok(RecisShardOutcome::WaitingForShards);
            }
        }
        self.publish()?;
        Ok(RecisShardOutcome::Published(remove_older_saves(&self.root, self.name)))
    }

    /// Makes the save the latest one. The caller holds the root exclusively, and the manifests of all shards exist.
    fn publish(&self) -> Result<()> {
        let (engine, dir) = (self.dir.engine(), &self.dir);
        if let Some(latest) = LatestRecisSave::find(&self.root)?.filter(|latest| latest.name.seq() > self.name.seq()) {
            let what = format!(
                "{} is older than {}, which was completed meanwhile: save again",
                dir.path().display(),
                latest.name
            );
            return Err(Error::new(Kind::State, what));
        }
        let read = |shard: RecisShard| {
            let path = dir.join(shard.manifest_file());
            let bytes = read_small(engine, &path, MAX_MANIFEST_BYTES)?;
            Ok((crc32c::crc32c(&bytes), parse::<RecisShardManifest>(&bytes, &path)?))
        };
        let (checksums, manifests): (Vec<u32>, Vec<RecisShardManifest>) =
            self.shard.all().map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        check_complete(&manifests)?;
        let indexes = RecisIndexes::new(&manifests)?;
        write_atomically(engine, &dir.join(NAMES_FILE), &indexes.names)?;
        write_atomically(engine, &dir.join(INDEX_FILE), &indexes.files)?;
        let manifest = render(&RecisSaveManifest::new(checksums))?;
        write_atomically(engine, &dir.join(MANIFEST_FILE), &manifest)?;
        let latest = LatestRecisSave { name: self.name, manifest_crc32c: crc32c::crc32c(&manifest) };
        write_atomically(engine, &self.root.join(LATEST_FILE), format!("{latest}\n").as_bytes())
    }

    /// Abandons the shard's part. A save of one shard is removed, unless `LATEST.blocks` names it already. A save of
    /// several shards stays until a later save removes it, because the others may have written their parts.
    pub fn abandon(self) -> Result<()> {
        let is_named =
            || Ok::<_, Error>(LatestRecisSave::find(&self.root)?.is_some_and(|latest| latest.name == self.name));
        if self.shard.count > 1 || is_named()? {
            return Ok(());
        }
        self.dir.remove()
    }
}

/// Creates the directory `dir` of a new save in `root`.
fn create_save(
    dir: &CheckpointDirectory,
    root: &CheckpointDirectory,
    shard: RecisShard,
    steps: &[(String, u64)],
) -> Result<()> {
    dir.make()?;
    root.sync()?;
    let begun = BegunRecord { shards: shard.count, steps: OrderedFields(steps) };
    write_atomically(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)
}

/// Reads `begun.json` of the save in `dir`; returns `None` if it is missing or corrupted.
fn read_begun(dir: &CheckpointDirectory) -> Result<Option<ParsedBegunRecord>> {
    if !dir.has(BEGUN_FILE)? {
        return Ok(None);
    }
    let path = dir.join(BEGUN_FILE);
    match read_small(dir.engine(), &path, MAX_MANIFEST_BYTES).and_then(|bytes| parse(&bytes, &path)) {
        Err(error) if error.kind() == Kind::Corruption => Ok(None),
        found => found.map(Some),
    }
}

/// Removes the saves older than `kept` that no process writes or reads. Returns an error for each save that could not
/// be removed.
fn remove_older_saves(root: &CheckpointDirectory, kept: RecisSaveName) -> Vec<Error> {
    let remove = |name: RecisSaveName| {
        let dir = name.dir(root);
        let Some(_unused) = hold_unread(&dir)? else { return Ok(()) };
        dir.remove()
    };
    match list_saves(root) {
        Err(error) => vec![error],
        Ok(found) => {
            found.into_iter().filter(|name| name.seq() < kept.seq()).filter_map(|name| remove(name).err()).collect()
        }
    }
}

/// A block to write.
#[derive(Clone, Debug)]
pub struct RecisBlockSpec {
    /// Name of the table or of the dense tensor.
    pub name: String,
    /// Column of the table's rows that the block contains; `None` for a dense tensor.
    pub slot: Option<String>,
    /// Dtype by its safetensors name.
    pub dtype: String,
    /// Shape; the first dimension of a table's block is its number of rows.
    pub shape: Vec<u64>,
}

/// A table whose blocks are written.
#[derive(Clone, Debug)]
pub struct RecisWrittenTable {
    /// Its entry in the manifest.
    pub share: RecisTableShare,
    /// `[runs, buckets + 1]`: index in each run of the first row of each bucket, then the number of rows.
    pub starts: Vec<i64>,
}

/// The data files of a shard's blocks. Blocks are distributed round-robin over `parallel` files and filled
/// concurrently.
#[derive(Debug)]
pub struct RecisShardWriter {
    parallel: u32,
    entries: Vec<RecisBlockEntry>,
    tensors: Vec<RecisTensor>,
    writer: RecisBlockWriter,
}

impl RecisShardWriter {
    /// Creates at most `parallel` data files, written by as many threads.
    ///
    /// Errors: `Input` for an unknown dtype, a shape that no file can hold, or two blocks with the same name;
    /// `Storage`.
    pub fn new(save: &RecisSave, parallel: u32, blocks: Vec<RecisBlockSpec>) -> Result<Self> {
        let parallel = parallel.max(1);
        let entry = |(number, block): (usize, RecisBlockSpec)| {
            let RecisBlockSpec { name, slot, dtype, shape } = block;
            RecisBlockEntry { name, slot, dtype, shape, file: number as u32 % parallel }
        };
        let entries: Vec<RecisBlockEntry> = blocks.into_iter().enumerate().map(entry).collect();
        let tensors = tensors_of(&entries, save.shard()).map_err(input_error)?;
        let dir = save.dir();
        let (mut files, mut layouts) = (Vec::new(), Vec::new());
        for file in 0..parallel.min(entries.len() as u32) {
            let layout = layout_of_file(file, &entries, &tensors).map_err(input_error)?;
            let name = save.shard().data_file(file, parallel);
            if dir.has(&name)? {
                // Left by an interrupted save of this shard.
                dir.engine().remove_file(&dir.join(&name))?;
            }
            files.push(RecisFileSpec { name, header: layout.header.clone(), bytes: layout.bytes });
            layouts.push(layout);
        }
        let range = |(entry, tensor): (&RecisBlockEntry, &RecisTensor)| {
            let file = entry.file as usize;
            RecisBlockRange { file, start: layouts[file].start(tensor), bytes: tensor.bytes }
        };
        let ranges: Vec<RecisBlockRange> = entries.iter().zip(&tensors).map(range).collect();
        let writer = RecisBlockWriter::new(dir, &files, &ranges, DENSE_CHUNK_BYTES, parallel as usize)?;
        Ok(Self { parallel, entries, tensors, writer })
    }

    /// Appends bytes to a block. See [`RecisBlockWriter::append`].
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        self.writer.append(block, bytes, copy)
    }

    /// Makes the blocks durable, then writes their checksums and the shard's manifest. The last shard publishes the
    /// save.
    ///
    /// Errors: `State` if a block is incomplete, or a newer save was completed concurrently; `Mismatch` if the shards
    /// do not make complete tables; `Input` if `tables` do not match their buckets; `Storage`.
    pub fn finish(
        self,
        save: &RecisSave,
        tables: Vec<RecisWrittenTable>,
        wait: &mut WaitCallback<'_>,
    ) -> Result<RecisShardOutcome> {
        let Self { parallel, entries, tensors, writer } = self;
        let checksums = writer.finish()?;
        let check = write_checks(save, &tensors, &checksums, &tables)?;
        let RecisShard { index: shard, count: shards } = save.shard();
        let tables = tables.into_iter().map(|table| table.share).collect();
        save.finish(&RecisShardManifest { shard, shards, parallel, tables, blocks: entries, check }, wait)
    }
}

/// Returns the tensors of the checksum file: the chunk checksums of each block, and the bucket starts of each table.
pub(crate) fn check_tensors(tensors: &[RecisTensor], tables: &[&RecisTableShare]) -> Result<Vec<RecisTensor>, String> {
    let chunks = |tensor: &RecisTensor| whole_pages(tensor.bytes).div_ceil(DENSE_CHUNK_BYTES as u64);
    let of_block =
        |tensor: &RecisTensor| RecisTensor::new(format!("{}.crc32c", tensor.name), "U32", vec![chunks(tensor)]);
    let of_table = |table: &&RecisTableShare| {
        let shape = vec![table.runs.len() as u64, table.starts()];
        RecisTensor::new(format!("{}.bucket_offsets", table.name), "I64", shape)
    };
    tensors.iter().map(of_block).chain(tables.iter().map(of_table)).collect()
}

/// Writes the checksums of a shard's blocks durably. Returns the CRC-32C of the file.
fn write_checks(
    save: &RecisSave,
    tensors: &[RecisTensor],
    checksums: &[Vec<u32>],
    tables: &[RecisWrittenTable],
) -> Result<u32> {
    let shares: Vec<&RecisTableShare> = tables.iter().map(|table| &table.share).collect();
    let described = check_tensors(tensors, &shares).map_err(input_error)?;
    let blocks = checksums.iter().map(|checksums| bytemuck::cast_slice::<u32, u8>(checksums));
    let starts = tables.iter().map(|table| bytemuck::cast_slice::<i64, u8>(&table.starts));
    let data: Vec<&[u8]> = blocks.chain(starts).collect();
    if let Some((tensor, _)) = described.iter().zip(&data).find(|(tensor, data)| tensor.bytes != data.len() as u64) {
        return Err(input_error(format!("{:?} does not have the shape {:?}", tensor.name, tensor.shape)));
    }
    let layout =
        RecisFileLayout::new(&described.iter().collect::<Vec<_>>(), TensorSpacing::Packed).map_err(input_error)?;
    let image = layout.image(described.iter().zip(data));
    write_atomically(save.dir().engine(), &save.dir().join(save.shard().check_file()), &image)?;
    Ok(crc32c::crc32c(&image))
}

fn input_error(message: String) -> Error {
    Error::new(Kind::Input, message)
}

/// A file to create.
#[derive(Clone, Debug)]
pub struct RecisFileSpec {
    /// Name in the directory.
    pub name: String,
    /// First bytes of the file, in whole pages.
    pub header: Vec<u8>,
    /// Length of the file, in whole pages.
    pub bytes: u64,
}

/// Byte range of a block in a file. Zeros follow it up to the next multiple of [`ALIGNMENT`].
#[derive(Clone, Copy, Debug)]
pub struct RecisBlockRange {
    /// Index of the file.
    pub file: usize,
    /// Offset in the file, a multiple of [`ALIGNMENT`].
    pub start: u64,
    /// Length of the block.
    pub bytes: u64,
}

/// Writes blocks to files. In memory are a piece of 4 MiB per started and incomplete block, and at most eight pieces
/// that are being written.
#[derive(Debug)]
pub struct RecisBlockWriter {
    files: Vec<Arc<dyn IoFile>>,
    blocks: Vec<Mutex<RecisOpenBlock>>,
    buffers: Arc<BufPool>,
    pool: PieceWriterPool,
}

#[derive(Debug)]
struct RecisOpenBlock {
    to: Arc<RecisBlockOutput>,
    bytes: u64,
    filled: u64,
    /// The last piece, if it is not full.
    piece: Option<PooledBuf>,
}

#[derive(Debug)]
struct RecisBlockOutput {
    io: Arc<dyn IoFile>,
    start: u64,
    chunk_bytes: usize,
    checksums: Mutex<Vec<u32>>,
}

impl PieceTarget for RecisBlockOutput {
    fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        let found: Vec<u32> = data.chunks(self.chunk_bytes).map(crc32c::crc32c).collect();
        let first = (at / self.chunk_bytes as u64) as usize;
        lock(&self.checksums)[first..first + found.len()].copy_from_slice(&found);
        self.io.write_at(self.start + at, data)
    }
}

impl RecisBlockWriter {
    /// Creates the files, which must not exist, in `directory`, and starts up to `threads` threads. Each checksum
    /// covers `chunk_bytes`, which must divide 4 MiB.
    pub fn new(
        directory: &CheckpointDirectory,
        files: &[RecisFileSpec],
        blocks: &[RecisBlockRange],
        chunk_bytes: usize,
        threads: usize,
    ) -> Result<Self> {
        directory.check_to_save()?;
        let whole = |bytes: u64| bytes.is_multiple_of(ALIGNMENT as u64);
        if chunk_bytes == 0 || !DENSE_PIECE_BYTES.is_multiple_of(chunk_bytes) {
            return Err(Error::new(
                Kind::Input,
                format!("chunks of {chunk_bytes} bytes do not divide {DENSE_PIECE_BYTES}"),
            ));
        }
        let outside = |range: &&RecisBlockRange| {
            let end = range.start.checked_add(range.bytes);
            let within = |file: &RecisFileSpec| whole(range.start) && end.is_some_and(|end| end <= file.bytes);
            !files.get(range.file).is_some_and(within)
        };
        if let Some(range) = blocks.iter().find(outside) {
            return Err(Error::new(Kind::Input, format!("{range:?} is not at whole pages of a file")));
        }
        let created = files.iter().map(|file| {
            let io =
                directory.engine().open(&directory.join(&file.name), IoOpenMode::Create { preallocate: file.bytes })?;
            // The length is set first because writes that extend a file are serialized.
            io.set_len(file.bytes)?;
            let mut header = AlignedBuf::try_zeroed(file.header.len())?;
            header.copy_from_slice(&file.header);
            io.write_at(0, &header)?;
            Ok(io)
        });
        let created = created.collect::<Result<Vec<_>>>()?;
        let block = |range: &RecisBlockRange| {
            let chunks = range.bytes.next_multiple_of(ALIGNMENT as u64).div_ceil(chunk_bytes as u64);
            let checksums = Mutex::new(vec![0; chunks as usize]);
            let to =
                RecisBlockOutput { io: Arc::clone(&created[range.file]), start: range.start, chunk_bytes, checksums };
            Mutex::new(RecisOpenBlock { to: Arc::new(to), bytes: range.bytes, filled: 0, piece: None })
        };
        let total: u64 = blocks.iter().map(|block| block.bytes).sum();
        let threads = if total > DENSE_PIECE_BYTES as u64 { threads.min(DENSE_THREADS) } else { 0 };
        Ok(Self {
            blocks: blocks.iter().map(block).collect(),
            files: created,
            buffers: Arc::new(BufPool::new(DENSE_PIECE_BYTES, DENSE_THREADS + MAX_QUEUED_PIECES + 1)),
            pool: PieceWriterPool::start(threads),
        })
    }

    /// Appends `bytes` to a block. `copy(at, into)` fills `into` with the bytes from offset `at`. Any thread may call
    /// this, but calls for one block must not overlap.
    ///
    /// Errors: `Storage` of this write or of an earlier one; `Memory`; `Input` past the block's end. After an error
    /// nothing can be finished.
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let result = self.fill(block, bytes, copy);
        result.inspect_err(|error| self.pool.fail(error))
    }

    fn fill(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let known = self.blocks.get(block);
        let mut block = lock(known.ok_or_else(|| Error::new(Kind::Input, format!("there is no block {block}")))?);
        if bytes as u64 > block.bytes - block.filled {
            return Err(Error::new(
                Kind::Input,
                format!("{bytes} bytes do not fit a block that has {} of {}", block.filled, block.bytes),
            ));
        }
        let mut at = 0;
        while at < bytes {
            let mut piece = match block.piece.take() {
                Some(piece) => piece,
                None => self.buffers.take_at_least(DENSE_PIECE_BYTES)?,
            };
            let filled = (block.filled % DENSE_PIECE_BYTES as u64) as usize;
            let count = (DENSE_PIECE_BYTES - filled).min(bytes - at);
            copy(at, &mut piece[filled..filled + count]);
            at += count;
            let end = filled + count;
            block.filled += count as u64;
            if end < DENSE_PIECE_BYTES && block.filled < block.bytes {
                block.piece = Some(piece);
                continue;
            }
            let len = end.next_multiple_of(ALIGNMENT);
            piece[end..len].fill(0);
            self.pool.run(PieceWriteTask { to: block.to.clone(), piece, len, at: block.filled - end as u64 })?;
        }
        Ok(())
    }

    /// Syncs all files, but not their names. Returns the CRC-32C of each chunk of each block, including zeros up to a
    /// whole page.
    ///
    /// Errors: `State` if a block is incomplete.
    pub fn finish(mut self) -> Result<Vec<Vec<u32>>> {
        for block in &self.blocks {
            let block = lock(block);
            if block.filled < block.bytes {
                let path = block.to.io.path().display();
                let message = format!("a block of {path} has {} of {} bytes", block.filled, block.bytes);
                return Err(Error::new(Kind::State, message));
            }
        }
        self.pool.end()?;
        for_each_piece(DENSE_THREADS, self.files.iter().collect(), |file| file.sync())?;
        Ok(self.blocks.iter().map(|block| std::mem::take(&mut *lock(&lock(block).to.checksums))).collect())
    }
}
