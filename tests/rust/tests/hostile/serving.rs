//! Deltas with false contents and valid checksums, read by a server of the previous checkpoint, and by one that opens
//! the delta directly.
//!
//! Each is rejected with an error that states the problem, or its rows are served as stored. A server that rejects one
//! continues to serve, and serves the next delta.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use embcache::checkpoint::{CheckpointChain, LatestCheckpoint};
use embcache::io::{IoEngine, write_atomically};
use embcache::rows::RowHeader;
use embcache::serve::{PollOutcome, ServeOptions, ServedTable, TableServer};
use embcache::types::Id;
use embcache::{Error, Kind};
use embcache_tests::checkpoint::{ROOT, Table, memory, on, save, save_delta};
use embcache_tests::directory_in;
use embcache_tests::serve::check;
use proptest::prelude::*;
use serde_json::Value;

use crate::allocations::{is_rank, limit, numbers};
use crate::allocator::largest_of;
use crate::checkpoint::{before, is_data, json, reseal, tables, tensor, value};
use crate::mutate::{Files, apply, engine_of, files, steps};
use crate::{check_error, fuzz};

/// The rows of each table that a server serves, as bits.
pub(crate) type Served = Vec<Vec<(Id, Vec<u32>)>>;

/// Checkpoints with all manifests sealed again.
pub(crate) struct Seed {
    /// A full checkpoint, of `before()`.
    full: Files,
    /// The same, and a delta on it, of `tables()`.
    pub(crate) delta: Files,
    /// All of these, and a delta on the delta, of `later()`.
    later: Files,
}

/// The tables of the next delta.
fn later() -> Vec<Table> {
    let mut later = tables();
    for table in &mut later {
        let ids: Vec<Id> = table.rows.keys().copied().filter(|id| id % 3 == 0).chain([200, 201]).collect();
        let (spec, kind) = (table.spec.clone(), table.spec.optimizer_kind().unwrap());
        table.rows.extend(Table::new("m", &spec.table, kind, spec.dim as usize, &ids, 5).rows);
        table.rows.retain(|id, _| id % 11 != 0);
    }
    later
}

pub(crate) fn seed() -> &'static Seed {
    static SEED: OnceLock<Seed> = OnceLock::new();
    SEED.get_or_init(|| {
        let root = Path::new(ROOT);
        let engine: Arc<dyn IoEngine> = Arc::new(memory());
        let parent = save(&engine, root, &before(), 2, 300, 7).unwrap().identity;
        save_delta(&engine, root, (&before(), &tables()), (2, 300), 8, on(&parent)).unwrap();
        let mut delta = files(&*engine, root);
        reseal(&mut delta);
        let full = below(&delta, &parent.name);
        let engine = engine_of(&delta);
        let directory = directory_in(&engine, root);
        let chain = CheckpointChain::open(&directory, LatestCheckpoint::read(&directory).unwrap()).unwrap();
        save_delta(&engine, root, (&tables(), &later()), (2, 300), 9, on(&chain.identity())).unwrap();
        Seed { full, delta, later: files(&*engine, root) }
    })
}

/// The files of one checkpoint, which `LATEST` names.
fn below(all: &Files, name: &str) -> Files {
    let mut of_it = all.clone();
    of_it.retain(|path, _| path.starts_with(Path::new(ROOT).join(name)));
    of_it.insert(Path::new(ROOT).join("LATEST"), format!("{name}\n").into_bytes());
    of_it
}

fn is_of_delta(path: &Path) -> bool {
    path.to_string_lossy().contains("/0000000002-")
}

/// The delta's manifests, or those of its data files that have rows of table `a`.
pub(crate) fn of_delta(files: &Files, data: bool) -> Vec<PathBuf> {
    let has_rows = |path: &Path| value(&files[path]).unwrap()["id"]["shape"][0].as_u64().unwrap() > 0;
    let is_it = |path: &&PathBuf| {
        if data {
            is_data(path) && path.to_string_lossy().contains("m+a") && has_rows(path)
        } else {
            path.extension().is_some_and(|end| end == "json")
        }
    };
    files.keys().filter(|path| is_of_delta(path)).filter(is_it).cloned().collect()
}

/// Applies a change to the JSON of each of the delta's manifests.
pub(crate) fn manifests(files: &mut Files, change: impl Fn(&Path, &mut Value)) {
    for path in of_delta(files, false) {
        let mut manifest = value(&files[&path]).unwrap();
        change(&path, &mut manifest);
        files.insert(path, serde_json::to_vec_pretty(&manifest).unwrap());
    }
}

/// The bytes of a tensor of a data file.
pub(crate) fn column<'a>(bytes: &'a mut [u8], name: &str) -> &'a mut [u8] {
    let header = value(bytes).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (start, end) = tensor(&header, data, name, bytes.len()).unwrap();
    &mut bytes[start..end]
}

/// Writes files to an engine, `LATEST` last.
fn put(engine: &dyn IoEngine, files: &Files) {
    let (latest, others): (Vec<_>, Vec<_>) = files.iter().partition(|(path, _)| path.ends_with("LATEST"));
    for (path, bytes) in others.into_iter().chain(latest) {
        engine.create_dir_all(path.parent().unwrap()).unwrap();
        write_atomically(engine, path, bytes).unwrap();
    }
}

fn open(engine: &Arc<dyn IoEngine>) -> embcache::Result<Arc<TableServer>> {
    TableServer::open(directory_in(engine, ROOT), ServeOptions::default())
}

/// The rows of all tables that a server serves, as bits.
fn rows_of(serving: &TableServer) -> Served {
    let version = serving.pin().unwrap();
    let ids: Vec<Id> = (-60..230).chain([i64::MIN, i64::MAX]).collect();
    let rows = |table: &Arc<ServedTable>| {
        let (mut out, mut found) = (vec![0.0; ids.len() * table.dim()], vec![false; ids.len()]);
        table.lookup(&ids, &mut out, &mut found).unwrap();
        let bits = out.chunks(table.dim()).map(|row| row.iter().map(|weight| weight.to_bits()).collect());
        let all = ids.iter().copied().zip(bits).zip(found);
        all.filter(|(_, found)| *found).map(|(row, _)| row).collect()
    };
    version.tables().iter().map(rows).collect()
}

/// The results of servers for a delta: the rows that they serve, or the error.
pub(crate) struct Met {
    /// A server of the full checkpoint that polls for a newer one.
    pub(crate) polled: Result<Served, Error>,
    /// A server that opens the delta, and finds an index of the full checkpoint.
    pub(crate) opened: Result<Served, Error>,
    /// A server that opens the delta, and finds no index.
    pub(crate) anew: Result<Served, Error>,
}

/// Lets servers read the delta of these files. A server that rejects it continues to serve, reports the reason, and
/// serves the next delta.
pub(crate) fn meet(files: &Files) -> Met {
    let engine = engine_of(&seed().full);
    let serving = open(&engine).unwrap();
    put(&*engine, files);
    let polled = serving.poll().map(|_| rows_of(&serving));
    if let Err(error) = &polled {
        check(&serving, &before());
        let again = serving.poll().expect_err("nothing has changed");
        // Files are read in parallel, and still the error names the same one of several wrong files each time. The
        // wrong field that it names may differ.
        assert_eq!((again.kind(), again.path()), (error.kind(), error.path()), "{error} and then {again}");
        let stats = serving.stats();
        assert_eq!((stats.swaps, stats.failed_polls, stats.last_error), (0, 2, Some(again.to_string())));
        assert_eq!(serving.pin().unwrap().name().seq, 1);
        check(&serving, &before());
    }
    let opened = open(&engine).map(|serving| rows_of(&serving));
    let anew = open(&engine_of(files)).map(|serving| rows_of(&serving));
    put(&*engine, &seed().later);
    assert!(matches!(serving.poll().unwrap(), PollOutcome::Newer(name) if name.seq == 3));
    check(&serving, &later());
    assert_eq!(serving.stats().last_error, None);
    Met { polled, opened, anew }
}

/// The rows after the delta of the seed; for table `a` optionally only those in the delta.
pub(crate) fn truth(is_in_delta: bool) -> Served {
    let bits = |row: &(RowHeader, Vec<f32>), dim| row.1[..dim].iter().map(|weight| weight.to_bits()).collect();
    let rows = |(before, now): (Table, Table)| {
        let is_new = |id: &Id| before.rows.get(id) != now.rows.get(id);
        let stays = |id: &Id| !is_in_delta || now.spec.table != "a" || is_new(id);
        let rows = now.rows.iter().filter(|(id, _)| stays(id));
        rows.map(|(id, row)| (*id, bits(row, now.spec.dim as usize))).collect()
    };
    before().into_iter().zip(tables()).map(rows).collect()
}

/// `LATEST` contains no name, or the name of a checkpoint that is not newer.
#[test]
fn latest_without_newer_checkpoint_keeps_served_version() {
    let engine = engine_of(&seed().delta);
    let serving = open(&engine).unwrap();
    let latest = Path::new(ROOT).join("LATEST");
    let names: [(&[u8], Kind); 6] = [
        (b"0000000001-0000000000000007\n", Kind::Mismatch),
        (b"0000000002-0000000000000009\n", Kind::Mismatch),
        (b"0000000009-0000000000000009\n", Kind::Corruption),
        (b"../0000000009-0000000000000009\n", Kind::Corruption),
        (b"\xff\xfe", Kind::Corruption),
        (b"", Kind::Corruption),
    ];
    for (number, (name, kind)) in names.iter().enumerate() {
        write_atomically(&*engine, &latest, name).unwrap();
        let error = serving.poll().expect_err("it is no newer checkpoint");
        assert_eq!(error.kind(), *kind, "{error}");
        let stats = serving.stats();
        assert_eq!((stats.failed_polls, stats.last_error), (number as u64 + 1, Some(error.to_string())));
        check(&serving, &tables());
    }
    put(&*engine, &seed().later);
    assert!(matches!(serving.poll().unwrap(), PollOutcome::Newer(name) if name.seq == 3));
    check(&serving, &later());
}

#[test]
fn delta_manifest_numbers_never_allocate_more_than_file_sizes() {
    let (mut refused, mut served) = (0, 0);
    for path in of_delta(&seed().delta, false) {
        let mut pointers = Vec::new();
        numbers(&value(&seed().delta[&path]).unwrap(), "", &mut pointers);
        for pointer in pointers {
            for large in [1_u64 << 24, 1 << 53, u64::MAX] {
                let mut files = seed().delta.clone();
                let same =
                    |other: &Path| other == path || (is_rank(other) && is_rank(&path) && pointer.contains("/spec/"));
                manifests(&mut files, |other, manifest| {
                    if same(other) {
                        *manifest.pointer_mut(&pointer).unwrap() = large.into();
                    }
                });
                reseal(&mut files);
                let engine = engine_of(&seed().full);
                let serving = open(&engine).unwrap();
                put(&*engine, &files);
                let (polled, largest) = largest_of(|| serving.poll());
                assert!(largest <= limit(&files), "{largest} bytes for {pointer} = {large} of {}", path.display());
                *(if polled.is_err() { &mut refused } else { &mut served }) += 1;
                check(&serving, &if polled.is_err() { before() } else { tables() });
            }
        }
    }
    assert!(refused > 100 && served < refused, "{refused} refused, {served} served");
}

#[test]
fn resealed_delta_is_rejected_or_same_for_all_servers() {
    fuzz(&steps(), |steps| {
        let (mut delta, others): (Files, Files) =
            seed().delta.clone().into_iter().partition(|(path, _)| is_of_delta(path) || path.ends_with("LATEST"));
        apply(&mut delta, &steps, json);
        let mut files: Files = others.into_iter().chain(delta).collect();
        reseal(&mut files);
        let met = meet(&files);
        let mut served: Vec<Served> = Vec::new();
        for result in [met.polled, met.opened, met.anew] {
            match result {
                Ok(rows) => served.push(rows),
                Err(error) => check_error(&error)?,
            }
        }
        prop_assert!(served.windows(2).all(|pair| pair[0] == pair[1]), "servers differ");
        Ok(())
    });
}
