//! The behaviour that all I/O engines share, checked on each of them.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use embcache::io::{
    ALIGNMENT, AlignedBuf, ConfinedEngine, FaultEngine, IoEngine, IoFile, IoOpenMode, IoReadRequest, MemoryEngine,
    PsyncEngine, UringEngine, read_file, write_atomically,
};
use embcache::{Error, Kind, Result};

/// An engine with a directory for it.
struct Fixture {
    engine: Arc<dyn IoEngine>,
    dir: PathBuf,
    _held: Option<tempfile::TempDir>,
}

impl Fixture {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn create(&self, name: &str, preallocate: u64) -> Arc<dyn IoFile> {
        self.engine.open(&self.path(name), IoOpenMode::Create { preallocate }).unwrap()
    }

    /// Creates a file of `len` bytes in a pattern.
    fn filled(&self, name: &str, len: usize) -> (Arc<dyn IoFile>, Vec<u8>) {
        let file = self.create(name, 0);
        let data = pattern(len.next_multiple_of(ALIGNMENT));
        file.write_at(0, &data).unwrap();
        file.set_len(len as u64).unwrap();
        (file, data[..len].to_vec())
    }
}

fn pattern(len: usize) -> AlignedBuf {
    let mut data = AlignedBuf::zeroed(len);
    for (i, byte) in data.iter_mut().enumerate() {
        *byte = (i.wrapping_mul(0x9e37_79b1) >> 13) as u8;
    }
    data
}

/// Each engine with a new directory. Without `io_uring` its two engines are omitted.
fn every_engine() -> Vec<Fixture> {
    let mut engines: Vec<Arc<dyn IoEngine>> = vec![
        Arc::new(MemoryEngine::default()),
        Arc::new(FaultEngine::new(Arc::new(MemoryEngine::default()))),
        Arc::new(PsyncEngine::new(false)),
        Arc::new(PsyncEngine::new(true)),
        Arc::new(FaultEngine::new(Arc::new(PsyncEngine::new(true)))),
    ];
    for direct in [false, true] {
        match UringEngine::new(direct) {
            Ok(engine) => engines.push(Arc::new(engine)),
            Err(error) => assert_eq!(error.kind(), Kind::Unsupported, "{error}"),
        }
    }
    engines
        .into_iter()
        .map(|engine| {
            let held = tempfile::tempdir().unwrap();
            let dir = held.path().to_owned();
            engine.create_dir_all(&dir).unwrap();
            Fixture { engine, dir, _held: Some(held) }
        })
        .collect()
}

fn on_every_engine(behaviour: impl Fn(&Fixture)) {
    for fixture in every_engine() {
        behaviour(&fixture);
    }
}

/// The outcomes of a batch by position. Each read must be returned exactly once.
fn read_all(engine: &dyn IoEngine, reads: &[IoReadRequest]) -> Vec<Result<Vec<u8>>> {
    let mut outcomes: Vec<Option<Result<Vec<u8>>>> = reads.iter().map(|_| None).collect();
    engine.read_batch(reads, &mut |position, outcome, _| {
        assert!(outcomes[position].replace(outcome.map(<[u8]>::to_vec)).is_none(), "read {position} came twice");
    });
    outcomes.into_iter().map(|outcome| outcome.expect("every read is handed over")).collect()
}

fn kind<T>(done: Result<T>) -> Option<Kind> {
    done.err().map(|e: Error| e.kind())
}

#[test]
fn reads_of_any_offset_and_length_give_what_was_written() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 300_001);
        for (offset, len) in
            [(0, 1), (511, 2), (512, 512), (1000, 308), (4095, 8194), (300_000, 1), (0, 300_001), (7, 0)]
        {
            let mut found = vec![0; len];
            file.read_at(offset, &mut found).unwrap();
            assert!(found == data[offset as usize..][..len], "{}: {len} at {offset}", fixture.engine.name());
        }
    });
}

#[test]
fn a_batch_deeper_than_any_queue_gives_each_read_its_own_bytes() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 1 << 20);
        let (other, other_data) = fixture.filled("b", 70_000);
        let reads: Vec<IoReadRequest> = (0..3000_u64)
            .map(|i| match i % 7 {
                0 => IoReadRequest { file: other.clone(), offset: i * 23 % 69_000, len: (i % 900) as usize },
                1 => IoReadRequest { file: file.clone(), offset: i * 8191 % 900_000, len: 9000 + i as usize },
                _ => IoReadRequest { file: file.clone(), offset: i * 308, len: 308 },
            })
            .collect();
        for (read, outcome) in reads.iter().zip(read_all(&*fixture.engine, &reads)) {
            let source = if Arc::ptr_eq(&read.file, &other) { &other_data } else { &data };
            assert!(
                outcome.unwrap() == source[read.offset as usize..][..read.len],
                "{}: {read:?}",
                fixture.engine.name()
            );
        }
    });
}

#[test]
fn large_reads_of_a_batch_are_whole() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 6 << 20);
        let reads: Vec<IoReadRequest> =
            (0..24_u64).map(|i| IoReadRequest { file: file.clone(), offset: i * 999, len: 5 << 20 }).collect();
        for (read, outcome) in reads.iter().zip(read_all(&*fixture.engine, &reads)) {
            assert!(outcome.unwrap() == data[read.offset as usize..][..read.len], "{}", fixture.engine.name());
        }
    });
}

#[test]
fn a_read_past_the_end_is_corruption_that_names_the_length() {
    on_every_engine(|fixture| {
        let (file, _) = fixture.filled("a", 5000);
        for (offset, len) in [(4999, 2), (5000, 1), (9000, 10), (0, 5001)] {
            let error = file.read_at(offset, &mut vec![0; len]).unwrap_err();
            assert_eq!(error.kind(), Kind::Corruption, "{}: {error}", fixture.engine.name());
            let wanted = format!("at least {}", offset as usize + len);
            assert!(error.to_string().contains(&wanted) && error.to_string().contains("is 5000"), "{error}");
            assert_eq!(error.path(), Some(&*fixture.path("a")));
        }
    });
}

#[test]
fn errors_in_a_batch_leave_the_other_reads_alone() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 200_000);
        let reads: Vec<IoReadRequest> = (0..1000_u64)
            .map(|i| IoReadRequest {
                file: file.clone(),
                offset: if i % 3 == 0 { 200_000 - i % 50 } else { i * 190 },
                len: 100,
            })
            .collect();
        for (i, (read, outcome)) in reads.iter().zip(read_all(&*fixture.engine, &reads)).enumerate() {
            if i % 3 == 0 {
                assert_eq!(kind(outcome), Some(Kind::Corruption), "{}: read {i}", fixture.engine.name());
            } else {
                assert!(outcome.unwrap() == data[read.offset as usize..][..100], "{}: read {i}", fixture.engine.name());
            }
        }
    });
}

#[test]
fn batches_of_several_threads_do_not_mix() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 1 << 20);
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let (file, data, engine) = (&file, &data, &fixture.engine);
                scope.spawn(move || {
                    let reads: Vec<IoReadRequest> = (0..500_u64)
                        .map(|i| IoReadRequest {
                            file: file.clone(),
                            offset: (i * 1999 + thread * 77) % 1_000_000,
                            len: 308,
                        })
                        .collect();
                    for (read, outcome) in reads.iter().zip(read_all(&**engine, &reads)) {
                        assert!(outcome.unwrap() == data[read.offset as usize..][..308]);
                    }
                });
            }
        });
    });
}

#[test]
fn a_sink_that_panics_leaves_the_engine_usable() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 400_000);
        let reads: Vec<IoReadRequest> =
            (0..600_u64).map(|i| IoReadRequest { file: file.clone(), offset: i * 500, len: 300 }).collect();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut count = 0;
            fixture.engine.read_batch(&reads, &mut |_, _, _| {
                count += 1;
                assert!(count < 5, "enough");
            });
        }));
        assert!(panicked.is_err());
        for (read, outcome) in reads.iter().zip(read_all(&*fixture.engine, &reads)) {
            assert!(outcome.unwrap() == data[read.offset as usize..][..300], "{}", fixture.engine.name());
        }
    });
}

#[test]
fn writes_that_direct_io_could_not_do_are_refused_by_every_engine() {
    on_every_engine(|fixture| {
        let file = fixture.create("a", 0);
        assert_eq!(kind(file.write_at(1, &[0; ALIGNMENT])), Some(Kind::Input));
        assert_eq!(kind(file.write_at(0, &[0; 100])), Some(Kind::Input));
        assert_eq!(file.len().unwrap(), 0);
    });
}

#[test]
fn a_write_from_memory_of_any_alignment_is_whole() {
    on_every_engine(|fixture| {
        let file = fixture.create("a", 0);
        let bytes = pattern((2 << 20) + ALIGNMENT);
        let unaligned = &bytes[1..=2 << 20];
        file.write_at(ALIGNMENT as u64, unaligned).unwrap();
        let mut found = vec![0; unaligned.len()];
        file.read_at(ALIGNMENT as u64, &mut found).unwrap();
        assert!(found == unaligned, "{}", fixture.engine.name());
        assert_eq!(file.len().unwrap(), (ALIGNMENT + unaligned.len()) as u64);
        let mut hole = vec![1; ALIGNMENT];
        file.read_at(0, &mut hole).unwrap();
        assert!(hole.iter().all(|byte| *byte == 0), "what was skipped reads as zeros");
    });
}

#[test]
fn preallocating_does_not_change_the_length() {
    on_every_engine(|fixture| {
        let file = fixture.create("a", 1 << 20);
        assert!(file.is_empty().unwrap());
        file.write_at(0, &pattern(ALIGNMENT)).unwrap();
        assert_eq!(file.len().unwrap(), ALIGNMENT as u64);
        file.set_len(10).unwrap();
        assert_eq!(file.len().unwrap(), 10);
        file.set_len(5000).unwrap();
        file.sync().unwrap();
        let mut tail = vec![1; 4990];
        file.read_at(10, &mut tail).unwrap();
        assert!(tail.iter().all(|byte| *byte == 0));
    });
}

#[test]
fn files_and_directories_appear_move_and_go() {
    on_every_engine(|fixture| {
        let engine = &*fixture.engine;
        let sub = fixture.path("x/y");
        engine.create_dir_all(&sub).unwrap();
        engine.create_dir_all(&sub).unwrap();
        write_atomically(engine, &sub.join("b"), b"two").unwrap();
        write_atomically(engine, &sub.join("a"), b"one").unwrap();
        assert_eq!(engine.list(&sub).unwrap(), [sub.join("a"), sub.join("b")]);
        assert_eq!(engine.list(&fixture.path("x")).unwrap(), std::slice::from_ref(&sub));

        engine.rename(&sub.join("a"), &sub.join("b")).unwrap();
        assert_eq!(engine.list(&sub).unwrap(), [sub.join("b")]);
        assert_eq!(read_file(engine, &sub.join("b"), 10).unwrap(), b"one");

        engine.rename(&sub, &fixture.path("z")).unwrap();
        assert!(!engine.exists(&sub).unwrap() && engine.exists(&fixture.path("z/b")).unwrap());
        assert!(!engine.exists(&fixture.path("z/b/below-a-file")).unwrap());
        engine.sync_dir(&fixture.path("z")).unwrap();
        engine.remove_file(&fixture.path("z/b")).unwrap();
        engine.remove_dir_all(&fixture.path("x")).unwrap();
        engine.remove_dir_all(&fixture.path("z")).unwrap();
        assert_eq!(engine.list(&fixture.dir).unwrap(), Vec::<PathBuf>::new());
    });
}

#[test]
fn missing_or_blocked_path_is_storage_error_with_errno() {
    on_every_engine(|fixture| {
        let engine = &*fixture.engine;
        write_atomically(engine, &fixture.path("a"), b"x").unwrap();
        let missing = fixture.path("missing");
        let errors = [
            (engine.open(&missing, IoOpenMode::Read).map(drop), libc::ENOENT, &missing),
            (
                engine.open(&fixture.path("a"), IoOpenMode::Create { preallocate: 0 }).map(drop),
                libc::EEXIST,
                &fixture.path("a"),
            ),
            (engine.list(&missing).map(drop), libc::ENOENT, &missing),
            (engine.rename(&missing, &fixture.path("b")), libc::ENOENT, &missing),
            (engine.remove_file(&missing), libc::ENOENT, &missing),
            (engine.remove_dir_all(&missing), libc::ENOENT, &missing),
            (engine.sync_dir(&missing), libc::ENOENT, &missing),
        ];
        for (index, (outcome, errno, path)) in errors.into_iter().enumerate() {
            let error = outcome.unwrap_err();
            let found = (error.kind(), error.errno(), error.path());
            assert_eq!(found, (Kind::Storage, Some(errno), Some(&**path)), "case {index} of {}", engine.name());
        }
        let file = engine.open(&fixture.path("a"), IoOpenMode::Read).unwrap();
        assert_eq!(kind(file.write_at(0, &pattern(ALIGNMENT))), Some(Kind::Storage), "opened for reading");
    });
}

#[test]
fn a_removed_file_can_be_read_through_its_open_handle() {
    on_every_engine(|fixture| {
        let (file, data) = fixture.filled("a", 9000);
        fixture.engine.remove_file(&fixture.path("a")).unwrap();
        let read = IoReadRequest { file, offset: 4000, len: 5000 };
        assert!(read_all(&*fixture.engine, &[read]).remove(0).unwrap() == data[4000..]);
    });
}

#[test]
fn publishing_replaces_a_file_and_a_leftover_of_an_earlier_try() {
    on_every_engine(|fixture| {
        let engine = &*fixture.engine;
        let path = fixture.path("manifest");
        write_atomically(engine, &path, b"").unwrap();
        assert_eq!(read_file(engine, &path, 0).unwrap(), b"");
        fixture.filled("manifest.tmp", 100);
        write_atomically(engine, &path, b"second").unwrap();
        assert_eq!(read_file(engine, &path, 6).unwrap(), b"second");
        assert_eq!(kind(read_file(engine, &path, 5)), Some(Kind::Corruption));
        assert_eq!(engine.list(&fixture.dir).unwrap(), [path]);
    });
}

#[test]
fn a_directory_is_held_once_and_free_again_after_the_drop() {
    on_every_engine(|fixture| {
        let first = fixture.engine.lock_dir(&fixture.dir).unwrap();
        let error = fixture.engine.lock_dir(&fixture.dir).unwrap_err();
        assert_eq!(error.kind(), Kind::InUse);
        assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
        assert_eq!(first.dir(), fixture.dir);
        drop(first);
        fixture.engine.lock_dir(&fixture.dir).unwrap();
        assert!(fixture.engine.lock_dir(&fixture.path("missing")).is_err());
    });
}

#[test]
fn engine_names_state_method_and_page_cache_use() {
    for fixture in every_engine() {
        let file = fixture.create("a", 0);
        let name = fixture.engine.name();
        assert_eq!(name.ends_with("+direct"), file.is_direct(), "{name}");
    }
    assert_eq!(PsyncEngine::new(false).name(), "pread");
    assert_eq!(MemoryEngine::default().name(), "memory");
}

#[test]
fn a_symbolic_link_is_not_opened() {
    for fixture in every_engine().into_iter().filter(|fixture| !fixture.engine.name().contains("memory")) {
        fixture.filled("a", 10);
        std::os::unix::fs::symlink(fixture.path("a"), fixture.path("link")).unwrap();
        assert_eq!(kind(fixture.engine.open(&fixture.path("link"), IoOpenMode::Read)), Some(Kind::Path));
        assert!(fixture.engine.exists(&fixture.path("link")).unwrap());
    }
}

#[test]
fn a_file_system_that_is_full_says_so_at_the_preallocation() {
    let fixture = Fixture { engine: Arc::new(PsyncEngine::default()), dir: PathBuf::from("/dev/shm"), _held: None };
    if !Path::new("/dev/shm").is_dir() {
        return;
    }
    let held = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = held.path().join("a");
    let error = fixture.engine.open(&path, IoOpenMode::Create { preallocate: 1 << 50 }).unwrap_err();
    assert!(matches!(error.errno(), Some(libc::ENOSPC | libc::EFBIG)), "{error}");
    assert!(!fixture.engine.exists(&path).unwrap(), "the empty file is gone");
}

#[test]
fn a_sink_sees_its_reads_on_the_thread_that_asked() {
    on_every_engine(|fixture| {
        let (file, _) = fixture.filled("a", 100_000);
        let reads: Vec<IoReadRequest> =
            (0..200_u64).map(|i| IoReadRequest { file: file.clone(), offset: i * 400, len: 200 }).collect();
        let threads = Mutex::new(Vec::new());
        fixture.engine.read_batch(&reads, &mut |_, _, _| threads.lock().unwrap().push(std::thread::current().id()));
        assert!(threads.into_inner().unwrap().iter().all(|id| *id == std::thread::current().id()));
    });
}

#[test]
fn a_path_that_cannot_be_looked_at_is_not_taken_for_absent() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    std::os::unix::fs::symlink("round", root.join("round")).unwrap();
    let plain: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let held = std::fs::File::open(root).unwrap();
    let beneath = ConfinedEngine::engine(
        Arc::clone(&plain),
        root,
        held.into(),
        embcache::paths::PathChecks::Strict.entry_check(),
    );
    for (engine, through_a_link) in [(plain, Kind::Storage), (beneath, Kind::Path)] {
        assert!(engine.exists(&root.join("round")).unwrap(), "the link itself");
        assert!(!engine.exists(&root.join("nothing/below")).unwrap());
        let unknown = engine.exists(&root.join("x".repeat(300))).unwrap_err();
        assert_eq!((unknown.kind(), unknown.errno()), (Kind::Storage, Some(libc::ENAMETOOLONG)), "{unknown}");
        assert_eq!(engine.exists(&root.join("round/below")).unwrap_err().kind(), through_a_link);
    }
}

#[test]
fn disk_read_reports_its_time_and_memory_read_reports_zero() {
    on_every_engine(|fixture| {
        let (file, _) = fixture.filled("a", 100_000);
        let reads: Vec<IoReadRequest> =
            (0..200_u64).map(|i| IoReadRequest { file: file.clone(), offset: i * 400, len: 200 }).collect();
        let began = Instant::now();
        let mut durations = Vec::new();
        fixture.engine.read_batch(&reads, &mut |_, outcome, took| {
            outcome.unwrap();
            durations.push(took);
        });
        let whole = began.elapsed();
        let is_disk = !fixture.engine.name().ends_with("memory");
        assert_eq!(durations.len(), reads.len());
        assert!(durations.iter().all(|took| (*took > Duration::ZERO) == is_disk), "{}", fixture.engine.name());
        assert!(durations.iter().all(|took| *took <= whole), "{}", fixture.engine.name());
    });
}
