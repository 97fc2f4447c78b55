//! Serving a converted checkpoint while the trainer's later deltas are corrupted, cannot be read, are removed, or are
//! very many.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{CheckpointId, SaveOptions, make_for_serving};
use embcache::config::OptimizerKind;
use embcache::io::{FaultEngine, IoEngine, IoFault, IoOperation, PsyncEngine, read_file, write_atomically};
use embcache::rows::WeightPrecision;
use embcache::serve::{PollOutcome, ServeOptions, TableServer};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, kind, memory, on, save, save_delta, save_with};
use embcache_tests::directory_in;

use crate::conversion::{SERVED, ids, newest, serve, tables};
use crate::faults::wait_for;
use crate::memory::held;
use crate::source::{changed, check, files, open};

const EIO: i32 = 5;
const EMFILE: i32 = 24;

fn root() -> &'static Path {
    Path::new(ROOT)
}

/// Converts the latest checkpoint of a trainer.
pub(crate) fn convert(engine: &Arc<dyn IoEngine>, trainer: &Path, to: &Path, precision: WeightPrecision) {
    engine.create_dir_all(to).expect("made");
    let from = newest(engine, trainer).expect("opened");
    make_for_serving(&from, &directory_in(engine, to), (5, 1), precision, &mut |_| Ok(())).expect("made");
}

/// A server of a directory, whose source is a trainer's.
fn follow(
    engine: &Arc<dyn IoEngine>,
    served: &Path,
    (theirs, trainer): (&Arc<dyn IoEngine>, &Path),
) -> Arc<TableServer> {
    let options = ServeOptions { source: Some(directory_in(theirs, trainer)), ..ServeOptions::default() };
    TableServer::open(directory_in(engine, served), options).expect("opened")
}

/// Three states of a trainer, each a delta on the previous one.
fn three() -> [Vec<Table>; 3] {
    let first = tables(&ids()[..200], 1);
    let second = changed(&first, 2);
    let third = changed(&second, 3);
    [first, second, third]
}

/// Saves the first state in full and converts it.
fn converted(engine: &Arc<dyn IoEngine>, first: &[Table], precision: WeightPrecision) -> CheckpointId {
    let full = save(engine, root(), first, 2, 9000, 1).expect("saved").identity;
    serve(engine, &newest(engine, ROOT).expect("opened"), precision).expect("made");
    full
}

/// Saves a state as a delta on another one.
fn delta(engine: &Arc<dyn IoEngine>, states: (&[Table], &[Table]), random: u64, parent: &CheckpointId) -> CheckpointId {
    save_delta(engine, root(), states, (2, 9000), random, on(parent)).expect("saved").identity
}

// ---- corruption

#[test]
fn corrupt_second_delta_keeps_first_delta_served() {
    let [first, second, third] = three();
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let full = converted(&engine, &first, WeightPrecision::Int8);
    let serving = open(&engine);
    let parent = delta(&engine, (&first, &second), 2, &full);
    serving.poll().expect("a look");
    let damaged = delta(&engine, (&second, &third), 3, &parent);
    let (mut refused, mut harmless) = (0, 0);
    for path in files(&engine, &root().join(&damaged.name)) {
        let whole = read_file(&*engine, &path, 1 << 30).expect("a file");
        for at in (0..whole.len()).step_by((whole.len() / 7).max(1)) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            write_atomically(&*engine, &path, &bytes).expect("written");
            let server = follow(&engine, Path::new(SERVED), (&engine, root()));
            if server.stats().last_error.is_none() {
                // Optimizer slots and headers of rows are not read.
                harmless += 1;
                check(&server, &third, &ids(), WeightPrecision::Int8);
                continue;
            }
            refused += 1;
            // A server that reads both deltas together serves neither.
            check(&server, &first, &ids(), WeightPrecision::Int8);
            for look in 0..2 {
                let error = serving.poll().expect_err("damaged");
                assert!(error.to_string().contains(&damaged.name), "look {look}: {error}");
                assert_eq!(error.kind(), Kind::Corruption, "byte {at} of {}: {error}", path.display());
                assert_eq!(serving.stats().last_error, Some(error.to_string()));
                check(&serving, &second, &ids(), WeightPrecision::Int8);
            }
        }
        write_atomically(&*engine, &path, &whole).expect("written");
    }
    assert!(refused > 50 && harmless > 0, "{refused} refused, {harmless} harmless");
    assert_eq!(serving.stats().failed_polls, 2 * refused);
    assert_eq!(serving.poll().expect("it is whole again"), PollOutcome::Newer(damaged.name.parse().expect("a name")));
    check(&serving, &third, &ids(), WeightPrecision::Int8);
}

#[test]
fn what_comes_after_a_damaged_delta_is_served_when_it_was_converted() {
    let [first, second, third] = three();
    for precision in WeightPrecision::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let full = converted(&engine, &first, precision);
        let serving = open(&engine);
        let parent = delta(&engine, (&first, &second), 2, &full);
        serving.poll().expect("a look");
        let damaged = delta(&engine, (&second, &third), 3, &parent);
        let directory = root().join(&damaged.name);
        for path in files(&engine, &directory).into_iter().filter(|path| path.parent() != Some(&directory)) {
            write_atomically(&*engine, &path, b"damaged").expect("written");
        }
        assert_eq!(kind(serving.poll()), Kind::Corruption);
        // A delta on it needs it, too.
        let fourth = changed(&third, 4);
        let later = delta(&engine, (&third, &fourth), 4, &damaged);
        let error = serving.poll().expect_err("its parent is damaged");
        assert!(error.kind() == Kind::Corruption && error.to_string().contains(&damaged.name), "{error}");
        check(&serving, &second, &ids(), precision);
        // A full one does not, and must be converted.
        let fifth = changed(&fourth, 5);
        let full = save_with(&engine, root(), &fifth, (1, 9000), 5, SaveOptions::default()).expect("saved").identity;
        let error = serving.poll().expect_err("it was not converted");
        assert!(error.kind() == Kind::Mismatch && error.to_string().contains(&full.name), "{error}");
        assert!(!error.to_string().contains(&later.name), "{error}");
        check(&serving, &second, &ids(), precision);
        serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
        check(&serving, &fifth, &ids(), precision);
        let sixth = changed(&fifth, 6);
        delta(&engine, (&fifth, &sixth), 6, &full);
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
        check(&serving, &sixth, &ids(), precision);
        assert_eq!((serving.stats().failed_polls, serving.stats().last_error), (3, None));
    }
}

/// A directory on the disk, in memory if there is such a disk, with a trainer's directory and a served one.
fn on_disk() -> (tempfile::TempDir, PathBuf, PathBuf, PathBuf) {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    let all = folder.path().canonicalize().expect("the folder");
    let (trainer, served) = (all.join("trained"), all.join("served"));
    for directory in [&trainer, &served] {
        std::fs::create_dir(directory).expect("room");
    }
    (folder, all, trainer, served)
}

#[test]
fn failed_polls_keep_no_mapping_no_file_and_no_lock() {
    let [first, second, third] = three();
    let (_folder, all, trainer, served) = on_disk();
    let disk: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let full = save(&disk, &trainer, &first, 2, 9000, 1).expect("saved").identity;
    convert(&disk, &trainer, &served, WeightPrecision::Fp16);
    let parent = save_delta(&disk, &trainer, (&first, &second), (2, 9000), 2, on(&full)).expect("saved").identity;
    // Files with injected faults are copied, and files with corruption only are mapped.
    let faulty = FaultEngine::new(Arc::clone(&disk));
    let theirs: Arc<dyn IoEngine> = Arc::new(faulty.clone());
    let servers = [&disk, &theirs].map(|engine| follow(&disk, &served, (engine, &trainer)));
    let newer = save_delta(&disk, &trainer, (&second, &third), (2, 9000), 3, on(&parent)).expect("saved").identity;
    let before = held(&servers[0], &all);
    assert!(before.mappings > 16 && before.descriptors == 0, "{before:?}");
    let kept = || {
        let now = held(&servers[0], &all);
        assert_eq!((now.mappings, now.descriptors), (before.mappings, 0));
        assert_eq!(servers.each_ref().map(|serving| serving.stats().versions), [2, 2]);
        for name in [&full.name, &parent.name, &newer.name] {
            drop(disk.lock_dir(&trainer.join(name)).expect("nobody holds it"));
        }
    };
    let mut data = files(&disk, &trainer.join(&newer.name));
    data.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    assert!(data.len() > 8, "{data:?}");
    for path in data {
        let whole = std::fs::read(&path).expect("a file");
        for damaged in [&whole[..whole.len() / 2], &[0; 4096]] {
            std::fs::write(&path, damaged).expect("written");
            assert_eq!(kind(servers[0].poll()), Kind::Corruption, "{}", path.display());
            kept();
        }
        std::fs::remove_file(&path).expect("removed");
        assert!(servers[0].poll().is_err());
        kept();
        std::fs::write(&path, whole).expect("written");
    }
    for operation in [IoOperation::Open, IoOperation::Read, IoOperation::Exists] {
        let mut failed = 0;
        // Only a fault during a poll makes it fail. Without a fault, the delta is served.
        while servers[1].pin().expect("a version").name().seq == 2 {
            faulty.hit_once(operation, failed, IoFault::Fail(EMFILE));
            if servers[1].poll().is_ok() {
                break;
            }
            assert!(!faulty.will_hit());
            kept();
            check(&servers[1], &second, &ids(), WeightPrecision::Fp16);
            failed += 1;
            if failed == 30 && operation != IoOperation::Exists {
                break;
            }
        }
        faulty.clear();
        assert!(failed > 1, "{operation:?}: {failed}");
    }
    for serving in &servers {
        serving.poll().expect("a look");
        check(serving, &third, &ids(), WeightPrecision::Fp16);
    }
}

// ---- a disk that fails

#[test]
fn failed_read_of_source_delta_keeps_served_version() {
    let [first, second, third] = three();
    let mut hits = BTreeMap::new();
    for fault in [IoFault::Fail(EIO), IoFault::Tear(EIO), IoFault::Flip] {
        for operation in [IoOperation::Read, IoOperation::Open, IoOperation::Exists, IoOperation::List] {
            for passing in (0..).step_by(if operation == IoOperation::Exists { 1 } else { 5 }) {
                let memory = memory();
                let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
                let full = converted(&engine, &first, WeightPrecision::Int8);
                let faulty = FaultEngine::new(Arc::new(memory));
                let theirs: Arc<dyn IoEngine> = Arc::new(faulty.clone());
                let serving = follow(&engine, Path::new(SERVED), (&theirs, root()));
                let parent = delta(&engine, (&first, &second), 2, &full);
                serving.poll().expect("a look");
                delta(&engine, (&second, &third), 3, &parent);
                faulty.hit_once(operation, passing, fault);
                let polled = serving.poll();
                let was_hit = !faulty.will_hit();
                check(&serving, if polled.is_ok() { &third } else { &second }, &ids(), WeightPrecision::Int8);
                *hits.entry(format!("{operation:?} {fault:?}")).or_insert(0) += u32::from(polled.is_err());
                faulty.clear();
                serving.poll().expect("the disk is well again");
                check(&serving, &third, &ids(), WeightPrecision::Int8);
                assert_eq!(serving.stats().last_error, None);
                if !was_hit || fault == IoFault::Flip && operation != IoOperation::Read {
                    break;
                }
            }
        }
    }
    for wanted in ["Read Fail(5)", "Read Tear(5)", "Read Flip", "Open Fail(5)", "Exists Fail(5)"] {
        assert!(hits[wanted] > 1, "{hits:?}");
    }
}

#[test]
fn panic_during_poll_keeps_served_version_and_next_poll_works() {
    let [first, second, _] = three();
    for operation in [IoOperation::Read, IoOperation::Open] {
        for passing in (0..).step_by(7) {
            let memory = memory();
            let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
            let full = converted(&engine, &first, WeightPrecision::Fp16);
            let faulty = FaultEngine::new(Arc::new(memory));
            let theirs: Arc<dyn IoEngine> = Arc::new(faulty.clone());
            let serving = follow(&engine, Path::new(SERVED), (&theirs, root()));
            delta(&engine, (&first, &second), 2, &full);
            faulty.panic_at(operation, passing);
            let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serving.poll()));
            if faulty.will_panic() {
                assert!(passing > 7, "{operation:?} {passing}");
                break;
            }
            if !matches!(looked, Ok(Ok(_))) {
                check(&serving, &first, &ids(), WeightPrecision::Fp16);
            }
            serving.poll().expect("a look");
            check(&serving, &second, &ids(), WeightPrecision::Fp16);
        }
    }
}

#[test]
fn failed_read_during_merge_keeps_changes_in_overlay() {
    let ids: Vec<Id> = (0..70_000).map(|n| n * 5 + 2000).collect();
    let table = |weight: f32| {
        let mut table = Table::new("m", "t", OptimizerKind::Sgd, 1, &ids, 1);
        table.rows.values_mut().for_each(|(_, vector)| vector.fill(weight));
        vec![table]
    };
    let (first, second) = (table(1.0), table(2.0));
    let save_on = |engine: &Arc<dyn IoEngine>, states: (&[Table], &[Table]), random, parent: &CheckpointId| {
        save_delta(engine, root(), states, (1, 1 << 20), random, on(parent)).expect("saved").identity
    };
    let (mut looks, mut merges) = (0, 0);
    for passing in (0..).step_by(7) {
        let memory = memory();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let full = save(&engine, root(), &first, 1, 1 << 20, 1).expect("saved").identity;
        serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
        let faulty = FaultEngine::new(Arc::new(memory));
        let theirs: Arc<dyn IoEngine> = Arc::new(faulty.clone());
        let serving = follow(&engine, Path::new(SERVED), (&theirs, root()));
        let mut parent = save_on(&engine, (&first, &second), 2, &full);
        faulty.hit_once(IoOperation::Read, passing, IoFault::Fail(EIO));
        if serving.poll().is_err() {
            looks += 1;
            check(&serving, &first, &[], WeightPrecision::Int8);
            continue;
        }
        wait_for(|| !faulty.will_hit() || serving.stats().overlay_ids == 0, "the merge meets the fault, or ends");
        check(&serving, &second, &[], WeightPrecision::Int8);
        let was_hit = !faulty.will_hit();
        merges += u32::from(was_hit);
        faulty.clear();
        // The next poll that finds a newer checkpoint starts the merge again.
        let mut now = second.clone();
        wait_for(
            || {
                let salt = now[0].spec.step + 1;
                let mut next = now.clone();
                next[0].spec.step = salt;
                next[0].rows.get_mut(&ids[7]).expect("a row").1.fill(salt as f32);
                parent = save_on(&engine, (&now, &next), salt + 2, &parent);
                now = next;
                serving.poll().expect("the disk is well again");
                serving.stats().overlay_ids < 100
            },
            "what failed is merged later",
        );
        check(&serving, &now, &[], WeightPrecision::Int8);
        if !was_hit {
            break;
        }
    }
    assert!(looks > 1 && merges > 1, "{looks} looks and {merges} merges failed");
}

// ---- a trainer that removes older checkpoints

#[test]
fn a_trainer_that_keeps_one_checkpoint_takes_nothing_away() {
    let options = |options: SaveOptions| SaveOptions { keep: 1, ..options };
    for precision in [WeightPrecision::Fp16, WeightPrecision::Int8] {
        let (_folder, all, trainer, served) = on_disk();
        let disk: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
        let mut now = tables(&ids()[..200], 1);
        let mut parent =
            save_with(&disk, &trainer, &now, (2, 9000), 1, options(SaveOptions::default())).expect("saved").identity;
        convert(&disk, &trainer, &served, precision);
        let serving = follow(&disk, &served, (&disk, &trainer));
        let mut before = Vec::new();
        for salt in 2..14 {
            let next = changed(&now, salt);
            before = std::mem::replace(&mut now, next);
            let is_full = salt % 4 == 0;
            let published = if is_full {
                save_with(&disk, &trainer, &now, (1, 9000), salt, options(SaveOptions::default()))
            } else {
                save_delta(&disk, &trainer, (&before, &now), (2, 9000), salt, options(on(&parent)))
            };
            parent = published.expect("saved").identity;
            if is_full {
                let error = serving.poll().expect_err("it was not converted");
                assert!(error.kind() == Kind::Mismatch && error.to_string().contains(&parent.name), "{error}");
                let there = std::fs::read_dir(&trainer).expect("a directory").filter_map(Result::ok);
                assert_eq!(there.filter(|entry| entry.path().join("manifest.json").exists()).count(), 1);
                check(&serving, &before, &ids(), precision);
                convert(&disk, &trainer, &served, precision);
            }
            assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
            check(&serving, &now, &ids(), precision);
            assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate);
        }
        // The previous version, whose files may all be removed, and the latest one of a trainer that continues after
        // that.
        serving.rollback().expect("the version before");
        check(&serving, &before, &ids(), precision);
        let next = changed(&now, 14);
        save_delta(&disk, &trainer, (&now, &next), (2, 9000), 14, options(on(&parent))).expect("saved");
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
        check(&serving, &next, &ids(), precision);
        std::fs::remove_dir_all(&all).expect("removed");
        check(&serving, &next, &ids(), precision);
    }
}

#[test]
fn poll_during_pruning_save_sees_published_checkpoint() {
    let [first, second, third] = three();
    for is_full in [false, true] {
        for stop in 0.. {
            let memory = memory();
            let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
            let full = converted(&engine, &first, WeightPrecision::Int8);
            let serving = open(&engine);
            let parent = delta(&engine, (&first, &second), 2, &full);
            let trainer = FaultEngine::new(Arc::new(memory));
            trainer.hit_change(stop, IoFault::Stop);
            let theirs: Arc<dyn IoEngine> = Arc::new(trainer.clone());
            let saved = if is_full {
                save_with(&theirs, root(), &third, (1, 9000), 3, SaveOptions::default())
            } else {
                save_delta(&theirs, root(), (&second, &third), (1, 9000), 3, on(&parent))
            };
            match serving.poll() {
                Ok(PollOutcome::Newer(name)) if name.seq == 2 => {
                    check(&serving, &second, &ids(), WeightPrecision::Int8);
                }
                Ok(PollOutcome::Newer(_)) => {
                    assert!(!is_full, "it was not converted");
                    check(&serving, &third, &ids(), WeightPrecision::Int8);
                }
                Ok(PollOutcome::UpToDate) => panic!("stop {stop}: the delta was published before"),
                Err(error) => {
                    assert!(is_full && error.kind() == Kind::Mismatch, "stop {stop}: {error}");
                    check(&serving, &first, &ids(), WeightPrecision::Int8);
                }
            }
            if !trainer.is_stopped() {
                saved.expect("nothing stopped it");
                assert!(stop > 20, "{stop} stops");
                break;
            }
        }
    }
}

#[test]
fn poll_during_conversion_serves_latest_source_delta() {
    let [first, second, third] = three();
    let (mut old, mut new) = (0, 0);
    for stop in 0.. {
        let memory = memory();
        let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
        let full = converted(&engine, &first, WeightPrecision::Int8);
        let serving = open(&engine);
        let parent = delta(&engine, (&first, &second), 2, &full);
        let from = newest(&engine, ROOT).expect("opened");
        let name = delta(&engine, (&second, &third), 3, &parent).name;
        let converter = FaultEngine::new(Arc::new(memory));
        converter.hit_change(stop, IoFault::Stop);
        let theirs: Arc<dyn IoEngine> = Arc::new(converter.clone());
        // The previous one is removed when the new one is published.
        let made =
            make_for_serving(&from, &directory_in(&theirs, SERVED), (6, 1), WeightPrecision::Int8, &mut |_| Ok(()));
        let before = files(&engine, Path::new(SERVED));
        assert_eq!(serving.poll().expect("a look"), PollOutcome::Newer(name.parse().expect("a name")), "stop {stop}");
        check(&serving, &third, &ids(), WeightPrecision::Int8);
        *(if files(&engine, Path::new(SERVED)) == before { &mut old } else { &mut new }) += 1;
        assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate);
        check(&open(&engine), &third, &ids(), WeightPrecision::Int8);
        if !converter.is_stopped() {
            made.expect("nothing stopped it");
            break;
        }
    }
    assert!(old > 10 && new > 0, "{old} with the conversion before, {new} with the new one, which got an index");
}

// ---- a chain without a new full checkpoint

/// Environment variable of a test that has its own process.
const ALONE: &str = "EMBCACHE_TEST_ALONE";
const DELTAS: u64 = 300;

#[test]
fn three_hundred_deltas_are_followed_and_opened_at_once() {
    if std::env::var_os(ALONE).is_some() {
        return follow_three_hundred_deltas();
    }
    // Other tests may share this process, and its memory is measured. It may have fewer files open than there are
    // deltas.
    let name = "source_faults::three_hundred_deltas_are_followed_and_opened_at_once";
    let mut child = std::process::Command::new("sh");
    child.args(["-c", r#"ulimit -n 128 && exec "$0" --exact "$1" --nocapture"#]);
    child.arg(std::env::current_exe().expect("this program")).arg(name);
    let status = child.env(ALONE, "1").status().expect("started");
    assert!(status.success(), "see above");
}

fn follow_three_hundred_deltas() {
    let (_folder, all, trainer, served) = on_disk();
    let disk: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let ids: Vec<Id> = (0..300).map(|n| n * 31 + 5000).collect();
    let small = |ids: &[Id], salt| {
        let mut table = Table::new("m", "a", OptimizerKind::Sgd, 4, ids, salt);
        table.rows.values_mut().flat_map(|(_, vector)| vector).for_each(|value| *value *= 1e-5);
        table
    };
    let mut now = vec![small(&ids, 1)];
    let mut parent = save(&disk, &trainer, &now, 1, 20_000, 1).expect("saved").identity;
    convert(&disk, &trainer, &served, WeightPrecision::Int8);
    let serving = follow(&disk, &served, (&disk, &trainer));
    let (first, mut middle) = (held(&serving, &all), None);
    for delta in 1..=DELTAS {
        let before = now.clone();
        let changed: Vec<Id> = ids.iter().copied().skip(delta as usize % 7).step_by(7).collect();
        now[0].rows.extend(small(&changed, delta + 1).rows);
        // Some rows are removed, and inserted again later.
        now[0].rows.remove(&ids[delta as usize % 300]);
        let published = save_delta(&disk, &trainer, (&before, &now), (1, 20_000), delta + 1, on(&parent));
        parent = published.expect("saved").identity;
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
        if delta % 50 == 0 {
            check(&serving, &now, &ids, WeightPrecision::Int8);
        }
        if delta == DELTAS / 2 {
            middle = Some(held(&serving, &all));
        }
    }
    let (middle, last) = (middle.expect("half of them"), held(&serving, &all));
    // Each delta has one file, and each file one mapping. No file stays open.
    assert_eq!(middle.mappings - first.mappings, DELTAS as usize / 2, "{first:?} {middle:?}");
    assert_eq!(last.mappings - first.mappings, DELTAS as usize, "{first:?} {last:?}");
    assert_eq!((first.descriptors, last.descriptors, last.versions), (0, 0, 2));
    assert_eq!(middle.private_bytes, last.private_bytes, "each id is kept once");
    assert!(last.anonymous < middle.anonymous + (16 << 20), "{middle:?} {last:?}");
    let at_once = follow(&disk, &served, (&disk, &trainer));
    assert_eq!(at_once.stats().version.to_string(), parent.name);
    check(&at_once, &now, &ids, WeightPrecision::Int8);
    assert_eq!(at_once.stats().private_bytes, last.private_bytes);
    assert_eq!((serving.stats().failed_polls, at_once.stats().last_error), (0, None));
    drop(at_once);
    assert_eq!(held(&serving, &all).mappings, last.mappings);
    // A conversion of all of them ends the chain: the next delta is served on the conversion only, and the previous
    // version is kept for a rollback.
    convert(&disk, &trainer, &served, WeightPrecision::Int8);
    for salt in [1000, 1001] {
        let next = vec![small(&ids[..250], salt)];
        let published = save_delta(&disk, &trainer, (&now, &next), (1, 20_000), salt, on(&parent));
        (now, parent) = (next, published.expect("saved").identity);
        serving.poll().expect("a look");
        check(&serving, &now, &ids, WeightPrecision::Int8);
    }
    assert_eq!(held(&serving, &all).mappings, first.mappings + 2);
    drop(serving);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("what the system says of this process");
    assert!(!maps.contains(all.to_str().expect("a path of text")), "nothing stays mapped");
}
