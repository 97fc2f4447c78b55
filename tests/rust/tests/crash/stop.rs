//! The machine or the process stops at an operation. A restart has one intact flushed state, and continues from it.
//!
//! A power cut is modelled: any part of the data that was not synced may be on the disk. Each stop is tested as a
//! killed process, as a power cut that keeps only synced data, and as two power cuts that keep some of the rest. With
//! `EMBCACHE_STRESS=20` these are forty.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoFault, MemoryEngine, read_file};
use embcache_tests::{Rig, times};

use crate::workload::{
    CHECKPOINTS, DEVICE, EVICTING, Kinds, ROOMY, Run, SWEPT, Snapshot, directory, disk, is_of_storage, load, open,
    save, train,
};

/// The stops to test in each kind of run: each `EMBCACHE_CRASH_EVERY`-th operation (1 for all), by default one in
/// `usual`.
pub(crate) fn every(usual: u64) -> u64 {
    std::env::var("EMBCACHE_CRASH_EVERY").map_or(usual, |text| text.parse().expect("EMBCACHE_CRASH_EVERY is a number"))
}

/// Runs the workload on a disk that stops after `passing` changes.
fn stopped(kinds: Kinds, passing: u64) -> (MemoryEngine, Run, bool) {
    let memory = disk();
    let fault = FaultEngine::new(Arc::new(memory.clone()));
    fault.hit_change(passing, IoFault::Stop);
    let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
    let mut run = Run::default();
    let outcome = open(&engine, kinds, ReopenMode::Never, None).and_then(|rigs| run.go(&engine, kinds, &rigs));
    assert!(outcome.as_ref().err().is_none_or(is_of_storage), "{kinds:?} stopped after {passing} changes: {outcome:?}");
    (memory, run, fault.is_stopped())
}

/// The segment files in a table's directory, and those that its states list.
fn segments(engine: &dyn IoEngine, table: usize) -> (BTreeSet<u64>, BTreeSet<u64>) {
    let (mut there, mut named) = (BTreeSet::new(), BTreeSet::new());
    for path in engine.list(&directory(table)).unwrap() {
        let number = || u64::from_str_radix(path.file_stem().unwrap().to_str().unwrap(), 16).unwrap();
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("seg") => {
                there.insert(number());
            }
            Some("state") => {
                let bytes = read_file(engine, &path, 1 << 20).unwrap();
                let at = bytes.iter().position(|byte| *byte == b'\n').unwrap();
                // The state is followed by the table's metadata blob.
                let mut values = serde_json::Deserializer::from_slice(&bytes[at..]).into_iter::<serde_json::Value>();
                let state = values.next().unwrap().unwrap();
                named.extend(state["segments"].as_array().unwrap().iter().map(|named| named["n"].as_u64().unwrap()));
            }
            None => assert_eq!(path.file_name().unwrap(), "lock"),
            Some(other) => panic!("a file {other} in {}", path.display()),
        }
    }
    (there, named)
}

/// Resumes the state of an image and continues from there; `false` if it has nothing to resume.
pub(crate) fn resumes(run: &Run, kinds: Kinds, image: &MemoryEngine, context: &str) -> bool {
    let engine: Arc<dyn IoEngine> = Arc::new(image.clone());
    let Some((token, flushed)) = run.newest(image, context) else { return false };
    let rigs = open(&engine, kinds, ReopenMode::Resume, Some(token)).unwrap_or_else(|e| panic!("{context}: {e}"));
    assert!(Snapshot::of(&rigs).unwrap() == *flushed, "{context}: state {token} came back with other rows");
    for table in 0..2 {
        let (there, named) = segments(image, table);
        assert_eq!(there, named, "{context}: files of no state stay");
    }
    // While no policy drops rows, the following results are bitwise identical to tables that never stopped.
    let straight = flushed.in_ram_as(kinds.swept);
    for (table, (rig, straight)) in rigs.iter().zip(&straight).enumerate() {
        for step in 100..103 {
            train(rig, step, table, kinds).unwrap_or_else(|e| panic!("{context}: {e}"));
            train(straight, step, table, Kinds { device_rows: None, ..kinds }).unwrap();
        }
    }
    let trained = Snapshot::of(&rigs).unwrap();
    if kinds.ssd_bytes == ROOMY.ssd_bytes {
        assert!(trained == Snapshot::of(&straight).unwrap(), "{context}: other bits after resuming");
    }
    for rig in &rigs {
        rig.table.flush(1000).unwrap_or_else(|e| panic!("{context}: {e}"));
    }
    drop(rigs);
    let engine: Arc<dyn IoEngine> = Arc::new(image.crash());
    let rigs = open(&engine, kinds, ReopenMode::Resume, Some(1000)).unwrap();
    assert!(Snapshot::of(&rigs).unwrap() == trained, "{context}: the next flush does not last");
    true
}

/// Stops at each operation of a resume, and resumes once more. Returns the number of stops.
fn resumes_after_a_stop_while_resuming(run: &Run, kinds: Kinds, image: &MemoryEngine, context: &str) -> u64 {
    let Some((token, _)) = run.newest(image, context) else { return 0 };
    for passing in 0.. {
        let copy = image.kill();
        let fault = FaultEngine::new(Arc::new(copy.clone()));
        fault.hit_change(passing, IoFault::Stop);
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        let outcome: embcache::Result<Vec<Rig>> = open(&engine, kinds, ReopenMode::Resume, Some(token));
        if !fault.is_stopped() {
            outcome.unwrap_or_else(|e| panic!("{context}: {e}"));
            return passing;
        }
        let image = match passing % 3 {
            0 => copy.crash(),
            1 => copy.kill(),
            _ => copy.crash_torn(passing),
        };
        drop(outcome);
        assert!(resumes(run, kinds, &image, &format!("{context}, and {passing} changes into resuming")));
    }
    unreachable!("an opening has an end")
}

/// Checks that a load finds the previous checkpoint or the one that was being saved, and that the next save leaves
/// nothing of either.
pub(crate) fn checkpoint_is_whole(run: &Run, image: &MemoryEngine, context: &str) {
    let engine: Arc<dyn IoEngine> = Arc::new(image.clone());
    let found = load(&engine).unwrap_or_else(|e| panic!("{context}: {e}"));
    match &found {
        None => assert!(run.saved.is_none(), "{context}: the checkpoint is gone"),
        Some(found) => assert!(
            run.saved.iter().chain(&run.saving).any(|known| known == found),
            "{context}: a checkpoint that nobody saved"
        ),
    }
    let rigs = Snapshot(vec![(embcache_tests::Contents::new(), 7); 2]).in_ram();
    for (table, rig) in rigs.iter().enumerate() {
        train(rig, 5, table, ROOMY).unwrap();
    }
    let tables: Vec<_> = rigs.iter().map(|rig| &rig.table).collect();
    save(&engine, &tables, 99).unwrap_or_else(|e| panic!("{context}: {e}"));
    assert!(load(&engine).unwrap() == Some(Snapshot::of(&rigs).unwrap()), "{context}");
    assert_eq!(engine.list(Path::new(CHECKPOINTS)).unwrap().len(), 3, "{context}: LATEST, the lock and one checkpoint");
}

/// Stops after 0, `step`, 2 `step`, … changes, starting at `first`, until the workload finishes.
fn stop_at_every_operation(kinds: Kinds, first: u64, step: u64) {
    let (mut resumed, mut twice, mut amid_sweeps) = (0, 0, 0);
    for passing in (first..).step_by(step as usize) {
        let (memory, run, hit) = stopped(kinds, passing);
        amid_sweeps = amid_sweeps.max(run.amid_sweeps);
        let mut images = vec![memory.kill(), memory.crash()];
        images.extend((0..times()).flat_map(|round| {
            let seed = passing ^ (round << 32);
            [memory.crash_torn(seed), memory.crash_torn(!seed)]
        }));
        for (number, image) in images.iter().enumerate() {
            let context = format!("{kinds:?} stopped after {passing} changes, image {number}");
            checkpoint_is_whole(&run, &image.kill(), &context);
            resumed += u64::from(resumes(&run, kinds, &image.kill(), &context));
            if number as u64 == passing % 4 {
                twice += resumes_after_a_stop_while_resuming(&run, kinds, image, &context);
            }
        }
        if !hit {
            assert!(passing > 400, "{passing} changes");
            break;
        }
    }
    assert!(resumed > 100 && twice > 100, "{resumed} resumed, {twice} stopped while resuming");
    assert!(amid_sweeps > 3 || !kinds.swept, "{amid_sweeps} flushes and saves came amid a sweep");
}

#[test]
fn a_stop_at_an_operation_of_tables_in_ram_and_on_ssd() {
    stop_at_every_operation(ROOMY, 0, every(4));
}

#[test]
fn a_stop_at_an_operation_of_tables_with_a_device_tier() {
    stop_at_every_operation(DEVICE, 1, every(7));
}

#[test]
fn a_stop_at_an_operation_of_tables_that_drop_rows() {
    stop_at_every_operation(EVICTING, 2, every(7));
}

#[test]
fn a_stop_at_an_operation_of_tables_that_are_swept() {
    stop_at_every_operation(SWEPT, 3, every(7));
}
