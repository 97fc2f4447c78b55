//! Serving while disks fail, trainers are killed, and changes are merged.

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{CheckpointId, SaveOptions};
use embcache::config::OptimizerKind;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine};
use embcache::serve::{PollOutcome, ServeOptions, TableServer};
use embcache::types::Id;
use embcache_tests::checkpoint::{
    ROOT, Table, compact, memory, newest_identity, on, save, save_chain, save_delta, save_with, stop_at_each_change,
    versions, write_delta,
};
use embcache_tests::directory_in;
use embcache_tests::serve::check;

const ENOSPC: i32 = 28;
const EIO: i32 = 5;

fn root() -> &'static Path {
    Path::new(ROOT)
}

fn tables(salt: u64) -> Vec<Table> {
    let ids: Vec<Id> = (0..90).map(|n| n * 77 - 2000).collect();
    vec![
        Table::new("m", "a", OptimizerKind::RowWiseAdagrad, 8, &ids, salt),
        Table::new("m", "b", OptimizerKind::Sgd, 3, &ids[..40], salt + 1),
    ]
}

fn open(engine: &Arc<dyn IoEngine>) -> Arc<TableServer> {
    TableServer::open(directory_in(engine, ROOT), ServeOptions::default()).expect("opened")
}

#[test]
fn killed_publication_keeps_published_version_served() {
    let (before, after) = (tables(1), tables(2));
    let disk = || {
        let memory = memory();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        save(&engine, root(), &before, 2, 2000, 1).expect("saved");
        memory
    };
    let work = |engine: FaultEngine| {
        let engine: Arc<dyn IoEngine> = Arc::new(engine);
        let parent = newest_identity(&engine)?;
        save_delta(&engine, root(), (&before, &after), (2, 2000), 2, on(&parent)).map(|_| ())
    };
    let (mut old, mut new) = (0, 0);
    let stops = stop_at_each_change(disk, 2, work, |disk, _, stop| {
        let engine: Arc<dyn IoEngine> = Arc::new(disk);
        let serving = open(&engine);
        let is_new = serving.pin().expect("a version").name().seq == 2;
        check(&serving, if is_new { &after } else { &before });
        *(if is_new { &mut new } else { &mut old }) += 1;
        assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate, "stop {stop}");
    });
    assert!(stops > 20 && old > 20 && new > 0, "{stops} stops, {old} before, {new} after");
}

#[test]
fn poll_during_publication_sees_published_version() {
    let (before, after) = (tables(1), tables(2));
    let (mut same, mut newer) = (0, 0);
    // A server that reads while the trainer works finds the trainer's progress.
    for stop in 0.. {
        let memory = memory();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let parent: CheckpointId = save(&engine, root(), &before, 1, 2000, 1).expect("saved").identity;
        let serving = open(&engine);
        let trainer = FaultEngine::new(Arc::new(memory));
        trainer.hit_change(stop, IoFault::Stop);
        let theirs: Arc<dyn IoEngine> = Arc::new(trainer.clone());
        let saved = save_delta(&theirs, root(), (&before, &after), (1, 2000), 2, on(&parent));
        let polled = serving.poll().expect("what LATEST names is whole");
        let is_same = polled == PollOutcome::UpToDate;
        check(&serving, if is_same { &before } else { &after });
        *(if is_same { &mut same } else { &mut newer }) += 1;
        if !trainer.is_stopped() {
            saved.expect("nothing stopped it");
            return assert!(same > 20 && newer > 1, "{same} looks found the one before, {newer} the new one");
        }
    }
}

#[test]
fn delta_on_concurrently_merged_parent_is_served() {
    let versions = versions(4);
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = save_chain(&engine, &versions[..2], &[1]);
    let pair = (&*versions[1], &*versions[2]);
    let (save, digests) = write_delta(&engine, root(), pair, (1, 400), 5, on(&saved[1].identity)).expect("written");
    let merged = compact(&engine, 1, 6).expect("merged");
    let serving = open(&engine);
    check(&serving, &versions[1]);
    let delta = save.publish(&digests, 1).expect("published");
    assert!(delta.latest.name.seq < merged.latest.name.seq, "the delta was begun before");
    assert_eq!(serving.poll().expect("a look"), PollOutcome::Newer(delta.latest.name));
    check(&serving, &versions[2]);
    assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate);
    let pair = (&*versions[2], &*versions[3]);
    save_delta(&engine, root(), pair, (1, 400), 7, on(&delta.identity)).expect("the next delta");
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
    check(&serving, &versions[3]);
}

/// The disk is full or fails while the index is written.
#[test]
fn index_write_failure_only_costs_memory() {
    for fault in [IoFault::Fail(ENOSPC), IoFault::Tear(ENOSPC), IoFault::Fail(EIO), IoFault::Flip] {
        for passing in 0.. {
            let memory = memory();
            let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
            let saved = tables(4);
            save(&engine, root(), &saved, 2, 2000, 1).expect("saved");
            let faulty = FaultEngine::new(Arc::new(memory));
            faulty.hit_change(passing, fault);
            let theirs: Arc<dyn IoEngine> = Arc::new(faulty.clone());
            check(&open(&theirs), &saved);
            let left = engine.list(&engine.list(root()).expect("a directory")[0]).expect("a checkpoint");
            assert!(!left.iter().any(|path| path.to_string_lossy().ends_with(".tmp")), "{fault:?} {passing}: {left:?}");
            check(&open(&engine), &saved);
            if faulty.will_hit() {
                assert!(passing > 3, "{passing} changes");
                break;
            }
        }
    }
}

#[test]
fn failed_read_of_delta_keeps_previous_version() {
    let (before, after) = (tables(1), tables(2));
    for fault in [IoFault::Fail(EIO), IoFault::Flip] {
        for operation in [IoOperation::Read, IoOperation::Open] {
            for passing in (0..).step_by(3) {
                let memory = memory();
                let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
                let parent = save(&engine, root(), &before, 1, 2000, 1).expect("saved").identity;
                let faulty = FaultEngine::new(Arc::new(memory));
                let serving = open(&(Arc::new(faulty.clone()) as Arc<dyn IoEngine>));
                save_delta(&engine, root(), (&before, &after), (1, 2000), 2, on(&parent)).expect("saved");
                faulty.hit_once(operation, passing, fault);
                let polled = serving.poll();
                let was_hit = !faulty.will_hit();
                check(&serving, if polled.is_ok() { &after } else { &before });
                faulty.clear();
                serving.poll().expect("the disk is well again");
                check(&serving, &after);
                if !was_hit || fault == IoFault::Flip && operation == IoOperation::Open {
                    assert!(passing > 3 || fault == IoFault::Flip, "{fault:?} {operation:?} {passing}");
                    break;
                }
            }
        }
    }
}

#[test]
fn a_follower_swaps_by_itself_and_ends_when_it_is_stopped() {
    let memory: MemoryEngine = memory();
    let engine: Arc<dyn IoEngine> = Arc::new(memory);
    let before = tables(1);
    save(&engine, root(), &before, 1, 2000, 1).expect("saved");
    let serving = open(&engine);
    let mut follower = serving.follow(std::time::Duration::from_millis(1)).expect("a thread");
    for number in 2..6 {
        let now = tables(number);
        save_with(&engine, root(), &now, (1, 2000), number, SaveOptions::default()).expect("saved");
        while serving.pin().expect("a version").name().seq != number {
            std::thread::yield_now();
        }
        check(&serving, &now);
    }
    follower.stop();
    save_with(&engine, root(), &before, (1, 2000), 9, SaveOptions::default()).expect("saved");
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert_eq!(serving.pin().expect("a version").name().seq, 5, "nobody looks any more");
    assert!(serving.follow(std::time::Duration::ZERO).is_err());
}

#[test]
fn follower_continues_after_panic_and_reports_it() {
    let memory = memory();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    save(&engine, root(), &tables(1), 1, 2000, 1).expect("saved");
    let faulty = FaultEngine::new(Arc::new(memory));
    let serving = open(&(Arc::new(faulty.clone()) as Arc<dyn IoEngine>));
    let _follower = serving.follow(std::time::Duration::from_millis(1)).expect("a thread");
    for number in 2..6 {
        let failed = serving.stats().failed_polls;
        faulty.panic_at(IoOperation::Read, number * 7);
        save_with(&engine, root(), &tables(number), (1, 2000), number, SaveOptions::default()).expect("saved");
        wait_for(|| !faulty.will_panic(), "it panicked");
        wait_for(|| serving.stats().failed_polls == failed + 1, "the panic was counted");
        wait_for(|| serving.pin().expect("a version").name().seq == number, "it is served");
        check(&serving, &tables(number));
    }
}

#[test]
fn many_changes_are_merged_into_an_index_that_all_share() {
    let memory = memory();
    let engine: Arc<dyn IoEngine> = Arc::new(memory);
    let ids: Vec<Id> = (0..90_000).map(|n| n * 3).collect();
    let table = |salt| vec![Table::new("m", "a", OptimizerKind::Sgd, 1, &ids, salt)];
    let small = || {
        let mut now = table(1);
        now[0].rows.extend(Table::new("", "", OptimizerKind::Sgd, 1, &ids[..50_000], 2).rows);
        now
    };
    let first = save(&engine, root(), &table(1), 1, 1 << 20, 1).expect("saved").identity;
    let serving = open(&engine);
    let other = open(&engine);
    let second =
        save_delta(&engine, root(), (&table(1), &small()), (1, 1 << 20), 2, on(&first)).expect("saved").identity;
    serving.poll().expect("a look");
    check(&serving, &small());
    assert!(serving.stats().overlay_ids >= 50_000, "few changes stay beside the index");
    save_delta(&engine, root(), (&small(), &table(3)), (1, 1 << 20), 3, on(&second)).expect("saved");
    serving.poll().expect("a look");
    check(&serving, &table(3));
    wait_for(|| serving.stats().overlay_ids == 0, "many are merged");
    check(&serving, &table(3));
    // Another server opens later, and uses the index that the first one built.
    other.poll().expect("a look");
    check(&other, &table(3));
    wait_for(|| other.stats().overlay_ids == 0, "many are merged");
    check(&other, &table(3));
    let last = open(&engine);
    check(&last, &table(3));
    for stats in [serving.stats(), other.stats(), last.stats()] {
        assert!(stats.shared_index_bytes > 90_000 * 15 && stats.private_bytes < 10_000, "{stats:?}");
    }
    // Merging changes the files of a checkpoint, and not its identity.
    assert_eq!((serving.stats().swaps, other.stats().swaps, last.stats().swaps), (2, 1, 0));
}

/// Waits for another thread. A test that waits in vain is stopped by the limit of all tests.
pub(crate) fn wait_for(mut done: impl FnMut() -> bool, what: &str) {
    let mut looks = 0_u32;
    while !done() {
        std::thread::sleep(std::time::Duration::from_millis(5));
        looks += 1;
        assert!(looks < 60_000, "waited for five minutes: {what}");
    }
}

#[test]
fn newer_checkpoints_are_served_while_changes_are_merged() {
    let memory = memory();
    let engine: Arc<dyn IoEngine> = Arc::new(memory);
    let ids: Vec<Id> = (0..70_000).map(|n| n * 5 + 2000).collect();
    let table = |salt| vec![Table::new("m", "a", OptimizerKind::Sgd, 1, &ids, salt)];
    let with = |rows: &[Table], changed: usize, salt| {
        let mut now = rows.to_vec();
        now[0].rows.extend(Table::new("", "", OptimizerKind::Sgd, 1, &ids[..changed], salt).rows);
        now
    };
    let mut chain = vec![table(1), table(2)];
    chain.push(with(&chain[1], 300, 3));
    chain.push(with(&chain[2], 200, 4));
    let mut parent = save(&engine, root(), &chain[0], 1, 1 << 20, 1).expect("saved").identity;
    let serving = open(&engine);
    let mut held = None;
    for seq in 2..=4 {
        let states = (&chain[seq - 2][..], &chain[seq - 1][..]);
        parent = save_delta(&engine, root(), states, (1, 1 << 20), seq as u64, on(&parent)).expect("saved").identity;
        if seq == 2 {
            // Building an index locks the checkpoint. So the merge waits here until it is cancelled.
            held = Some(engine.lock_dir(&root().join(&parent.name)).expect("nobody holds it"));
        }
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == seq as u64));
        check(&serving, &chain[seq - 1]);
        assert!(serving.stats().overlay_ids > 70_000, "nothing is merged yet");
    }
    let before = serving.pin().expect("a version");
    drop(held);
    wait_for(|| serving.stats().overlay_ids < 400, "the deltas after the one that was merged stay beside the index");
    assert!(serving.stats().overlay_ids >= 300);
    check(&serving, &chain[3]);
    assert_eq!(serving.pin().expect("a version").name(), before.name());
    assert_eq!(serving.rollback().expect("the version before").seq, 3);
    check(&serving, &chain[2]);
}

#[test]
fn an_index_of_a_version_that_is_served_no_longer_is_left_alone() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let ids: Vec<Id> = (0..70_000).map(|n| n * 5).collect();
    let table = |salt| vec![Table::new("m", "a", OptimizerKind::Sgd, 1, &ids, salt)];
    let first = save(&engine, root(), &table(1), 1, 1 << 20, 1).expect("saved").identity;
    let serving = open(&engine);
    let second = save_delta(&engine, root(), (&table(1), &table(2)), (1, 1 << 20), 2, on(&first)).expect("saved");
    let directory = root().join(&second.identity.name);
    let held = engine.lock_dir(&directory).expect("nobody holds it");
    serving.poll().expect("a look");
    serving.rollback().expect("the version before");
    drop(held);
    wait_for(|| engine.exists(&directory.join("serve.idx")).expect("a look"), "the index is made");
    // A thread that has finished the merge has released the version that it merged.
    wait_for(|| serving.stats().versions == 1, "the version is given up");
    check(&serving, &table(1));
    assert_eq!(serving.pin().expect("a version").name().seq, 1);
}

#[test]
fn a_follower_that_waits_for_an_index_can_be_ended() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    save(&engine, root(), &tables(1), 2, 2000, 1).expect("saved");
    let serving = open(&engine);
    let newer = save(&engine, root(), &tables(2), 2, 2000, 2).expect("saved").identity;
    let held = engine.lock_dir(&root().join(&newer.name)).expect("nobody holds it");
    let mut follower = serving.follow(std::time::Duration::from_millis(1)).expect("a thread");
    wait_for(|| serving.stats().polls > 0, "it looks");
    follower.stop();
    let stats = serving.stats();
    assert_eq!((stats.polls, stats.failed_polls, stats.last_error, stats.version.seq), (1, 0, None, 1));
    drop(held);
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
    check(&serving, &tables(2));
}

#[test]
fn index_build_and_wait_for_it_can_be_interrupted() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let saved = save(&engine, root(), &tables(1), 2, 2000, 1).expect("saved").identity;
    let directory = root().join(&saved.name);
    let ended = || Kind::State.error("a signal ended the work");
    let open_while = |looks: usize| {
        let mut count = 0;
        let mut wait = || {
            count += 1;
            if count > looks { Err(ended()) } else { Ok(()) }
        };
        TableServer::open_while(directory_in(&engine, ROOT), ServeOptions::default(), &mut wait).map(|_| ())
    };
    let held = engine.lock_dir(&directory).expect("nobody holds it");
    assert_eq!(open_while(3).expect_err("it waits for whoever holds the checkpoint").kind(), Kind::State);
    drop(held);
    let mut files = 0;
    while let Err(error) = open_while(files) {
        assert_eq!(error.kind(), Kind::State, "{error}");
        assert!(!engine.exists(&directory.join("serve.idx")).expect("a look"), "nothing was written");
        drop(engine.lock_dir(&directory).expect("it is held no longer"));
        files += 1;
    }
    assert!(files >= 4, "two tables have two files each at least, and it was asked {files} times");
    assert!(engine.exists(&directory.join("serve.idx")).expect("a look"));
    open_while(0).expect("there is an index");
}
