//! Numbers of RecIS-format saves that determine allocations, and headers that contradict the manifest's counts.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use embcache::checkpoint::{CheckpointDirectory, RecisReader};
use embcache::{Error, Kind};
use embcache_tests::recis::{ROOT, memory, never, save};
use serde_json::{Value, json};

use crate::allocations::{LARGE, limit, numbers};
use crate::allocator::largest_of;
use crate::mutate::{Files, engine_of, files};

/// The files of a save of two shards.
fn seed() -> &'static Files {
    static SEED: OnceLock<Files> = OnceLock::new();
    SEED.get_or_init(|| {
        let engine = memory();
        save(engine.clone(), 2, 1).unwrap();
        files(&engine, Path::new(ROOT))
    })
}

/// Fixes the checksums of the manifests, from the shards' up to LATEST.blocks.
fn reseal(files: &mut Files) {
    let named = |files: &Files, end: &str| -> Vec<PathBuf> {
        files.keys().filter(|path| path.to_string_lossy().contains(end)).cloned().collect()
    };
    let shards: Vec<u32> = named(files, "/shard-")
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .map(|path| crc32c::crc32c(&files[path]))
        .collect();
    let manifest = named(files, "/manifest.json").remove(0);
    let mut value: Value = serde_json::from_slice(&files[&manifest]).unwrap();
    value["shards"] = shards.into();
    let bytes = serde_json::to_vec(&value).unwrap();
    let name = manifest.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    let line = format!("{name} {:08x}\n", crc32c::crc32c(&bytes));
    files.insert(manifest, bytes);
    files.insert(Path::new(ROOT).join("LATEST.blocks"), line.into_bytes());
}

/// The result of opening the save, and its largest allocation.
fn open(files: &Files) -> (Result<(), Error>, usize) {
    let directory = CheckpointDirectory::with_engine(Arc::clone(&engine_of(files)), Path::new(ROOT));
    largest_of(|| RecisReader::open(&directory, &mut never).map(drop))
}

#[test]
fn shard_manifest_numbers_never_allocate_more_than_file_sizes() {
    let mut sealed = seed().clone();
    reseal(&mut sealed);
    open(&sealed).0.expect("it is whole");
    let shards: Vec<PathBuf> = seed()
        .keys()
        .filter(|path| path.to_string_lossy().contains("/shard-") && path.extension().is_some_and(|end| end == "json"))
        .cloned()
        .collect();
    assert_eq!(shards.len(), 2);
    let mut refused = 0;
    for path in &shards {
        let good: Value = serde_json::from_slice(&seed()[path]).unwrap();
        let mut pointers = Vec::new();
        numbers(&good, "", &mut pointers);
        for pointer in pointers {
            for large in LARGE {
                let mut bad = good.clone();
                *bad.pointer_mut(&pointer).unwrap() = large.into();
                let mut files = seed().clone();
                files.insert(path.clone(), serde_json::to_vec(&bad).unwrap());
                reseal(&mut files);
                let (result, largest) = open(&files);
                if let Err(error) = result {
                    assert!(matches!(error.kind(), Kind::Corruption | Kind::Unsupported), "{error:?}");
                    refused += 1;
                }
                assert!(largest <= limit(&files), "{largest} bytes for {pointer} = {large}");
            }
        }
    }
    assert!(refused > 100, "{refused} refused");
}

#[test]
fn a_header_that_says_it_is_huge_is_refused_without_room_for_it() {
    for path in seed().keys().filter(|path| path.extension().is_some_and(|end| end == "safetensors")) {
        for length in LARGE {
            let mut files = seed().clone();
            files.get_mut(path).unwrap()[..8].copy_from_slice(&length.to_le_bytes());
            let (result, largest) = open(&files);
            assert_eq!(result.expect_err("another header").kind(), Kind::Corruption);
            assert!(largest <= limit(&files), "{largest} bytes for a header of {length}");
        }
    }
}

#[test]
fn a_save_of_another_format_or_version_is_refused() {
    for (field, other) in [
        ("version", json!(0)),
        ("version", json!(2)),
        ("version", json!(-1)),
        ("version", json!("1")),
        ("version", Value::Null),
        ("format", json!("other")),
    ] {
        let mut files = seed().clone();
        let manifest = files.keys().find(|path| path.ends_with("manifest.json")).unwrap().clone();
        let mut value: Value = serde_json::from_slice(&files[&manifest]).unwrap();
        value[field] = other.clone();
        files.insert(manifest, serde_json::to_vec(&value).unwrap());
        reseal(&mut files);
        assert_eq!(open(&files).0.expect_err("refused").kind(), Kind::Unsupported, "{field} {other}");
    }
}

#[test]
fn a_field_that_no_manifest_has_is_refused() {
    for (file, object) in [("manifest.json", ""), ("shard-", ""), ("shard-", "/tables/0"), ("shard-", "/blocks/0")] {
        let mut files = seed().clone();
        let named = |path: &&PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(file));
        let path = files.keys().find(named).unwrap().clone();
        let mut value: Value = serde_json::from_slice(&files[&path]).unwrap();
        value.pointer_mut(object).unwrap()["other"] = json!(1);
        files.insert(path, serde_json::to_vec(&value).unwrap());
        reseal(&mut files);
        let error = open(&files).0.expect_err("refused");
        assert!(
            error.kind() == Kind::Corruption && error.to_string().contains("unknown field"),
            "{file}{object}: {error}"
        );
    }
}
