//! After any stop of a save, a load finds either the previous checkpoint or the new one, intact.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{LatestCheckpoint, SaveOptions};
use embcache::config::OptimizerKind::{Adagrad, RowWiseAdagrad};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine, read_file, write_atomically};
use embcache::types::Id;
use embcache_tests::checkpoint::{
    ROOT, Table, compact, load, memory, newest_identity, on, save, save_chain, save_delta, stop_at_each_change,
    versions, write,
};
use embcache_tests::directory_in;

fn tables(salt: u64) -> Vec<Table> {
    let ids: Vec<Id> = (0..20 + salt as i64).collect();
    vec![Table::new("m", "a", RowWiseAdagrad, 3, &ids, salt), Table::new("m", "b", Adagrad, 2, &ids[..3], salt)]
}

fn save_to(engine: impl IoEngine + 'static, salt: u64) -> embcache::Result<()> {
    let engine: Arc<dyn IoEngine> = Arc::new(engine);
    save(&engine, Path::new(ROOT), &tables(salt), 2, 400, salt).map(|_| ())
}

fn load_from(engine: MemoryEngine) -> Vec<Table> {
    load(&(Arc::new(engine) as Arc<dyn IoEngine>), Path::new(ROOT), 3).expect("a whole checkpoint")
}

/// A disk with a first checkpoint.
fn with_first() -> MemoryEngine {
    let memory = memory();
    save_to(memory.clone(), 1).expect("saved");
    memory
}

#[test]
fn a_stop_at_every_operation_leaves_the_old_checkpoint_or_the_new_one() {
    let (old, new) = (tables(1), tables(2));
    let (mut kept, mut replaced) = (0, 0);
    let work = |engine| save_to(engine, 2);
    let stops = stop_at_each_change(with_first, 4, work, |image, result, stops| {
        let found = load_from(image.clone());
        assert!(found == old || found == new, "neither, after {stops} changes");
        assert!(result.is_err() || found == new, "a save that succeeded is lost after {stops} changes");
        *if found == old { &mut kept } else { &mut replaced } += 1;
        // A further save succeeds.
        save_to(image.clone(), 3).expect("saved");
        assert_eq!(load_from(image.clone()), tables(3));
        assert_eq!(image.list(Path::new(ROOT)).expect("listed").len(), 3, "orphans are swept");
    });
    assert!(stops > 30 && kept > 100 && replaced > 0, "{stops} stops, {kept} kept, {replaced} replaced");
}

#[test]
fn the_first_save_to_a_directory_is_there_as_a_whole_or_not_at_all() {
    let work = |engine| save_to(engine, 1);
    let stops = stop_at_each_change(memory, 1, work, |image, result, _| {
        let image: Arc<dyn IoEngine> = Arc::new(image);
        match load(&image, Path::new(ROOT), 1) {
            Ok(found) => assert_eq!(found, tables(1)),
            Err(error) => {
                assert_eq!(error.kind(), Kind::Path, "{error}");
                assert!(result.is_err());
            }
        }
    });
    assert!(stops > 20);
}

#[test]
fn save_without_latest_keeps_complete_checkpoints_until_done() {
    let latest = Path::new(ROOT).join("LATEST");
    // LATEST is missing, is corrupted, or names a checkpoint that does not exist.
    for now in [None, Some("000"), Some("0000000009-0123456789abcdef\n")] {
        let (mut stops, mut kept) = (0, 0);
        loop {
            let memory = with_first();
            let line = read_file(&memory, &latest, 256).expect("read");
            match now {
                None => memory.remove_file(&latest).expect("removed"),
                Some(now) => write_atomically(&memory, &latest, now.as_bytes()).expect("written"),
            }
            memory.sync_dir(Path::new(ROOT)).expect("synced");
            let engine = FaultEngine::new(Arc::new(memory.clone()));
            engine.hit_change(stops, IoFault::Stop);
            let result = save_to(engine.clone(), 2);
            let stopped = engine.is_stopped();
            for image in [memory.crash(), memory.kill(), memory.crash_torn(stops)] {
                let again: Arc<dyn IoEngine> = Arc::new(image.clone());
                if !load(&again, Path::new(ROOT), 1).is_ok_and(|found| found == tables(2)) {
                    assert!(stopped && result.is_err(), "{now:?}");
                    // After the line is restored, the checkpoint is intact.
                    write_atomically(&image, &latest, &line).expect("written");
                    assert_eq!(load_from(image), tables(1), "{now:?}: lost after {stops} changes");
                    kept += 1;
                }
            }
            if !stopped {
                assert_eq!(memory.list(Path::new(ROOT)).expect("listed").len(), 3, "it is superseded by the new one");
                break;
            }
            stops += 1;
        }
        assert!(kept > 60, "{kept} times kept in {stops} stops");
    }
}

#[test]
fn failed_operation_fails_save_and_keeps_old_checkpoint() {
    for operation in [
        IoOperation::Create,
        IoOperation::Write,
        IoOperation::SetLen,
        IoOperation::Sync,
        IoOperation::Rename,
        IoOperation::CreateDir,
    ] {
        for fault in [IoFault::Fail(libc::ENOSPC), IoFault::Tear(libc::EIO)] {
            let mut passing = 0;
            loop {
                let memory = with_first();
                let engine = FaultEngine::new(Arc::new(memory.clone()));
                engine.hit_once(operation, passing, fault);
                let result = save_to(engine.clone(), 2);
                let Err(error) = result else { break };
                assert_eq!(error.kind(), Kind::Storage, "{error}");
                assert!(error.errno().is_some(), "{error}");
                assert_eq!(load_from(memory.kill()), tables(1), "{operation:?} {passing}");
                assert_eq!(load_from(memory.crash()), tables(1), "{operation:?} {passing}");
                passing += 1;
            }
            assert!(passing > 0, "{operation:?} is never done");
        }
    }
}

#[test]
fn a_publication_that_fails_removes_what_it_was_to_publish() {
    for operation in [
        IoOperation::Open,
        IoOperation::Read,
        IoOperation::Create,
        IoOperation::Write,
        IoOperation::Sync,
        IoOperation::Rename,
        IoOperation::SyncDir,
    ] {
        let (mut passing, mut failed) = (0, 0);
        loop {
            let memory = with_first();
            let engine = FaultEngine::new(Arc::new(memory.clone()));
            let through: Arc<dyn IoEngine> = Arc::new(engine.clone());
            let (save, digests) =
                write(&directory_in(&through, ROOT), &tables(2), (2, 400), 2, SaveOptions::default()).expect("written");
            engine.hit_once(operation, passing, IoFault::Fail(libc::EIO));
            let published = save.publish(&digests, 1);
            let was_hit = !engine.will_hit();
            engine.clear();
            let is_new = load_from(memory.kill()) == tables(2);
            if let Err(error) = published {
                // LATEST, the lock file, and the previous checkpoint. The new one is kept if LATEST already names it.
                let entries = memory.list(Path::new(ROOT)).expect("listed");
                assert_eq!(entries.len(), 3 + usize::from(is_new), "{operation:?} {passing}: {error}, {entries:?}");
                failed += 1;
            } else {
                assert!(is_new, "{operation:?} {passing}");
            }
            if !was_hit {
                break;
            }
            passing += 1;
        }
        assert!(failed > 0, "{operation:?} never fails a publication");
    }
}

#[test]
fn a_read_that_fails_while_loading_is_reported() {
    let memory = with_first();
    let mut passing = 0;
    loop {
        let engine = FaultEngine::new(Arc::new(memory.clone()));
        engine.hit_once(IoOperation::Read, passing, IoFault::Fail(libc::EIO));
        let engine: Arc<dyn IoEngine> = Arc::new(engine);
        match load(&engine, Path::new(ROOT), 1) {
            Ok(found) => {
                assert_eq!(found, tables(1));
                break;
            }
            Err(error) => assert_eq!(error.errno(), Some(libc::EIO), "{error}"),
        }
        passing += 1;
    }
    assert!(passing > 20);
}

/// Stops `work` at every operation that changes the disk, on a chain of the first `links` versions of the tables. A
/// load then finds the last of these or the version `after`, and a further save succeeds.
fn stop_everywhere(
    links: usize,
    after: usize,
    work: impl Fn(&Arc<dyn IoEngine>) -> embcache::Result<()>,
) -> (u64, u64) {
    let versions = versions(4);
    let chain = || {
        let memory = memory();
        let direct: Arc<dyn IoEngine> = Arc::new(memory.clone());
        (save_chain(&direct, &versions[..links], &[2]), memory)
    };
    // The names are the same each time.
    let (saved, _) = chain();
    let mut kept = 0;
    let work = |engine| work(&(Arc::new(engine) as Arc<dyn IoEngine>));
    let stops = stop_at_each_change(
        || chain().1,
        2,
        work,
        |image, result, stops| {
            let found = load_from(image.clone());
            assert!(found == versions[links - 1] || found == versions[after], "neither, after {stops} changes");
            assert!(result.is_err() || found == versions[after], "lost after {stops} changes");
            let again: Arc<dyn IoEngine> = Arc::new(image.clone());
            let newest = LatestCheckpoint::read(&directory_in(&again, ROOT)).ok();
            if found == versions[links - 1] && newest == Some(saved[links - 1].latest) {
                kept += 1;
                // The base of the next delta is intact.
                let pair = (&*versions[links - 1], &*versions[3]);
                let options = on(&newest_identity(&again).expect("the newest"));
                save_delta(&again, Path::new(ROOT), pair, (1, 400), 9, options).expect("a delta");
                assert_eq!(load_from(image.clone()), versions[3]);
                assert_eq!(image.list(Path::new(ROOT)).expect("listed").len(), links + 3, "orphans are swept");
            }
            save(&again, Path::new(ROOT), &versions[1], 1, 400, 10).expect("saved");
            assert_eq!(load_from(image.clone()), versions[1]);
            assert_eq!(image.list(Path::new(ROOT)).expect("listed").len(), 3, "the chain is swept");
        },
    );
    (stops, kept)
}

#[test]
fn stopped_delta_leaves_old_chain_or_one_longer() {
    let versions = versions(3);
    let (stops, kept) = stop_everywhere(2, 2, |engine| {
        let parent = newest_identity(engine)?;
        save_delta(engine, Path::new(ROOT), (&versions[1], &versions[2]), (2, 400), 5, on(&parent)).map(|_| ())
    });
    assert!(stops > 30 && kept > 60, "{stops} stops, {kept} kept");
}

#[test]
fn a_stop_at_every_operation_of_a_compaction_loses_nothing() {
    let (stops, kept) = stop_everywhere(3, 2, |engine| compact(engine, 2, 6).map(|_| ()));
    assert!(stops > 30 && kept > 60, "{stops} stops, {kept} kept");
}
