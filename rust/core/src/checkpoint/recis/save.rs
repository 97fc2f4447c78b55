//! Saves in the RecIS format: a save waits for its shards, and each of them writes its blocks to data files, then their
//! checksums and its manifest. The last one publishes the save.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use super::index::{build_indexes, check_complete};
use super::layout::{
    BEGUN_FILE, INDEX_FILE, LATEST_FILE, LatestRecisSave, MAX_MANIFEST_BYTES, NAMES_FILE, OrderedFields,
    RecisFileLayout, RecisSaveName, RecisShard, RecisTensor, TensorSpacing, list_saves, read_small, render,
    whole_pages,
};
use super::manifest::{
    RecisBlockEntry, RecisSaveManifest, RecisShardManifest, RecisTableShare, layout_of_file, parse, tensors_of,
};
use crate::checkpoint::chunked_file::{ChunkedStream, STREAM_THREADS, StreamWriter, for_each_piece};
use crate::checkpoint::directory::CheckpointDirectory;
use crate::checkpoint::manifest::MANIFEST_FILE;
use crate::checkpoint::manifest::latest::{CheckpointName, WaitCallback, hold_recis_root, hold_unread, unless_in_use};
use crate::checkpoint::manifest::manifests::STREAM_CHUNK_BYTES;
use crate::error::{Error, Kind, Result};
use crate::io::{AlignedBuf, DirLock, DirLockPurpose, IoFile, IoOpenMode, write_atomically};
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
#[derive(Serialize, Deserialize)]
struct BegunRecord {
    shards: u32,
    #[serde(deserialize_with = "in_order")]
    steps: OrderedFields<u64>,
}

/// Deserializes the fields of a JSON object in their order.
fn in_order<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<OrderedFields<u64>, D::Error> {
    struct OrderedFieldsVisitor;
    impl<'de> serde::de::Visitor<'de> for OrderedFieldsVisitor {
        type Value = OrderedFields<u64>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of numbers")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            std::iter::from_fn(|| map.next_entry().transpose()).collect::<Result<_, _>>().map(OrderedFields)
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
        let done = LatestRecisSave::find(root)?.map_or(0, |latest| latest.name.0.seq);
        let saves = list_saves(root)?;
        if matches!(join, RecisJoinMode::NewestOrNew) && shard.count > 1 {
            for &name in saves.iter().rev().filter(|name| name.0.seq > done) {
                if let Some(joined) = Self::join(root, name, shard, steps)? {
                    return Ok(joined);
                }
            }
        }
        if let RecisJoinMode::Named(name) = join {
            let name: RecisSaveName = name.parse()?;
            let RecisShard { index, count } = shard;
            return Self::join(root, name, shard, steps)?.ok_or_else(|| {
                let dir = root.subdirectory(name);
                let what = format!(
                    "shard {index} of {count} does not fit, or takes part already in, {}",
                    dir.path().display()
                );
                Kind::InUse.error(format!("{what}: save it once"))
            });
        }
        let highest = saves.last().map_or(0, |name| name.0.seq).max(done);
        let used_up = || Kind::Corruption.error(format!("{}: the numbers of saves are used up", root.path().display()));
        let seq = highest.checked_add(1).ok_or_else(used_up)?;
        let name = RecisSaveName(CheckpointName { seq, random });
        let dir = root.subdirectory(name);
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
        let dir = root.subdirectory(name);
        let Some(BegunRecord { shards, steps: OrderedFields(mut known) }) = read_begun(&dir)? else {
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
        let Some(held) = unless_in_use(held)? else { return Ok(None) };
        let more: Vec<(String, u64)> =
            steps.iter().filter(|(table, _)| known.iter().all(|(name, _)| name != table)).cloned().collect();
        if !more.is_empty() {
            known.extend(more);
            let begun = BegunRecord { shards, steps: OrderedFields(known) };
            write_atomically(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)?;
        }
        Ok(Some(Self { root: root.clone(), dir, name, shard, _held: held }))
    }

    /// Name of the save, for the other shards.
    pub fn name(&self) -> RecisSaveName {
        self.name
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
        if let Some(latest) = LatestRecisSave::find(&self.root)?.filter(|latest| latest.name.0.seq > self.name.0.seq) {
            let what = format!(
                "{} is older than {}, which was completed meanwhile: save again",
                dir.path().display(),
                latest.name
            );
            return Err(Kind::State.error(what));
        }
        let read = |shard: RecisShard| {
            let path = dir.join(shard.manifest_file());
            let bytes = read_small(engine, &path, MAX_MANIFEST_BYTES)?;
            Ok((crc32c::crc32c(&bytes), parse::<RecisShardManifest>(&bytes, &path)?))
        };
        let (checksums, manifests): (Vec<u32>, Vec<RecisShardManifest>) =
            self.shard.all().map(read).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        check_complete(&manifests)?;
        let [names, files] = build_indexes(&manifests)?;
        write_atomically(engine, &dir.join(NAMES_FILE), &names)?;
        write_atomically(engine, &dir.join(INDEX_FILE), &files)?;
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
    let begun = BegunRecord { shards: shard.count, steps: OrderedFields(steps.to_vec()) };
    write_atomically(dir.engine(), &dir.join(BEGUN_FILE), &render(&begun)?)
}

/// Reads `begun.json` of the save in `dir`; returns `None` if it is missing or corrupted.
fn read_begun(dir: &CheckpointDirectory) -> Result<Option<BegunRecord>> {
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
        let dir = root.subdirectory(name);
        let Some(_unused) = hold_unread(&dir)? else { return Ok(()) };
        dir.remove()
    };
    match list_saves(root) {
        Err(error) => vec![error],
        Ok(found) => {
            found.into_iter().filter(|name| name.0.seq < kept.0.seq).filter_map(|name| remove(name).err()).collect()
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

/// The data files of a shard's blocks. Blocks are distributed round-robin over `parallel` files and filled
/// concurrently. In memory are a piece of 4 MiB per started and incomplete block, and at most seven pieces that are
/// queued or being written.
#[derive(Debug)]
pub struct RecisShardWriter {
    parallel: u32,
    entries: Vec<RecisBlockEntry>,
    tensors: Vec<RecisTensor>,
    files: Vec<Arc<dyn IoFile>>,
    blocks: Vec<Mutex<ChunkedStream>>,
    writer: StreamWriter,
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
        let tensors = tensors_of(&entries, save.shard).map_err(input_error)?;
        let layouts = (0..parallel.min(entries.len() as u32)).map(|file| layout_of_file(file, &entries, &tensors));
        let layouts = layouts.collect::<Result<Vec<_>, _>>().map_err(input_error)?;
        let create = |(file, layout)| create_file(&save.dir, &save.shard.data_file(file, parallel), layout);
        let files = (0..).zip(&layouts).map(create).collect::<Result<Vec<_>>>()?;
        let block = |(entry, tensor): (&RecisBlockEntry, &RecisTensor)| {
            let file = entry.file as usize;
            Mutex::new(ChunkedStream::new(Arc::clone(&files[file]), layouts[file].start(tensor), tensor.bytes))
        };
        let blocks = entries.iter().zip(&tensors).map(block).collect();
        let writer = StreamWriter::start(parallel as usize, tensors.iter().map(|tensor| tensor.bytes).sum());
        Ok(Self { parallel, entries, tensors, files, blocks, writer })
    }

    /// Appends `bytes` to a block. `copy(at, into)` fills `into` with the bytes from offset `at`. Any thread may call
    /// this, but calls for one block must not overlap.
    ///
    /// Errors: `Storage` of this write or of an earlier one; `Memory`; `Input` past the block's end. After an error
    /// nothing can be finished.
    pub fn append(&self, block: usize, bytes: usize, copy: impl Fn(usize, &mut [u8])) -> Result<()> {
        let append = || {
            let known = self.blocks.get(block);
            let mut stream = lock(known.ok_or_else(|| input_error(format!("there is no block {block}")))?);
            if bytes as u64 > stream.room() {
                let (length, room) = (self.tensors[block].bytes, stream.room());
                let what = format!("{bytes} bytes do not fit a block that has {} of {length}", length - room);
                return Err(input_error(what));
            }
            self.writer.append(&mut stream, bytes, copy)
        };
        append().inspect_err(|error| self.writer.threads.fail(error))
    }

    /// Makes the blocks durable, then writes their checksums and the shard's manifest. The last shard publishes the
    /// save.
    ///
    /// Errors: `State` if a block is incomplete, or a newer save was completed concurrently; `Mismatch` if the shards
    /// do not make complete tables; `Storage`.
    pub fn finish(
        mut self,
        save: &RecisSave,
        tables: Vec<RecisTableShare>,
        wait: &mut WaitCallback<'_>,
    ) -> Result<RecisShardOutcome> {
        let blocks = self.blocks.iter().zip(&self.tensors).map(|(block, tensor)| (lock(block), tensor));
        if let Some((block, tensor)) = blocks.into_iter().find(|(block, _)| block.room() > 0) {
            let (path, filled) = (block.path().display(), tensor.bytes - block.room());
            let message = format!("a block of {path} has {filled} of {} bytes", tensor.bytes);
            return Err(Kind::State.error(message));
        }
        self.writer.threads.end()?;
        for_each_piece(STREAM_THREADS, self.files.iter().collect(), |file| file.sync())?;
        let checksums: Vec<Vec<u32>> = self.blocks.iter().map(|block| lock(block).take_checksums()).collect();
        let check = write_checks(save, &self.tensors, &checksums)?;
        let RecisShard { index: shard, count: shards } = save.shard;
        let (parallel, blocks) = (self.parallel, self.entries);
        save.finish(&RecisShardManifest { shard, shards, parallel, tables, blocks, check }, wait)
    }
}

/// Creates a data file, with its header and its length. Removes one left by an interrupted save of the shard.
fn create_file(dir: &CheckpointDirectory, name: &str, layout: &RecisFileLayout) -> Result<Arc<dyn IoFile>> {
    let (engine, path) = (dir.engine(), dir.join(name));
    if dir.has(name)? {
        engine.remove_file(&path)?;
    }
    let io = engine.open(&path, IoOpenMode::Create { preallocate: layout.bytes })?;
    // The length is set first because writes that extend a file are serialized.
    io.set_len(layout.bytes)?;
    let mut header = AlignedBuf::try_zeroed(layout.header.len())?;
    header.copy_from_slice(&layout.header);
    io.write_at(0, &header)?;
    Ok(io)
}

/// Returns the tensors of the checksum file: the chunk checksums of each block.
pub(crate) fn check_tensors(tensors: &[RecisTensor]) -> Result<Vec<RecisTensor>, String> {
    let chunks = |tensor: &RecisTensor| whole_pages(tensor.bytes).div_ceil(STREAM_CHUNK_BYTES as u64);
    let of_block =
        |tensor: &RecisTensor| RecisTensor::new(format!("{}.crc32c", tensor.name), "U32", vec![chunks(tensor)]);
    tensors.iter().map(of_block).collect()
}

/// Writes the checksums of a shard's blocks durably. Returns the CRC-32C of the file.
fn write_checks(save: &RecisSave, tensors: &[RecisTensor], checksums: &[Vec<u32>]) -> Result<u32> {
    let described = check_tensors(tensors).map_err(input_error)?;
    let data: Vec<&[u8]> = checksums.iter().map(|checksums| bytemuck::cast_slice(checksums)).collect();
    if let Some((tensor, _)) = described.iter().zip(&data).find(|(tensor, data)| tensor.bytes != data.len() as u64) {
        return Err(input_error(format!("{:?} does not have the shape {:?}", tensor.name, tensor.shape)));
    }
    let layout = RecisFileLayout::new(described.iter().collect(), TensorSpacing::Packed).map_err(input_error)?;
    let image = layout.image(described.iter().zip(data));
    write_atomically(save.dir.engine(), &save.dir.join(save.shard.check_file()), &image)?;
    Ok(crc32c::crc32c(&image))
}

fn input_error(message: String) -> Error {
    Kind::Input.error(message)
}
