//! Serving a converted checkpoint, with the trainer's own deltas after it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use embcache::Kind;
use embcache::checkpoint::{CheckpointId, SaveOptions};
use embcache::config::OptimizerKind;
use embcache::io::{IoEngine, write_atomically};
use embcache::lifecycle::{ExpiryRule, ExpirySweep};
use embcache::rows::WeightPrecision;
use embcache::serve::{PollOutcome, ServeOptions, TableServer};
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, kind, memory, on, save, save_delta, save_with};
use embcache_tests::directory_in;

use crate::conversion::{SERVED, expected, ids, newest, serve, tables};
use crate::server::save_sweep;

fn root() -> &'static Path {
    Path::new(ROOT)
}

fn with_source(engine: &Arc<dyn IoEngine>) -> ServeOptions {
    ServeOptions { source: Some(directory_in(engine, ROOT)), ..ServeOptions::default() }
}

pub(crate) fn open(engine: &Arc<dyn IoEngine>) -> Arc<TableServer> {
    TableServer::open(directory_in(engine, SERVED), with_source(engine)).expect("opened")
}

/// Checks that every row equals its conversion, and that removed ids have none.
pub(crate) fn check(serving: &TableServer, tables: &[Table], left: &[Id], precision: WeightPrecision) {
    let version = serving.pin().expect("a version");
    for table in tables {
        let dim = table.spec.dim as usize;
        let kept: Vec<Id> = table.rows.keys().copied().collect();
        let gone = left.iter().filter(|id| !table.rows.contains_key(id));
        let ids: Vec<Id> = kept.iter().chain(gone).copied().collect();
        let (mut out, mut found) = (vec![0.0_f32; ids.len() * dim], vec![false; ids.len()]);
        let served = version.table(&table.spec.table).expect("the table");
        served.lookup(&ids, &mut out, &mut found).expect("served");
        for ((row, (_, vector)), id) in out.chunks(dim).zip(table.rows.values()).zip(&ids) {
            let bits: Vec<u32> = row.iter().map(|weight| weight.to_bits()).collect();
            assert_eq!(bits, expected(vector, dim, precision)[..dim], "id {id}, {precision:?}");
        }
        assert!(found[..kept.len()].iter().all(|found| *found) && !found[kept.len()..].iter().any(|found| *found));
        assert_eq!(served.rows(), kept.len() as u64);
    }
}

/// The tables after some rows were changed, removed and inserted.
pub(crate) fn changed(before: &[Table], salt: u64) -> Vec<Table> {
    let mut now = tables(&ids(), salt);
    for (before, now) in before.iter().zip(&mut now) {
        now.rows.retain(|id, _| id % 5 == salt as Id % 5);
        let kept = before.rows.iter().filter(|(id, _)| *id % 9 != salt as Id % 9 && *id % 5 != salt as Id % 5);
        now.rows.extend(kept.map(|(id, row)| (*id, row.clone())));
    }
    now
}

/// Every file below a directory, except locks.
pub(crate) fn files(engine: &Arc<dyn IoEngine>, directory: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in engine.list(directory).expect("a directory") {
        match engine.list(&path) {
            Ok(_) => all.extend(files(engine, &path)),
            Err(_) => all.push(path),
        }
    }
    all.retain(|path| !path.ends_with("lock"));
    all.sort();
    all
}

#[test]
fn a_trainers_deltas_read_as_if_they_were_converted() {
    for precision in WeightPrecision::ALL {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let mut now = tables(&ids()[..600], 1);
        let mut parent: CheckpointId = save(&engine, root(), &now, 2, 9000, 1).expect("saved").identity;
        serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
        let serving = open(&engine);
        check(&serving, &now, &ids(), precision);
        assert_eq!(
            serving.poll().expect("a look"),
            PollOutcome::UpToDate,
            "the trainer's newest is what was converted"
        );
        for salt in 2..6 {
            let next = changed(&now, salt);
            let world = 1 + salt as u32 % 3;
            parent =
                save_delta(&engine, root(), (&now, &next), (world, 9000), salt, on(&parent)).expect("saved").identity;
            let before = files(&engine, root());
            now = next;
            assert!(
                matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.to_string() == parent.name)
            );
            check(&serving, &now, &ids(), precision);
            // A server that opens now applies all deltas together.
            check(&open(&engine), &now, &ids(), precision);
            assert_eq!(files(&engine, root()), before, "nothing is written in the trainer's directory");
        }
        assert_eq!(serving.rollback().expect("the version before").seq, 4);
        // The same rows, converted.
        serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
        check(&open(&engine), &now, &ids(), precision);
        assert_eq!(serving.stats().failed_polls, 0);
    }
}

#[test]
fn a_new_chain_of_the_trainer_is_served_when_it_was_converted() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (first, second) = (tables(&ids()[..600], 1), tables(&ids(), 2));
    save(&engine, root(), &first, 1, 9000, 1).expect("saved");
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
    let serving = open(&engine);
    let full = save_with(&engine, root(), &second, (2, 9000), 2, SaveOptions { keep: 2, ..SaveOptions::default() });
    let full = full.expect("saved").identity;
    assert_eq!(kind(serving.poll()), Kind::Mismatch);
    assert!(serving.stats().last_error.expect("an error").contains(&full.name));
    check(&serving, &first, &ids(), WeightPrecision::Int8);
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp16).expect("made");
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(_)));
    check(&serving, &second, &ids(), WeightPrecision::Fp16);
    assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate);
    let before = serving.rollback().expect("the version before");
    assert_eq!(serving.poll().expect("a look"), PollOutcome::UpToDate, "it was rolled back from");
    assert_eq!(serving.pin().expect("a version").name(), before);
    check(&serving, &first, &ids(), WeightPrecision::Int8);
    // The trainer is a chain and a delta ahead of the server.
    let third = save_with(&engine, root(), &first, (2, 9000), 3, SaveOptions { keep: 2, ..SaveOptions::default() });
    let third = third.expect("saved").identity;
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Bf16).expect("made");
    let fourth = changed(&first, 7);
    save_delta(&engine, root(), (&first, &fourth), (1, 9000), 4, on(&third)).expect("saved");
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == 4));
    check(&serving, &fourth, &ids(), WeightPrecision::Bf16);
    // The checkpoint is converted again, and the previous one is removed: the next delta is served on the newer one.
    let fourth_name = newest(&engine, ROOT).expect("opened").identity();
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
    let fifth = changed(&fourth, 8);
    save_delta(&engine, root(), (&fourth, &fifth), (1, 9000), 5, on(&fourth_name)).expect("saved");
    assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == 5));
    check(&serving, &fifth, &ids(), WeightPrecision::Int8);
    assert_eq!(serving.stats().failed_polls, 1);
}

/// The served directory is missing or corrupted.
#[test]
fn lost_served_directory_does_not_stop_source_deltas() {
    for is_gone in [true, false] {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let first = tables(&ids()[..600], 1);
        let full = save(&engine, root(), &first, 1, 9000, 1).expect("saved").identity;
        serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
        let serving = open(&engine);
        let second = changed(&first, 2);
        let delta = save_delta(&engine, root(), (&first, &second), (1, 9000), 2, on(&full)).expect("saved").identity;
        if is_gone {
            engine.remove_dir_all(Path::new(SERVED)).expect("removed");
        } else {
            let newer = serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
            let manifest = Path::new(SERVED).join(newer.identity.name).join("manifest.json");
            write_atomically(&*engine, &manifest, b"damaged").expect("written");
        }
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == 2));
        check(&serving, &second, &ids(), WeightPrecision::Int8);
        let third = changed(&second, 3);
        save_delta(&engine, root(), (&second, &third), (2, 9000), 3, on(&delta)).expect("saved");
        assert!(matches!(serving.poll().expect("a look"), PollOutcome::Newer(name) if name.seq == 3));
        check(&serving, &third, &ids(), WeightPrecision::Int8);
        // A chain that is not based on the served checkpoint needs the directory, and its error is reported.
        save(&engine, root(), &first, 1, 9000, 4).expect("saved");
        let wanted = if is_gone { Kind::Path } else { Kind::Corruption };
        assert_eq!(kind(serving.poll()), wanted);
        check(&serving, &third, &ids(), WeightPrecision::Int8);
    }
}

#[test]
fn poll_interrupted_at_conversion_applies_nothing_else() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let (first, second) = (tables(&ids()[..600], 1), tables(&ids(), 2));
    let full = save(&engine, root(), &first, 1, 9000, 1).expect("saved").identity;
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Int8).expect("made");
    let serving = open(&engine);
    save_delta(&engine, root(), (&first, &second), (1, 9000), 2, on(&full)).expect("saved");
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Bf16).expect("made");
    let ended = serving.poll_while(&mut || Err(Kind::State.error("the user left")));
    assert!(ended.expect_err("ended").to_string().contains("the user left"));
    assert_eq!((serving.stats().failed_polls, serving.stats().version.seq), (0, 1));
    serving.poll().expect("a look");
    check(&serving, &second, &ids(), WeightPrecision::Bf16);
}

#[test]
fn a_delta_that_cannot_be_served_as_it_is_leaves_the_version_before() {
    let table = |weight: f32, ids: &[Id]| {
        let mut table = Table::new("m", "t", OptimizerKind::Sgd, 2, ids, 1);
        for (header, vector) in table.rows.values_mut() {
            header.last_step = if header.id == 2 { 1 } else { 9 };
            vector.fill(weight);
        }
        table
    };
    let weights = ExpirySweep { step: 10, rule: ExpiryRule::NormBelow(1.0) };
    let age = ExpirySweep { step: 10, rule: ExpiryRule::LastStep(2) };
    for (precision, sweep, weight, wanted) in [
        (WeightPrecision::Fp32, &weights, 0.5, Ok(4)),
        (WeightPrecision::Int8, &weights, 0.5, Err(Kind::Mismatch)),
        (WeightPrecision::Int8, &age, 0.5, Ok(3)),
        (WeightPrecision::Fp16, &age, 0.5, Ok(3)),
        (WeightPrecision::Fp16, &age, 1e30, Err(Kind::Input)),
        (WeightPrecision::Int8, &age, f32::NAN, Err(Kind::Input)),
        (WeightPrecision::Bf16, &age, 1e30, Ok(3)),
    ] {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let full = save(&engine, root(), &[table(9.0, &[1, 2, 3])], 1, 1000, 1).expect("saved").identity;
        serve(&engine, &newest(&engine, ROOT).expect("opened"), precision).expect("made");
        let serving = open(&engine);
        let total = wanted.unwrap_or(3);
        save_sweep(&engine, &full, &table(weight, &[4]), std::slice::from_ref(sweep), total, 2);
        let (mut out, mut found) = ([0.0; 8], [false; 4]);
        let polled = serving.poll();
        let version = serving.pin().expect("a version");
        let served = version.table("t").expect("the table");
        served.lookup(&[1, 2, 3, 4], &mut out, &mut found).expect("served");
        match wanted {
            Ok(rows) => {
                polled.expect("a look");
                assert_eq!(found, [true, rows == 4, true, true], "{precision:?} {sweep:?}");
            }
            Err(wanted) => {
                assert_eq!(kind(polled), wanted, "{precision:?} {sweep:?} {weight}");
                assert_eq!((found, version.name().seq), ([true, true, true, false], 1));
            }
        }
    }
}

#[test]
fn many_source_changes_are_merged_without_a_file() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let ids: Vec<Id> = (0..70_000).map(|n| n * 5 + 2000).collect();
    let table = |weight: f32| {
        let mut table = Table::new("m", "t", OptimizerKind::Sgd, 1, &ids, 1);
        table.rows.values_mut().for_each(|(_, vector)| vector.fill(weight));
        vec![table]
    };
    let full = save(&engine, root(), &table(1.0), 1, 1 << 20, 1).expect("saved").identity;
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp16).expect("made");
    let serving = open(&engine);
    let second = save_delta(&engine, root(), (&table(1.0), &table(2.0)), (1, 1 << 20), 2, on(&full)).expect("saved");
    let (trainers, own) = (files(&engine, root()), files(&engine, Path::new(SERVED)));
    serving.poll().expect("a look");
    check(&serving, &table(2.0), &[], WeightPrecision::Fp16);
    crate::faults::wait_for(|| serving.stats().overlay_ids == 0, "the delta is merged");
    check(&serving, &table(2.0), &[], WeightPrecision::Fp16);
    assert_eq!(serving.stats().shared_index_bytes, 0, "the index is in this process's memory");
    assert_eq!((files(&engine, root()), files(&engine, Path::new(SERVED))), (trainers, own));
    // Deltas continue after the merge.
    save_delta(&engine, root(), (&table(2.0), &table(3.0)), (1, 1 << 20), 3, on(&second.identity)).expect("saved");
    serving.poll().expect("a look");
    check(&serving, &table(3.0), &[], WeightPrecision::Fp16);
    // The trainer's directory may be removed: the served rows are kept.
    engine.remove_dir_all(root()).expect("removed");
    assert!(serving.poll().is_err());
    check(&serving, &table(3.0), &[], WeightPrecision::Fp16);
}

#[test]
fn an_index_that_would_pass_host_bytes_is_not_made() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    let table = |salt| tables(&ids(), salt);
    let full = save(&engine, root(), &table(1), 1, 9000, 1).expect("saved").identity;
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp16).expect("made");
    // Four tables of 700 rows, whose overlays use more than an index of them may.
    let options = ServeOptions { host_bytes: Some(10_000), ..with_source(&engine) };
    let serving = TableServer::open(directory_in(&engine, SERVED), options).expect("the index is shared");
    save_delta(&engine, root(), (&table(1), &table(2)), (1, 9000), 2, on(&full)).expect("saved");
    let error = serving.poll().expect_err("neither fits");
    assert_eq!(error.kind(), Kind::Capacity);
    assert!(error.to_string().contains("would take 47600 bytes"), "{error}");
    check(&serving, &table(1), &ids(), WeightPrecision::Fp16);
}

#[test]
fn one_checkpoint_is_served_for_good_or_a_trainer_is_followed() {
    let engine: Arc<dyn IoEngine> = Arc::new(memory());
    save(&engine, root(), &tables(&ids(), 1), 1, 9000, 1).expect("saved");
    serve(&engine, &newest(&engine, ROOT).expect("opened"), WeightPrecision::Fp16).expect("made");
    let both = ServeOptions { at: Some("1".into()), ..with_source(&engine) };
    assert_eq!(kind(TableServer::open(directory_in(&engine, SERVED), both)), Kind::Config);
    // A directory that has a copy of the trainer's own checkpoint can be followed as well.
    let own = TableServer::open(directory_in(&engine, ROOT), with_source(&engine)).expect("opened");
    assert_eq!(own.poll().expect("a look"), PollOutcome::UpToDate);
}
