//! Serving checkpoints whose manifests contradict themselves or their files. Each is corruption, detected before a row
//! is read.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use embcache::Kind;
use embcache::checkpoint::{CheckpointChain, LatestCheckpoint, make_for_serving};
use embcache::config::OptimizerKind::{Adam, Sgd};
use embcache::io::IoEngine;
use embcache::rows::WeightPrecision;
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, memory, save};
use embcache_tests::directory_in;
use serde_json::{Value, json};

use crate::allocations::limit;
use crate::allocator::largest_of;
use crate::checkpoint::{is_data, reseal, value};
use crate::mutate::{Files, engine_of, files};

const SERVED: &str = "/checkpoints/served";

/// A serving checkpoint of int8, of two tables.
fn seed() -> &'static Files {
    static SEED: OnceLock<Files> = OnceLock::new();
    SEED.get_or_init(|| {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let ids: Vec<Id> = (-30..30).collect();
        let mut tables = vec![Table::new("m", "a", Adam, 5, &ids, 1), Table::new("m", "b", Sgd, 2, &ids[..9], 2)];
        for vector in tables.iter_mut().flat_map(|table| table.rows.values_mut().map(|row| &mut row.1)) {
            for value in vector {
                *value *= 1e-5;
            }
        }
        save(&engine, Path::new(ROOT), &tables, 1, 1000, 7).unwrap();
        let directory = directory_in(&engine, ROOT);
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).unwrap()).unwrap();
        engine.create_dir_all(Path::new(SERVED)).unwrap();
        make_for_serving(&chain, &directory_in(&engine, SERVED), (8, 1), WeightPrecision::Int8, &mut |_| Ok(()))
            .unwrap();
        let mut all = files(&*engine, Path::new(SERVED));
        reseal(&mut all);
        all
    })
}

fn read(files: &Files) -> embcache::Result<u64> {
    let directory = directory_in(&engine_of(files), Path::new(SERVED));
    let latest = LatestCheckpoint::read(&directory)?;
    let (opened, largest) = largest_of(|| CheckpointChain::open(&directory, latest));
    assert!(largest <= 2 * limit(files), "{largest} bytes");
    let chain = opened?;
    Ok(chain.table_reader("m", "a", 0..7)?.verify()? + chain.table_reader("m", "b", 0..7)?.verify()?)
}

/// The seed, with `change` applied to the coordinator's manifest or to both manifests, and every checksum fixed.
fn with(both: bool, change: impl Fn(&mut Value)) -> Files {
    let mut files = seed().clone();
    let manifests: Vec<PathBuf> =
        files.keys().filter(|path| path.extension().is_some_and(|end| end == "json")).cloned().collect();
    for path in manifests.iter().filter(|path| !is_data(path) && (both || path.ends_with("manifest.json"))) {
        let bytes = files.get_mut(path).unwrap();
        let mut manifest = value(bytes).unwrap();
        change(&mut manifest);
        *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
    }
    reseal(&mut files);
    files
}

/// A serving checkpoint that contradicts itself or its files is corrupted.
#[test]
fn contradictory_serving_checkpoint_is_corruption() {
    type Change = Box<dyn Fn(&mut Value)>;
    let spec = |field: &'static str, to: Value| -> Change {
        Box::new(move |manifest| manifest["tables"][0]["spec"][field] = to.clone())
    };
    let top = |field: &'static str, to: Value| -> Change { Box::new(move |manifest| manifest[field] = to.clone()) };
    let coordinators: Vec<Change> = vec![
        top("kind", json!("full")),
        top("kind", json!("linked")),
        top("made_from", Value::Null),
        top("made_from", json!({"name": 1, "manifest_xxh3": 1})),
        top("made_from", json!({"name": "x"})),
        top("parent", json!({"name": "x", "manifest_xxh3": 1})),
        top("merged", json!({"name": "x", "manifest_xxh3": 1})),
        Box::new(|manifest| {
            manifest.as_object_mut().unwrap().remove("made_from");
        }),
    ];
    let everywhere: Vec<Change> = vec![
        spec("precision", json!("int4")),
        spec("precision", json!("Int8")),
        spec("precision", json!(8)),
        spec("precision", Value::Null),
        spec("precision", json!("fp16")),
        spec("dtype", json!("F32")),
        spec("dtype", json!("I8")),
        spec("dim", json!(4)),
        spec("dim", json!(65_537)),
        Box::new(|manifest| {
            manifest["tables"][0]["spec"]["precision"] = json!("fp32");
            manifest["tables"][0]["spec"]["dtype"] = json!("F32");
        }),
        Box::new(|manifest| {
            manifest["tables"][0]["spec"]["precision"] = json!("bf16");
            manifest["tables"][0]["spec"]["dtype"] = json!("BF16");
        }),
        Box::new(|manifest| {
            manifest["tables"][0]["spec"].as_object_mut().unwrap().remove("precision");
            manifest["tables"][0]["spec"]["dtype"] = json!("F32");
        }),
    ];
    let cases = coordinators
        .into_iter()
        .map(|change| (false, change))
        .chain(everywhere.into_iter().map(|change| (true, change)));
    for (number, (both, change)) in cases.enumerate() {
        let error = read(&with(both, change)).expect_err("refused");
        assert_eq!(error.kind(), Kind::Corruption, "{number}: {error}");
        assert!(error.path().is_some(), "{number}: {error}");
    }
}

#[test]
fn the_seed_is_whole_and_any_scale_and_bias_is_read() {
    assert_eq!(read(seed()).unwrap(), 69);
    let mut files = seed().clone();
    let data = files.iter_mut().find(|(path, _)| is_data(path)).unwrap().1;
    let length = data.len();
    // Codes and values of rows that no conversion would write, including infinities and NaN: they are valid values.
    let start = weights_start(data);
    data[start..(start + 60 * 9).min(length)].fill(0xfe);
    reseal(&mut files);
    assert_eq!(read(&files).unwrap(), 69);
}

fn weights_start(data: &[u8]) -> usize {
    let header = value(data).unwrap();
    let length = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize + 8;
    length + header["weight"]["data_offsets"][0].as_u64().unwrap() as usize
}
