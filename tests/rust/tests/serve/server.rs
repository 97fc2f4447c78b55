//! Serving: every row of a checkpoint, with any chain of deltas, equals the result of a load.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use embcache::Kind;
use embcache::checkpoint::{
    CheckpointDirectory, CheckpointId, CheckpointName, CheckpointSave, DeltaChanges, RankWriter, SaveOptions,
};
use embcache::config::OptimizerKind;
use embcache::io::{IoEngine, PsyncEngine};
use embcache::lifecycle::{ExpiryRule, ExpirySweep};
use embcache::paths::PathChecks;
use embcache::serve::{MissingRead, PollOutcome, PoolingMode, ServeOptions, TableServer, make_index};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, kind, load, memory, on, save, save_delta, save_with};
use embcache_tests::directory_in;
use embcache_tests::serve::{check, opened};

fn tables(salt: u64) -> Vec<Table> {
    let ids: Vec<Id> = (0..700).map(|n| n * n * 7919 - 40_000).collect();
    vec![
        Table::new("sparse.a", "item", OptimizerKind::RowWiseAdagrad, 16, &ids, salt),
        Table::new("sparse.a", "user", OptimizerKind::Adam, 5, &ids[..300], salt + 1),
        Table::new("sparse.b", "item", OptimizerKind::Sgd, 1, &ids[..1], salt + 2),
        Table::new("sparse.b", "none", OptimizerKind::Sgd, 33, &[], salt + 3),
    ]
}

/// An engine in memory, and one on the disk with its directory.
fn engines() -> Vec<(Arc<dyn IoEngine>, std::path::PathBuf, Option<tempfile::TempDir>)> {
    let dir = tempfile::tempdir().expect("a directory");
    let disk: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let root = dir.path().to_owned();
    vec![(Arc::new(memory()), ROOT.into(), None), (disk, root, Some(dir))]
}

#[test]
fn every_row_is_served_for_any_number_of_saving_ranks() {
    for (engine, root, _dir) in engines() {
        for world in 1..=4 {
            let saved = tables(u64::from(world));
            save(&engine, &root, &saved, world, 3000, u64::from(world)).expect("saved");
            let serving = TableServer::open(directory_in(&engine, &root), ServeOptions::default()).expect("opened");
            check(&serving, &saved);
            let again = TableServer::open(directory_in(&engine, &root), ServeOptions::default()).expect("opened again");
            check(&again, &saved);
            assert!(make_index(&directory_in(&engine, &root), None, &mut || Ok(())).expect("an index").existed);
        }
    }
}

/// The tables after some rows were changed, removed and inserted.
pub(crate) fn changed(before: &[Table], salt: u64) -> Vec<Table> {
    let mut after = before.to_vec();
    for table in &mut after {
        let ids: Vec<Id> = table.rows.keys().copied().collect();
        let (dim, kind) = (table.spec.dim as usize, table.spec.optimizer_kind().expect("an optimizer"));
        let pick = |n: u64| move |id: &&Id| (**id as u64 ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 59 == n;
        let mut touched: Vec<Id> = ids.iter().filter(pick(3)).copied().collect();
        touched.extend((0..20).map(|n| 9_000_000 + salt as Id * 10 + n));
        let new = Table::new("", "", kind, dim, &touched, salt);
        table.rows.extend(new.rows);
        ids.iter().filter(pick(5)).for_each(|id| {
            table.rows.remove(id);
        });
        table.spec.step += 1;
    }
    after
}

#[test]
fn a_follower_serves_what_a_load_of_the_same_chain_gives() {
    for (engine, root, _dir) in engines() {
        let mut now = tables(3);
        let mut parent: CheckpointId = save(&engine, &root, &now, 2, 3000, 1).expect("saved").identity;
        let serving = TableServer::open(directory_in(&engine, &root), ServeOptions::default()).expect("opened");
        for round in 0..12 {
            let next = changed(&now, 100 + round);
            let published = if round == 7 {
                save_with(&engine, &root, &next, (3, 2000), round, SaveOptions::default())
            } else {
                save_delta(&engine, &root, (&now, &next), (1 + round as u32 % 3, 2000), round, on(&parent))
            };
            (now, parent) = (next, published.expect("saved").identity);
            let pinned = serving.pin().expect("a version");
            assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
            assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate);
            assert_ne!(pinned.name(), serving.pin().expect("a version").name());
            check(&serving, &now);
            assert!(load(&engine, &root, 2).expect("loaded") == now);
            let again = TableServer::open(directory_in(&engine, &root), ServeOptions::default()).expect("opened");
            check(&again, &now);
            if round == 4 {
                make_index(&directory_in(&engine, &root), None, &mut || Ok(())).expect("an index of the chain");
            }
        }
        let stats = serving.stats();
        assert_eq!(
            (stats.swaps, stats.failed_polls, stats.versions),
            (12, 0, 2),
            "the one before is kept for a rollback"
        );
    }
}

#[test]
fn rows_that_were_preloaded_are_never_waited_for() {
    let (dir, engine, saved, parent) = saved_on_disk();
    let root = dir.path();
    let options = ServeOptions { preload: true, ..ServeOptions::default() };
    let serving = opened(&engine, root, options.clone());
    let without = opened(&engine, root, ServeOptions::default());
    check(&serving, &saved);
    check(&without, &saved);
    assert_eq!(serving.stats().cold_rows, 0);
    assert!(without.stats().cold_rows > 0, "without it rows are read as they are asked for");
    let next = changed(&saved, 6);
    save_delta(&engine, root, (&saved, &next), (2, 3000), 6, on(&parent)).expect("saved");
    serving.poll().expect("a look");
    check(&serving, &next);
    save_with(&engine, root, &saved, (1, 3000), 7, SaveOptions::default()).expect("saved");
    serving.poll().expect("a look");
    check(&serving, &saved);
    assert_eq!(serving.stats().cold_rows, 0);
    let mut turns = 0;
    let ended = TableServer::open_while(directory_in(&engine, root), options, &mut || {
        turns += 1;
        if turns > 3 { Err(Kind::State.error("the user left")) } else { Ok(()) }
    });
    assert!(ended.is_err(), "preloading can be ended");
}

/// A directory on disk with a full checkpoint of `tables(5)`, and its contents.
pub(crate) fn saved_on_disk() -> (tempfile::TempDir, Arc<dyn IoEngine>, Vec<Table>, CheckpointId) {
    let dir = tempfile::tempdir().expect("a directory");
    let engine: Arc<dyn IoEngine> = Arc::new(PsyncEngine::new(false));
    let saved = tables(5);
    let parent = save(&engine, dir.path(), &saved, 2, 3000, 1).expect("saved").identity;
    (dir, engine, saved, parent)
}

/// Every file of a checkpoint whose name has this ending.
pub(crate) fn files(root: &Path, checkpoint: &str, ending: &str) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root.join(checkpoint)).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(std::fs::read_dir(path).expect("a directory").map(|entry| entry.expect("an entry").path()));
        } else {
            found.push(path);
        }
    }
    found.retain(|path| path.to_string_lossy().ends_with(ending));
    found.sort();
    found
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).expect("read");
    bytes[at] ^= 1;
    std::fs::write(path, bytes).expect("written");
}

#[test]
fn a_delta_that_is_damaged_anywhere_leaves_the_version_before_serving() {
    let (dir, engine, before, parent) = saved_on_disk();
    let after = changed(&before, 1);
    let delta = save_delta(&engine, dir.path(), (&before, &after), (2, 2000), 2, on(&parent)).expect("saved");
    let (name, latest) = (delta.identity.name, dir.path().join("LATEST"));
    let serving_before = || {
        std::fs::write(&latest, format!("{}\n", parent.name)).expect("written");
        let serving = opened(&engine, dir.path(), ServeOptions::default());
        std::fs::write(&latest, format!("{name}\n")).expect("written");
        serving
    };
    let mut serving = serving_before();
    let (mut refused, mut served) = (0, 0);
    for path in files(dir.path(), &name, "") {
        let whole = std::fs::read(&path).expect("read");
        for at in (0..whole.len()).step_by((whole.len() / 17).max(1)) {
            flip(&path, at);
            if serving.poll().is_err() {
                refused += 1;
                check(&serving, &before);
                assert!(serving.stats().last_error.is_some());
            } else {
                // Optimizer slots are not read. Any other corruption is rejected.
                served += 1;
                check(&serving, &after);
                serving = serving_before();
            }
            std::fs::write(&path, &whole).expect("written");
        }
        std::fs::remove_file(&path).expect("removed");
        assert!(serving.poll().is_err(), "without {}", path.display());
        check(&serving, &before);
        std::fs::write(&path, &whole).expect("written");
    }
    assert!(refused > 50 && served > 0 && served < refused, "{refused} refused, {served} served");
    assert_eq!(
        serving.poll().expect("whole again"),
        PollOutcome::Newer(name.parse::<CheckpointName>().expect("a name"))
    );
    check(&serving, &after);
    assert_eq!(serving.stats().last_error, None);
}

#[test]
fn an_index_that_is_damaged_or_of_another_chain_is_made_again() {
    let (dir, engine, saved, parent) = saved_on_disk();
    check(&opened(&engine, dir.path(), ServeOptions::default()), &saved);
    let index = dir.path().join(&parent.name).join("serve.idx");
    let whole = std::fs::read(&index).expect("an index");
    for at in (0..whole.len()).step_by(whole.len() / 40) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&index, bytes).expect("written");
        check(&opened(&engine, dir.path(), ServeOptions::default()), &saved);
    }
    for length in [0, 5, 4096, whole.len() - 1] {
        std::fs::write(&index, &whole[..length]).expect("written");
        check(&opened(&engine, dir.path(), ServeOptions::default()), &saved);
    }
    let other = tables(6);
    let name = save(&engine, dir.path(), &other, 2, 3000, 2).expect("saved").identity.name;
    std::fs::write(dir.path().join(name).join("serve.idx"), &whole).expect("written");
    check(&opened(&engine, dir.path(), ServeOptions::default()), &other);
}

#[test]
fn what_is_served_stays_when_its_directory_is_removed() {
    let (dir, engine, saved, _) = saved_on_disk();
    let serving = opened(&engine, dir.path(), ServeOptions::default());
    std::fs::remove_dir_all(dir.path()).expect("removed");
    check(&serving, &saved);
    assert!(serving.poll().is_err());
    check(&serving, &saved);
}

#[test]
fn a_directory_that_cannot_be_written_is_served_from_memory() {
    let (dir, engine, saved, parent) = saved_on_disk();
    let root = CheckpointDirectory::open_to_load(dir.path(), PathChecks::Basic).expect("a directory");
    let allowed = ServeOptions { host_bytes: Some(1 << 20), ..ServeOptions::default() };
    check(&TableServer::open(root.clone(), allowed).expect("opened"), &saved);
    // A directory in place of the index's temporary file: nothing can be written there.
    std::fs::remove_file(dir.path().join(&parent.name).join("serve.idx")).expect("it was made");
    std::fs::create_dir(dir.path().join(&parent.name).join("serve.idx.tmp")).expect("made");
    let serving = TableServer::open(root.clone(), ServeOptions::default()).expect("opened");
    check(&serving, &saved);
    assert!(serving.stats().private_bytes > 0 && serving.stats().shared_index_bytes == 0);
    let refused = TableServer::open(root, ServeOptions { host_bytes: Some(100), ..ServeOptions::default() });
    assert_eq!(kind(refused), Kind::Capacity);
    drop(engine);
}

#[test]
fn a_version_can_be_chosen_and_gone_back_from() {
    let (dir, engine, first, parent) = saved_on_disk();
    let keep = SaveOptions { keep: 9, ..on(&parent) };
    let second = changed(&first, 1);
    let serving = opened(&engine, dir.path(), ServeOptions::default());
    assert_eq!(kind(serving.rollback()), Kind::State);
    let on_first = save_delta(&engine, dir.path(), (&first, &second), (1, 2000), 2, keep).expect("saved").identity;
    serving.poll().expect("a look");
    check(&serving, &second);
    assert_eq!(serving.rollback().expect("one before").to_string(), parent.name);
    check(&serving, &first);
    assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate, "it was rolled back from");
    check(&serving, &first);
    let third = changed(&second, 2);
    save_delta(&engine, dir.path(), (&second, &third), (1, 2000), 3, on(&on_first)).expect("saved");
    serving.poll().expect("a look");
    check(&serving, &third);
    for (at, expected) in [("1", &first), ("0000000002", &second), (on_first.name.as_str(), &second), ("3", &third)] {
        let one = opened(&engine, dir.path(), ServeOptions { at: Some(at.into()), ..ServeOptions::default() });
        check(&one, expected);
        assert_eq!(one.poll().expect("a look"), PollOutcome::UpToDate, "a chosen version stays");
    }
    let none = TableServer::open(
        directory_in(&engine, dir.path()),
        ServeOptions { at: Some("7".into()), ..ServeOptions::default() },
    );
    assert_eq!(kind(none), Kind::Path);
}

#[test]
fn bags_are_pooled_and_bad_requests_are_refused() {
    let (dir, engine, saved, _) = saved_on_disk();
    let serving =
        opened(&engine, dir.path(), ServeOptions { missing: Some(MissingRead::Zeros), ..ServeOptions::default() });
    let version = serving.pin().expect("a version");
    let table = version.table("sparse.a/item").expect("the table");
    assert_eq!(kind(version.table("item").cloned()), Kind::Mismatch, "two modules have an item");
    let mut ids: Vec<Id> = saved[0].rows.keys().copied().cycle().take(5000).collect();
    ids.extend([5, 6]);
    let offsets: Vec<i64> = vec![0, 3, 3, 10, 4000, 5001, 5002];
    let weights: Vec<f32> = (0..ids.len()).map(|n| n as f32 * 0.25).collect();
    let mut rows = vec![0.0; ids.len() * 16];
    table.lookup(&ids, &mut rows, &mut vec![false; ids.len()]).expect("served");
    for (pooling, weights) in
        [(PoolingMode::Sum, None), (PoolingMode::Mean, None), (PoolingMode::Sum, Some(&weights[..]))]
    {
        let mut out = vec![0.0; 6 * 16];
        let missing = table.lookup_pooled(&ids, &offsets, pooling, weights, &mut out).expect("served");
        assert_eq!(missing, 2);
        for (bag, out) in out.chunks(16).enumerate() {
            let span = offsets[bag] as usize..offsets[bag + 1] as usize;
            for column in 0..16 {
                let term =
                    |n: usize| f64::from(rows[n * 16 + column]) * weights.map_or(1.0, |weights| f64::from(weights[n]));
                let sum: f64 = span.clone().map(term).sum();
                let scale: f64 = span.clone().map(|n| term(n).abs()).sum();
                let expected = if pooling == PoolingMode::Mean { sum / span.len().max(1) as f64 } else { sum };
                assert!((f64::from(out[column]) - expected).abs() <= 1e-6 * scale, "bag {bag}, column {column}");
            }
        }
    }
    let mut out = vec![0.0; 6 * 16];
    for offsets in [&[][..], &[0, 1], &[1, 5002], &[0, 9, 3, 5002], &[0, 5003], &[-1, 5002]] {
        assert_eq!(
            kind(table.lookup_pooled(&ids, offsets, PoolingMode::Sum, None, &mut out)),
            Kind::Input,
            "{offsets:?}"
        );
    }
    assert_eq!(
        kind(table.lookup_pooled(&ids, &[0, 5002], PoolingMode::Sum, None, &mut out)),
        Kind::Input,
        "room for six bags"
    );
    assert_eq!(kind(table.lookup(&[1, 2], &mut [0.0; 16], &mut [false; 2])), Kind::Input);
    assert_eq!(kind(table.lookup(&[1], &mut [0.0; 16], &mut [])), Kind::Input);
}

#[test]
fn what_is_too_old_is_refused_where_that_was_asked_for() {
    let (dir, engine, saved, _) = saved_on_disk();
    let old = ServeOptions { max_staleness: Some(Duration::ZERO), ..ServeOptions::default() };
    check(&opened(&engine, dir.path(), old.clone()), &saved);
    let refusing = opened(&engine, dir.path(), ServeOptions { raise_when_stale: true, ..old });
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(kind(refusing.pin()), Kind::Stale);
    assert!(refusing.stats().staleness_seconds > 0.0);
    let shared = ServeOptions { missing: Some(MissingRead::OovRow), ..ServeOptions::default() };
    assert_eq!(kind(TableServer::open(directory_in(&engine, dir.path()), shared)), Kind::Mismatch);
}

/// Saves a delta of one table on `parent`: the rows of `changed`, and a sweep after which `total_rows` remain.
pub(crate) fn save_sweep(
    engine: &Arc<dyn IoEngine>,
    parent: &CheckpointId,
    changed: &Table,
    sweeps: &[ExpirySweep],
    total_rows: u64,
    random: u64,
) -> CheckpointId {
    let directory = directory_in(engine, ROOT);
    let save = CheckpointSave::begin_with(&directory, random, on(parent)).expect("begun");
    let mut writer = RankWriter::new(&directory, save.name(), 0, 1).expect("a writer");
    let buckets = changed.buckets_of(0, 1);
    let changes = DeltaChanges { tombstones: &[], sweeps, total_rows };
    let mut source = changed.source(&buckets, 5);
    writer.write_changes(changed.spec.clone(), buckets, &mut source, changes).expect("written");
    let digest = writer.finish().expect("durable");
    save.publish(&[digest], 1).expect("published").identity
}

#[test]
fn expired_row_does_not_expose_replaced_version() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let table = |weight: f32, ids: &[Id]| {
        let mut table = Table::new("m", "t", OptimizerKind::Sgd, 2, ids, 1);
        for (header, vector) in table.rows.values_mut() {
            header.last_step = 1;
            vector.fill(weight);
        }
        table
    };
    let full = save(&engine, Path::new(ROOT), &[table(9.0, &[1, 2, 3])], 1, 1000, 1).expect("saved").identity;
    let serving = TableServer::open(directory_in(&engine, ROOT), ServeOptions::default()).expect("opened");
    let small = save_sweep(&engine, &full, &table(0.1, &[2]), &[], 3, 2);
    serving.poll().expect("a look");
    let sweep = ExpirySweep { step: 5, rule: ExpiryRule::NormBelow(1.0) };
    save_sweep(&engine, &small, &table(0.0, &[]), &[sweep], 2, 3);
    let expected = [table(9.0, &[1, 3])];
    assert!(load(&engine, Path::new(ROOT), 1).expect("loaded")[0].rows == expected[0].rows);
    serving.poll().expect("a look");
    check(&serving, &expected);
    // By an index of the entire chain.
    engine.remove_file(&Path::new(ROOT).join(&full.name).join("serve.idx")).expect("it was made");
    check(&TableServer::open(directory_in(&engine, ROOT), ServeOptions::default()).expect("opened"), &expected);
}
