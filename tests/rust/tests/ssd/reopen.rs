//! Directories: which are rejected, how they are locked, and how one that is not empty is opened.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use embcache::config::ReopenMode;
use embcache::io::{IoEngine, IoOpenMode, MemoryEngine, PsyncEngine, default_engine};
use embcache::ssd::{ShardIdentity, SsdTier, StateCounters};
use embcache::{Kind, Result};
use embcache_tests::ssd::{Versions, append, check, config, identity, layout, open};

const DIR: &str = "/embcache-reopen/tier";
const CAP: u64 = 512 << 10;

type Change = (&'static str, fn(&mut ShardIdentity));

fn memory() -> Arc<dyn IoEngine> {
    Arc::new(MemoryEngine::default())
}

fn kind<T>(result: Result<T>) -> Kind {
    match result {
        Ok(_) => panic!("opened"),
        Err(error) => error.kind(),
    }
}

#[test]
fn a_directory_that_is_not_empty_is_refused_with_both_ways_out() {
    let engine = memory();
    let dir = Path::new(DIR);
    for _ in 0..2 {
        // An empty directory may be opened in any mode, repeatedly.
        for reopen in [ReopenMode::Never, ReopenMode::Resume, ReopenMode::Discard] {
            assert_eq!(open(&engine, &config(dir, CAP, reopen)).unwrap().1, None);
        }
    }
    let (tier, _) = open(&engine, &config(dir, CAP, ReopenMode::Never)).unwrap();
    append(&tier, &[1], 1, &mut Versions::new()).unwrap();
    drop(tier);
    let error = open(&engine, &config(dir, CAP, ReopenMode::Never)).unwrap_err();
    assert_eq!(error.kind(), Kind::State);
    assert!(error.to_string().contains("\"resume\"") && error.to_string().contains("\"discard\""), "{error}");
    // Nothing was published, so there is nothing to resume.
    let error = open(&engine, &config(dir, CAP, ReopenMode::Resume)).unwrap_err();
    assert_eq!(error.kind(), Kind::State);
    assert!(error.to_string().contains("Saver"), "{error}");
    let (tier, resumed) = open(&engine, &config(dir, CAP, ReopenMode::Discard)).unwrap();
    assert_eq!((tier.rows(), resumed), (0, None));
}

#[test]
fn discard_removes_our_files_and_no_others() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("tier");
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let (tier, _) = open(&engine, &config(&dir, CAP, ReopenMode::Never)).unwrap();
    append(&tier, &(0..50).collect::<Vec<_>>(), 1, &mut Versions::new()).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    drop(tier);
    let foreign = ["notes.txt", "1.seg", "000000000000000g.seg", "x.state"];
    for name in foreign {
        std::fs::write(dir.join(name), "mine").unwrap();
    }
    drop(open(&engine, &config(&dir, CAP, ReopenMode::Discard)).unwrap());
    let mut left: Vec<String> =
        std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["000000000000000g.seg", "1.seg", "lock", "notes.txt", "x.state"]);
}

#[test]
fn either_of_the_last_two_states_can_be_resumed_by_its_token() {
    let engine = memory();
    let dir = Path::new(DIR);
    let (tier, _) = open(&engine, &config(dir, CAP, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    let mut states = Vec::new();
    for token in [3, 5, 8] {
        append(&tier, &(0..40).map(|at| at * token).collect::<Vec<_>>(), token as u32, &mut held).unwrap();
        let counters = StateCounters { step: token as u64, epoch: 1 };
        tier.publish(Some(token as u64), counters, Vec::new()).unwrap();
        states.push((counters, held.clone()));
    }
    assert_eq!(kind(tier.publish(Some(8), StateCounters::default(), Vec::new())), Kind::Input);
    append(&tier, &[1, 2, 3], 99, &mut held).unwrap();
    tier.close().unwrap();
    drop(tier);
    assert_eq!(SsdTier::published_commit_ids(dir, &*engine).unwrap(), [5, 8]);
    let mut resume = config(dir, CAP, ReopenMode::Resume);
    resume.resume_commit_id = Some(3);
    assert_eq!(kind(open(&engine, &resume)), Kind::State);
    for (token, at) in [(None, 2), (Some(8), 2), (Some(5), 1), (None, 1)] {
        resume.resume_commit_id = token;
        let (tier, counters) = open(&engine, &resume).unwrap();
        assert_eq!(counters, Some(states[at].0));
        check(&tier, &states[at].1, -10..400);
    }
    assert_eq!(SsdTier::published_commit_ids(dir, &*engine).unwrap(), [5], "resuming a state drops those after it");
}

#[test]
fn another_table_is_refused_by_the_field_that_differs() {
    let engine = memory();
    let dir = Path::new(DIR);
    let (tier, _) = open(&engine, &config(dir, CAP, ReopenMode::Never)).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    drop(tier);
    let changes: [Change; 9] = [
        ("table", |i| i.table = "user".into()),
        ("table key", |i| i.key = 8),
        ("embedding_dim", |i| i.dim = 16),
        ("optimizer", |i| i.optimizer = "sgd".into()),
        ("seed", |i| i.seed = 2),
        ("initializer", |i| i.initializer = "Constant(0)".into()),
        ("total_num_buckets", |i| i.total_num_buckets = 11),
        ("first bucket", |i| i.bucket_begin = 1),
        ("last bucket", |i| i.bucket_end = 9),
    ];
    for (field, change) in changes {
        let mut other = identity();
        change(&mut other);
        let error = SsdTier::open(&config(dir, CAP, ReopenMode::Resume), &other, layout(), engine.clone()).unwrap_err();
        assert_eq!(error.kind(), Kind::Mismatch, "{field}");
        assert!(error.to_string().contains(field) && error.to_string().contains("Saver"), "{error}");
    }
    open(&engine, &config(dir, CAP, ReopenMode::Resume)).unwrap();
}

#[test]
fn a_directory_is_held_by_one_table_until_it_is_closed() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("tier");
    for engine in [memory(), default_engine().unwrap()] {
        let (tier, _) = open(&engine, &config(&dir, CAP, ReopenMode::Never)).unwrap();
        let error = open(&engine, &config(&dir, CAP, ReopenMode::Discard)).unwrap_err();
        assert_eq!(error.kind(), Kind::InUse);
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        tier.close().unwrap();
        assert_eq!(kind(append(&tier, &[1], 1, &mut Versions::new())), Kind::State);
        assert_eq!(kind(tier.publish(Some(1), StateCounters::default(), Vec::new())), Kind::State);
        tier.close().unwrap();
        open(&engine, &config(&dir, CAP, ReopenMode::Never)).unwrap();
    }
}

#[test]
fn wrong_directory_kind_or_mode_is_rejected_before_writes() {
    let root = tempfile::tempdir().unwrap();
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::default());
    let made = root.path().join("made");
    std::fs::create_dir(&made).unwrap();
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&made, &link).unwrap();
    assert_eq!(kind(open(&engine, &config(&link, CAP, ReopenMode::Never))), Kind::Path);
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_eq!(kind(open(&engine, &config(&file, CAP, ReopenMode::Never))), Kind::Path);
    for mode in [0o755, 0o770, 0o707, 0o777] {
        std::fs::set_permissions(&made, std::fs::Permissions::from_mode(mode)).unwrap();
        let error = open(&engine, &config(&made, CAP, ReopenMode::Never)).unwrap_err();
        assert_eq!(error.kind(), Kind::Permission);
        assert!(error.to_string().contains(&format!("chmod {:o} ", mode & 0o750)), "{error}");
    }
    assert_eq!(std::fs::read_dir(&made).unwrap().count(), 0);
    std::fs::set_permissions(&made, std::fs::Permissions::from_mode(0o750)).unwrap();
    // A directory with other contents is rejected before a lock file is created in it.
    std::fs::write(made.join("notes.txt"), "mine").unwrap();
    assert_eq!(kind(open(&engine, &config(&made, CAP, ReopenMode::Never))), Kind::State);
    assert_eq!(std::fs::read_dir(&made).unwrap().count(), 1);
    let below = root.path().join("a/b/c");
    drop(open(&engine, &config(&below, CAP, ReopenMode::Never)).unwrap());
    for dir in ["a", "a/b", "a/b/c"] {
        let mode = std::fs::metadata(root.path().join(dir)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode & !0o750, 0, "{dir} has mode {mode:o}");
    }
}

#[test]
fn a_cap_that_became_too_small_is_refused_with_the_least_that_works() {
    let engine = memory();
    let dir = Path::new(DIR);
    let (tier, _) = open(&engine, &config(dir, 2 << 20, ReopenMode::Never)).unwrap();
    let mut held = Versions::new();
    append(&tier, &(0..8000).collect::<Vec<_>>(), 1, &mut held).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    drop(tier);
    let error = open(&engine, &config(dir, 512 << 10, ReopenMode::Resume)).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    let least = error.to_string().split("set it to ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let (tier, _) = open(&engine, &config(dir, least, ReopenMode::Resume)).unwrap();
    check(&tier, &held, -5..8005);
    // The space exists: every row can be written again.
    for version in 2..5 {
        append(&tier, &(0..8000).collect::<Vec<_>>(), version, &mut held).unwrap();
    }
    check(&tier, &held, -5..8005);
}

#[test]
fn an_older_state_that_is_damaged_holds_no_bytes_of_the_cap() {
    let memory = MemoryEngine::default();
    let engine: Arc<dyn IoEngine> = Arc::new(memory.clone());
    let dir = Path::new("/embcache-reopen/older");
    let (tier, _) = open(&engine, &config(dir, 1 << 20, ReopenMode::Never)).unwrap();
    let rows = tier.capacity_rows() as i64;
    let ids: Vec<i64> = (0..rows * 2 / 5).collect();
    let mut held = Versions::new();
    let segments = |engine: &MemoryEngine| {
        let mut files = engine.list(dir).unwrap();
        files.retain(|path| path.extension().is_some_and(|suffix| suffix == "seg"));
        files.sort();
        files
    };
    append(&tier, &ids, 1, &mut held).unwrap();
    tier.publish(Some(1), StateCounters::default(), Vec::new()).unwrap();
    let of_the_first = segments(&memory);
    append(&tier, &ids, 2, &mut held).unwrap();
    tier.publish(Some(2), StateCounters::default(), Vec::new()).unwrap();
    tier.close().unwrap();
    drop(tier);
    let there: Vec<_> = of_the_first.into_iter().filter(|path| segments(&memory).contains(path)).collect();
    assert!(there.len() > 2, "both states have segments of their own");
    engine.remove_file(there.last().unwrap()).unwrap();
    let (tier, _) = open(&engine, &config(dir, 1 << 20, ReopenMode::Resume)).unwrap();
    let files = segments(&memory);
    assert!(there.iter().all(|path| !files.contains(path)), "nothing of the older state is left");
    let on_disk: u64 = files.iter().map(|path| engine.open(path, IoOpenMode::Read).unwrap().len().unwrap()).sum();
    assert_eq!(tier.stats().tier.bytes, on_disk);
    check(&tier, &held, 0..rows);
    // The entire cap can be used.
    append(&tier, &(0..rows).collect::<Vec<_>>(), 3, &mut held).unwrap();
    check(&tier, &held, 0..rows);
}
