//! The fault engine injects exactly the specified faults.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use embcache::Kind;
use embcache::io::{
    ALIGNMENT, AlignedBuf, FaultEngine, IoEngine, IoFault, IoOpenMode, IoOperation, IoReadRequest, MemoryEngine,
    PsyncEngine, read_file, write_atomically,
};
use embcache_tests::watched;

fn engines() -> (MemoryEngine, FaultEngine) {
    let memory = MemoryEngine::default();
    memory.create_dir_all(Path::new("/d")).unwrap();
    memory.sync_dir(Path::new("/")).unwrap();
    (memory.clone(), FaultEngine::new(Arc::new(memory)))
}

fn ones(len: usize) -> AlignedBuf {
    let mut data = AlignedBuf::zeroed(len);
    data.fill(1);
    data
}

#[test]
fn changes_are_counted_and_logged_in_order_and_reads_are_not() {
    let (_, engine) = engines();
    let path = Path::new("/d/a");
    write_atomically(&engine, path, b"x").unwrap();
    read_file(&engine, path, 10).unwrap();
    let operations: Vec<IoOperation> = engine.log().into_iter().map(|(operation, _)| operation).collect();
    assert_eq!(
        operations,
        [
            IoOperation::Create,
            IoOperation::Write,
            IoOperation::SetLen,
            IoOperation::Sync,
            IoOperation::Rename,
            IoOperation::SyncDir
        ]
    );
    assert_eq!(engine.changes(), 6);
    assert_eq!(engine.log()[5].1, Path::new("/d"));
}

#[test]
fn a_publish_stopped_anywhere_leaves_the_old_or_the_new_file() {
    let path = Path::new("/d/a");
    let mut old = 0;
    for passing in 0..=7 {
        let (memory, engine) = engines();
        write_atomically(&engine, path, b"old").unwrap();
        engine.hit_change(passing, IoFault::Stop);
        let published = write_atomically(&engine, path, b"new");
        assert_eq!(published.is_err(), passing < 6, "six changes a publish");
        for after in (0..16).map(|seed| memory.crash_torn(seed)).chain([memory.crash(), memory.kill()]) {
            let found = read_file(&after, path, 10).unwrap();
            assert!(found == b"new" || (found == b"old" && published.is_err()), "{found:?} after {passing}");
            old += usize::from(found == b"old");
        }
    }
    assert!(old > 0);
}

#[test]
fn after_a_stop_everything_fails_and_what_was_durable_is_left() {
    let (memory, engine) = engines();
    write_atomically(&engine, Path::new("/d/a"), b"x").unwrap();
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Read).unwrap();
    engine.stop();
    assert!(engine.is_stopped());
    engine.clear();
    let outcomes = [
        engine.open(Path::new("/d/a"), IoOpenMode::Read).map(drop),
        engine.create_dir_all(Path::new("/e")),
        engine.list(Path::new("/d")).map(drop),
        engine.rename(Path::new("/d/a"), Path::new("/d/b")),
        engine.remove_file(Path::new("/d/a")),
        engine.remove_dir_all(Path::new("/d")),
        engine.sync_dir(Path::new("/d")),
        engine.lock_dir(Path::new("/d")).map(drop),
        file.read_at(0, &mut [0]),
        file.len().map(drop),
        file.sync(),
    ];
    for (index, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome.unwrap_err().kind(), Kind::Storage, "operation {index}");
    }
    let mut failed = 0;
    engine.read_batch(&[IoReadRequest { file, offset: 0, len: 1 }], &mut |_, outcome, _| {
        failed += usize::from(outcome.is_err());
    });
    assert_eq!(failed, 1);
    assert_eq!(read_file(&memory.crash(), Path::new("/d/a"), 10).unwrap(), b"x");
}

#[test]
fn an_error_hits_the_chosen_operation_once_or_until_it_is_cleared() {
    let (_, engine) = engines();
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
    let page = ones(ALIGNMENT);
    engine.hit_once(IoOperation::Write, 1, IoFault::Fail(libc::EIO));
    let errnos: Vec<_> =
        (0..3).map(|i| file.write_at(i * ALIGNMENT as u64, &page).err().and_then(|e| e.errno())).collect();
    assert_eq!(errnos, [None, Some(libc::EIO), None]);
    engine.hit_every(IoOperation::Create, IoFault::Fail(libc::ENOSPC));
    for _ in 0..3 {
        let error = engine.open(Path::new("/d/b"), IoOpenMode::Create { preallocate: 0 }).unwrap_err();
        assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOSPC)));
        file.write_at(0, &page).unwrap();
    }
    engine.clear();
    engine.open(Path::new("/d/b"), IoOpenMode::Create { preallocate: 0 }).unwrap();
}

#[test]
fn partial_write_leaves_first_half_and_flip_one_wrong_bit() {
    let (_, engine) = engines();
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
    engine.hit_once(IoOperation::Write, 0, IoFault::Tear(libc::ENOSPC));
    assert_eq!(file.write_at(0, &ones(4 * ALIGNMENT)).unwrap_err().errno(), Some(libc::ENOSPC));
    assert_eq!(file.len().unwrap(), 2 * ALIGNMENT as u64);
    engine.hit_once(IoOperation::Write, 0, IoFault::Flip);
    file.write_at(0, &ones(ALIGNMENT)).unwrap();
    let mut found = vec![0; ALIGNMENT];
    file.read_at(0, &mut found).unwrap();
    let wrong: u32 = found.iter().map(|byte| (byte ^ 1).count_ones()).sum();
    assert_eq!(wrong, 1);
}

#[test]
fn faults_in_a_batch_hit_their_reads_only() {
    let (_, engine) = engines();
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
    file.write_at(0, &ones(64 * ALIGNMENT)).unwrap();
    engine.hit_once(IoOperation::Read, 10, IoFault::Fail(libc::EIO));
    engine.hit_once(IoOperation::Read, 20, IoFault::Flip);
    engine.hit_once(IoOperation::Read, 30, IoFault::Tear(libc::EIO));
    let reads: Vec<IoReadRequest> =
        (0..300).map(|i| IoReadRequest { file: file.clone(), offset: i * 512, len: 300 }).collect();
    let mut hit = Vec::new();
    engine.read_batch(&reads, &mut |position, outcome, _| match outcome {
        Ok(data) if data.iter().all(|byte| *byte == 1) && data.len() == 300 => {}
        Ok(_) => hit.push((position, None)),
        Err(error) => hit.push((position, Some(error.kind()))),
    });
    hit.sort_unstable_by_key(|(position, _)| *position);
    // A rule that hits consumes the operation, so the rules after it count from the next one.
    assert_eq!(hit, [(10, Some(Kind::Storage)), (21, None), (32, Some(Kind::Corruption))]);
}

#[test]
fn held_operation_continues_after_release() {
    let (memory, engine) = engines();
    let file = engine.open(Path::new("/d/a"), IoOpenMode::Create { preallocate: 0 }).unwrap();
    engine.hold(IoOperation::Sync);
    std::thread::scope(|scope| {
        let synced = scope.spawn(|| file.sync());
        engine.wait_until_held();
        file.write_at(0, &ones(ALIGNMENT)).unwrap();
        engine.release();
        synced.join().unwrap().unwrap();
    });
    engine.sync_dir(Path::new("/d")).unwrap();
    assert_eq!(read_file(&memory.crash(), Path::new("/d/a"), 1 << 20).unwrap().len(), ALIGNMENT);
}

#[test]
fn panic_in_read_thread_fails_its_reads_and_no_thread_hangs() {
    watched(String::new, || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows");
        std::fs::write(&path, vec![1; 1 << 16]).unwrap();
        let disk = Arc::new(PsyncEngine::new(false));
        let faults = FaultEngine::new(disk.clone());
        let file = faults.open(&path, IoOpenMode::Read).unwrap();
        // The pool's threads read from the faulty file itself.
        let reads: Vec<IoReadRequest> =
            (0..200).map(|number| IoReadRequest { file: file.clone(), offset: number * 300, len: 300 }).collect();
        let outcomes = || {
            let mut outcomes: Vec<Option<embcache::Result<()>>> = vec![None; reads.len()];
            disk.read_batch(&reads, &mut |position, read, _| {
                let read = read.map(|bytes| assert_eq!(bytes, [1; 300]));
                assert!(outcomes[position].replace(read).is_none(), "read {position} comes twice");
            });
            outcomes.into_iter().map(|outcome| outcome.expect("each read comes")).collect::<Vec<_>>()
        };
        // This is more panics than the pool has threads.
        for number in 0..40 {
            faults.panic_at(IoOperation::Read, number);
            let ended = outcomes();
            let failed: Vec<_> = ended.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
            assert!((1..=16).contains(&failed.len()), "{} of a chunk", failed.len());
            assert!(failed.iter().all(|error| error.to_string().contains("panic")), "{failed:?}");
        }
        assert!(outcomes().iter().all(Result::is_ok), "the pool reads on");
    });
}
