//! Block-level saves: whatever stops one, and whatever operation fails, a load finds the save before or the new one, whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::checkpoint::{
    BlockReader, BlockSave, BlockToWrite, Directory, Finished, Join, Shard, ShardWriter, TableShare, WrittenTable,
};
use embcache::io::{Fault, FaultEngine, IoEngine, MemoryEngine, Operation, read_file};
use embcache::types::{BucketHash, Bucketing, Id};
use embcache::{Error, Kind, Result};

pub(crate) const ROOT: &str = "/blocks";
const BUCKETS: u32 = 7;
const RUN_ROWS: usize = 10;

/// What a load finds: weights by id, and a dense tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Found {
    rows: BTreeMap<Id, f32>,
    dense: Vec<u8>,
}

fn bucketing() -> Bucketing {
    Bucketing::new(BUCKETS, BucketHash::SplitMix64)
}

/// Rows and a tensor that follow from `salt`.
pub(crate) fn contents(salt: u32) -> Found {
    let rows = (0..40 + i64::from(salt)).map(|id| (id * 7919 - 100, (id as f32) + salt as f32)).collect();
    Found { rows, dense: (0..70_000_u32).map(|n| (n * salt + n / 251) as u8).collect() }
}

pub(crate) fn never() -> Result<()> {
    Err(Error::new(Kind::State, "nobody else holds the directory"))
}

pub(crate) fn directory(engine: impl IoEngine + 'static) -> Directory {
    Directory::in_engine(Arc::new(engine), Path::new(ROOT))
}

fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn buckets_of(shard: Shard) -> [u32; 2] {
    let start = |index: u32| BUCKETS * index / shard.count;
    [start(shard.index), start(shard.index + 1)]
}

/// Append in two pieces, so that a stop can come between them.
fn append(writer: &ShardWriter, block: usize, data: &[u8]) -> Result<()> {
    let half = data.len() / 2;
    for part in [&data[..half], &data[half..]] {
        writer.append(block, part.len(), |at, into| into.copy_from_slice(&part[at..at + into.len()]))?;
    }
    Ok(())
}

fn share(shard: Shard, step: u64, runs: Vec<u64>) -> TableShare {
    TableShare {
        name: "item".into(),
        dim: 1,
        optimizer: "sgd".into(),
        key: 7,
        seed: 3,
        step,
        epoch: 2,
        total_num_buckets: BUCKETS,
        bucket_hash: BucketHash::SplitMix64.name().into(),
        buckets: buckets_of(shard),
        runs,
    }
}

/// Write one shard's part of `what`; the error comes after the part was given up, as Python's sessions do it.
fn write(save: &BlockSave, shard: Shard, step: u64, what: &Found) -> Result<Finished> {
    let [begin, end] = buckets_of(shard);
    let bucket = |id: Id| bucketing().of(id);
    let mine: Vec<(Id, f32)> = what
        .rows
        .iter()
        .map(|(&id, &weight)| (id, weight))
        .filter(|&(id, _)| (begin..end).contains(&bucket(id)))
        .collect();
    let rows = mine.len() as u64;
    let of_table = |slot: &str, dtype: &str, shape: Vec<u64>| BlockToWrite {
        name: "item".into(),
        slot: Some(slot.into()),
        dtype: dtype.into(),
        shape,
    };
    let mut blocks = vec![of_table("id", "I64", vec![rows]), of_table("embedding", "F32", vec![rows, 1])];
    if shard.index == 0 {
        let shape = vec![what.dense.len() as u64];
        blocks.push(BlockToWrite { name: "w".into(), slot: None, dtype: "U8".into(), shape });
    }
    let writer = ShardWriter::new(save, 2, blocks)?;
    let (mut runs, mut starts) = (Vec::new(), Vec::new());
    for run in mine.chunks(RUN_ROWS) {
        let mut run = run.to_vec();
        run.sort_by_key(|&(id, _)| (bucket(id), id.cast_unsigned()));
        let ids: Vec<Id> = run.iter().map(|&(id, _)| id).collect();
        let weights: Vec<f32> = run.iter().map(|&(_, weight)| weight).collect();
        append(&writer, 0, &bytes(&ids))?;
        append(&writer, 1, &bytes(&weights))?;
        runs.push(run.len() as u64);
        starts.extend((begin..=end).map(|of| ids.iter().filter(|&&id| bucket(id) < of).count() as i64));
    }
    if shard.index == 0 {
        append(&writer, 2, &what.dense)?;
    }
    writer.finish(save, vec![WrittenTable { share: share(shard, step, runs), starts }], &mut never)
}

fn steps(step: u64) -> Vec<(String, u64)> {
    vec![("item".into(), step)]
}

/// Save `what` by `count` shards, one after the other.
pub(crate) fn save(engine: impl IoEngine + 'static, count: u32, salt: u32) -> Result<()> {
    let directory = directory(engine);
    for index in 0..count {
        let shard = Shard { index, count };
        let (step, random) = (u64::from(salt), u64::from(salt) * 100 + u64::from(index));
        let save = BlockSave::begin(&directory, shard, &steps(step), &Join::NewestOrNew, random, &mut never)?;
        match write(&save, shard, step, &contents(salt)) {
            Ok(Finished::OthersWait) => assert!(index + 1 < count),
            Ok(Finished::Published(_)) => assert!(index + 1 == count),
            Err(error) => {
                let _ = save.abandon();
                return Err(error);
            }
        }
    }
    Ok(())
}

/// The rows of `buckets`, and the tensor.
fn load_some(engine: impl IoEngine + 'static, buckets: std::ops::Range<u32>) -> Result<Found> {
    let reader = BlockReader::open(&directory(engine), &mut never)?;
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
    // In windows that fit no chunk.
    for (n, window) in found.dense.chunks_mut(30_011).enumerate() {
        reader.read_tensor("w", n as u64 * 30_011, window)?;
    }
    Ok(found)
}

pub(crate) fn load(engine: impl IoEngine + 'static) -> Result<Found> {
    load_some(engine, 0..BUCKETS)
}

pub(crate) fn memory() -> MemoryEngine {
    let engine = MemoryEngine::default();
    engine.create_dir_all(Path::new(ROOT)).expect("made");
    engine.sync_dir(Path::new("/")).expect("synced");
    engine
}

pub(crate) fn with_first() -> MemoryEngine {
    let memory = memory();
    save(memory.clone(), 2, 1).expect("saved");
    memory
}

/// The directories of saves.
fn saves(engine: &dyn IoEngine) -> Vec<PathBuf> {
    let entries = engine.list(Path::new(ROOT)).expect("listed");
    entries.into_iter().filter(|entry| entry.to_string_lossy().contains("/blocks-")).collect()
}

#[test]
fn what_any_number_of_shards_saved_is_read_by_any_and_each_reads_its_own_buckets() {
    for count in [1, 2, 3] {
        let engine = memory();
        save(engine.clone(), count, 5).expect("saved");
        assert_eq!(load(engine.clone()).expect("whole"), contents(5));
        let parts = [0..3, 3..3, 3..7].map(|buckets| load_some(engine.clone(), buckets).expect("whole").rows);
        assert!(parts.iter().all(|part| part.len() < contents(5).rows.len()));
        assert_eq!(parts.into_iter().flatten().collect::<BTreeMap<_, _>>(), contents(5).rows);
    }
}

#[test]
fn a_stop_at_every_operation_leaves_the_save_before_or_the_new_one() {
    let (old, new) = (contents(1), contents(2));
    for count in [1, 2] {
        let (mut stops, mut kept, mut replaced) = (0, 0, 0);
        loop {
            let memory = with_first();
            let engine = FaultEngine::new(Arc::new(memory.clone()));
            engine.hit_change(stops, Fault::Stop);
            let result = save(engine.clone(), count, 2);
            if !engine.is_stopped() {
                result.expect("nothing stopped it");
                break;
            }
            let torn = (0..4).map(|seed| memory.crash_torn(stops * 4 + seed));
            for image in [memory.crash(), memory.kill()].into_iter().chain(torn) {
                let found = load(image.clone()).expect("a whole save");
                assert!(found == old || found == new, "neither, after {stops} changes");
                assert!(result.is_err() || found == new, "a save that succeeded is lost after {stops} changes");
                if found == old {
                    kept += 1;
                } else {
                    replaced += 1;
                }
                // And saving goes on from there, and leaves one save.
                save(image.clone(), count, 3).expect("saved");
                assert_eq!(load(image.clone()).expect("whole"), contents(3));
                assert_eq!(saves(&image).len(), 1, "what was left is removed");
            }
            stops += 1;
        }
        assert!(stops > 30 && kept > 100 && replaced > 0, "{stops} stops, {kept} kept, {replaced} replaced");
    }
}

#[test]
fn the_first_save_is_there_as_a_whole_or_not_at_all() {
    let mut stops = 0;
    loop {
        let memory = memory();
        let engine = FaultEngine::new(Arc::new(memory.clone()));
        engine.hit_change(stops, Fault::Stop);
        let result = save(engine.clone(), 2, 1);
        if !engine.is_stopped() {
            break;
        }
        for image in [memory.crash(), memory.kill(), memory.crash_torn(stops)] {
            match load(image) {
                Ok(found) => assert_eq!(found, contents(1)),
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Path, "{error}");
                    assert!(result.is_err());
                }
            }
        }
        stops += 1;
    }
    assert!(stops > 30);
}

#[test]
fn an_error_of_every_operation_is_typed_and_leaves_the_save_before() {
    let operations = [
        Operation::Create,
        Operation::Write,
        Operation::SetLen,
        Operation::Sync,
        Operation::Rename,
        Operation::CreateDir,
        Operation::SyncDir,
        Operation::Look,
        Operation::Open,
        Operation::List,
        Operation::Read,
    ];
    for operation in operations {
        for fault in [Fault::Fail(libc::ENOSPC), Fault::Tear(libc::EIO)] {
            let mut passing = 0;
            loop {
                let memory = with_first();
                let engine = FaultEngine::new(Arc::new(memory.clone()));
                engine.hit_once(operation, passing, fault);
                let result = save(engine.clone(), 1, 2);
                let was_hit = !engine.will_hit();
                engine.clear();
                for image in [memory.kill(), memory.crash()] {
                    let found = load(image.clone()).expect("a whole save");
                    assert!(found == contents(1) || found == contents(2), "{operation:?} {passing}");
                    assert!(result.is_err() || found == contents(2), "{operation:?} {passing}");
                    save(image.clone(), 1, 3).expect("saved");
                    assert_eq!(load(image.clone()).expect("whole"), contents(3));
                    assert_eq!(saves(&image).len(), 1);
                }
                if !was_hit {
                    result.expect("nothing failed");
                    break;
                }
                // An error of the removal of older saves is no error of the save.
                if let Err(error) = result {
                    let is_short = operation == Operation::Read && fault == Fault::Tear(libc::EIO);
                    let expected = if is_short { Kind::Corruption } else { Kind::Storage };
                    assert_eq!(error.kind(), expected, "{error}");
                    // A save of one shard that failed is removed, unless LATEST.blocks names it by then.
                    let is_named = load(memory.kill()).expect("a whole save") == contents(2);
                    assert_eq!(saves(&memory).len(), 1 + usize::from(is_named), "{error}");
                }
                passing += 1;
            }
            assert!(passing > 0, "{operation:?} is never done");
        }
    }
}

#[test]
fn an_error_of_every_operation_of_a_load_is_typed() {
    let memory = with_first();
    for operation in [Operation::Look, Operation::Open, Operation::Read] {
        let mut passing = 0;
        loop {
            let engine = FaultEngine::new(Arc::new(memory.clone()));
            engine.hit_once(operation, passing, Fault::Fail(libc::EIO));
            match load(engine) {
                Ok(found) => {
                    assert_eq!(found, contents(1));
                    break;
                }
                Err(error) => assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::EIO)), "{error}"),
            }
            passing += 1;
        }
        assert!(passing > 1, "{operation:?} is done {passing} times");
    }
}

#[test]
fn a_flipped_bit_of_every_read_is_found() {
    let memory = with_first();
    let (mut passing, mut found) = (0, 0);
    loop {
        let engine = FaultEngine::new(Arc::new(memory.clone()));
        engine.hit_once(Operation::Read, passing, Fault::Flip);
        let result = load(engine.clone());
        if engine.will_hit() {
            break;
        }
        match result {
            Ok(read) => assert_eq!(read, contents(1), "the bit lay in what nobody asked for"),
            Err(error) => {
                assert!(matches!(error.kind(), Kind::Corruption | Kind::Unsupported | Kind::Path), "{error}");
                found += 1;
            }
        }
        passing += 1;
    }
    assert!(found > 10 && found * 2 > passing, "{found} of {passing}");
}

#[test]
fn a_save_that_is_read_is_left_to_the_save_after_the_load() {
    let engine = with_first();
    let reader = BlockReader::open(&directory(engine.clone()), &mut never).expect("whole");
    save(engine.clone(), 1, 2).expect("saved");
    assert_eq!(saves(&engine).len(), 2);
    reader.let_go();
    save(engine.clone(), 1, 3).expect("saved");
    assert_eq!(saves(&engine).len(), 1);
}

fn begin(engine: &MemoryEngine, index: u32, step: u64, join: &Join, random: u64) -> Result<BlockSave> {
    let shard = Shard { index, count: 2 };
    BlockSave::begin(&directory(engine.clone()), shard, &steps(step), join, random, &mut never)
}

#[test]
fn a_shard_joins_the_save_that_waits_for_it_and_saw_its_steps() {
    let engine = with_first();
    let first = begin(&engine, 0, 5, &Join::NewestOrNew, 50).expect("begun");
    let other = begin(&engine, 1, 5, &Join::NewestOrNew, 51).expect("joined");
    assert_eq!(first.name(), other.name());
    // It is taken, and a shard of other steps belongs to another save.
    let again = begin(&engine, 1, 5, &Join::NewestOrNew, 52).expect("another");
    let later = begin(&engine, 1, 6, &Join::NewestOrNew, 53).expect("another");
    assert_ne!(again.name(), first.name());
    assert_ne!(later.name(), again.name());
    let error = begin(&engine, 0, 5, &Join::Named(first.name().to_string()), 0).expect_err("it is saved already");
    assert_eq!(error.kind(), Kind::InUse, "{error}");
    // What a killed shard began is completed by nobody with newer rows.
    drop((first, other, again, later));
    let killed = begin(&engine, 0, 7, &Join::New, 54).expect("begun");
    let name = killed.name();
    drop(killed);
    assert_ne!(begin(&engine, 1, 8, &Join::NewestOrNew, 55).expect("another").name(), name);
    assert_eq!(begin(&engine, 0, 7, &Join::Named(name.to_string()), 0).expect("the same").name(), name);
}

#[test]
fn an_older_save_is_not_published_over_a_newer_one_and_shards_must_make_one_table() {
    let engine = with_first();
    let shards = [0, 1].map(|index| Shard { index, count: 2 });
    let old = shards.map(|shard| begin(&engine, shard.index, 5, &Join::NewestOrNew, 60).expect("begun"));
    write(&old[0], shards[0], 5, &contents(2)).expect("written");
    save(engine.clone(), 2, 3).expect("saved");
    let error = write(&old[1], shards[1], 5, &contents(2)).expect_err("it is older");
    assert_eq!(error.kind(), Kind::State, "{error}");
    assert_eq!(load(engine.clone()).expect("whole"), contents(3));
    // Of one save, tables of two steps.
    let shared = begin(&engine, 0, 8, &Join::New, 61).expect("begun");
    write(&shared, shards[0], 8, &contents(2)).expect("written");
    let other = begin(&engine, 1, 8, &Join::Named(shared.name().to_string()), 0).expect("joined");
    let error = write(&other, shards[1], 9, &contents(2)).expect_err("another step");
    assert_eq!(error.kind(), Kind::Mismatch, "{error}");
    assert!(error.to_string().contains("step 9 on shard 1 and 8 on shard 0"), "{error}");
    assert_eq!(load(engine).expect("whole"), contents(3));
}

#[test]
fn a_wait_for_another_process_ends_when_the_caller_says_so() {
    let engine = with_first();
    let held = engine.hold_dir(Path::new(ROOT), embcache::io::Hold::ToRemove).expect("held");
    let mut looks = 0;
    let mut interrupted = || {
        looks += 1;
        if looks < 3 { Ok(()) } else { Err(Error::new(Kind::State, "Ctrl-C")) }
    };
    let error = BlockReader::open(&directory(engine.clone()), &mut interrupted).expect_err("ended");
    assert_eq!(error.to_string(), "Ctrl-C");
    assert_eq!(looks, 3);
    drop(held);
    load(engine).expect("whole");
}

#[test]
fn files_are_named_as_recis_names_them() {
    let engine = memory();
    save(engine.clone(), 2, 1).expect("saved");
    let names = |dir: &Path| -> Vec<String> {
        let entries = engine.list(dir).expect("listed");
        entries.iter().map(|entry| entry.file_name().expect("a name").to_string_lossy().into_owned()).collect()
    };
    let dir = saves(&engine).remove(0);
    assert_eq!(
        names(&dir),
        [
            "begun.json",
            "check-000000-of-000002.safetensors",
            "check-000001-of-000002.safetensors",
            "index",
            "manifest.json",
            "model-000000-of-000004.safetensors",
            "model-000001-of-000004.safetensors",
            "model-000002-of-000004.safetensors",
            "model-000003-of-000004.safetensors",
            "shard-000000-of-000002.json",
            "shard-000000.lock",
            "shard-000001-of-000002.json",
            "shard-000001.lock",
            "tensorkey.json",
        ]
    );
    let text =
        |name: &str| String::from_utf8(read_file(&engine, &dir.join(name), 1 << 20).expect("read")).expect("text");
    assert_eq!(
        text("tensorkey.json"),
        "{\n \"item.id/part_0_2\": \"item@id^0@7@7\",\n \"item.embedding/part_0_2\": \"item@embedding^0@7@7\",\n \"w\": \"w^ \",\n \
         \"item.id/part_1_2\": \"item@id^0@07@7\",\n \"item.embedding/part_1_2\": \"item@embedding^0@07@7\"\n}\n"
    );
    assert!(text("index").starts_with("{\n \"file_index\": {\n  \"model-000000-of-000004.safetensors\": 0,\n"));
    assert_eq!(text("begun.json"), "{\n \"shards\": 2,\n \"steps\": {\n  \"item\": 1\n }\n}\n");
}
