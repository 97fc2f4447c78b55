//! An operation fails, once or permanently. The process continues, and the results of earlier steps can be read, and
//! saved elsewhere.

use std::path::Path;
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOpenMode, IoOperation, MemoryEngine, read_file};
use embcache::{Error, Kind, Result};
use embcache_tests::Rig;

use crate::stop::{checkpoint_is_whole, every, resumes};
use crate::workload::{
    DEVICE, EVICTING, Kinds, PARTS, ROOMY, Run, STEPS, SWEPT, Snapshot, directory, disk, do_part, is_of_storage, load,
    open, save,
};

/// The tables after each number of parts of an undisturbed run.
fn undisturbed(kinds: Kinds) -> Vec<Snapshot> {
    let memory = disk();
    let engine: Arc<dyn IoEngine> = Arc::new(memory);
    let rigs = open(&engine, Kinds { ssd_bytes: 4 << 20, ..kinds }, ReopenMode::Never, None).unwrap();
    let mut all = vec![Snapshot::of(&rigs).unwrap()];
    for step in 0..STEPS {
        for (table, rig) in rigs.iter().enumerate() {
            for part in 0..PARTS {
                do_part(rig, step, table, part, kinds).unwrap();
                all.push(Snapshot::of(&rigs).unwrap());
            }
        }
    }
    all
}

/// True if the part in which a run stopped only trains. (An import or a removal that fails may be half done.)
fn only_trains(parts: u64) -> bool {
    parts.is_multiple_of(PARTS)
}

/// Checks that the tables can be saved to another disk, and loaded from there.
fn can_be_saved_elsewhere(rigs: &[Rig], context: &str) {
    let elsewhere: Arc<dyn IoEngine> = Arc::new(disk());
    let tables: Vec<_> = rigs.iter().map(|rig| &rig.table).collect();
    save(&elsewhere, &tables, 1).unwrap_or_else(|e| panic!("{context}: {e}"));
    let found = load(&elsewhere).unwrap_or_else(|e| panic!("{context}: {e}"));
    assert!(found == Some(Snapshot::of(rigs).unwrap()), "{context}: saved elsewhere with other rows");
}

/// Checks the tables after a failed write: rows can be read and saved, training fails, and the previously flushed
/// states are there.
fn lives_on(run: &Run, kinds: Kinds, rigs: &[Rig], errno: i32, context: &str) {
    can_be_saved_elsewhere(rigs, context);
    let before = Snapshot::of(rigs).unwrap();
    for (table, rig) in rigs.iter().enumerate().filter(|(_, rig)| rig.table.is_read_only()) {
        let refused = |error: &Error| is_of_storage(error) && error.errno() == Some(errno);
        let error = rig.table.flush(5000).expect_err(context);
        assert!(error.kind() == Kind::ReadOnly && refused(&error), "{context}: {error:?}");
        let ids = crate::workload::ids_of(run.parts, table, kinds);
        rig.evaluate(&ids, 4, false).unwrap_or_else(|e| panic!("{context}: {e}"));
        assert_eq!(rig.table.stats().unwrap().pinned_rows, 0, "{context}");
    }
    assert!(Snapshot::of(rigs).unwrap() == before, "{context}: reading changed something");
}

fn after_an_error_at_an_operation(kinds: Kinds, first: u64, step: u64) {
    let known = undisturbed(kinds);
    let (mut stuck, mut survived) = (0, 0);
    for passing in (first..).step_by(step as usize) {
        let memory = disk();
        let fault = FaultEngine::new(Arc::new(memory.clone()));
        let errno = [libc::ENOSPC, libc::EIO, libc::EDQUOT, libc::EROFS][passing as usize % 4];
        fault.hit_change(passing, if passing % 3 == 0 { IoFault::Tear(errno) } else { IoFault::Fail(errno) });
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        let context = format!("{kinds:?}: errno {errno} after {passing} changes");
        let mut run = Run::default();
        match open(&engine, kinds, ReopenMode::Never, None) {
            Err(error) => assert_eq!(error.errno(), Some(errno), "{context}: {error}"),
            Ok(rigs) => match run.go(&engine, kinds, &rigs) {
                Ok(()) => survived += 1,
                Err(error) => {
                    assert!(is_of_storage(&error) && error.errno() == Some(errno), "{context}: {error:?}");
                    // A closed table reports that it is closed, before any other error.
                    if run.parts < STEPS * 2 * PARTS || rigs.iter().all(|rig| rig.table.step().is_ok()) {
                        if only_trains(run.parts) && kinds.ids == ROOMY.ids {
                            let found = Snapshot::of(&rigs).unwrap_or_else(|e| panic!("{context}: {e}"));
                            assert!(found == known[run.parts as usize], "{context}: other rows than before");
                        }
                        lives_on(&run, kinds, &rigs, errno, &context);
                    }
                    stuck += 1;
                }
            },
        }
        for (number, image) in [memory.kill(), memory.crash(), memory.crash_torn(passing)].iter().enumerate() {
            let context = format!("{context}, image {number}");
            checkpoint_is_whole(&run, &image.kill(), &context);
            resumes(&run, kinds, image, &context);
        }
        if fault.changes() <= passing {
            break;
        }
    }
    assert!(stuck > 30 && survived > 0, "{stuck} stuck, {survived} survived");
}

#[test]
fn after_an_error_at_an_operation_of_tables_in_ram_and_on_ssd() {
    after_an_error_at_an_operation(ROOMY, 0, every(7));
}

#[test]
fn after_an_error_at_an_operation_of_tables_with_a_device_tier() {
    after_an_error_at_an_operation(DEVICE, 1, every(7));
}

#[test]
fn after_an_error_at_an_operation_of_tables_that_drop_rows() {
    after_an_error_at_an_operation(EVICTING, 2, every(7));
}

#[test]
fn after_an_error_at_an_operation_of_tables_that_are_swept() {
    after_an_error_at_an_operation(SWEPT, 3, every(7));
}

/// Repeats `work` after an error that a disk returns once.
fn again<T>(mut work: impl FnMut() -> Result<T>, errors: &mut u64, context: &str) -> T {
    loop {
        match work() {
            Ok(done) => return done,
            Err(error) => {
                assert!(
                    matches!(error.kind(), Kind::Storage | Kind::Corruption) && error.path().is_some(),
                    "{context}: {error:?}"
                );
                *errors += 1;
                assert!(*errors < 4, "{context}: {error}");
            }
        }
    }
}

/// One read of the entire run fails, is short, or returns a wrong bit. The caller gets the error and repeats the call,
/// and nothing is different.
fn one_bad_read(kinds: Kinds, fault: IoFault, step: usize) {
    let known = undisturbed(kinds);
    let mut told = 0;
    for passing in (0..).step_by(step) {
        let engine = FaultEngine::new(Arc::new(disk()));
        engine.hit_once(IoOperation::Read, passing, fault);
        let shared: Arc<dyn IoEngine> = Arc::new(engine.clone());
        let rigs = open(&shared, kinds, ReopenMode::Never, None).unwrap();
        let context = format!("{fault:?} at read {passing}");
        let mut errors = 0;
        for step in 0..STEPS {
            for (table, rig) in rigs.iter().enumerate() {
                for part in 0..PARTS {
                    again(|| do_part(rig, step, table, part, kinds), &mut errors, &context);
                    if step % 4 == 3 && part == 0 {
                        again(|| rig.table.flush(step), &mut errors, &context);
                    }
                }
            }
        }
        let found = again(|| Snapshot::of(&rigs), &mut errors, &context);
        assert!(found == known[known.len() - 1], "{context}: other rows");
        told += errors;
        if errors == 0 && passing > 400 {
            break;
        }
    }
    assert!(told > 5, "{told} errors reached a caller");
}

#[test]
fn failed_read_is_reported_and_changes_nothing() {
    one_bad_read(ROOMY, IoFault::Fail(libc::EIO), 17);
    one_bad_read(DEVICE, IoFault::Fail(libc::EIO), 17);
    one_bad_read(SWEPT, IoFault::Fail(libc::EIO), 17);
}

#[test]
fn short_read_is_reported_and_changes_nothing() {
    one_bad_read(ROOMY, IoFault::Tear(libc::EIO), 17);
}

#[test]
fn corrupt_read_is_reported_and_changes_nothing() {
    one_bad_read(ROOMY, IoFault::Flip, 7);
    one_bad_read(DEVICE, IoFault::Flip, 7);
    one_bad_read(SWEPT, IoFault::Flip, 7);
}

#[test]
fn a_disk_that_cannot_be_read_for_a_while_costs_no_room_for_ever() {
    (40..52).for_each(a_disk_that_cannot_be_read_from);
}

fn a_disk_that_cannot_be_read_from(begin: u64) {
    let fault = FaultEngine::new(Arc::new(MemoryEngine::default()));
    let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
    let rigs = open(&engine, EVICTING, ReopenMode::Never, None).unwrap();
    let (mut told, mut trained) = (0, 0);
    for step in 0..160 {
        if step == begin {
            fault.hit_every(IoOperation::Read, IoFault::Fail(libc::EIO));
        }
        if step == 80 {
            fault.clear();
        }
        let done = do_part(&rigs[0], step, 0, 0, EVICTING);
        if let Err(error) = &done {
            assert!(is_of_storage(error) && error.errno() == Some(libc::EIO), "{step}: {error:?}");
        }
        told += u64::from(done.is_err());
        trained += u64::from(done.is_ok() && step >= 80);
        if rigs[0].table.is_read_only() {
            // Rows were half written when the space ran out. Then only reopening helps, as the error stated.
            return;
        }
    }
    assert!(told > 0 && trained == 80, "{told} errors, {trained} steps trained after them");
    let rows = rigs[0].contents().unwrap().len() as u64;
    assert_eq!(rows, rigs[0].table.len().unwrap(), "the count of rows follows what was dropped");
}

/// More segments than a table keeps for reuse lose all their rows, repeatedly.
#[test]
fn files_that_cannot_be_removed_are_named_and_no_row_is_lost_count_of() {
    let kinds = Kinds { ssd_bytes: 512 << 10, ids: 4000, ..ROOMY };
    let memory = disk();
    let fault = FaultEngine::new(Arc::new(memory.clone()));
    let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
    let rigs = open(&engine, kinds, ReopenMode::Never, None).unwrap();
    let rig = &rigs[0];
    fault.hit_every(IoOperation::RemoveFile, IoFault::Fail(libc::EPERM));
    let all: Vec<_> = (-50..kinds.ids).collect();
    let held_bytes = || -> u64 {
        // The bytes of a file that is renamed concurrently are those of another file.
        let files = memory.list(&directory(0)).unwrap();
        files.iter().filter_map(|path| memory.open(path, IoOpenMode::Read).ok()).map(|file| file.len().unwrap()).sum()
    };
    let round = |round: u64| -> Result<()> {
        for step in 0..60 {
            do_part(rig, round * 60 + step, 0, 0, kinds)?;
            assert!(held_bytes() <= kinds.ssd_bytes, "{} bytes in round {round}, step {step}", held_bytes());
        }
        rig.table.remove_rows(&all).map(|_| ())
    };
    let refused = (0..20).find_map(|number| round(number).err()).expect("the cap is reached with files that cannot go");
    assert_eq!(refused.errno(), Some(libc::EPERM), "{refused:?}");
    assert!(refused.path().is_some() && refused.to_string().contains("could not be removed"), "{refused}");
    assert_eq!(rig.contents().unwrap().len() as u64, rig.table.len().unwrap());
    can_be_saved_elsewhere(&rigs, "after files could not be removed");
    let path = refused.path().map(Path::to_owned).unwrap_or_default();
    assert!(read_file(&memory, &path, 1 << 20).is_ok(), "{} is there", path.display());
}
