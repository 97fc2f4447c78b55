//! The values that missing ids read, in the manifests of ranks and of the coordinator. Unreadable values, and manifests
//! that disagree, are corruption.

use std::path::{Path, PathBuf};

use embcache::Kind;
use embcache::checkpoint::{CheckpointChain, LatestCheckpoint};
use embcache::config::MissingRead;
use embcache_tests::checkpoint::ROOT;
use embcache_tests::directory_in;
use serde_json::{Value, json};

use crate::checkpoint::{is_data, reseal, seed, value};
use crate::mutate::{Files, engine_of};

fn manifests() -> Vec<PathBuf> {
    let is_manifest = |path: &&PathBuf| path.extension().is_some_and(|end| end == "json") && !is_data(path);
    seed().keys().filter(is_manifest).cloned().collect()
}

/// The seed, in which missing ids of table `a` read `said` by the manifests at `paths`, and zeros by the others.
fn with(paths: &[PathBuf], said: &Value) -> Files {
    let mut files = seed().clone();
    for path in manifests() {
        let bytes = files.get_mut(&path).unwrap();
        let mut manifest = value(bytes).unwrap();
        let here = if paths.contains(&path) { said.clone() } else { json!("zeros") };
        manifest["tables"][0]["spec"]["missing_read"] = here;
        *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
    }
    reseal(&mut files);
    files
}

fn read(files: &Files) -> embcache::Result<MissingRead> {
    let directory = directory_in(&engine_of(files), Path::new(ROOT));
    let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory)?)?;
    Ok(chain.table_reader("m", "a", 0..7)?.spec().missing_read)
}

#[test]
fn what_is_no_such_read_is_damage_wherever_it_is() {
    let damages = [
        Value::Null,
        json!("Zeros"),
        json!(""),
        json!("value"),
        json!(0.5),
        json!([0.5]),
        json!({"value": null}),
        json!({"value": "0.5"}),
        json!({"value": 1e39}),
        json!({"value": -1e300}),
        json!({"value": 0.5, "more": 1}),
        json!({}),
        json!("oov_row"), // The table has none.
    ];
    let all = manifests();
    let mut places: Vec<Vec<PathBuf>> = all.iter().map(|path| vec![path.clone()]).collect();
    places.push(all);
    for place in &places {
        for damage in &damages {
            let error = read(&with(place, damage)).expect_err("refused");
            assert_eq!(error.kind(), Kind::Corruption, "{damage}: {error}");
            assert!(error.path().is_some(), "{damage}: {error}");
        }
    }
}

#[test]
fn manifests_that_do_not_agree_on_it_are_damage() {
    for path in manifests() {
        let error = read(&with(&[path], &json!("initial"))).expect_err("refused");
        assert_eq!(error.kind(), Kind::Corruption, "{error}");
    }
}

#[test]
fn what_all_manifests_say_is_read() {
    assert_eq!(read(&with(&[], &Value::Null)).unwrap(), MissingRead::Zeros);
    let said = json!({"value": f32::from_bits(1)});
    assert_eq!(read(&with(&manifests(), &said)).unwrap(), MissingRead::Value(f32::from_bits(1)));
    assert_eq!(read(seed()).unwrap(), MissingRead::Initial);
}
