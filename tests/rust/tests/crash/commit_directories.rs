//! A flush of tables below several commit directories is atomic, at whichever point it stops.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig};
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, MemoryEngine, read_file, write_atomically};
use embcache::ssd::{CommitDirectory, SsdTier};
use embcache::types::Id;
use embcache_tests::{Contents, Rig, config, flips, tells_of_damage};

/// The first root is the coordinator.
const ROOTS: [&str; 3] = ["/one", "/two", "/three"];
const OPTIMIZER: OptimizerKind = OptimizerKind::RowWiseAdagrad;

fn directory(root: usize) -> PathBuf {
    Path::new(ROOTS[root]).join("m/t/0-of-1")
}

fn open(engine: &Arc<dyn IoEngine>, reopen: ReopenMode, token: Option<u64>) -> embcache::Result<Vec<Rig>> {
    let one = |root| {
        let mut wanted = config(4, OPTIMIZER, 10);
        wanted.ssd = Some(SsdConfig { dir: directory(root), bytes: 256 << 10, reopen, resume_commit_id: token });
        Rig::open(wanted, engine.clone())
    };
    (0..ROOTS.len()).map(one).collect()
}

fn root(engine: &Arc<dyn IoEngine>, root: usize) -> CommitDirectory {
    CommitDirectory::new(engine.clone(), Path::new(ROOTS[root]))
}

fn train(rigs: &[Rig], step: u32) -> embcache::Result<()> {
    rigs.iter().enumerate().try_for_each(|(root, rig)| {
        let ids: Vec<Id> = (0..30).map(|id| id * 3 % 17 + Id::from(step) + root as Id).collect();
        rig.train(&ids, 3, step).map(|_| ())
    })
}

fn contents(rigs: &[Rig]) -> Vec<Contents> {
    rigs.iter().map(|rig| rig.contents().expect("rows")).collect()
}

/// Flushes like `torchrec_embcache.flush`. States that earlier flushes left incomplete are `forgotten`.
fn flush(engine: &Arc<dyn IoEngine>, rigs: &[Rig], token: u64) -> embcache::Result<()> {
    let roots: Vec<CommitDirectory> = (0..ROOTS.len()).map(|number| root(engine, number)).collect();
    let names = (77..).zip(&roots).map(|(random, root)| root.ensure_name(random)).collect::<Result<Vec<u64>, _>>()?;
    let mut old = Vec::new();
    for (number, rig) in rigs.iter().enumerate() {
        for other in SsdTier::published_commit_ids(&directory(number), &**engine)? {
            old.push(other);
            if !roots[number].is_committed(other)? {
                rig.table.forget_published(other)?;
            }
        }
        rig.table.flush(token)?;
    }
    for follower in &roots[1..] {
        follower.prepare(token, Path::new(ROOTS[0]), names[0])?;
    }
    for root in &roots {
        root.commit(token)?;
    }
    for (number, root) in roots.iter().enumerate() {
        let kept = SsdTier::published_commit_ids(&directory(number), &**engine)?;
        old.iter().filter(|old| !kept.contains(old)).try_for_each(|old| root.remove_records(*old))?;
    }
    Ok(())
}

/// The commit id that each root resumes, as its tables find it one by one.
fn tokens(engine: &Arc<dyn IoEngine>) -> Vec<Option<u64>> {
    let newest = |number: usize| {
        let published = SsdTier::published_commit_ids(&directory(number), &**engine).expect("listed");
        published.into_iter().rev().find(|&token| root(engine, number).is_committed(token).expect("decided"))
    };
    (0..ROOTS.len()).map(newest).collect()
}

fn disk() -> MemoryEngine {
    let memory = MemoryEngine::default();
    for root in ROOTS {
        memory.create_dir_all(Path::new(root)).expect("made");
    }
    memory.sync_dir(Path::new("/")).expect("synced");
    memory
}

/// Runs flushes 1, 2 and 3 with training between them. Returns the rows at each flush, and the number of flushes that
/// returned.
fn run(engine: &Arc<dyn IoEngine>) -> (Vec<Vec<Contents>>, usize, embcache::Result<()>) {
    let (mut states, mut done) = (Vec::new(), 0);
    let mut all = || {
        let rigs = open(engine, ReopenMode::Never, None)?;
        for token in 1..=3 {
            train(&rigs, token as u32)?;
            states.push(contents(&rigs));
            flush(engine, &rigs, token)?;
            done += 1;
        }
        Ok(())
    };
    let outcome = all();
    (states, done, outcome)
}

#[test]
fn roots_agree_after_a_stop_at_every_operation_of_flushes() {
    let mut agreed = [0; 4];
    for passing in 0.. {
        let memory = disk();
        let fault = FaultEngine::new(Arc::new(memory.clone()));
        fault.hit_change(passing, IoFault::Stop);
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        let (states, done, outcome) = run(&engine);
        for image in [memory.crash(), memory.kill(), memory.crash_torn(passing), memory.crash_torn(!passing)] {
            let context = format!("stopped after {passing} changes, {done} flushes returned");
            let engine: Arc<dyn IoEngine> = Arc::new(image.clone());
            let tokens = tokens(&engine);
            let token = tokens[0];
            assert!(tokens.iter().all(|&other| other == token), "{context}: roots resume {tokens:?}");
            agreed[token.unwrap_or(0) as usize] += 1;
            let Some(token) = token else {
                assert_eq!(done, 0, "{context}");
                continue;
            };
            assert!(token as usize >= done, "{context}: {token}");
            let rigs = open(&engine, ReopenMode::Resume, Some(token)).unwrap_or_else(|e| panic!("{context}: {e}"));
            assert!(contents(&rigs) == states[token as usize - 1], "{context}: other rows");
            // Training continues. A flush that did not finish is not a state of any later resume.
            train(&rigs, 9).expect("trained");
            let trained = contents(&rigs);
            flush(&engine, &rigs, 9).unwrap_or_else(|e| panic!("{context}: {e}"));
            drop(rigs);
            let engine: Arc<dyn IoEngine> = Arc::new(image.crash());
            assert_eq!(self::tokens(&engine), [Some(9); 3], "{context}");
            assert!(contents(&open(&engine, ReopenMode::Resume, Some(9)).expect("resumed")) == trained, "{context}");
        }
        if !fault.is_stopped() {
            outcome.expect("nothing stopped it");
            break;
        }
    }
    assert!(agreed.iter().all(|&times| times > 3), "{agreed:?}");
}

#[test]
fn a_flush_goes_on_after_an_error_at_any_operation_on_the_marks() {
    let mut failed = 0;
    for passing in 0.. {
        let memory = disk();
        let fault = FaultEngine::new(Arc::new(memory.clone()));
        let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
        let roots: Vec<CommitDirectory> = (0..2).map(|number| root(&engine, number)).collect();
        fault.hit_change(passing, IoFault::Fail(libc::ENOSPC));
        let mark = |token| {
            let name = roots[0].ensure_name(5)?;
            roots[1].ensure_name(6)?;
            roots[1].prepare(token, Path::new(ROOTS[0]), name)?;
            roots[0].commit(token)?;
            roots[1].commit(token)?;
            roots.iter().try_for_each(|root| root.remove_records(token - 2))
        };
        let outcome: embcache::Result<()> = mark(3);
        assert_eq!(roots[0].is_committed(3).expect("decided"), roots[1].is_committed(3).expect("decided"));
        match outcome {
            Err(error) => assert_eq!((error.kind(), error.errno()), (Kind::Storage, Some(libc::ENOSPC)), "{error}"),
            Ok(()) => break,
        }
        failed += 1;
        mark(5).expect("the next one does it");
        let image: Arc<dyn IoEngine> = Arc::new(memory.crash());
        assert!((0..2).all(|number| root(&image, number).is_committed(5).expect("decided")));
    }
    assert!(failed > 10, "{failed}");
}

#[test]
fn missing_or_other_coordinator_is_error_naming_it() {
    let memory = disk();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let (first, second) = (root(&engine, 0), root(&engine, 1));
    let name = first.ensure_name(5).expect("named");
    assert_eq!(first.ensure_name(6).expect("named"), name, "a root keeps its name");
    assert!(first.has_name(name).expect("looked") && !second.has_name(name).expect("looked"));
    second.ensure_name(7).expect("named");
    second.prepare(3, Path::new(ROOTS[0]), name).expect("prepared");
    assert!(!second.is_committed(3).expect("decided"));
    first.commit(3).expect("committed");
    assert!(second.is_committed(3).expect("decided"));
    // Another disk is mounted there, with its own commit records.
    for path in engine.list(Path::new("/one/.flushed")).expect("listed") {
        engine.remove_file(&path).expect("removed");
    }
    assert_ne!(first.ensure_name(8).expect("named"), name);
    first.commit(3).expect("committed");
    let error = second.is_committed(3).expect_err("nobody can say");
    assert_eq!(error.kind(), Kind::State);
    assert!(error.to_string().contains(ROOTS[0]), "{error}");
}

#[test]
fn a_damaged_mark_is_found_and_decides_nothing() {
    let memory = disk();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    root(&engine, 0).ensure_name(5).expect("named");
    root(&engine, 1).ensure_name(6).expect("named");
    root(&engine, 1).prepare(3, Path::new(ROOTS[0]), 5).expect("prepared");
    root(&engine, 0).commit(3).expect("committed");
    let path = Path::new("/two/.flushed/3.prepared");
    let bytes = read_file(&*engine, path, 4096).expect("read");
    let damaged = (0..bytes.len())
        .step_by(flips(1))
        .map(|at| {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            flipped
        })
        .chain((0..bytes.len()).map(|len| bytes[..len].to_vec()));
    for damaged in damaged {
        let image = memory.kill();
        write_atomically(&image, path, &damaged).expect("written");
        let engine: Arc<dyn IoEngine> = Arc::new(image);
        let error = root(&engine, 1).is_committed(3).expect_err("damage");
        assert_eq!(error.kind(), Kind::Corruption, "{error}");
        assert!(tells_of_damage(&error), "{error}");
    }
}

#[test]
fn marks_are_removed_with_the_states_they_are_of() {
    let memory = disk();
    let fault = FaultEngine::new(Arc::new(memory));
    let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
    let (_, done, outcome) = run(&engine);
    outcome.expect("undisturbed");
    assert_eq!(done, 3);
    for (number, marks) in [["2", "3"].as_slice(), &["2", "2.prepared", "3", "3.prepared"]].into_iter().enumerate() {
        let found = engine.list(&Path::new(ROOTS[number]).join(".flushed")).expect("listed");
        let names: Vec<&str> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        let (named, marks_found): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| name.len() == 21);
        assert_eq!(named.len(), 1, "{names:?}");
        assert_eq!(marks_found, marks);
    }
    assert!(fault.log().iter().any(|(operation, _)| *operation == IoOperation::RemoveFile));
}

#[test]
fn failed_read_of_marks_never_selects_older_state() {
    let disk_of_flushes = disk();
    let whole: Arc<dyn IoEngine> = Arc::new(disk_of_flushes.clone());
    run(&whole).2.expect("undisturbed");
    let mut refused = 0;
    for errno in [libc::EIO, libc::EMFILE, libc::EACCES] {
        for passing in 0.. {
            let fault = FaultEngine::new(Arc::new(disk_of_flushes.kill()));
            fault.hit_once(IoOperation::Exists, passing, IoFault::Fail(errno));
            let engine: Arc<dyn IoEngine> = Arc::new(fault.clone());
            let newest = |number: usize| {
                for token in SsdTier::published_commit_ids(&directory(number), &*engine)?.into_iter().rev() {
                    if root(&engine, number).is_committed(token)? {
                        return Ok(Some(token));
                    }
                }
                Ok(None)
            };
            let found: embcache::Result<Vec<Option<u64>>> = (0..ROOTS.len()).map(newest).collect();
            match found {
                Ok(tokens) => assert_eq!(tokens, [Some(3); 3], "look {passing}"),
                Err(error) => {
                    let expected = if errno == libc::EACCES { Kind::Permission } else { Kind::Storage };
                    assert_eq!((error.kind(), error.errno()), (expected, Some(errno)), "{error}");
                    refused += 1;
                    continue;
                }
            }
            let rigs = open(&engine, ReopenMode::Resume, Some(3));
            match rigs {
                Ok(_) => break,
                Err(error) => assert_eq!(error.errno(), Some(errno), "{error}"),
            }
            refused += 1;
        }
    }
    assert!(refused > 9, "{refused}");
}
