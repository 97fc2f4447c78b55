//! The files of a linked checkpoint: manifests that list segments, and the segments.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use embcache::cache::Table;
use embcache::checkpoint::{CheckpointChain, CheckpointSave, LatestCheckpoint, RankWriter, SaveOptions};
use embcache::config::{OptimizerKind, ReopenMode, SsdConfig, TableConfig};
use embcache::io::IoEngine;
use embcache::rows::RowHeader;
use embcache::ssd::StateCounters;
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, memory};
use embcache_tests::{Contents, Rig, config, directory_in};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use serde_json::Value;

use crate::allocations::{LARGE, is_rank, limit, numbers};
use crate::allocator::largest_of;
use crate::checkpoint::{json, reseal, value};
use crate::mutate::{Files, apply, engine_of, files, steps};
use crate::ssd::{le, reseal_segment};
use crate::{check_error, fuzz};

const IDS: u32 = 200;

fn table_config() -> TableConfig {
    let ssd = SsdConfig { dir: "/tier".into(), bytes: 512 << 10, reopen: ReopenMode::Discard, resume_commit_id: None };
    TableConfig { ssd: Some(ssd), ..config(4, OptimizerKind::RowWiseAdagrad, 30) }
}

/// A linked checkpoint with dead records and tombstones, and its rows.
fn seed() -> &'static (Files, Contents) {
    static SEED: OnceLock<(Files, Contents)> = OnceLock::new();
    SEED.get_or_init(|| {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let rig = Rig::open(table_config(), Arc::clone(&engine)).unwrap();
        for step in 0..6 {
            let ids: Vec<Id> = (step * 20..step * 20 + 60).map(|id| Id::from(id % IDS)).collect();
            rig.train(&ids, 3, step).unwrap();
            rig.table.flush(u64::from(step) + 1).unwrap();
        }
        rig.table.remove_rows(&[1, 2, 50]).unwrap();
        let directory = directory_in(&engine, ROOT);
        let save =
            CheckpointSave::begin_with(&directory, 5, SaveOptions { linked: true, keep: 1, ..SaveOptions::default() })
                .unwrap();
        let mut writer = RankWriter::new(&directory, save.name(), 0, 1).unwrap();
        writer.link_rows_of("m", &rig.table, BTreeMap::new()).unwrap();
        save.publish(&[writer.finish().unwrap()], 1).unwrap();
        let files = files(&*engine, Path::new(ROOT));
        assert!(files.keys().filter(|path| is_segment(path)).count() > 2, "{:?}", files.keys());
        (files, rig.contents().unwrap())
    })
}

fn is_segment(path: &Path) -> bool {
    path.extension().is_some_and(|found| found == "seg")
}

/// Fixes every checksum, including those of the segments that changed.
fn reseal_all(files: &mut Files, changed: &[PathBuf], sorted: bool) {
    for path in changed.iter().filter(|path| is_segment(path)) {
        if let Some(bytes) = files.get_mut(path) {
            reseal_segment(bytes, sorted);
        }
    }
    let segments: Vec<(String, usize, usize)> = files
        .iter()
        .filter(|(path, bytes)| is_segment(path) && bytes.len() >= 4)
        .map(|(path, bytes)| {
            (path.file_name().unwrap().to_string_lossy().into_owned(), bytes.len(), le(bytes, bytes.len() - 4))
        })
        .collect();
    for (_, bytes) in files.iter_mut().filter(|(path, _)| is_rank(path) && !is_segment(path)) {
        let Some(mut manifest) = value(bytes) else { continue };
        let named = manifest.pointer_mut("/tables/0/segments/segments").and_then(Value::as_array_mut);
        for segment in named.into_iter().flatten().filter(|segment| segment.is_object()) {
            let name = format!("0-of-1.{:016x}.seg", segment["n"].as_u64().unwrap_or(0));
            if let Some((_, len, crc)) = segments.iter().find(|known| known.0 == name)
                && changed.iter().any(|path| path.ends_with(&name))
            {
                segment["b"] = (*len).into();
                segment["c"] = (*crc).into();
            }
        }
        *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
    }
    reseal(files);
}

/// Reads every row, of all buckets and of some; opens a table from the segments, and uses it. Rows that are not
/// `original` fail, and so does a changed file.
fn load(files: &Files, original: bool) -> TestCaseResult {
    let known = &seed().1;
    let engine = engine_of(files);
    let directory = directory_in(&engine, ROOT);
    let opened = LatestCheckpoint::read(&directory).and_then(|latest| CheckpointChain::open(&directory, latest));
    let chain = match opened {
        Ok(chain) => chain,
        Err(error) => return check_error(&error),
    };
    for entry in &chain.manifest().tables {
        let spec = &entry.spec;
        let all = spec.total_num_buckets;
        let same = |header: &RowHeader, vector: &[f32]| {
            let row = (*header, vector.iter().map(|value| value.to_bits()).collect());
            known.get(&header.id) == Some(&row)
        };
        for buckets in [0..all, all / 3..2 * all / 3] {
            let mut wrong = None;
            let read = chain.table_reader(&spec.module, &spec.table, buckets.clone()).and_then(|reader| {
                reader.read(&mut |headers, vectors| {
                    let floats = vectors.len() / headers.len().max(1);
                    for (header, vector) in headers.iter().zip(vectors.chunks(floats.max(1))) {
                        if !buckets.contains(&spec.bucketing().of(header.id)) || (original && !same(header, vector)) {
                            wrong = Some(header.id);
                        }
                    }
                    Ok(())
                })
            });
            prop_assert_eq!(wrong, None, "a row that was never saved, or of another bucket, is handed over");
            if let Err(error) = read {
                check_error(&error)?;
            }
        }
        if let Err(error) = spec.check_fits(&table_config(), true) {
            check_error(&error)?;
            continue;
        }
        let found = chain.links()[0].segments_of(&spec.module, &spec.table, &(0..all));
        let opened = found.and_then(|found| {
            let Some(found) = found else { return Ok(None) };
            let counters = StateCounters { step: spec.step, epoch: chain.manifest().next_epoch };
            let config = TableConfig { key: spec.key, total_num_buckets: all, buckets: 0..all, ..table_config() };
            Table::open_from(config, None, Arc::clone(&engine), Some((&found, counters))).map(Some)
        });
        let table = match opened {
            Ok(Some(table)) => table,
            Ok(None) => continue,
            Err(error) => {
                check_error(&error)?;
                continue;
            }
        };
        let mut wrong = None;
        let read = table.for_each_chunk(50, &mut |chunk| {
            let floats = chunk.vectors.len() / chunk.headers.len().max(1);
            for (header, vector) in chunk.headers.iter().zip(chunk.vectors.chunks(floats.max(1))) {
                wrong = wrong.or((original && !same(header, vector)).then_some(header.id));
            }
            Ok(())
        });
        prop_assert_eq!(wrong, None, "a row that was never saved is in the table");
        let steps = [read, table.remove_rows(&[3, 4, 5]).map(drop), table.flush(1), table.close()];
        for error in steps.into_iter().filter_map(Result::err) {
            check_error(&error)?;
        }
    }
    let after = crate::mutate::files(&*engine, Path::new(ROOT));
    prop_assert!(after == *files, "a load changed a file of the snapshot");
    Ok(())
}

#[test]
fn changed_snapshot_is_rejected_or_loads_saved_rows() {
    fuzz(&steps(), |steps| {
        let mut files = seed().0.clone();
        apply(&mut files, &steps, json);
        load(&files, true)
    });
}

/// The files are changed, and their checksums are fixed.
#[test]
fn resealed_snapshot_is_rejected_or_works_without_panic() {
    fuzz(&(steps(), any::<bool>()), |(steps, sorted)| {
        let mut files = seed().0.clone();
        let changed = apply(&mut files, &steps, json);
        reseal_all(&mut files, &changed, sorted);
        load(&files, false)
    });
}

#[test]
fn the_seed_loads_and_resealing_changes_nothing_but_white_space() {
    let mut files = seed().0.clone();
    load(&files, true).unwrap();
    let all: Vec<PathBuf> = files.keys().cloned().collect();
    reseal_all(&mut files, &all, true);
    let segments = |files: &Files| -> Vec<Vec<u8>> {
        files.iter().filter(|(path, _)| is_segment(path)).map(|(_, bytes)| bytes.clone()).collect()
    };
    assert!(segments(&files) == segments(&seed().0));
    load(&files, true).unwrap();
    let engine = engine_of(&files);
    let directory = directory_in(&engine, ROOT);
    let latest = LatestCheckpoint::read(&directory).unwrap();
    let chain = CheckpointChain::open(&directory, latest).unwrap();
    let found = chain.links()[0].segments_of("m", "t", &(0..13)).unwrap().unwrap();
    assert_eq!(found.rows(), seed().1.len() as u64);
}

/// The largest allocation while the segments are opened up to their footers, and true if they were rejected.
fn check(files: &Files) -> (bool, usize) {
    let engine = engine_of(files);
    largest_of(|| {
        let directory = directory_in(&engine, ROOT);
        let opened = LatestCheckpoint::read(&directory).and_then(|latest| CheckpointChain::open(&directory, latest));
        opened.and_then(|chain| chain.links()[0].segments_of("m", "t", &(0..13)).map(drop)).is_err()
    })
}

#[test]
fn segment_list_numbers_never_allocate_more_than_file_sizes() {
    let (refused, whole) = check(&seed().0);
    assert!(!refused && whole > 0);
    let path = seed().0.keys().find(|path| is_rank(path) && !is_segment(path)).unwrap();
    let manifest = value(&seed().0[path]).unwrap();
    let mut pointers = Vec::new();
    numbers(&manifest, "", &mut pointers);
    pointers.retain(|pointer| pointer.starts_with("/tables/0/segments/"));
    assert!(pointers.len() > 8, "{pointers:?}");
    let mut refused = 0;
    for pointer in &pointers {
        for large in LARGE {
            let mut files = seed().0.clone();
            let mut manifest = manifest.clone();
            *manifest.pointer_mut(pointer).unwrap() = large.into();
            // Numbers that occur twice are equal.
            let rows = manifest["tables"][0]["segments"]["rows"].clone();
            manifest["tables"][0]["total_rows"] = rows.clone();
            files.insert(path.clone(), serde_json::to_vec_pretty(&manifest).unwrap());
            let (_, bytes) = files.iter_mut().find(|(path, _)| path.ends_with("manifest.json")).unwrap();
            let mut whole = value(bytes).unwrap();
            whole["tables"][0]["rows"] = rows.clone();
            whole["tables"][0]["total_rows"] = rows;
            *bytes = serde_json::to_vec_pretty(&whole).unwrap();
            reseal(&mut files);
            let (was_refused, largest) = check(&files);
            refused += usize::from(was_refused);
            assert!(largest <= limit(&files), "{largest} bytes for {pointer} = {large}");
            load(&files, false).unwrap();
        }
    }
    assert!(refused > 30, "{refused} refused");
}
