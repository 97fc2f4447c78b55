//! The files of a checkpoint: LATEST, manifests and data files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use embcache::checkpoint::{CheckpointChain, LatestCheckpoint};
use embcache::config::OptimizerKind::{RowWiseAdagrad, Sgd};
use embcache::io::IoEngine;
use embcache::types::Id;
use embcache_tests::checkpoint::{ROOT, Table, memory, on, save, save_delta};
use embcache_tests::directory_in;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::mutate::{Files, apply, engine_of, files, steps};
use crate::{check_error, fuzz};

pub(crate) fn tables() -> Vec<Table> {
    let ids: Vec<Id> = (-30..30).collect();
    vec![Table::new("m", "a", RowWiseAdagrad, 4, &ids, 1), Table::new("m", "b", Sgd, 2, &ids[..9], 2)]
}

/// The tables before the last checkpoint. Some rows were different, some have been removed since, and some were not
/// inserted yet.
pub(crate) fn before() -> Vec<Table> {
    let mut before = tables();
    for table in &mut before {
        let changed: Vec<Id> = table.rows.keys().copied().filter(|id| id % 4 == 0).collect();
        let Table { spec, rows } = table;
        let others = Table::new("m", &spec.table, spec.optimizer_kind().unwrap(), spec.dim as usize, &changed, 9);
        rows.extend(others.rows);
        rows.retain(|id, _| id % 7 != 0);
        let gone =
            Table::new("m", &spec.table, spec.optimizer_kind().unwrap(), spec.dim as usize, &[90, 91, 92, 93], 8);
        rows.extend(gone.rows);
    }
    before
}

/// A checkpoint of two tables by two ranks, with several groups of each, and a delta on it.
pub(crate) fn seed() -> &'static Files {
    static SEED: OnceLock<Files> = OnceLock::new();
    SEED.get_or_init(|| {
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let full = save(&engine, Path::new(ROOT), &before(), 2, 1000, 7).unwrap();
        let pair = (&*before(), &*tables());
        save_delta(&engine, Path::new(ROOT), pair, (2, 1000), 8, on(&full.identity)).unwrap();
        files(&*engine, Path::new(ROOT))
    })
}

pub(crate) fn json(bytes: &[u8]) -> Option<(usize, usize)> {
    if bytes.first() == Some(&b'{') {
        return Some((0, bytes.len()));
    }
    let len = u64::from_le_bytes(bytes.get(..8)?.try_into().unwrap());
    let end = usize::try_from(len).ok()?.checked_add(8).filter(|end| *end <= bytes.len())?;
    Some((8, end))
}

pub(crate) fn value(bytes: &[u8]) -> Option<Value> {
    let (start, end) = json(bytes)?;
    serde_json::from_slice(&bytes[start..end]).ok()
}

pub(crate) fn is_data(path: &Path) -> bool {
    path.extension().is_some_and(|found| found == "safetensors")
}

/// Replaces the header of a data file, whose data stay in place.
pub(crate) fn set_header(bytes: &mut [u8], header: &Value) {
    let (start, end) = json(bytes).unwrap();
    let text = header.to_string().into_bytes();
    bytes[start..end].fill(b' ');
    bytes[start..start + text.len()].copy_from_slice(&text);
}

/// The offset and the length of a tensor in a data file.
pub(crate) fn tensor(header: &Value, data: usize, name: &str, len: usize) -> Option<(usize, usize)> {
    let offset = |at: usize| header[name]["data_offsets"][at].as_u64().and_then(|at| usize::try_from(at).ok());
    let (start, end) = (data.checked_add(offset(0)?)?, data.checked_add(offset(1)?)?);
    (start <= end && end <= len).then_some((start, end))
}

/// Fixes the checksums of a data file's columns, as far as its header can be read.
fn reseal_columns(bytes: &mut [u8]) {
    let (Some(header), Some((_, data))) = (value(bytes), json(bytes)) else { return };
    let mut group = 0;
    while reseal_group(bytes, &header, data, group) {
        group += 1;
    }
}

/// Name of a column of a group.
fn in_group(name: &str, group: usize) -> String {
    if group == 0 { name.to_owned() } else { format!("{name}.{group}") }
}

/// Fixes the checksums of a group. Returns false if there is no such group.
fn reseal_group(bytes: &mut [u8], header: &Value, data: usize, group: usize) -> bool {
    let Some((at, end)) = tensor(header, data, &in_group("checksums", group), bytes.len()) else { return false };
    let names = header.as_object().into_iter().flat_map(|fields| fields.keys());
    let checked = names.filter(|name| {
        let column = name.split('.').next().unwrap();
        !["__metadata__", "__pad", "checksums"].contains(&column) && **name == in_group(column, group)
    });
    let mut columns: Vec<(usize, usize)> =
        checked.filter_map(|name| tensor(header, data, name, bytes.len())).filter(|(start, end)| start < end).collect();
    columns.sort_unstable();
    let crcs: Vec<u8> =
        columns.iter().flat_map(|&(start, end)| crc32c::crc32c(&bytes[start..end]).to_le_bytes()).collect();
    let count = crcs.len().min(end - at);
    bytes[at..at + count].copy_from_slice(&crcs[..count]);
    true
}

/// Fixes every checksum, from the data files up to the coordinator's manifest.
pub(crate) fn reseal(files: &mut Files) {
    files.iter_mut().filter(|(path, _)| is_data(path)).for_each(|(_, bytes)| reseal_columns(bytes));
    let data: Vec<(PathBuf, usize, u32, Vec<u32>)> = files
        .iter()
        .filter(|(path, _)| is_data(path))
        .map(|(path, bytes)| {
            let header_end = json(bytes).map_or(0, |(_, end)| end);
            let header = value(bytes).unwrap_or_default();
            let checksums = (0..).map_while(|group| {
                let (start, end) = tensor(&header, header_end, &in_group("checksums", group), bytes.len())?;
                Some(crc32c::crc32c(&bytes[start..end]))
            });
            let checksums = checksums.collect();
            (path.clone(), bytes.len(), crc32c::crc32c(&bytes[..header_end]), checksums)
        })
        .collect();
    let mut digests = Vec::new();
    for (path, bytes) in files.iter_mut() {
        let Some(stem) = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".json"))
        else {
            continue;
        };
        if stem == "manifest" {
            continue;
        }
        let Some(mut manifest) = value(bytes) else { continue };
        for table in manifest.get_mut("tables").and_then(Value::as_array_mut).into_iter().flatten() {
            let dir = format!(
                "{}+{}",
                table["spec"]["module"].as_str().unwrap_or_default(),
                table["spec"]["table"].as_str().unwrap_or_default()
            );
            for (n, file) in table.get_mut("files").and_then(Value::as_array_mut).into_iter().flatten().enumerate() {
                let name = path.parent().unwrap().join(&dir).join(format!("{stem}.{n}.safetensors"));
                if let Some((_, len, header, checksums)) = data.iter().find(|known| known.0 == name)
                    && file.is_object()
                {
                    file["bytes"] = (*len).into();
                    file["header_crc32c"] = (*header).into();
                    let groups = file.get_mut("groups").and_then(Value::as_array_mut);
                    for (n, group) in groups.into_iter().flatten().filter(|group| group.is_object()).enumerate() {
                        group["checksums_crc32c"] = checksums.get(n).copied().unwrap_or(0).into();
                    }
                }
            }
        }
        *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
        digests.push((path.clone(), bytes.len(), xxh3_64(bytes)));
    }
    // They are sealed in the order of their names, so that the parent of a delta comes first.
    let mut sealed_as: Vec<(String, u64)> = Vec::new();
    for (path, bytes) in files.iter_mut().filter(|(path, _)| path.ends_with("manifest.json")) {
        let Some(mut manifest) = value(bytes) else { continue };
        let Some(fields) = manifest.as_object_mut() else { continue };
        fields.remove("xxh3");
        let world = fields.get("ranks").and_then(Value::as_array).map_or(0, Vec::len);
        for (rank, digest) in fields.get_mut("ranks").and_then(Value::as_array_mut).into_iter().flatten().enumerate() {
            let name = path.with_file_name(format!("{rank}-of-{world}.json"));
            if let Some((_, len, xxh3)) = digests.iter().find(|known| known.0 == name)
                && digest.is_object()
            {
                digest["bytes"] = (*len).into();
                digest["xxh3"] = (*xxh3).into();
            }
        }
        if let Some(parent) = fields.get_mut("parent").and_then(Value::as_object_mut)
            && let Some((_, xxh3)) =
                sealed_as.iter().find(|(name, _)| parent.get("name") == Some(&Value::from(&**name)))
        {
            parent.insert("manifest_xxh3".into(), (*xxh3).into());
        }
        *bytes = sealed(&manifest);
        let name = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        sealed_as.push((name.to_owned(), xxh3_64(bytes)));
    }
}

/// A coordinator's manifest with its own checksum.
pub(crate) fn sealed(manifest: &Value) -> Vec<u8> {
    let rendered = format!("{}\n", serde_json::to_string_pretty(manifest).unwrap());
    let body = rendered.strip_suffix("\n}\n").unwrap_or(&rendered);
    format!("{body},\n  \"xxh3\": {}\n}}\n", xxh3_64(rendered.as_bytes())).into_bytes()
}

/// Loads every table as one rank and as the second rank of three. Rows that are not `original` fail.
fn load(files: &Files, original: bool) -> TestCaseResult {
    let engine = engine_of(files);
    let directory = directory_in(&engine, ROOT);
    let opened = LatestCheckpoint::read(&directory).and_then(|latest| CheckpointChain::open(&directory, latest));
    let checkpoint = match opened {
        Ok(checkpoint) => checkpoint,
        Err(error) => return check_error(&error),
    };
    let known = tables();
    for entry in &checkpoint.manifest().tables {
        let spec = &entry.spec;
        let third = spec.total_num_buckets / 3;
        for buckets in [0..spec.total_num_buckets, third..2 * third] {
            let reader = match checkpoint.table_reader(&spec.module, &spec.table, buckets.clone()) {
                Ok(reader) => reader,
                Err(error) => {
                    check_error(&error)?;
                    continue;
                }
            };
            let mut rows = 0;
            let mut wrong = None;
            let read = reader.read(&mut |headers, vectors| {
                rows += headers.len() as u64;
                let floats = vectors.len() / headers.len().max(1);
                for (header, vector) in headers.iter().zip(vectors.chunks(floats.max(1))) {
                    let table = known.iter().find(|table| table.spec.table == spec.table);
                    let row = table.and_then(|table| table.rows.get(&header.id));
                    let same = row.is_some_and(|(is, floats)| is == header && floats == vector);
                    if !buckets.contains(&spec.bucketing().of(header.id)) || (original && !same) {
                        wrong = Some(header.id);
                    }
                }
                Ok(())
            });
            prop_assert_eq!(wrong, None, "a row that was never saved, or of another bucket, is handed over");
            match read {
                Ok(read) => prop_assert_eq!(rows, read),
                Err(error) => check_error(&error)?,
            }
        }
    }
    Ok(())
}

#[test]
fn changed_checkpoint_is_rejected_or_loads_saved_rows() {
    fuzz(&steps(), |steps| {
        let mut files = seed().clone();
        apply(&mut files, &steps, json);
        load(&files, true)
    });
}

/// The files are changed, and their checksums are fixed.
#[test]
fn resealed_checkpoint_is_rejected_or_loads_without_panic() {
    fuzz(&steps(), |steps| {
        let mut files = seed().clone();
        apply(&mut files, &steps, json);
        reseal(&mut files);
        load(&files, false)
    });
}

#[test]
fn a_manifest_whose_counters_cannot_go_on_is_refused() {
    let changes: [fn(&mut Value); 2] = [
        |manifest| manifest["next_epoch"] = u32::MAX.into(),
        |manifest| manifest["tables"][0]["spec"]["step"] = u64::MAX.into(),
    ];
    for change in changes {
        let mut files = seed().clone();
        for (_, bytes) in files.iter_mut().filter(|(path, _)| path.extension().is_some_and(|found| found == "json")) {
            let mut manifest = value(bytes).unwrap();
            change(&mut manifest);
            *bytes = serde_json::to_vec_pretty(&manifest).unwrap();
        }
        reseal(&mut files);
        let engine = engine_of(&files);
        let directory = directory_in(&engine, ROOT);
        let latest = LatestCheckpoint::read(&directory).unwrap();
        let error = CheckpointChain::open(&directory, latest).unwrap_err();
        assert_eq!(error.kind(), embcache::Kind::Corruption, "{error}");
    }
}

#[test]
fn the_seed_loads_and_so_does_what_is_sealed_again() {
    let mut files = seed().clone();
    load(&files, true).unwrap();
    reseal(&mut files);
    let engine = engine_of(&files);
    let directory = directory_in(&engine, ROOT);
    let latest = LatestCheckpoint::read(&directory).unwrap();
    let checkpoint = CheckpointChain::open(&directory, latest).unwrap();
    let reader = checkpoint.table_reader("m", "a", 0..7).unwrap();
    assert_eq!(reader.read(&mut |_, _| Ok(())).unwrap(), 60);
}
