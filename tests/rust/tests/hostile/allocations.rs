//! Numbers in a checkpoint that determine allocations. None of them may allocate more than the size of the files.

use std::path::{Path, PathBuf};

use embcache::checkpoint::{LatestCheckpoint, OpenCheckpoint};
use embcache_tests::checkpoint::ROOT;
use embcache_tests::directory_in;
use serde_json::Value;

use crate::allocator::largest_of;
use crate::checkpoint::{is_data, reseal, seed, set_header, value};
use crate::mutate::{Files, engine_of};

pub(crate) const LARGE: [u64; 8] =
    [1 << 16, 1 << 24, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, 1 << 53, 1 << 62, u64::MAX];
/// Bytes that are allocated for any files, for errors and maps of tables.
const FIXED: usize = 16 << 10;

/// The positions of the numbers in a JSON value, as JSON pointers.
pub(crate) fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(n, value)| numbers(value, &format!("{at}/{n}"), found));
        }
        Value::Object(fields) => fields.iter().for_each(|(name, value)| numbers(value, &format!("{at}/{name}"), found)),
        _ => {}
    }
}

pub(crate) fn is_rank(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("-of-")) && !is_data(path)
}

/// Makes the coordinator's manifest agree with the ranks' about the tables, so that the code after that comparison
/// runs.
fn agree(files: &mut Files) {
    let ranks: Vec<Value> =
        files.iter().filter(|(path, _)| is_rank(path)).map(|(_, bytes)| value(bytes).unwrap()).collect();
    let (_, bytes) = files.iter_mut().find(|(path, _)| path.ends_with("manifest.json")).unwrap();
    let mut manifest = value(bytes).unwrap();
    for (n, table) in manifest["tables"].as_array_mut().unwrap().iter_mut().enumerate() {
        let shares: Vec<&Value> = ranks.iter().map(|rank| &rank["tables"][n]).collect();
        table["spec"] = shares[0]["spec"].clone();
        for count in ["rows", "tombstones"] {
            let all = shares.iter().flat_map(|share| share["files"].as_array().unwrap());
            let sum = all.map(|file| file[count].as_u64().unwrap_or(0)).fold(0_u64, u64::wrapping_add);
            table[count] = sum.into();
        }
    }
    *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
}

/// The largest allocation while every table is opened, and true if all of them were rejected.
fn open(files: &Files) -> (bool, usize) {
    let engine = engine_of(files);
    largest_of(|| {
        let directory = directory_in(&engine, ROOT);
        let opened = LatestCheckpoint::read(&directory).and_then(|latest| OpenCheckpoint::open(&directory, latest));
        let Ok(checkpoint) = opened else { return true };
        let tables = checkpoint.manifest().tables.clone();
        tables.iter().all(|entry| {
            let all = 0..entry.spec.total_num_buckets;
            checkpoint.table_reader(&entry.spec.module, &entry.spec.table, all).is_err()
        })
    })
}

pub(crate) fn limit(files: &Files) -> usize {
    // Lists that are read from a file grow by doubling.
    2 * files.values().map(Vec::len).max().unwrap() + FIXED
}

#[test]
fn manifest_numbers_never_allocate_more_than_file_sizes() {
    let (_, whole) = open(seed());
    assert!(whole > 0);
    let mut refused = 0;
    let manifests: Vec<PathBuf> =
        seed().keys().filter(|path| path.extension().is_some_and(|end| end == "json")).cloned().collect();
    for path in &manifests {
        let mut pointers = Vec::new();
        numbers(&value(&seed()[path]).unwrap(), "", &mut pointers);
        assert!(!pointers.is_empty());
        for pointer in pointers {
            for large in LARGE {
                let mut files = seed().clone();
                // The description of a table is the same on all ranks.
                let same =
                    |other: &Path| other == path || (is_rank(other) && is_rank(path) && pointer.contains("/spec/"));
                for (_, bytes) in files.iter_mut().filter(|(other, _)| same(other)) {
                    let mut manifest = value(bytes).unwrap();
                    *manifest.pointer_mut(&pointer).unwrap() = large.into();
                    *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
                }
                if is_rank(path) {
                    agree(&mut files);
                }
                reseal(&mut files);
                let (all_refused, largest) = open(&files);
                refused += usize::from(all_refused);
                assert!(largest <= limit(&files), "{largest} bytes for {pointer} = {large} of {}", path.display());
            }
        }
    }
    assert!(refused > 100, "{refused} refused");
}

#[test]
fn header_numbers_never_allocate_more_than_file_size() {
    let data: Vec<PathBuf> = seed().keys().filter(|path| is_data(path)).cloned().collect();
    let mut seen = 0;
    for path in [&data[0], data.last().unwrap()] {
        let bytes = &seed()[path];
        let header = value(bytes).unwrap();
        let mut pointers = Vec::new();
        numbers(&header, "", &mut pointers);
        for pointer in pointers {
            for large in LARGE {
                let mut header = header.clone();
                *header.pointer_mut(&pointer).unwrap() = large.into();
                let mut changed = bytes.clone();
                set_header(&mut changed, &header);
                let mut files = seed().clone();
                files.insert(path.clone(), changed);
                reseal(&mut files);
                let (_, largest) = open(&files);
                assert!(largest <= limit(&files), "{largest} bytes for {pointer} = {large}");
                seen += 1;
            }
        }
        for length in LARGE {
            let mut files = seed().clone();
            files.get_mut(path).unwrap()[..8].copy_from_slice(&length.to_le_bytes());
            reseal(&mut files);
            let (_, largest) = open(&files);
            assert!(largest <= limit(&files), "{largest} bytes for a header of {length}");
        }
    }
    assert!(seen > 100);
}
