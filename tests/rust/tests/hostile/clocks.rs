//! Step clocks in the manifests of ranks and of the coordinator. Each impossible clock is corruption, which is detected
//! before a table changes.

use std::path::{Path, PathBuf};

use embcache::Kind;
use embcache::checkpoint::{CheckpointChain, LatestCheckpoint};
use embcache::config::{EvictionConfig, EvictionRule, OptimizerKind, TableConfig};
use embcache_tests::checkpoint::ROOT;
use embcache_tests::{Rig, config, directory_in};
use serde_json::{Value, json};

use crate::allocations::limit;
use crate::allocator::largest_of;
use crate::checkpoint::{is_data, reseal, seed, value};
use crate::mutate::{Files, engine_of};

/// Step 0 by second 1, and step 1, which is the last of table `a`, by second 2.5.
const WHOLE: &str = "0 0 1000 1 1500";

fn manifests() -> Vec<PathBuf> {
    let is_manifest = |path: &&PathBuf| path.extension().is_some_and(|end| end == "json") && !is_data(path);
    seed().keys().filter(is_manifest).cloned().collect()
}

/// The seed, with the clock of table `a` replaced by `damage` in the manifests at `paths` and intact in the others.
fn with_clock(paths: &[&Path], damage: &Value) -> Files {
    let mut files = seed().clone();
    for path in manifests() {
        let bytes = files.get_mut(&path).unwrap();
        let mut manifest = value(bytes).unwrap();
        manifest["tables"][0]["clock"] = if paths.contains(&path.as_path()) { damage.clone() } else { WHOLE.into() };
        *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
    }
    reseal(&mut files);
    files
}

/// A table that can be loaded, with other rows and other times.
fn table() -> Rig {
    let eviction = Some(EvictionConfig { rule: EvictionRule::PerSweepTimed, every_steps: None });
    let (rig, _) = Rig::with_faults(TableConfig {
        eviction,
        total_num_buckets: 7,
        buckets: 0..7,
        ..config(4, OptimizerKind::RowWiseAdagrad, 1000)
    });
    rig.table.set_time(7_000).unwrap();
    rig.train(&[5, 900, -900], 3, 1).unwrap();
    rig
}

/// Loads table `a`. Opening a checkpoint allocates no more than the files explain: a pair of 16 bytes has 4 bytes of
/// text.
fn load(files: &Files, rig: &Rig) -> embcache::Result<u64> {
    let engine = engine_of(files);
    let directory = directory_in(&engine, ROOT);
    let latest = LatestCheckpoint::read(&directory)?;
    let (opened, largest) = largest_of(|| CheckpointChain::open(&directory, latest));
    assert!(largest <= 2 * limit(files), "{largest} bytes");
    opened?.table_reader("m", "a", 0..7)?.load_into(&rig.table)
}

/// Clocks that are invalid, or cannot belong to table `a`.
fn damages() -> Vec<Value> {
    let texts = [
        "",
        " ",
        "x",
        "0 0 1000 x 1500",
        "2 0 1000 1 1500", // not numbers, and an unknown kind
        "0 0 1000 1",
        "0 0 1000 1 ",
        "0 0", // truncated
        "0 0 1000 0 1500",
        "0 0 1000 1 -1500",
        "0 0 1000 -1 1500",
        "0 0 1000 +1 1500", // not increasing
        "0 0 1000 2 1500",
        "0 5 1000", // steps that the table has not made
        "0 0 1000 18446744073709551615 1500",
        "0 0 1000 1 18446744073709551615",
        "0 0 18446744073709551616 1 1500",
        "0 4611686018427387905 0",
        "0 0 4611686018427387904 1 1", // steps and times that are too large
    ]; // fmt: skip
    let long = format!("0 0 1000{}", " 1 0".repeat(50_000));
    let others = [json!(null), json!(0), json!([0, 0, 1000]), json!({}), json!(format!("{long} x")), json!(long)];
    texts.iter().map(|&text| text.into()).chain(others).collect()
}

/// An impossible step clock is corruption in each manifest that has one.
#[test]
fn impossible_step_clock_is_corruption_and_no_table_changes() {
    let rig = table();
    let state = || (rig.contents().unwrap(), rig.table.step().unwrap(), rig.table.clock().unwrap());
    let before = state();
    let all = manifests();
    let mut places: Vec<Vec<&Path>> = all.iter().map(|path| vec![path.as_path()]).collect();
    places.push(all.iter().map(PathBuf::as_path).collect());
    assert_eq!(
        places.len(),
        7,
        "two ranks' and the coordinator's, of a delta and of its parent, and all of them at once"
    );
    for place in &places {
        for damage in damages() {
            let text: String = damage.to_string().chars().take(60).collect();
            let error = load(&with_clock(place, &damage), &rig).expect_err(&text);
            assert_eq!(error.kind(), Kind::Corruption, "{text}: {error}");
            assert!(error.path().is_some(), "{text}: {error}");
            assert_eq!(state(), before, "{text}");
        }
    }
}

#[test]
fn a_step_clock_that_another_manifest_contradicts_is_damage() {
    let rig = table();
    let before = rig.contents().unwrap();
    for path in manifests() {
        // A rank may have made a step earlier than the others: then the coordinator's clock is theirs.
        for contradiction in ["0 0 1000 1 9000", "1 0 1000 1 1500"] {
            let error = load(&with_clock(&[&path], &contradiction.into()), &rig).expect_err(contradiction);
            assert_eq!(error.kind(), Kind::Corruption, "{error}");
            assert_eq!(rig.contents().unwrap(), before);
        }
    }
}

#[test]
fn the_clock_that_the_manifests_agree_on_is_loaded() {
    let rig = table();
    assert_eq!(load(&with_clock(&[], &Value::Null), &rig).unwrap(), 60);
    let clock = rig.table.clock().unwrap();
    let steps = [999, 1000, 2499, 2500].map(|time| clock.step_at(time));
    assert_eq!((steps, clock.latest()), ([None, Some(0), Some(0), Some(1)], 2500));
}
