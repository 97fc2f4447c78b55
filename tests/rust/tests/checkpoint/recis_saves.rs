//! RecIS-format saves: after any stop or failed operation, a load finds the previous save or the new one, intact.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::checkpoint::{RecisJoinMode, RecisReader, RecisSave, RecisShard};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine, read_file};
use embcache::types::BucketMapper;
use embcache::{Kind, Result};
use embcache_tests::checkpoint::stop_at_each_change;
use embcache_tests::recis::{
    BUCKETS, Found, ROOT, contents, directory, load, load_some, memory, never, save, steps, with_first, write,
    write_runs,
};

/// The directories of saves.
fn saves(engine: &dyn IoEngine) -> Vec<PathBuf> {
    let entries = engine.list(Path::new(ROOT)).expect("listed");
    entries.into_iter().filter(|entry| entry.to_string_lossy().contains("/blocks-")).collect()
}

/// Each shard reads its own buckets of a save by any number of shards.
#[test]
fn any_shards_read_saves_of_any_other_number_of_shards() {
    for count in [1, 2, 3] {
        let engine = memory();
        save(engine.clone(), count, 5).expect("saved");
        assert_eq!(load(engine.clone()).expect("whole"), contents(5));
        let parts = [0..3, 3..3, 3..7].map(|buckets| load_some(engine.clone(), buckets).expect("whole").rows);
        assert!(parts.iter().all(|part| part.len() < contents(5).rows.len()));
        assert_eq!(parts.into_iter().flatten().collect::<BTreeMap<_, _>>(), contents(5).rows);
    }
}

/// Runs are searched over several chunks of ids, and several runs share a chunk.
#[test]
fn buckets_are_found_in_runs_of_any_length() {
    let rows: BTreeMap<i64, f32> = (0..100_000).map(|id| (id * 7919, id as f32)).collect();
    let what = Found { rows, dense: vec![1] };
    for run_rows in [100_000, 45_000, 900] {
        let (engine, shard) = (memory(), RecisShard { index: 0, count: 1 });
        let directory = directory(engine.clone());
        let save = RecisSave::begin(&directory, shard, &steps(1), &RecisJoinMode::New, 7, &mut never).expect("begun");
        write_runs(&save, shard, 1, &what, run_rows).expect("written");
        for buckets in (0..7).map(|bucket| bucket..bucket + 1).chain([0..7, 2..5, 3..3]) {
            let found = load_some(engine.clone(), buckets.clone()).expect("loaded").rows;
            let is_within = |id: i64| buckets.contains(&BucketMapper::new(BUCKETS).of(id));
            let expected = what.rows.iter().filter(|(id, _)| is_within(**id)).map(|(id, row)| (*id, *row));
            assert!(found == expected.collect(), "{buckets:?} in runs of {run_rows}");
        }
    }
}

#[test]
fn a_stop_at_every_operation_leaves_the_save_before_or_the_new_one() {
    let (old, new) = (contents(1), contents(2));
    for count in [1, 2] {
        let (mut kept, mut replaced) = (0, 0);
        let work = |engine| save(engine, count, 2);
        let stops = stop_at_each_change(with_first, 4, work, |image, result, stops| {
            let found = load(image.clone()).expect("a whole save");
            assert!(found == old || found == new, "neither, after {stops} changes");
            assert!(result.is_err() || found == new, "a save that succeeded is lost after {stops} changes");
            *if found == old { &mut kept } else { &mut replaced } += 1;
            // A further save succeeds, and leaves one save.
            save(image.clone(), count, 3).expect("saved");
            assert_eq!(load(image.clone()).expect("whole"), contents(3));
            assert_eq!(saves(&image).len(), 1, "what was left is removed");
        });
        assert!(stops > 30 && kept > 100 && replaced > 0, "{stops} stops, {kept} kept, {replaced} replaced");
    }
}

#[test]
fn the_first_save_is_there_as_a_whole_or_not_at_all() {
    let work = |engine| save(engine, 2, 1);
    let stops = stop_at_each_change(memory, 1, work, |image, result, _| match load(image) {
        Ok(found) => assert_eq!(found, contents(1)),
        Err(error) => {
            assert_eq!(error.kind(), Kind::Path, "{error}");
            assert!(result.is_err());
        }
    });
    assert!(stops > 30);
}

#[test]
fn an_error_of_every_operation_is_typed_and_leaves_the_save_before() {
    let operations = [
        IoOperation::Create,
        IoOperation::Write,
        IoOperation::SetLen,
        IoOperation::Sync,
        IoOperation::Rename,
        IoOperation::CreateDir,
        IoOperation::SyncDir,
        IoOperation::Exists,
        IoOperation::Open,
        IoOperation::List,
        IoOperation::Read,
    ];
    for operation in operations {
        for fault in [IoFault::Fail(libc::ENOSPC), IoFault::Tear(libc::EIO)] {
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
                // An error while older saves are removed is not an error of the save.
                if let Err(error) = result {
                    let is_short = operation == IoOperation::Read && fault == IoFault::Tear(libc::EIO);
                    let expected = if is_short { Kind::Corruption } else { Kind::Storage };
                    assert_eq!(error.kind(), expected, "{error}");
                    // A failed save of one shard is removed, unless LATEST.blocks already names it.
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
    for operation in [IoOperation::Exists, IoOperation::Open, IoOperation::Read] {
        let mut passing = 0;
        loop {
            let engine = FaultEngine::new(Arc::new(memory.clone()));
            engine.hit_once(operation, passing, IoFault::Fail(libc::EIO));
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
        engine.hit_once(IoOperation::Read, passing, IoFault::Flip);
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
    let reader = RecisReader::open(&directory(engine.clone()), &mut never).expect("whole");
    save(engine.clone(), 1, 2).expect("saved");
    assert_eq!(saves(&engine).len(), 2);
    drop(reader);
    save(engine.clone(), 1, 3).expect("saved");
    assert_eq!(saves(&engine).len(), 1);
}

fn begin(engine: &MemoryEngine, index: u32, step: u64, join: &RecisJoinMode, random: u64) -> Result<RecisSave> {
    let shard = RecisShard { index, count: 2 };
    RecisSave::begin(&directory(engine.clone()), shard, &steps(step), join, random, &mut never)
}

#[test]
fn a_shard_joins_the_save_that_waits_for_it_and_saw_its_steps() {
    let engine = with_first();
    let first = begin(&engine, 0, 5, &RecisJoinMode::NewestOrNew, 50).expect("begun");
    let other = begin(&engine, 1, 5, &RecisJoinMode::NewestOrNew, 51).expect("joined");
    assert_eq!(first.name(), other.name());
    // It is joined, and a shard of another step belongs to another save.
    let again = begin(&engine, 1, 5, &RecisJoinMode::NewestOrNew, 52).expect("another");
    let later = begin(&engine, 1, 6, &RecisJoinMode::NewestOrNew, 53).expect("another");
    assert_ne!(again.name(), first.name());
    assert_ne!(later.name(), again.name());
    let error =
        begin(&engine, 0, 5, &RecisJoinMode::Named(first.name().to_string()), 0).expect_err("it is saved already");
    assert_eq!(error.kind(), Kind::InUse, "{error}");
    // A save that a killed shard started is not completed with newer rows.
    drop((first, other, again, later));
    let killed = begin(&engine, 0, 7, &RecisJoinMode::New, 54).expect("begun");
    let name = killed.name();
    drop(killed);
    assert_ne!(begin(&engine, 1, 8, &RecisJoinMode::NewestOrNew, 55).expect("another").name(), name);
    assert_eq!(begin(&engine, 0, 7, &RecisJoinMode::Named(name.to_string()), 0).expect("the same").name(), name);
}

/// An older save is not published over a newer one. Shards that do not form one table are rejected.
#[test]
fn older_save_is_not_published_over_newer_one() {
    let engine = with_first();
    let shards = [0, 1].map(|index| RecisShard { index, count: 2 });
    let old = shards.map(|shard| begin(&engine, shard.index, 5, &RecisJoinMode::NewestOrNew, 60).expect("begun"));
    write(&old[0], shards[0], 5, &contents(2)).expect("written");
    save(engine.clone(), 2, 3).expect("saved");
    let error = write(&old[1], shards[1], 5, &contents(2)).expect_err("it is older");
    assert_eq!(error.kind(), Kind::State, "{error}");
    assert_eq!(load(engine.clone()).expect("whole"), contents(3));
    // Tables of two steps in one save.
    let shared = begin(&engine, 0, 8, &RecisJoinMode::New, 61).expect("begun");
    write(&shared, shards[0], 8, &contents(2)).expect("written");
    let other = begin(&engine, 1, 8, &RecisJoinMode::Named(shared.name().to_string()), 0).expect("joined");
    let error = write(&other, shards[1], 9, &contents(2)).expect_err("another step");
    assert_eq!(error.kind(), Kind::Mismatch, "{error}");
    assert!(error.to_string().contains("step 9 on shard 1 and 8 on shard 0"), "{error}");
    assert_eq!(load(engine).expect("whole"), contents(3));
}

#[test]
fn a_wait_for_another_process_ends_when_the_caller_says_so() {
    let engine = with_first();
    let held = engine.lock_dir_for(Path::new(ROOT), embcache::io::DirLockPurpose::ToRemove).expect("held");
    let mut looks = 0;
    let mut interrupted = || {
        looks += 1;
        if looks < 3 { Ok(()) } else { Err(Kind::State.error("Ctrl-C")) }
    };
    let error = RecisReader::open(&directory(engine.clone()), &mut interrupted).expect_err("ended");
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
