//! RecIS-format saves and loads.
#![allow(clippy::missing_panics_doc)] // a helper of tests panics when a check fails

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use embcache::checkpoint::{
    CheckpointDirectory, RecisBlockSpec, RecisJoinMode, RecisReader, RecisSave, RecisShard, RecisShardOutcome,
    RecisShardWriter, RecisTableShare,
};
use embcache::io::{IoEngine, MemoryEngine};
use embcache::types::{BucketMapper, Id};
use embcache::{Kind, Result};

/// The directory of the saves.
pub const ROOT: &str = "/blocks";
/// The number of buckets of the table.
pub const BUCKETS: u32 = 7;
const RUN_ROWS: usize = 10;

/// The result of a load: weights by id, and a dense tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// The weight of each id.
    pub rows: BTreeMap<Id, f32>,
    /// The bytes of the dense tensor.
    pub dense: Vec<u8>,
}

fn bucketing() -> BucketMapper {
    BucketMapper::new(BUCKETS)
}

/// Rows and a tensor that are determined by `salt`.
pub fn contents(salt: u32) -> Found {
    let rows = (0..40 + i64::from(salt)).map(|id| (id * 7919 - 100, (id as f32) + salt as f32)).collect();
    Found { rows, dense: (0..70_000_u32).map(|n| (n * salt + n / 251) as u8).collect() }
}

/// Fails a wait for the lock of the directory, which no other process has.
pub fn never() -> Result<()> {
    Err(Kind::State.error("nobody else holds the directory"))
}

/// The directory [`ROOT`] of an engine.
pub fn directory(engine: impl IoEngine + 'static) -> CheckpointDirectory {
    CheckpointDirectory::with_engine(Arc::new(engine), Path::new(ROOT))
}

fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn buckets_of(shard: RecisShard) -> [u32; 2] {
    let start = |index: u32| BUCKETS * index / shard.count;
    [start(shard.index), start(shard.index + 1)]
}

/// Appends in two pieces, so that a stop can happen between them.
fn append(writer: &RecisShardWriter, block: usize, data: &[u8]) -> Result<()> {
    let half = data.len() / 2;
    for part in [&data[..half], &data[half..]] {
        writer.append(block, part.len(), |at, into| into.copy_from_slice(&part[at..at + into.len()]))?;
    }
    Ok(())
}

fn share(shard: RecisShard, step: u64, runs: Vec<u64>) -> RecisTableShare {
    RecisTableShare {
        name: "item".into(),
        dim: 1,
        optimizer: "sgd".into(),
        key: 7,
        seed: 3,
        step,
        epoch: 2,
        total_num_buckets: BUCKETS,
        buckets: buckets_of(shard),
        runs,
    }
}

/// Like [`write_runs`], in short runs.
pub fn write(save: &RecisSave, shard: RecisShard, step: u64, what: &Found) -> Result<RecisShardOutcome> {
    write_runs(save, shard, step, what, RUN_ROWS)
}

/// Writes one shard's part of the contents, in runs of `run_rows` rows; an error is returned after the part was cancelled, as in Python's sessions.
pub fn write_runs(
    save: &RecisSave,
    shard: RecisShard,
    step: u64,
    what: &Found,
    run_rows: usize,
) -> Result<RecisShardOutcome> {
    let [begin, end] = buckets_of(shard);
    let bucket = |id: Id| bucketing().of(id);
    let mine: Vec<(Id, f32)> = what
        .rows
        .iter()
        .map(|(&id, &weight)| (id, weight))
        .filter(|&(id, _)| (begin..end).contains(&bucket(id)))
        .collect();
    let rows = mine.len() as u64;
    let of_table = |slot: &str, dtype: &str, shape: Vec<u64>| RecisBlockSpec {
        name: "item".into(),
        slot: Some(slot.into()),
        dtype: dtype.into(),
        shape,
    };
    let mut blocks = vec![of_table("id", "I64", vec![rows]), of_table("embedding", "F32", vec![rows, 1])];
    if shard.index == 0 {
        let shape = vec![what.dense.len() as u64];
        blocks.push(RecisBlockSpec { name: "w".into(), slot: None, dtype: "U8".into(), shape });
    }
    let writer = RecisShardWriter::new(save, 2, blocks)?;
    let mut runs = Vec::new();
    for run in mine.chunks(run_rows) {
        let mut run = run.to_vec();
        run.sort_by_key(|&(id, _)| (bucket(id), id.cast_unsigned()));
        let ids: Vec<Id> = run.iter().map(|&(id, _)| id).collect();
        let weights: Vec<f32> = run.iter().map(|&(_, weight)| weight).collect();
        append(&writer, 0, &bytes(&ids))?;
        append(&writer, 1, &bytes(&weights))?;
        runs.push(run.len() as u64);
    }
    if shard.index == 0 {
        append(&writer, 2, &what.dense)?;
    }
    writer.finish(save, vec![share(shard, step, runs)], &mut never)
}

/// The step of the table, for a save.
pub fn steps(step: u64) -> Vec<(String, u64)> {
    vec![("item".into(), step)]
}

/// Saves the contents in `count` shards, one after the other.
pub fn save(engine: impl IoEngine + 'static, count: u32, salt: u32) -> Result<()> {
    let directory = directory(engine);
    for index in 0..count {
        let shard = RecisShard { index, count };
        let (step, random) = (u64::from(salt), u64::from(salt) * 100 + u64::from(index));
        let save = RecisSave::begin(&directory, shard, &steps(step), &RecisJoinMode::NewestOrNew, random, &mut never)?;
        match write(&save, shard, step, &contents(salt)) {
            Ok(RecisShardOutcome::WaitingForShards) => assert!(index + 1 < count),
            Ok(RecisShardOutcome::Published(_)) => assert!(index + 1 == count),
            Err(error) => {
                let _ = save.abandon();
                return Err(error);
            }
        }
    }
    Ok(())
}

/// The rows of `buckets`, and the tensor.
pub fn load_some(engine: impl IoEngine + 'static, buckets: std::ops::Range<u32>) -> Result<Found> {
    let reader = RecisReader::open(&directory(engine), &mut never)?;
    let mut found = Found::default();
    for run in reader.runs("item", bucketing(), &buckets)? {
        let rows = run.rows() as usize;
        let (mut ids, mut weights) = (vec![0_i64; rows], vec![0_f32; rows]);
        reader.read_rows("item", &run, "id", bytemuck::cast_slice_mut(&mut ids))?;
        reader.read_rows("item", &run, "embedding", bytemuck::cast_slice_mut(&mut weights))?;
        for (id, weight) in ids.into_iter().zip(weights) {
            assert!(found.rows.insert(id, weight).is_none(), "id {id} twice");
        }
    }
    let (_, shape) = reader.tensors().next().expect("the tensor");
    found.dense = vec![0; shape.bytes as usize];
    // In windows that do not align with chunks.
    for (n, window) in found.dense.chunks_mut(30_011).enumerate() {
        reader.read_tensor("w", n as u64 * 30_011, window)?;
    }
    Ok(found)
}

/// All rows, and the tensor.
pub fn load(engine: impl IoEngine + 'static) -> Result<Found> {
    load_some(engine, 0..BUCKETS)
}

/// A directory tree in RAM that contains [`ROOT`].
pub fn memory() -> MemoryEngine {
    let engine = MemoryEngine::default();
    engine.create_dir_all(Path::new(ROOT)).expect("made");
    engine.sync_dir(Path::new("/")).expect("synced");
    engine
}

/// Like [`memory`], with a save of two shards.
pub fn with_first() -> MemoryEngine {
    let memory = memory();
    save(memory.clone(), 2, 1).expect("saved");
    memory
}
