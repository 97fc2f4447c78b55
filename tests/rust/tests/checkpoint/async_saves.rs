//! Asynchronous saves. Their files are those of a blocking save at the same instant, and no stop or error loses the
//! previous checkpoint.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::cache::{BaseCheckpoint, Table};
use embcache::checkpoint::{
    AsyncSaveOptions, AsyncSaveTable, CheckpointId, CheckpointSave, PublishedCheckpoint, RankSnapshot, RankWriter,
    SaveOptions,
};
use embcache::config::{OptimizerKind, PolicyKind, ReopenMode, SsdConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine, read_file};
use embcache::types::Id;
use embcache::{Kind, Result};
use embcache_tests::checkpoint::{ROOT, Rows, load, memory};
use embcache_tests::{Contents, Rig, config, directory_in};

const RANDOM: u64 = 5;

/// A table in RAM, one with a device tier, and one on all tiers. All were trained.
pub(crate) fn rigs() -> Vec<Rig> {
    let tiers = [(None, 400, false), (Some(20), 400, false), (Some(15), 20, true)];
    let rigs = tiers.into_iter().enumerate().map(|(number, (device_rows, host_rows, ssd))| {
        let mut wanted = config(3, OptimizerKind::Adagrad, host_rows);
        wanted.name = format!("t{number}");
        wanted.policy = PolicyKind::S3Fifo;
        wanted.device_rows = device_rows;
        let dir = PathBuf::from("/base/m/t/0-of-1");
        wanted.ssd =
            ssd.then_some(SsdConfig { dir, bytes: 4 << 20, reopen: ReopenMode::Never, resume_commit_id: None });
        Rig::open(wanted, Arc::new(MemoryEngine::default())).unwrap()
    });
    rigs.collect()
}

fn trained() -> Vec<Rig> {
    let rigs = rigs();
    train_all(&rigs, 0);
    rigs
}

fn train(rig: &Rig, salt: Id) {
    for step in 0..6 {
        let ids: Vec<Id> = (0..60).map(|at| (at * 7 + step * 31 + salt * 11) % 190).collect();
        rig.train(&ids, 4, salt as u32).unwrap();
    }
}

fn to_save(rigs: &[Rig], base: Option<&BaseCheckpoint>) -> Vec<AsyncSaveTable> {
    let numbers = BTreeMap::from([("lr".to_owned(), 0.1)]);
    let to_save = |rig: &Rig| AsyncSaveTable {
        module: "m".to_owned(),
        table: rig.table.clone(),
        hyperparameters: numbers.clone(),
        base: base.cloned(),
    };
    rigs.iter().map(to_save).collect()
}

/// The epoch with which the next save is published.
pub(crate) fn next_epoch(rigs: &[Rig]) -> u32 {
    rigs.iter().map(|rig| rig.table.epoch().unwrap()).max().unwrap() + 1
}

/// Saves asynchronously, in full or as a delta on `base`. `between` is called after the snapshot was taken, and
/// `within` after each table.
pub(crate) fn save_async(
    engine: &Arc<dyn IoEngine>,
    rigs: &[Rig],
    base: Option<&BaseCheckpoint>,
    between: impl FnOnce(),
    within: impl Fn(),
    image_bytes: usize,
) -> Result<PublishedCheckpoint> {
    let parent = base.map(|base| CheckpointId { name: base.name.clone(), manifest_xxh3: base.manifest_xxh3 });
    let options = SaveOptions { parent, ..SaveOptions::default() };
    let directory = directory_in(engine, ROOT);
    let save = CheckpointSave::begin_with(&directory, RANDOM, options)?;
    let next_epoch = next_epoch(rigs);
    let options = AsyncSaveOptions { next_epoch, pre_image_bytes: image_bytes, bytes_per_second: None, counts: true };
    let tables = to_save(rigs, base);
    let mut moment = RankSnapshot::begin(&directory, save.name(), (0, 1), tables, options)?;
    between();
    while moment.write_next()?.is_some() {
        within();
    }
    let digest = moment.finish()?;
    save.publish(&[digest], next_epoch)
}

pub(crate) fn save_blocking(engine: &Arc<dyn IoEngine>, rigs: &[Rig]) -> Result<PublishedCheckpoint> {
    let directory = directory_in(engine, ROOT);
    let save = CheckpointSave::begin(&directory, RANDOM)?;
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1)?;
    for AsyncSaveTable { module, table, hyperparameters, .. } in to_save(rigs, None) {
        writer.write_rows_of(&module, &table, hyperparameters)?;
    }
    save.publish(&[writer.finish()?], next_epoch(rigs))
}

/// The files of a checkpoint by their paths, without the time of the save in manifests.
fn files(engine: &MemoryEngine, dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in engine.list(dir).unwrap() {
        match read_file(engine, &path, 1 << 30) {
            Ok(bytes) if path.ends_with("manifest.json") => {
                let mut manifest: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
                for of_the_time in ["saved_unix_ms", "xxh3"] {
                    assert!(manifest.as_object_mut().unwrap().remove(of_the_time).is_some());
                }
                _ = found.insert(path, serde_json::to_vec(&manifest).unwrap());
            }
            Ok(bytes) => _ = found.insert(path, bytes),
            Err(_) => found.extend(files(engine, &path)),
        }
    }
    found
}

pub(crate) fn rows_of(rigs: &[Rig]) -> Vec<Rows> {
    let floats = |(id, (header, bits)): (Id, (embcache::rows::RowHeader, Vec<u32>))| {
        (id, (header, bits.into_iter().map(f32::from_bits).collect()))
    };
    let rows = |contents: Contents| contents.into_iter().map(floats).collect();
    rigs.iter().map(|rig| rows(rig.contents().unwrap())).collect()
}

pub(crate) fn loaded(engine: MemoryEngine) -> Vec<Rows> {
    let engine: Arc<dyn IoEngine> = Arc::new(engine);
    load(&engine, Path::new(ROOT), 2).expect("a whole checkpoint").into_iter().map(|table| table.rows).collect()
}

pub(crate) fn train_all(rigs: &[Rig], salt: Id) {
    for rig in rigs {
        train(rig, salt);
    }
}

#[test]
fn async_save_files_equal_blocking_save_despite_training() {
    let rigs = trained();
    let (before, beside) = (memory(), memory());
    let engine = |memory: &MemoryEngine| Arc::new(memory.clone()) as Arc<dyn IoEngine>;
    save_blocking(&engine(&before), &rigs).unwrap();
    let rows = rows_of(&rigs);
    let saved = save_async(&engine(&beside), &rigs, None, || train_all(&rigs, 1), || train_all(&rigs, 2), 1).unwrap();
    assert!(rows_of(&rigs) != rows);
    let dir = Path::new(ROOT).join(saved.identity.name);
    let (before, beside) = (files(&before, &dir), files(&beside, &dir));
    assert_eq!(before.keys().collect::<Vec<_>>(), beside.keys().collect::<Vec<_>>());
    assert!(before.len() >= 5 && before == beside, "the same bytes");
}

/// A save is stopped at every operation. Training continues.
#[test]
fn stopped_async_save_leaves_old_or_new_checkpoint() {
    let (mut stops, mut kept, mut replaced) = (0, 0, 0);
    let all = trained();
    loop {
        let memory = memory();
        let plain: Arc<dyn IoEngine> = Arc::new(memory.clone());
        save_blocking(&plain, &all).unwrap();
        let old = rows_of(&all);
        train_all(&all, 3);
        let new = rows_of(&all);
        let faults = FaultEngine::new(Arc::new(memory.clone()));
        faults.hit_change(stops, IoFault::Stop);
        let faulty: Arc<dyn IoEngine> = Arc::new(faults.clone());
        let result = save_async(&faulty, &all, None, || train_all(&all, 4), || train_all(&all, 5), 1);
        train_all(&all, 6);
        if !faults.is_stopped() {
            result.unwrap();
            break;
        }
        for image in [memory.crash(), memory.kill(), memory.crash_torn(stops)] {
            let found = loaded(image.clone());
            assert!(found == old || found == new, "neither, after {stops} changes");
            assert!(result.is_err() || found == new, "a save that succeeded is lost after {stops} changes");
            if found == old {
                kept += 1;
            } else {
                replaced += 1;
            }
            let again: Arc<dyn IoEngine> = Arc::new(image.clone());
            save_blocking(&again, &all).unwrap();
            assert_eq!(image.list(Path::new(ROOT)).unwrap().len(), 3, "orphans are swept");
        }
        stops += 1;
    }
    assert!(stops > 30 && kept > 60 && replaced > 0, "{stops} stops, {kept} kept, {replaced} replaced");
}

/// A failed operation fails the save with a typed error. Training and the old checkpoint are not affected.
#[test]
fn failed_operation_fails_only_the_async_save() {
    let all = trained();
    for operation in [IoOperation::Create, IoOperation::Write, IoOperation::Sync, IoOperation::Rename] {
        let mut passing = 0;
        loop {
            let memory = memory();
            let plain: Arc<dyn IoEngine> = Arc::new(memory.clone());
            save_blocking(&plain, &all).unwrap();
            let old = rows_of(&all);
            let faults = FaultEngine::new(Arc::new(memory.clone()));
            faults.hit_once(operation, passing, IoFault::Fail(libc::ENOSPC));
            let faulty: Arc<dyn IoEngine> = Arc::new(faults);
            let result = save_async(&faulty, &all, None, || train_all(&all, 7), || train_all(&all, 8), 1);
            train_all(&all, 9);
            let Err(error) = result else { break };
            assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOSPC)), "{error}");
            assert_eq!(loaded(memory.kill()), old, "{operation:?} {passing}");
            assert_eq!(loaded(memory.crash()), old, "{operation:?} {passing}");
            passing += 1;
        }
        assert!(passing > 0, "{operation:?} is never done");
    }
}

#[test]
fn a_save_that_cannot_hold_every_table_holds_none() {
    let all = trained();
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let directory = directory_in(&engine, ROOT);
    let save = CheckpointSave::begin(&directory, RANDOM).unwrap();
    let options =
        AsyncSaveOptions { next_epoch: 1, pre_image_bytes: 1 << 20, bytes_per_second: Some(1 << 40), counts: true };
    let begin = |tables| RankSnapshot::begin(&directory, save.name(), (0, 1), tables, options);
    let twice: Vec<AsyncSaveTable> = to_save(&all, None).into_iter().chain(to_save(&all[..1], None)).collect();
    assert_eq!(begin(twice).unwrap_err().kind(), Kind::State);
    let moment = begin(to_save(&all, None)).unwrap();
    assert_eq!(moment.finish().unwrap_err().kind(), Kind::State, "nothing was written");
    drop(begin(to_save(&all, None)).unwrap());
    all.iter().map(|rig| &rig.table).for_each(|table: &Table| table.clear().unwrap());
}
